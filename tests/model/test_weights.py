"""State dicts into modules: names, shapes, dtypes, ties, and no second copy."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrizations

from fxaudit.errors import LoadError
from fxaudit.model.load import load
from fxaudit.model.weights import load_weights
from tests.model.hostile import CONTAINERS, header, require_refusal, saved


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight


def weights_refused(module: nn.Module, path: Path) -> LoadError:
    return require_refusal(lambda: load_weights(module, path))


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "models.py"
    path.write_text("import torch\nfrom torch import nn\ndef build():\n    return nn.Linear(3, 2), torch.randn(2, 3)\n")
    return path


@pytest.mark.parametrize("form", ["safetensors", "torch", "legacy", "safetensors under another name", "checkpoint"])
def test_weights_replace_those_of_the_model(file, tmp_path, form):
    source, path = nn.Linear(3, 2), tmp_path / ("w.safetensors" if form == "safetensors" else "w.pt")
    if form.startswith("safetensors"):
        save_file(source.state_dict(), path)
    elif form == "checkpoint":
        path.write_bytes(saved({"epoch": 1, "model_state_dict": source.state_dict(), "loss": 0.5}))
    else:
        path.write_bytes(saved(source.state_dict(), _use_new_zipfile_serialization=form != "legacy"))
    loaded = load(f"{file}:build", weights=path).module
    assert torch.equal(loaded.weight, source.weight)
    assert torch.equal(loaded.bias, source.bias)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_the_prefix_of_a_wrapper_is_left_out(tmp_path, prefix):
    source, module = nn.Linear(3, 2), nn.Linear(3, 2)
    save_file({f"{prefix}{name}": tensor for name, tensor in source.state_dict().items()}, tmp_path / "w.safetensors")
    load_weights(module, tmp_path / "w.safetensors")
    assert torch.equal(module.weight, source.weight)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_bomb_given_as_weights_is_never_executed(tmp_path, container):
    marker, path = tmp_path / "executed", tmp_path / "w.ckpt"
    path.write_bytes(CONTAINERS[container](marker))
    require_refusal(lambda: load_weights(nn.Linear(3, 2), path), marker)


def test_a_pickled_module_given_as_weights_is_refused(tmp_path):
    (tmp_path / "w.pt").write_bytes(saved(nn.Linear(3, 2)))
    assert "state_dict" in weights_refused(nn.Linear(3, 2), tmp_path / "w.pt").remedy


@pytest.mark.parametrize(
    "content", [{"width": 3}, {}, [torch.zeros(2)], {"a": {"w": torch.zeros(1)}, "b": {"w": torch.zeros(1)}}]
)
def test_a_file_without_one_state_dict_is_refused(tmp_path, content):
    (tmp_path / "w.pt").write_bytes(saved(content))
    assert "no state dict" in weights_refused(nn.Linear(3, 2), tmp_path / "w.pt").what


def test_weights_with_a_wrong_name_are_refused_by_that_name(tmp_path):
    save_file({"weight": torch.zeros(2, 3), "offset": torch.zeros(2)}, tmp_path / "w.safetensors")
    found = weights_refused(nn.Linear(3, 2), tmp_path / "w.safetensors").found
    assert found == "missing bias; unexpected offset"


def test_weights_of_a_wrong_shape_are_refused_by_that_shape(tmp_path):
    save_file({"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}, tmp_path / "w.safetensors")
    found = weights_refused(nn.Linear(3, 2), tmp_path / "w.safetensors").found
    assert "weight" in found
    assert "[2, 4]" in found


def test_a_shape_that_only_the_file_claims_is_never_allocated(tmp_path):
    claimed = torch.zeros(1).expand(1 << 40)
    (tmp_path / "w.pt").write_bytes(saved({"weight": claimed, "bias": torch.zeros(2)}))
    assert "1099511627776" in weights_refused(nn.Linear(3, 2), tmp_path / "w.pt").found


# --- dtypes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_floating_point_weights_take_the_dtype_of_the_model(tmp_path, dtype):
    weight = torch.randn(2, 3).to(dtype)
    save_file({"weight": weight, "bias": torch.zeros(2, dtype=dtype)}, tmp_path / "w.safetensors")
    module = nn.Linear(3, 2)
    load_weights(module, tmp_path / "w.safetensors")
    assert torch.equal(module.weight, weight.to(torch.float32))


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
def test_weights_of_another_kind_of_number_are_refused(tmp_path, dtype):
    (tmp_path / "w.pt").write_bytes(saved({"weight": torch.ones(2, 3).to(dtype), "bias": torch.zeros(2)}))
    assert weights_refused(nn.Linear(3, 2), tmp_path / "w.pt").found == str(dtype)


def test_whole_numbers_convert_only_where_each_is_kept(tmp_path):
    module = nn.Module()
    module.register_buffer("count", torch.zeros(2, dtype=torch.int8))
    save_file({"count": torch.tensor([1, 2])}, tmp_path / "w.safetensors")
    load_weights(module, tmp_path / "w.safetensors")
    assert module.count.tolist() == [1, 2]
    save_file({"count": torch.tensor([1, 300])}, tmp_path / "w.safetensors")
    weights_refused(module, tmp_path / "w.safetensors")


# --- ties -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
def test_a_tied_weight_that_is_saved_under_one_name_stays_tied(tmp_path, name):
    value = torch.randn(5, 4)
    save_file({name: value}, tmp_path / "w.safetensors")
    model = Tied()
    load_weights(model, tmp_path / "w.safetensors")
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, value)


def test_a_tied_weight_that_is_saved_twice_stays_tied(tmp_path):
    value = torch.randn(5, 4)
    save_file({"head.weight": value, "embedding.weight": value.clone()}, tmp_path / "w.safetensors")
    model = Tied()
    load_weights(model, tmp_path / "w.safetensors")
    assert model.head.weight is model.embedding.weight


def test_two_values_for_one_tied_weight_are_refused(tmp_path):
    save_file({"head.weight": torch.zeros(5, 4), "embedding.weight": torch.ones(5, 4)}, tmp_path / "w.safetensors")
    assert "two different values" in weights_refused(Tied(), tmp_path / "w.safetensors").found


def test_a_tied_weight_that_is_not_saved_at_all_is_missing(tmp_path):
    save_file({"other": torch.zeros(1)}, tmp_path / "w.safetensors")
    assert "embedding.weight" in weights_refused(Tied(), tmp_path / "w.safetensors").found


def test_tensors_that_only_the_file_ties_stay_apart(tmp_path):
    value = torch.randn(3, 3)
    (tmp_path / "w.pt").write_bytes(saved({"0.weight": value, "1.weight": value}))
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    load_weights(model, tmp_path / "w.pt")
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(model[1].weight, value)


# --- modules with state of their own --------------------------------------------------------------------------------


STATEFUL = {
    "lstm": lambda: nn.LSTM(3, 4, 2),
    "batch norm": lambda: nn.BatchNorm1d(4),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
    "attention": lambda: nn.MultiheadAttention(4, 2),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_weights_give_the_outputs_of_the_module_they_came_from(tmp_path, name):
    source, module = STATEFUL[name]().eval(), STATEFUL[name]().eval()
    for tensor in source.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5)
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    load_weights(module, tmp_path / "w.safetensors")
    x = torch.randn(5, 4 if name in ("batch norm", "attention") else 3)
    arguments = (x, x, x) if name == "attention" else (x,)
    with torch.no_grad():
        ours, theirs = module(*arguments), source(*arguments)
    for one, other in zip(
        ours if isinstance(ours, tuple) else [ours], theirs if isinstance(theirs, tuple) else [theirs], strict=True
    ):
        for a, b in zip(
            one if isinstance(one, tuple) else [one], other if isinstance(other, tuple) else [other], strict=True
        ):
            assert torch.equal(a, b)


def test_what_asks_for_no_gradient_still_asks_for_none(tmp_path):
    module = nn.Linear(3, 2)
    module.weight.requires_grad_(False)
    save_file(nn.Linear(3, 2).state_dict(), tmp_path / "w.safetensors")
    load_weights(module, tmp_path / "w.safetensors")
    assert not module.weight.requires_grad
    assert module.bias.requires_grad


MEMORY = """
import resource, sys, torch
from torch import nn
from fxaudit.model.weights import load_weights
from pathlib import Path
with torch.device("meta"):
    module = nn.Linear(16384, 8192, bias=False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
load_weights(module, Path(sys.argv[1]))
print(module.weight[0, 0].item(), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_weights_are_not_copied(tmp_path, ending):
    size = 16384 * 8192 * 4
    weight, path = torch.full((8192, 16384), 3.0), tmp_path / f"w.{ending}"
    save_file({"weight": weight}, path) if ending == "safetensors" else torch.save({"weight": weight}, path)
    done = subprocess.run([sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True, check=True)
    value, grown = done.stdout.split()
    assert float(value) == 3.0
    assert int(grown) < 1.2 * size


# --- damaged files --------------------------------------------------------------------------------------------------


LIES = {
    "a header longer than the file": header(b'{"weight":{}}', 1 << 40),
    "a header that is no JSON": header(b"{" * 20),
    "offsets behind the end": header(b'{"weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}') + bytes(8),
    "offsets that do not fit the shape": header(b'{"weight":{"dtype":"F32","shape":[9,9],"data_offsets":[0,24]}}')
    + bytes(24),
    "an absurd shape": header(b'{"weight":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,24]}}')
    + bytes(24),
    "an unknown dtype": header(b'{"weight":{"dtype":"F1","shape":[2,3],"data_offsets":[0,24]}}') + bytes(24),
    "overlapping tensors": header(
        b'{"weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"bias":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    )
    + bytes(24),
    "nothing": b"",
    "garbage": b"garbage",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_safetensors_file_that_lies_is_refused(tmp_path, lie):
    (tmp_path / "w.safetensors").write_bytes(LIES[lie])
    weights_refused(nn.Linear(3, 2), tmp_path / "w.safetensors")


def test_missing_weights_are_refused(tmp_path):
    assert weights_refused(nn.Linear(3, 2), tmp_path / "w.safetensors").found == "no such file"

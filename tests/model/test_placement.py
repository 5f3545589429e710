"""Dtype, device, and what is done to a module before its first forward call."""

from pathlib import Path

import pytest
import torch
from torch import nn

from fxaudit.errors import LoadError, UsageError
from fxaudit.model.load import load
from fxaudit.model.placement import DTYPES, Placement, parse_device, parse_dtype, place
from tests.model.hostile import require_refusal

FILE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("phase", torch.tensor([1 + 2j, 3 - 1j]))
        self.register_buffer("steps", torch.arange(3))

    def forward(self, ids, scale):
        return self.head(self.embedding(ids)) * scale

def build():
    return Model(), (torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2, 5))

def on_meta():
    with torch.device("meta"):
        return nn.Linear(3, 2), torch.randn(2, 3, device="cpu")

def doubles(module):
    with torch.no_grad():
        module.head.weight.mul_(2)

def replaces(module):
    return nn.Sequential(nn.Identity(), module.head)

def returns_a_number(module):
    return 7

def fails(module):
    raise ValueError("cannot prepare this")
"""


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "models.py").write_text(FILE)
    return tmp_path / "models.py"


@pytest.mark.parametrize("name", DTYPES)
def test_a_dtype_converts_floating_point_weights_and_inputs_and_nothing_else(file, name):
    loaded = load(f"{file}:build", dtype=name)
    ids, scale = loaded.arguments[0]
    assert loaded.module.head.weight.dtype == scale.dtype == DTYPES[name]
    assert ids.dtype == loaded.module.steps.dtype == torch.int64
    assert loaded.module.phase.tolist() == [1 + 2j, 3 - 1j]


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"device": "meta"}, {"device": "cpu"}])
def test_tied_weights_stay_tied(file, options):
    module = load(f"{file}:build", **options).module
    assert module.head.weight is module.embedding.weight


def test_the_model_keeps_its_own_dtype_without_the_option(file):
    assert load(f"{file}:build").module.head.weight.dtype == torch.float32


@pytest.mark.parametrize("model", ["torchvision:resnet18", "timm:resnet10t"])
def test_a_zoo_model_on_meta_needs_neither_weights_nor_memory(model):
    loaded = load(model, device="meta")
    assert {tensor.device.type for tensor in [*loaded.module.parameters(), *loaded.arguments[0]]} == {"meta"}
    with torch.no_grad():
        assert list(loaded.module.eval()(*loaded.arguments[0]).shape) == [2, 1000]


def test_inputs_follow_a_module_that_was_built_on_meta(file):
    assert load(f"{file}:on_meta").arguments[0][0].device.type == "meta"


def test_a_module_on_meta_takes_weights_from_a_file(file, tmp_path):
    source = nn.Linear(3, 2)
    torch.save(source.state_dict(), tmp_path / "w.pt")
    loaded = load(f"{file}:on_meta", weights=tmp_path / "w.pt")
    assert torch.equal(loaded.module.weight, source.weight)
    assert loaded.arguments[0][0].device.type == "cpu"


def test_a_module_on_meta_has_no_values_to_move(file):
    assert "--weights" in require_refusal(lambda: load(f"{file}:on_meta", device="cpu")).remedy


def test_weights_have_no_place_on_meta(file, tmp_path):
    with pytest.raises(UsageError):
        load(f"{file}:build", device="meta", weights=tmp_path / "w.pt")


@pytest.mark.parametrize("name", ["float23", "int8", "float"])
def test_another_dtype_is_a_mistake_of_usage(name):
    with pytest.raises(UsageError) as caught:
        parse_dtype(name)
    assert "bfloat16" in caught.value.expected


@pytest.mark.parametrize("name", ["gpu", "cpu:3", "xla", ""])
def test_another_device_is_a_mistake_of_usage(name):
    with pytest.raises(UsageError) as caught:
        parse_device(name)
    assert "cuda:N" in caught.value.expected


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7"])
def test_a_cuda_device_that_is_not_there_is_called_missing(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    error = require_refusal(lambda: load("torchvision:resnet18", random_init=True, device=name))
    assert "0 CUDA devices" in error.found
    assert "CPU" in error.remedy


def test_a_dtype_may_be_given_as_torch_has_it():
    assert parse_dtype(torch.float64) is parse_dtype("torch.float64") is torch.float64


def test_placing_without_a_wish_changes_nothing():
    module = nn.Linear(3, 2)
    weight = module.weight
    assert place(module, Placement()) is module
    assert module.weight is weight


# --- prepare --------------------------------------------------------------------------------------------------------


def test_a_preparation_changes_the_module_that_it_is_given(file):
    plain, prepared = load(f"{file}:build").module, load(f"{file}:build", prepare=f"{file}:doubles").module
    assert torch.equal(prepared.head.weight, plain.head.weight * 2)


def test_a_preparation_may_return_another_module(file):
    assert type(load(f"{file}:build", prepare=f"{file}:replaces").module) is nn.Sequential


def test_a_preparation_sees_the_weights_and_dtype_that_were_asked_for(file, tmp_path):
    (file.parent / "look.py").write_text("def look(module):\n    module.seen = module.head.weight.dtype\n")
    assert load(f"{file}:build", dtype="float64", prepare=f"{tmp_path}/look.py:look").module.seen == torch.float64


@pytest.mark.parametrize(
    ("function", "found"), [("returns_a_number", "int"), ("fails", "cannot prepare this"), ("missing", "callables")]
)
def test_a_preparation_that_fails_is_reported(file, function, found):
    error = require_refusal(lambda: load(f"{file}:build", prepare=f"{file}:{function}"))
    assert found in error.found


def test_a_preparation_that_is_no_function_in_a_file_is_refused(file):
    with pytest.raises(LoadError):
        load(f"{file}:build", prepare="nothing.py:build")

"""Torch files as MODEL."""

import pickle
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import timm
import torch
import torchvision
import transformers
from safetensors.torch import save_file
from torch import nn

from fxaudit.model.load import load
from tests.model.hostile import CONTAINERS, archive, call, mapping, named, new, program, require_refusal, saved, text

INPUTS = torch.randn(2, 3)


class OwnModule(nn.Module):
    def forward(self, x):
        return x * 2


def written(tmp_path: Path, data: bytes, name: str = "model.pt") -> str:
    path = tmp_path / name
    path.write_bytes(data)
    return str(path)


# --- hostile files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pt2", ".safetensors", ".model"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_bomb_is_never_executed_whatever_the_container_and_its_name(tmp_path, container, ending):
    marker = tmp_path / "executed"
    path = written(tmp_path, CONTAINERS[container](marker), f"model{ending}")
    require_refusal(lambda: load(path, inputs=INPUTS), marker)


@pytest.mark.parametrize("container", CONTAINERS)
def test_the_containers_of_these_tests_are_hostile(tmp_path, container):
    marker = tmp_path / "executed"
    path = written(tmp_path, CONTAINERS[container](marker))
    for act in (lambda: torch.load(path, weights_only=False), lambda: pickle.loads(Path(path).read_bytes())):
        try:
            act()
        except Exception:
            continue
    if "another pickle" in container:  # torch hands it to the loader of TorchScript, which has its own unpickler
        with zipfile.ZipFile(path) as file:
            pickle.loads(file.read("archive/data.pkl"))
    assert marker.exists()


def test_trust_executes_what_the_file_holds(tmp_path):
    marker = tmp_path / "executed"
    path = written(tmp_path, CONTAINERS["torch archive"](marker))
    with pytest.raises(Exception, match="holds no model"):
        load(path, inputs=INPUTS, trust_pickle=True)
    assert marker.exists()


LINEAR = "torch.nn.modules.linear.Linear"
HOOKS = call("collections.OrderedDict")

# Pickles of protocol 2 around known layers that still would run something, and what the refusal names.
ATTACKS = {
    "a function as an attribute": (new(LINEAR, mapping(("act", named("os.mkdir")))), "os.mkdir"),
    "a function of the same library": (new(LINEAR, mapping(("act", named("torch.hub.load")))), "torch.hub.load"),
    "a constructor": (new(LINEAR, mapping(("act", call(LINEAR, b"K\x02", b"K\x02")))), LINEAR),
    "a constructor of a whole model": (
        new(LINEAR, mapping(("act", call("torchvision.models.resnet.ResNet", b"N", b"N")))),
        "torchvision.models.resnet.ResNet",
    ),
    "a model class that a layer would call": (
        new(LINEAR, mapping(("act", named("torchvision.models.resnet.ResNet")))),
        "torchvision.models.resnet.ResNet",
    ),
    "a constructor behind what rebuilds tensors": (
        new(
            LINEAR,
            mapping(("w", call("torch._tensor._rebuild_from_type_v2", named(LINEAR), named(LINEAR), b")", b"}"))),
        ),
        "_rebuild_from_type_v2",
    ),
    "arguments of a new object": (new(LINEAR, b"}", b"K\x02\x85"), "with arguments"),
    "a partial of a function": (
        new(LINEAR, mapping(("act", call("functools.partial", named("os.mkdir"))))),
        "os.mkdir",
    ),
    "a partial of a model": (
        new(LINEAR, mapping(("act", call("functools.partial", named("torchvision.models.resnet.ResNet"))))),
        "functools.partial",
    ),
    "a method of its own": (
        new(LINEAR, mapping(("forward", named("torch.nn.functional.relu")))),
        "with a `forward` of its own",
    ),
    "a hook": (
        new(LINEAR, mapping(("_forward_hooks", HOOKS + b"K\x00" + named("torch.nn.functional.relu") + b"s"))),
        "with forward hooks",
    ),
    "a special attribute": (new(LINEAR, mapping(("__class__", b"N"))), "without a name"),
    "getattr": (new(LINEAR, mapping(("act", call("builtins.getattr", b"N", text("x"))))), "builtins.getattr"),
    "eval in the spelling of Python 2": (call("__builtin__.eval", text("1")), "eval"),
    "bytes that are unpickled": (
        new(LINEAR, mapping(("w", call("torch.storage._load_from_bytes", text("x"))))),
        "_load_from_bytes",
    ),
    "a name that another module defines": (new("torch.nn.modules.container.Module"), "container.Module"),
    "a member of a class": (new("torch.nn.modules.linear.Linear.__init__"), "__init__"),
    "a module that its library only imports": (
        new(LINEAR, mapping(("act", named("timm.layers.os")))),
        "timm.layers.os",
    ),
    "a graph of code": (new("torch.fx.graph_module.GraphModule"), "GraphModule"),
    "a compiled program": (new("torch.jit._script.RecursiveScriptModule"), "RecursiveScriptModule"),
    "a class outside the libraries": (new("subprocess.Popen"), "subprocess.Popen"),
    "a state that is no dict": (new(LINEAR, b"K\x01"), "no dict"),
    "a kernel of the hub": (
        new(
            "transformers.models.bert.modeling_bert.BertModel",
            mapping(
                (
                    "config",
                    new(
                        "transformers.models.bert.configuration_bert.BertConfig",
                        mapping(("_attn_implementation_internal", text("evil/kernel"))),
                    ),
                )
            ),
        ),
        "kernel of the hub",
    ),
    "kernels that are switched on": (
        new("transformers.models.bert.modeling_bert.BertModel", mapping(("_use_kernels", b"\x88"))),
        "kernels of the hub",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_pickle_of_known_layers_that_would_run_something_is_refused_by_what_it_would_run(tmp_path, attack):
    pickled, named_as = ATTACKS[attack]
    path = written(tmp_path, archive(program(pickled)))
    error = require_refusal(lambda: load(path, inputs=INPUTS))
    assert named_as in error.found
    if "eval" not in attack:
        assert "--trust-pickle" in error.remedy
        assert "--weights" in error.remedy


def test_the_layer_of_these_attacks_is_admitted_without_them(tmp_path):
    assert type(load(written(tmp_path, saved(nn.Linear(3, 2))), inputs=INPUTS).module) is nn.Linear


@pytest.mark.parametrize("state", [b"}", mapping(("_modules", b"N")), mapping(("in_features", b"K\x03"))])
def test_a_module_without_the_parts_of_one_is_refused(tmp_path, state):
    error = require_refusal(lambda: load(written(tmp_path, archive(program(new(LINEAR, state)))), inputs=INPUTS))
    assert "whole module" in error.expected


def storage(count: int) -> bytes:
    return b"(" + text("storage") + named("torch.FloatStorage") + text("0") + text("cpu") + struct_int(count) + b"tQ"


def struct_int(value: int) -> bytes:
    data = value.to_bytes(8, "little", signed=True)
    return b"\x8a\x08" + data


def tensor(count: int) -> bytes:
    size = struct_int(count)
    return call(
        "torch._utils._rebuild_tensor_v2", storage(count), b"K\x00", size + b"\x85", b"K\x01\x85", b"\x89", HOOKS
    )


@pytest.mark.parametrize("count", [3, 1 << 40, -1])
def test_a_storage_that_is_larger_than_its_bytes_is_refused_before_it_is_read(tmp_path, count):
    good = archive(program(mapping(("w", tensor(2)))), {"0": bytes(8)})
    bad = archive(program(mapping(("w", tensor(count)))), {"0": bytes(8)})
    assert "w [2]" in require_refusal(lambda: load(written(tmp_path, good))).found
    assert "torage" in require_refusal(lambda: load(written(tmp_path, bad))).expected


def test_a_legacy_storage_that_is_larger_than_the_file_is_refused_before_it_is_allocated(tmp_path):
    data = saved({"w": torch.zeros(7)}, _use_new_zipfile_serialization=False)
    huge = data.replace(b"K\x07", b"\x8a\x06" + (1 << 40).to_bytes(6, "little"))
    assert huge != data
    assert "bytes" in require_refusal(lambda: load(written(tmp_path, huge))).found


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path):
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"N" * 50_000_000)
        file.writestr("archive/version", b"3\n")
    error = require_refusal(lambda: load(str(path)))
    assert "uncompressed" in error.expected
    assert "50,000,000" in error.found


def test_an_archive_that_declares_more_than_it_has_is_refused(tmp_path):
    data = bytearray(archive(program(b"N")))
    start = data.index(b"PK\x01\x02")  # the first entry of the directory: the sizes are at 20 and 24
    for offset in (20, 24):
        data[start + offset : start + offset + 4] = (1 << 30).to_bytes(4, "little")
    require_refusal(lambda: load(written(tmp_path, bytes(data))))


@pytest.mark.parametrize("name", ["../../evil", "/evil", "archive/../../evil", "archive\\evil"])
def test_a_member_that_leads_out_of_the_archive_is_refused(tmp_path, name):
    path = tmp_path / "model.pt"
    path.write_bytes(archive(program(b"N")))
    with zipfile.ZipFile(path, "a") as file:
        file.writestr(name, b"")
    error = require_refusal(lambda: load(str(path)))
    assert error.found.startswith("a member named") or "subdirectory" in error.found


def test_two_members_of_one_name_are_refused(tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(archive(program(b"N")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(path, "a") as file:
            file.writestr("archive/data.pkl", program(call("os.getcwd")))
    assert require_refusal(lambda: load(str(path))).found == "two members of one name"


@pytest.mark.parametrize("legacy", [False, True])
def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path, legacy):
    data = saved(nn.Linear(30, 30).state_dict(), _use_new_zipfile_serialization=not legacy)
    for part in (1, 2, 10, 100, len(data) // 3, len(data) // 2, len(data) - 1):
        require_refusal(lambda part=part: load(written(tmp_path, data[:part])))


def test_an_archive_that_claims_to_span_several_disks_is_refused(tmp_path):
    data = bytearray(saved({"w": torch.zeros(2)}))
    locator = b"PK\x06\x07" + bytes(12) + (2).to_bytes(4, "little")  # the 64-bit end of directory, on two disks
    data[data.rindex(b"PK\x05\x06") :] = locator + data[data.rindex(b"PK\x05\x06") :]
    path = written(tmp_path, bytes(data))
    with pytest.raises(zipfile.BadZipFile, match="multiple disks"):
        zipfile.is_zipfile(path)
    require_refusal(lambda: load(path))


def test_a_member_with_a_damaged_header_is_refused(tmp_path):
    data = bytearray(archive(program(b"N")))
    data[data.index(b"PK\x03\x04")] = 0
    assert "whole member" in require_refusal(lambda: load(written(tmp_path, bytes(data)))).expected


def test_a_pickle_that_never_ends_is_refused(tmp_path):
    require_refusal(lambda: load(written(tmp_path, archive(b"\x80\x02" + b"N0" * 1000))))


def test_a_pickle_nested_without_end_is_refused(tmp_path):
    require_refusal(lambda: load(written(tmp_path, archive(program(b"]" * 100_000 + b"a" * 99_999)))))


# --- what a file is -------------------------------------------------------------------------------------------------


def test_a_state_dict_is_called_one_with_the_command_that_works(tmp_path):
    path = written(tmp_path, saved(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).state_dict()))
    error = require_refusal(lambda: load(path))
    assert "state dict" in error.what
    assert "4 tensors, 14 values: 0.weight [2, 3], 0.bias [2]" in error.found
    assert f"fxaudit trace file.py:function --weights {path}" in error.remedy


def test_a_training_checkpoint_is_called_one_with_what_lies_beside_the_weights(tmp_path):
    layer = nn.Linear(3, 2)
    content = {
        "state_dict": layer.state_dict(),
        "epoch": 3,
        "optimizer": torch.optim.Adam(layer.parameters()).state_dict(),
    }
    error = require_refusal(lambda: load(written(tmp_path, saved(content), "model.ckpt")))
    assert "under `state_dict`, beside epoch, optimizer" in error.found
    assert "--weights" in error.remedy


def test_safetensors_under_another_name_are_called_what_they_are(tmp_path):
    save_file({"weight": torch.zeros(2, 3)}, tmp_path / "model.pt")
    error = require_refusal(lambda: load(str(tmp_path / "model.pt")))
    assert "weight [2, 3]" in error.found
    assert "--weights" in error.remedy


def test_a_torchscript_archive_is_called_one_under_any_name(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "model.pth")
    for trust in (False, True):
        error = require_refusal(lambda trust=trust: load(str(tmp_path / "model.pth"), trust_pickle=trust))
        assert "TorchScript" in error.what
        assert "state_dict()" in error.remedy


def test_a_tar_of_before_2017_is_called_one(tmp_path):
    error = require_refusal(lambda: load(written(tmp_path, CONTAINERS["torch tar"](tmp_path / "executed"))))
    assert "tar" in error.found


def test_plain_values_are_called_no_model(tmp_path):
    error = require_refusal(lambda: load(written(tmp_path, saved({"width": 3, "names": ["a"]}))))
    assert "no model" in error.what


def test_another_kind_of_file_is_called_neither(tmp_path):
    assert "neither" in require_refusal(lambda: load(written(tmp_path, b"hello, world"))).found


def test_an_empty_file_is_called_empty(tmp_path):
    assert "empty" in require_refusal(lambda: load(written(tmp_path, b""))).found


# --- modules --------------------------------------------------------------------------------------------------------


def same(first: nn.Module, second: nn.Module) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=50, max_position_embeddings=16, **SMALL))


MODULES = {
    "torch": lambda: nn.Sequential(nn.Linear(3, 4), nn.MultiheadAttention(4, 2), nn.LSTM(4, 4), nn.BatchNorm1d(4)),
    "torchvision": lambda: torchvision.models.get_model("mobilenet_v3_small", weights=None),
    "torchvision with a partial": lambda: torchvision.models.VisionTransformer(32, 16, 1, 2, 8, 8),
    "timm": lambda: timm.create_model("resnet10t", pretrained=False),
    "timm with an enumeration": lambda: timm.create_model("vit_tiny_patch16_224", depth=1, pretrained=False),
    "transformers": bert,
}


@pytest.mark.parametrize("name", MODULES)
def test_a_pickled_module_of_a_library_loads_without_trust(tmp_path, name):
    torch.manual_seed(0)
    module = MODULES[name]().eval()
    loaded = load(written(tmp_path, saved(module)), inputs=INPUTS).module
    assert type(loaded) is type(module)
    assert same(loaded, module)


def test_a_pickled_module_computes_what_it_did(tmp_path):
    torch.manual_seed(0)
    module = MODULES["torchvision"]().eval()
    loaded = load(written(tmp_path, saved(module)))
    with torch.no_grad():
        assert torch.equal(loaded.module(*loaded.arguments[0]), module(*loaded.arguments[0]))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("torchvision", [2, 3, 224, 224]), ("timm", [2, 3, 176, 176])],
)
def test_a_pickled_image_model_comes_with_images_of_its_size(tmp_path, name, shape):
    assert list(load(written(tmp_path, saved(MODULES[name]()))).arguments[0][0].shape) == shape


def test_a_pickled_transformers_model_comes_with_token_ids(tmp_path):
    ids = load(written(tmp_path, saved(bert()))).arguments[1]["input_ids"]
    assert list(ids.shape) == [2, 16]
    assert int(ids.max()) < 50


def test_a_pickled_module_without_inferable_inputs_names_the_option_for_them(tmp_path):
    error = require_refusal(lambda: load(written(tmp_path, saved(nn.Linear(3, 2)))))
    assert "--inputs" in error.remedy


def test_tied_weights_of_a_pickled_module_stay_tied(tmp_path):
    loaded = load(written(tmp_path, saved(bert()))).module
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


def test_a_module_of_the_users_own_class_needs_trust(tmp_path):
    path = written(tmp_path, saved(OwnModule()))
    error = require_refusal(lambda: load(path, inputs=INPUTS))
    name = f"{OwnModule.__module__}.OwnModule"
    assert name in error.found
    assert error.globals == (name,)
    loaded = load(path, inputs=INPUTS, trust_pickle=True).module
    assert type(loaded) is OwnModule


def test_a_module_inside_a_training_checkpoint_loads_with_trust(tmp_path):
    path = written(tmp_path, saved({"model": OwnModule(), "epoch": 3}))
    require_refusal(lambda: load(path, inputs=INPUTS))
    assert type(load(path, inputs=INPUTS, trust_pickle=True).module) is OwnModule


@pytest.mark.filterwarnings("ignore")
def test_a_module_in_the_old_format_needs_trust(tmp_path):
    path = written(tmp_path, saved(nn.Linear(3, 2), _use_new_zipfile_serialization=False))
    assert "Linear" in require_refusal(lambda: load(path, inputs=INPUTS)).found
    assert type(load(path, inputs=INPUTS, trust_pickle=True).module) is nn.Linear


def test_a_module_in_a_bare_pickle_needs_trust(tmp_path):
    path = written(tmp_path, pickle.dumps(nn.Identity()), "model.pkl")
    require_refusal(lambda: load(path, inputs=INPUTS))
    assert type(load(path, inputs=INPUTS, trust_pickle=True).module) is nn.Identity


def test_a_class_that_cannot_be_imported_is_reported_with_trust(tmp_path):
    data = archive(program(new("fxaudit_no_such_package.Model")))
    error = require_refusal(lambda: load(written(tmp_path, data), inputs=INPUTS, trust_pickle=True))
    assert "fxaudit_no_such_package" in error.found


def test_loading_a_pickled_module_leaves_no_class_allowed_behind(tmp_path):
    before = set(torch.serialization.get_safe_globals())
    load(written(tmp_path, saved(nn.Linear(3, 2))), inputs=INPUTS)
    assert set(torch.serialization.get_safe_globals()) == before


def test_attributes_that_a_library_sets_on_tensors_are_kept(tmp_path):
    layer = nn.Linear(3, 2)
    layer.weight._is_hf_initialized = True
    layer.register_buffer("mask", torch.ones(2))
    layer.mask.note = "plain"
    loaded = load(written(tmp_path, saved(layer)), inputs=INPUTS).module
    assert loaded.weight._is_hf_initialized is True
    assert loaded.mask.note == "plain"


def test_an_attribute_of_a_tensor_that_could_be_called_is_refused(tmp_path):
    layer = nn.Linear(3, 2)
    layer.weight.factory = nn.ReLU
    error = require_refusal(lambda: load(written(tmp_path, saved(layer)), inputs=INPUTS))
    assert "ReLU" in error.found


def test_the_items_of_an_ordered_dict_are_judged(tmp_path):
    layer = nn.Linear(3, 2)
    layer.table = OrderedDict(act=print)
    error = require_refusal(lambda: load(written(tmp_path, saved(layer)), inputs=INPUTS))
    assert "print" in error.found

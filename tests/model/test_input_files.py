"""Example inputs from files."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fxaudit.model.input_files import read_inputs
from fxaudit.model.load import load
from tests.model.hostile import CONTAINERS, require_refusal, saved

FILE = """
import torch
from torch import nn

class Two(nn.Module):
    def forward(self, x, scale=None, *, parts=(), mode="plain"):
        y = x * (1 if scale is None else scale)
        for part in parts:
            y = y + part
        return y

def build():
    return Two()
"""


@pytest.fixture
def model(tmp_path) -> str:
    (tmp_path / "two.py").write_text(FILE)
    return f"{tmp_path}/two.py:build"


def test_names_of_a_safetensors_file_are_keyword_arguments(tmp_path, model):
    x, scale = torch.randn(3, 2), torch.ones(2, dtype=torch.bfloat16)
    save_file({"x": x, "scale": scale}, tmp_path / "i.safetensors")
    positional, keywords = load(model, inputs=tmp_path / "i.safetensors").arguments
    assert positional == ()
    assert torch.equal(keywords["x"], x)
    assert keywords["scale"].dtype == torch.bfloat16


@pytest.mark.parametrize("names", [("0", "1"), ("arg0", "arg1"), ("arg_0", "arg_1")])
def test_numbers_are_positions(tmp_path, names):
    values = {name: torch.full((2, 2), float(i)) for i, name in reversed(list(enumerate(names)))}
    save_file(values, tmp_path / "i.safetensors")
    assert [int(tensor[0, 0]) for tensor in read_inputs(tmp_path / "i.safetensors")] == [0, 1]


def test_ten_positions_are_in_the_order_of_their_numbers(tmp_path):
    save_file({str(i): torch.full((2,), float(i)) for i in range(11)}, tmp_path / "i.safetensors")
    assert [int(tensor[0]) for tensor in read_inputs(tmp_path / "i.safetensors")] == list(range(11))


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64", "bool", "uint8", "float16", "complex64"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_of_an_npz_file_keep_their_dtype_and_values(tmp_path, dtype, save):
    array = np.array([[0, 1], [1, 3]]).astype(dtype)
    save(tmp_path / "i.npz", ids=array)
    read = read_inputs(tmp_path / "i.npz")["ids"]
    assert str(read.dtype).removeprefix("torch.") == dtype
    assert np.array_equal(read.numpy(), array)


def test_arrays_in_the_other_byte_order_keep_their_values(tmp_path):
    np.savez(tmp_path / "i.npz", x=np.array([1.5, 2.5], dtype=">f4"))
    assert read_inputs(tmp_path / "i.npz")["x"].tolist() == [1.5, 2.5]


@pytest.mark.parametrize(
    "content",
    [
        torch.ones(2, 3),
        (torch.ones(2, 3), torch.zeros(3)),
        [torch.ones(2, 3)],
        {"x": torch.ones(2, 3), "parts": [torch.ones(3), torch.ones(3)], "mode": "other"},
    ],
)
def test_a_torch_file_holds_inputs_of_any_form(tmp_path, model, content):
    (tmp_path / "i.pt").write_bytes(saved(content))
    loaded = load(model, inputs=tmp_path / "i.pt")
    positional, keywords = loaded.arguments
    expected = torch.ones(2, 3)
    assert torch.equal(positional[0] if positional else keywords["x"], expected)
    if keywords:
        assert keywords["mode"] == "other"
        assert torch.equal(loaded.module(**keywords), expected + 2)


def test_one_input_of_a_file_is_joined_by_a_second(tmp_path, model):
    save_file({"x": torch.randn(1, 3)}, tmp_path / "i.safetensors")
    assert list(load(model, inputs=tmp_path / "i.safetensors").arguments[1]["x"].shape) == [2, 3]


@pytest.mark.parametrize(
    "names", [("0", "2"), ("0", "x"), ("not a name",), ("arg1",)], ids=["a gap", "both", "no name", "no first"]
)
def test_names_that_are_neither_arguments_nor_positions_are_refused(tmp_path, names):
    save_file({name: torch.zeros(2) for name in names}, tmp_path / "i.safetensors")
    error = require_refusal(lambda: read_inputs(tmp_path / "i.safetensors"))
    assert names[0] in error.found


@pytest.mark.parametrize("content", [{}, 7, "text", None])
def test_a_torch_file_without_inputs_is_refused(tmp_path, content):
    (tmp_path / "i.pt").write_bytes(saved(content))
    require_refusal(lambda: read_inputs(tmp_path / "i.pt"))


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("ending", ["pt", "npz", "safetensors"])
def test_a_bomb_given_as_inputs_is_never_executed(tmp_path, container, ending):
    marker, path = tmp_path / "executed", tmp_path / f"i.{ending}"
    path.write_bytes(CONTAINERS[container](marker))
    require_refusal(lambda: read_inputs(path), marker)


def test_objects_in_an_npz_file_are_never_unpickled(tmp_path):
    from tests.model.hostile import Bomb

    marker = tmp_path / "executed"
    np.savez(tmp_path / "i.npz", x=np.array([Bomb(marker)], dtype=object))
    require_refusal(lambda: read_inputs(tmp_path / "i.npz"), marker)


def test_an_npz_file_that_declares_far_more_than_it_has_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("fxaudit.model.input_files._ALWAYS_READ", 1 << 20)
    np.savez_compressed(tmp_path / "i.npz", x=np.zeros(1 << 24, np.uint8))
    assert "declared" in require_refusal(lambda: read_inputs(tmp_path / "i.npz")).found


def test_a_tensor_that_claims_far_more_than_it_stores_is_refused(tmp_path):
    (tmp_path / "i.pt").write_bytes(saved({"x": torch.zeros(1).expand(1 << 40)}))
    assert "too large" in require_refusal(lambda: read_inputs(tmp_path / "i.pt")).what


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04garbage"])
@pytest.mark.parametrize("ending", ["pt", "npz", "safetensors", "other"])
def test_a_file_of_another_kind_is_refused(tmp_path, content, ending):
    (tmp_path / f"i.{ending}").write_bytes(content)
    require_refusal(lambda: read_inputs(tmp_path / f"i.{ending}"))


def test_a_missing_file_does_not_exist(tmp_path, model):
    assert require_refusal(lambda: load(model, inputs=str(tmp_path / "i.pt"))).found == "no such file"


def test_a_pickled_module_takes_inputs_from_a_file(tmp_path):
    (tmp_path / "model.pt").write_bytes(saved(nn.Linear(3, 2)))
    save_file({"0": torch.randn(2, 3)}, tmp_path / "i.safetensors")
    loaded = load(str(tmp_path / "model.pt"), inputs=tmp_path / "i.safetensors")
    assert list(loaded.module(*loaded.arguments[0]).shape) == [2, 2]

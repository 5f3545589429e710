"""Archives of torch.export as MODEL: the scan, and what it lets through."""

import contextlib
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

from fxaudit.model.load import load
from fxaudit.stages import trace
from tests.model.hostile import Bomb, archive, program, require_refusal, saved


class Gated(nn.Module):
    """Layers, a buffer, a constant, several inputs in a container, a value that is no tensor, a dict as output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("scale", torch.full((6,), 2.0))
        self.offset = torch.arange(6.0)

    def forward(self, x, extra=None, *, mode="a"):
        flat = x.reshape(x.shape[0] * x.shape[1], 6)
        y = self.norm(self.linear(flat)) * torch.sigmoid(flat) * self.scale + self.offset
        return {"out": y if mode == "a" else -y, "more": (y.mean(), extra["q"][0] * 2)}


ARGUMENTS = (torch.randn(4, 5, 6),), {"extra": {"q": [torch.randn(3)]}, "mode": "a"}


def exported(module: nn.Module, *arguments, dynamic=None, **keywords) -> bytes:
    buffer = io.BytesIO()
    made = torch.export.export(module.eval(), arguments, keywords or None, dynamic_shapes=dynamic, strict=False)
    torch.export.save(made, buffer)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def gated() -> tuple[Gated, bytes]:
    torch.manual_seed(0)
    module = Gated()
    (x,), keywords = ARGUMENTS
    shapes = {"x": {0: Dim("batch", min=2, max=64), 1: Dim.AUTO}, "extra": {"q": [None]}, "mode": None}
    return module, exported(module, x, dynamic=shapes, **keywords)


@pytest.fixture(scope="module")
def data(gated) -> bytes:
    return gated[1]


def members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {name.partition("/")[2]: file.read(name) for name in file.namelist()}


def packed(content: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, value in content.items():
            file.writestr(f"model/{name}", value)
    return buffer.getvalue()


def changed(data: bytes, change: Callable[[dict], object], member: str = "models/model.json") -> bytes:
    content = members(data)
    tree = json.loads(content[member])
    change(tree)
    return packed({**content, member: json.dumps(tree).encode()})


def written(tmp_path: Path, data: bytes, name: str = "model.pt2") -> str:
    path = tmp_path / name
    path.write_bytes(data)
    return str(path)


# --- what loads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.pt2", "model.pt", "model.bin"])
def test_an_archive_loads_without_trust_whatever_its_name(tmp_path, gated, name):
    module, data = gated
    loaded = load(written(tmp_path, data, name))
    with torch.no_grad():
        ours, theirs = loaded.module(*ARGUMENTS[0], **ARGUMENTS[1]), module(*ARGUMENTS[0], **ARGUMENTS[1])
    assert torch.equal(ours["out"], theirs["out"])
    assert torch.equal(ours["more"][1], theirs["more"][1])


def test_an_archive_comes_with_the_inputs_that_it_was_exported_with(tmp_path, data):
    positional, keywords = load(written(tmp_path, data)).arguments
    assert torch.equal(positional[0], ARGUMENTS[0][0])
    assert torch.equal(keywords["extra"]["q"][0], ARGUMENTS[1]["extra"]["q"][0])
    assert keywords["mode"] == "a"


def test_an_archive_unpacked_and_packed_again_still_loads(tmp_path, data):
    load(written(tmp_path, packed(members(data))))


def test_an_archive_can_be_switched_to_eval_mode(tmp_path, data):
    assert not load(written(tmp_path, data)).module.eval().training


def test_the_guards_of_an_archive_still_hold(tmp_path, data):
    module = load(written(tmp_path, data)).module
    with pytest.raises((AssertionError, RuntimeError)):
        module(torch.randn(80, 5, 6), **ARGUMENTS[1])


def test_an_archive_traces_bit_for_bit_with_the_modules_paths_and_source_lines(tmp_path, data):
    traced = trace(written(tmp_path, data))
    assert traced.fidelity.bitwise
    linear = next(node for node in traced.graph.nodes if str(node.target).startswith("aten.linear"))
    assert list(linear.meta["nn_module_stack"].values())[-1][0] == "linear"
    assert "test_exported.py" in str([node.meta.get("stack_trace") for node in traced.graph.nodes])


def test_an_archive_of_one_input_keeps_that_batch(tmp_path):
    loaded = load(written(tmp_path, exported(nn.Linear(3, 2), torch.randn(1, 3))))
    assert list(loaded.arguments[0][0].shape) == [1, 3]


def test_inputs_of_the_users_own_replace_those_of_the_archive(tmp_path, data):
    other = torch.randn(7, 5, 6)
    loaded = load(written(tmp_path, data), inputs={"x": other, **ARGUMENTS[1]})
    assert loaded.arguments[1]["x"] is other


class Branching(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y - 1, (x,))


class Symbolic(nn.Module):
    """Sizes through division, remainder, powers, extrema and comparisons."""

    def forward(self, x, y):
        n, m = x.shape[0], y.shape[0]
        torch._check(n * 2 >= m)
        z = torch.cat([x, y])[: max(n, m) + (n + m) // 3 + n % 2 + 0 * n**2]
        return z * (n / m), x.new_zeros(n // 2 + 1)


MODELS = {
    "control flow": lambda: exported(Branching(), torch.randn(3)),
    "symbolic sizes": lambda: exported(
        Symbolic(), torch.randn(6), torch.randn(9), dynamic={"x": {0: Dim.AUTO}, "y": {0: Dim.AUTO}}
    ),
    "tied weights": lambda: exported(nn.Sequential(*[nn.Linear(3, 3)] * 2), torch.randn(2, 3)),
    "a recurrent layer": lambda: exported(nn.LSTM(3, 4), torch.randn(5, 2, 3)),
    "attention": lambda: exported(nn.MultiheadAttention(4, 2), *[torch.randn(3, 2, 4)] * 3),
    "a text model": lambda: exported(text_model(), input_ids=torch.randint(50, (2, 8))),
    "a vision model": lambda: exported(vision_model(), torch.randn(2, 3, 64, 64)),
    "bfloat16": lambda: exported(nn.Linear(3, 2).bfloat16(), torch.randn(2, 3).bfloat16()),
    "no parameters": lambda: exported(nn.Softmax(-1), torch.randn(2, 3)),
}


def text_model() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, use_cache=False
    )
    return transformers.LlamaForCausalLM(config)


def vision_model() -> nn.Module:
    import torchvision

    return torchvision.models.mobilenet_v3_small(weights=None)


@pytest.mark.parametrize("name", MODELS)
def test_archives_as_torch_writes_them_are_accepted(tmp_path, name):
    torch.manual_seed(0)
    data = MODELS[name]()
    reference = torch.export.load(io.BytesIO(data)).module()
    loaded = load(written(tmp_path, data))
    positional, keywords = loaded.arguments
    with torch.no_grad():
        ours, theirs = (m(*positional, **keywords) for m in (loaded.module, reference))
    for a, b in zip(*(torch.utils._pytree.tree_leaves(out) for out in (ours, theirs)), strict=True):
        assert torch.equal(a, b)


# --- hostile pickles ------------------------------------------------------------------------------------------------


def with_bomb(data: bytes, place: str, marker: Path) -> bytes:
    content = members(data)
    bomb = saved(Bomb(marker))
    if place == "sample inputs":
        content["data/sample_inputs/model.pt"] = bomb
    elif place == "sample inputs as a bare pickle":
        content["data/sample_inputs/model.pt"] = pickle.dumps(Bomb(marker))
    elif place in ("pickled weights", "pickled constants"):
        folder, name = ("weights", "weight_0") if "weights" in place else ("constants", "tensor_0")
        config = json.loads(content[f"data/{folder}/model_{folder}_config.json"])
        next(meta for meta in config["config"].values() if meta["path_name"] == name)["use_pickle"] = True
        content |= {
            f"data/{folder}/model_{folder}_config.json": json.dumps(config).encode(),
            f"data/{folder}/{name}": bomb,
        }
    elif place in ("weights of an older torch", "constants of an older torch"):
        content[f"data/{place.split()[0]}/model.pt"] = saved({"weight": Bomb(marker)})
    elif place in ("an opaque object", "a custom object"):
        name = "opaque_obj_0" if "opaque" in place else "custom_obj_0"
        config = json.loads(content["data/constants/model_constants_config.json"])
        config["config"]["bomb"] = {"path_name": name, "is_param": False, "use_pickle": True, "tensor_meta": None}
        content["data/constants/model_constants_config.json"] = json.dumps(config).encode()
        content[f"data/constants/{name}"] = pickle.dumps(Bomb(marker))
    return packed(content)


PLACES = [
    "sample inputs",
    "sample inputs as a bare pickle",
    "pickled weights",
    "pickled constants",
    "weights of an older torch",
    "constants of an older torch",
    "an opaque object",
    "a custom object",
]


@pytest.mark.parametrize("place", PLACES)
def test_a_bomb_in_an_archive_is_never_executed(tmp_path, data, place):
    marker = tmp_path / "executed"
    error = require_refusal(lambda: load(written(tmp_path, with_bomb(data, place, marker))), marker)
    assert "--trust-pickle" in error.remedy


# torch reads a custom object with the unpickler of TorchScript, which knows no functions of Python.
@pytest.mark.parametrize("place", [place for place in PLACES if place != "a custom object"])
def test_the_bombs_of_these_tests_explode_in_torch_itself(tmp_path, data, place):
    marker = tmp_path / "executed"
    with contextlib.suppress(Exception):
        torch.export.load(io.BytesIO(with_bomb(data, place, marker)))
    assert marker.exists() or place == "sample inputs as a bare pickle"


def test_trust_loads_what_the_scan_refuses(tmp_path, data):
    content = members(data)
    path = written(tmp_path, packed({**content, "extra/notes": b"by hand"}))
    require_refusal(lambda: load(path))
    assert load(path, trust_pickle=True).parameter_count == 54


# --- hostile programs -----------------------------------------------------------------------------------------------

SHAPE = "Symbol('s77', positive=True, integer=True)"


def first_size(tree: dict, text: object) -> None:
    value = next(v for v in tree["graph_module"]["graph"]["sym_int_values"].values() if "as_expr" in v)
    value["as_expr"]["expr_str"] = text


def node(tree: dict, target: str) -> dict:
    return next(node for node in tree["graph_module"]["graph"]["nodes"] if target in node["target"])


def call_of(tree: dict) -> dict:
    return tree["graph_module"]["module_call_graph"][0]["signature"]


def rename_input(tree: dict, name: str) -> dict:
    """The program with its input `x` under another name, wherever it is named."""
    text = (
        json.dumps(tree)
        .replace('"name": "x"', f'"name": {json.dumps(name)}')
        .replace('"x": {', f"{json.dumps(name)}: {{")
    )
    return json.loads(text)


def evil(marker: Path) -> str:
    return f"__import__('os').mkdir({str(marker)!r})"


PROGRAMS: dict[str, Callable[[dict, Path], object]] = {
    "an expression": lambda tree, marker: first_size(tree, evil(marker)),
    "an expression inside an expression": lambda tree, marker: first_size(tree, f"Add(Integer(1), {evil(marker)})"),
    "an attribute in an expression": lambda tree, marker: first_size(tree, f"Integer(1).__class__({evil(marker)})"),
    "a lambda in an expression": lambda tree, marker: first_size(tree, f"(lambda: {evil(marker)})()"),
    "a text in an expression": lambda tree, marker: first_size(tree, f"Integer({evil(marker)!r})"),
    "expressions in a list": lambda tree, marker: first_size(tree, [evil(marker)]),
    "a size of a tensor": lambda tree, marker: tree["graph_module"]["graph"]["tensor_values"]["x"]["sizes"][0][
        "as_expr"
    ].update(expr_str=evil(marker)),
    "a guard": lambda tree, marker: tree["guards_code"].append(f"{evil(marker)} is None"),
    "a guard that ends early": lambda tree, marker: tree["guards_code"].append(f"True) or {evil(marker)} or (True"),
    "a guard of two lines": lambda tree, marker: tree["guards_code"].append(f"(True\n, {evil(marker)})"),
    "a guard with a comment": lambda tree, marker: tree["guards_code"].append(f"L['x'].size()[0] > 1 # {evil(marker)}"),
    "a guard with a quote": lambda tree, marker: tree["guards_code"].append(f"'\") or {evil(marker)} or (\"' == 'a'"),
    "a function of Python": lambda tree, marker: node(tree, "sigmoid").update(target="torch.os.system"),
    "a loader": lambda tree, marker: node(tree, "sigmoid").update(target="torch.hub.load"),
    "a library": lambda tree, marker: node(tree, "sigmoid").update(target="torch.ops.load_library"),
    "an operator over files": lambda tree, marker: node(tree, "sigmoid").update(
        target="torch.ops.aten.from_file.default"
    ),
    "a method of an operator": lambda tree, marker: node(tree, "sigmoid").update(
        target="torch.ops.aten.sigmoid.__init__"
    ),
    "a function of the operator module": lambda tree, marker: node(tree, "sigmoid").update(
        target="_operator.attrgetter"
    ),
    "an operator as an argument": lambda tree, marker: node(tree, "sigmoid")["inputs"][0].update(
        arg={"as_operator": "torch.os.system"}
    ),
    "the name of a node": lambda tree, marker: tree.update(rename_input(tree, f"x = {evil(marker)}; y")),
    "the name of a parameter": lambda tree, marker: tree["graph_module"]["signature"]["input_specs"][0][
        "parameter"
    ].update(parameter_name=f'linear.weight", {evil(marker)})  # '),
    "a value that is a text": lambda tree, marker: next(
        spec for spec in tree["graph_module"]["signature"]["input_specs"] if "constant_input" in spec
    )["constant_input"].update(value={"as_string": f"a' or {evil(marker)} or 'a"}),
    "the name of an argument": lambda tree, marker: call_of(tree).update(
        forward_arg_names=[f"x=({evil(marker)})", "extra", "mode"]
    ),
    "a key of the arguments": lambda tree, marker: call_of(tree).update(
        in_spec=call_of(tree)["in_spec"].replace('\\"extra\\"', f"\\\"extra': {evil(marker)}, 'more\\\"")
    ),
    "a factory in the structure": lambda tree, marker: call_of(tree).update(
        out_spec='[1, {"type": "collections.defaultdict", "context": {"default_factory_module": "os", '
        '"default_factory_name": "getcwd", "dict_context": ["a"]}, "children_spec": []}]'
    ),
    "an enumeration in the structure": lambda tree, marker: call_of(tree).update(
        out_spec='[1, {"type": "builtins.tuple", "context": '
        '"{\\"__enum__\\": 1, \\"fqn\\": \\"antigravity:X\\", \\"name\\": \\"Y\\"}", "children_spec": []}]'
    ),
    "a custom object": lambda tree, marker: tree["graph_module"]["graph"]["custom_obj_values"].update(
        bomb={"name": "bomb", "class_fqn": "__torch__.Bomb"}
    ),
    "another type than the schema's": lambda tree, marker: tree["range_constraints"].update(
        s77={"min_val": "2", "max_val": 4}
    ),
    "a symbol that counts without end": lambda tree, marker: tree["range_constraints"].update(
        u99999999999={"min_val": 0, "max_val": 4}
    ),
    "a power without end": lambda tree, marker: first_size(tree, "Pow(Integer(9), Pow(Integer(9), Integer(99999)))"),
    "a number without end": lambda tree, marker: first_size(tree, "Integer(" + "9" * 5000 + ")"),
    "nesting without end": lambda tree, marker: first_size(tree, "(" * 4000 + "1" + ")" * 4000),
    "control characters in a stack trace": lambda tree, marker: node(tree, "sigmoid")["metadata"].update(
        stack_trace='File "a.py", line 1\x1b[2J'
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_with_code_in_it_is_refused_and_never_executed(tmp_path, data, name):
    marker = tmp_path / "executed"
    hostile = changed(data, lambda tree: PROGRAMS[name](tree, marker))
    error = require_refusal(lambda: load(written(tmp_path, hostile)), marker)
    assert "models/model.json" in error.where
    assert "--trust-pickle" in error.remedy


@pytest.mark.parametrize(
    "name", ["an expression", "an expression inside an expression", "a size of a tensor", "a guard"]
)
def test_programs_of_these_tests_execute_in_torch_itself(tmp_path, data, name):
    marker = tmp_path / "executed"
    with contextlib.suppress(Exception):
        torch.export.load(io.BytesIO(changed(data, lambda tree: PROGRAMS[name](tree, marker)))).module()(
            *ARGUMENTS[0], **ARGUMENTS[1]
        )
    assert marker.exists()


# --- members and sizes ----------------------------------------------------------------------------------------------

WEIGHTS = "data/weights/model_weights_config.json"


def weight(tree: dict) -> dict:
    return next(meta for meta in tree["config"].values() if meta["path_name"] == "weight_0")


SIZES: dict[str, Callable[[dict], object]] = {
    "an absurd size": lambda tree: weight(tree)["tensor_meta"].update(sizes=[{"as_int": 1 << 40}, {"as_int": 6}]),
    "an absurd stride": lambda tree: weight(tree)["tensor_meta"].update(strides=[{"as_int": 1 << 40}, {"as_int": 1}]),
    "an absurd offset": lambda tree: weight(tree)["tensor_meta"].update(storage_offset={"as_int": 1 << 40}),
    "a negative size": lambda tree: weight(tree)["tensor_meta"].update(sizes=[{"as_int": -6}, {"as_int": 6}]),
    "fewer strides than sizes": lambda tree: weight(tree)["tensor_meta"].update(strides=[{"as_int": 1}]),
    "a wider dtype": lambda tree: weight(tree)["tensor_meta"].update(dtype=8),
    "an unknown dtype": lambda tree: weight(tree)["tensor_meta"].update(dtype=99),
    "a symbolic size": lambda tree: weight(tree)["tensor_meta"].update(sizes=[{"as_expr": {"expr_str": SHAPE}}] * 2),
    "a member outside the archive": lambda tree: weight(tree).update(path_name="../../../etc/passwd"),
    "a member that is not there": lambda tree: weight(tree).update(path_name="weight_99"),
    "no description of the tensor": lambda tree: weight(tree).update(tensor_meta=None),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_weight_that_is_not_what_it_declares_is_refused(tmp_path, data, name):
    error = require_refusal(lambda: load(written(tmp_path, changed(data, SIZES[name], WEIGHTS))))
    assert WEIGHTS in error.where


@pytest.mark.parametrize(
    "member",
    ["data/aotinductor/model/model.so", "code/evil.py", "extra/notes", "models/other.json", "data/weights/evil.pt"],
)
def test_a_member_of_another_kind_is_refused_by_its_name(tmp_path, data, member):
    error = require_refusal(lambda: load(written(tmp_path, packed({**members(data), member: b""}))))
    assert member in error.where or "TorchScript" in error.what


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff", b'{"graph_module": {}}'])
def test_a_program_that_is_none_is_refused(tmp_path, data, content):
    require_refusal(lambda: load(written(tmp_path, packed({**members(data), "models/model.json": content}))))


@pytest.mark.parametrize("member", ["models/model.json", WEIGHTS, "data/sample_inputs/model.pt", "archive_version"])
def test_an_archive_that_lacks_a_part_is_refused(tmp_path, data, member):
    content = members(data)
    del content[member]
    require_refusal(lambda: load(written(tmp_path, packed(content))))


def test_a_truncated_archive_is_refused_wherever_it_ends(tmp_path, data):
    for part in (1, 10, len(data) // 2, len(data) - 1):
        require_refusal(lambda part=part: load(written(tmp_path, data[:part])))


def test_an_archive_of_an_older_torch_needs_trust(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name in ("version", "serialized_exported_program.json", "serialized_state_dict.pt"):
            file.writestr(name, b"5.0")
    require_refusal(lambda: load(written(tmp_path, buffer.getvalue())))


def test_a_sample_input_that_declares_more_than_it_has_is_refused(tmp_path, data):
    content = members(data)
    content["data/sample_inputs/model.pt"] = archive(program(b"N"), {"0": b""}).replace(b"archive", b"other/.")
    require_refusal(lambda: load(written(tmp_path, packed(content))))

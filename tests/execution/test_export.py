"""Exported files against the frozen model that they came from."""

import re

import numpy as np
import onnx
import onnxruntime
import pytest
import sympy
import torch
from torch import nn
from torch.nn import functional as F

import fxaudit
from fxaudit.controllers.controller import Coefficient, Domain
from fxaudit.errors import DataError, ExportError
from fxaudit.execution.baking import expanded, expanded_all
from fxaudit.execution.export import export_graphs, files
from fxaudit.execution.export.exported import GRAPHS
from fxaudit.model.settings import TraceOptions

WIDTH = 16


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.sigmoid(self.linear(x))


class SharedGate(nn.Module):
    """One gate called twice on the same input: two controllers, two coefficients of equal value."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.first, self.second = Gate(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.gate(x) * self.first(x) + self.gate(x) * self.second(x)


class ManyOutputs(nn.Module):
    """Output names that the exported graph already has: of another op, of an input, of one value returned twice."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = Gate(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, linear):
        gate = self.gate(x)
        y = gate * self.value(x)
        return {"sigmoid": y, "again": y, "input": x, "gate": gate, "linear": y + linear}


class ParameterNamedOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value, self.output = Gate(), nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return self.gate(x) * self.value(x) + self.output


class FixedBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = Gate(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return (self.gate(x) * self.value(x)).reshape(3, 5 * WIDTH)


class SingularValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = Gate(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.linalg.svdvals(self.gate(x) * self.value(x))


class Router(nn.Module):
    """Two of four experts for each token; inputs and tokens are one axis of the coefficients."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        weights, indices = F.softmax(self.router(flat), -1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        outputs = (flat[:, None, None] @ self.experts[indices]).squeeze(2)
        return (outputs * weights.unsqueeze(-1)).sum(1).view_as(x)


def frozen(model, inputs):
    torch.manual_seed(0)
    return fxaudit.freeze(model().eval(), inputs)


def x(batch=3):
    return torch.randn(batch, 5, WIDTH, generator=torch.Generator().manual_seed(batch))


def first_profile(model, positions):
    """The coefficients of the first input at its first position, with size 1 along samples and positions."""
    leaves = model.traced.flatten(model.traced.subject.arguments)
    values = model.run_tapped(leaves)[1]
    return {c.key: positions(v).contiguous() for c, v in zip(model.coefficients, values, strict=False)}


def run(path, **feeds):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, {n: np.asarray(v) for n, v in feeds.items()}), strict=True))


def names(path):
    graph = onnx.load(path).graph
    return [v.name for v in graph.input], [v.name for v in graph.output]


def assert_close(found, expected):
    expected = expected.detach().numpy()
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    model = frozen(SharedGate, (x(),))
    profile = first_profile(model, lambda v: v[:1, :1])
    return model, export_graphs(model, tmp_path_factory.mktemp("shared"), profile)


@pytest.fixture(scope="module")
def router(tmp_path_factory):
    model = frozen(Router, (x(),))
    profile = first_profile(model, lambda v: v[:1])
    return model, export_graphs(model, tmp_path_factory.mktemp("router"), profile)


def test_a_gate_called_twice_on_one_input_stays_two_coefficients(shared):
    model, exported = shared
    assert names(exported.bound)[0] == ["x", "gate.linear_0_coefficient", "gate.linear_1_coefficient"]
    assert list(exported.bound_inputs) == ["gate.linear#0/coefficient", "gate.linear#1/coefficient"]
    graph = onnx.load(exported.live).graph
    assert [n.op_type for n in graph.node].count("Sigmoid") == 2
    coefficients = {
        name: torch.full((3, 5, WIDTH), value)
        for name, value in zip(exported.bound_inputs.values(), (0.25, 1.0), strict=True)
    }
    expected = model(x(), coefficients=dict(zip(exported.bound_inputs, coefficients.values(), strict=True)))
    assert_close(run(exported.bound, x=x(), **coefficients)["output"], expected)


def test_the_bound_nodes_are_among_the_live_ones_and_the_rest_is_reported_by_module(shared):
    _, exported = shared
    live, bound = ({n.name for n in onnx.load(path).graph.node} for path in (exported.live, exported.bound))
    assert bound < live
    assert {node.name for node in exported.removed_nodes} == live - bound
    assert {node.module for node in exported.removed_nodes} == {"gate", "gate.linear"}
    assert exported.live_nodes == len(live)


def test_the_removed_parameters_are_those_of_the_gate_once(shared):
    _, exported = shared
    assert {p.name: p.elements for p in exported.removed_parameters} == {
        "gate.linear.weight": WIDTH * WIDTH,
        "gate.linear.bias": WIDTH,
    }
    bound = {initializer.name for initializer in onnx.load(exported.bound).graph.initializer}
    assert {"first.weight", "second.weight", "first.bias", "second.bias"} <= bound
    assert not any(name.startswith("gate") for name in bound)


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_every_form_takes_any_number_of_inputs(shared, batch):
    model, exported = shared
    live = model.live(x(batch))
    assert exported.batch == "batch"
    assert_close(run(exported.live, x=x(batch))["output"], live.output)
    tapped = run(exported.tapped, x=x(batch))
    for key, name in exported.coefficient_names.items():
        assert_close(tapped[name], live.coefficients[key])
    static = expanded_all(exported.profile, model.coefficients, model.traced.sample, batch)
    frozen_output = model(x(batch), coefficients=dict(zip(live.coefficients, static, strict=True)))
    assert_close(run(exported.baked, x=x(batch))["output"], frozen_output)


def test_no_file_holds_a_barrier_or_another_domain(shared, router):
    for _, exported in (shared, router):
        for path in (exported.live, exported.tapped, exported.bound, exported.baked):
            proto = onnx.load(path)
            assert {opset.domain for opset in proto.opset_import} == {""}
            assert {node.domain for node in proto.graph.node} == {""}


def test_a_profile_is_broadcast_where_its_reader_broadcasts(shared):
    _, exported = shared
    graph = onnx.load(exported.baked).graph
    assert exported.expanded == ()
    assert "Expand" not in {node.op_type for node in graph.node}
    shapes = {i.name: list(i.dims) for i in graph.initializer if i.name.endswith("coefficient")}
    assert shapes == {name: [1, 1, WIDTH] for name in exported.coefficient_names.values()}


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_weights_and_indices_of_a_router_are_bound_and_baked_together(router, batch):
    model, exported = router
    assert len(exported.bound_inputs) == 2
    assert set(exported.expanded) == set(exported.bound_inputs)
    live = model.live(x(batch))
    feeds = {name: live.coefficients[key] for key, name in exported.bound_inputs.items()}
    assert_close(run(exported.bound, x=x(batch), **feeds)["output"], live.output)
    static = {key: value.expand(batch * 5, 2) for key, value in exported.profile.items()}
    assert_close(run(exported.baked, x=x(batch))["output"], model(x(batch), coefficients=static))


def test_a_model_keeps_its_own_names_unless_two_would_be_the_same(tmp_path):
    other = torch.randn(3, 5, WIDTH)
    model = frozen(ManyOutputs, (x(), other))
    exported = export_graphs(model, tmp_path, first_profile(model, lambda v: v[:1, :1]))
    outputs = ["sigmoid", "again", "input", "gate", "linear_output"]
    assert names(exported.live) == (["x", "linear"], outputs)
    assert names(exported.bound) == (["x", "linear", "gate.linear_0_coefficient"], outputs)
    expected = model.live(x(), other).output
    for name, found in run(exported.live, x=x(), linear=other).items():
        assert_close(found, expected[name.removesuffix("_output")])
    gate = torch.rand(3, 5, WIDTH)
    found = run(exported.bound, x=x(), linear=other, **{"gate.linear_0_coefficient": gate})
    np.testing.assert_array_equal(found["gate"], gate)
    # The coefficient is an output of full size, whatever the size of its profile.
    baked = run(exported.baked, x=x(7), linear=torch.randn(7, 5, WIDTH))
    assert baked["gate"].shape == (7, 5, WIDTH)


def test_a_parameter_yields_its_name_to_an_output(tmp_path):
    model = frozen(ParameterNamedOutput, (x(),))
    exported = export_graphs(model, tmp_path)
    assert exported.baked is None
    assert_close(run(exported.live, x=x())["output"], model.live(x()).output)


def test_a_model_with_a_fixed_batch_is_exported_at_that_batch(tmp_path):
    model = frozen(FixedBatch, (x(),))
    exported = export_graphs(model, tmp_path, first_profile(model, lambda v: v[:1, :1]))
    assert exported.batch is None
    assert onnx.load(exported.live).graph.input[0].type.tensor_type.shape.dim[0].dim_value == 3
    static = {key: value.expand(3, 5, WIDTH) for key, value in exported.profile.items()}
    assert_close(run(exported.baked, x=x())["output"], model(x(), coefficients=static))


def test_an_op_that_onnx_lacks_is_an_export_error_that_names_it_and_its_line(tmp_path):
    with pytest.raises(ExportError, match="no translation of `_linalg_svd`") as raised:
        export_graphs(frozen(SingularValues, (x(),)), tmp_path)
    assert raised.value.exit_code == 7
    assert re.search(
        r"`linalg_svdvals` in <root>\n.*test_export\.py:\d+   return torch\.linalg\.svdvals", raised.value.where
    )
    assert raised.value.remedy


def test_a_profile_that_does_not_fit_is_refused(tmp_path, shared):
    model, exported = shared
    key = model.coefficients[0].key
    with pytest.raises(DataError, match="not one of this model"):
        export_graphs(model, tmp_path, {key: exported.profile[key]})
    with pytest.raises(DataError, match="does not fit"):
        export_graphs(model, tmp_path, {**exported.profile, key: torch.ones(1, 1, WIDTH - 1)})
    with pytest.raises(DataError, match="does not fit"):
        export_graphs(model, tmp_path, {**exported.profile, key: torch.ones(1, 1, WIDTH, dtype=torch.float64)})


@pytest.fixture
def external(tmp_path, monkeypatch):
    """An export whose weights are too large for the graphs, by a lowered limit."""
    monkeypatch.setattr(files, "INLINE_BYTES", 0)
    model = frozen(SharedGate, (x(),))
    return model, export_graphs(model, tmp_path, first_profile(model, lambda v: v[:1, :1]))


def test_large_weights_lie_once_in_a_file_that_all_graphs_share(external):
    model, exported = external
    folder = exported.live.parent
    assert exported.external == folder / "weights.data"
    assert {path.name for path in folder.iterdir()} == {*(f"{g}.onnx" for g in GRAPHS), "weights.data"}
    places: dict[str, set[tuple[str, str]]] = {}
    for path in exported.paths.values():
        for tensor in onnx.load(path, load_external_data=False).graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                entry = {e.key: e.value for e in tensor.external_data}
                places.setdefault(tensor.name, set()).add((entry["location"], entry["offset"]))
    linear = {f"{name}.weight" for name in ("gate.linear", "first", "second")}
    assert places.keys() == linear
    assert all(len(found) == 1 for found in places.values())
    assert exported.external.stat().st_size == 3 * WIDTH * WIDTH * 4
    assert_close(run(exported.live, x=x())["output"], model.live(x()).output)


def test_graphs_that_share_their_weights_compute_what_graphs_of_their_own_compute(external, shared):
    for form in ("live", "baked"):
        ours, theirs = (run(exported.paths[form], x=x())["output"] for _, exported in (external, shared))
        np.testing.assert_array_equal(ours, theirs)


def test_only_the_graphs_that_are_asked_for_are_written(tmp_path):
    exported = export_graphs(frozen(SharedGate, (x(),)), tmp_path, graphs=("bound",))
    assert [path.name for path in tmp_path.iterdir()] == ["bound.onnx"]
    assert (list(exported.paths), list(exported.programs)) == (["bound"], ["bound"])
    assert {parameter.bytes for parameter in exported.removed_parameters} == {4 * WIDTH * WIDTH, 4 * WIDTH}


@pytest.mark.parametrize("opset", [18, 23])
def test_the_opset_can_be_chosen(tmp_path, opset):
    model = frozen(SharedGate, (x(),))
    exported = export_graphs(model, tmp_path, graphs=("live",), opset=opset)
    assert [entry.version for entry in onnx.load(exported.live).opset_import] == [opset]
    assert_close(run(exported.live, x=x())["output"], model.live(x()).output)


def test_a_dynamic_sequence_keeps_its_name_and_takes_other_lengths(tmp_path):
    torch.manual_seed(0)
    traced = fxaudit.trace(SharedGate().eval(), (x(),), options=TraceOptions(dynamic_sequence=True))
    model = fxaudit.freeze(traced)
    exported = export_graphs(model, tmp_path)
    for path in (exported.live, exported.bound):
        shape = onnx.load(path).graph.input[0].type.tensor_type.shape.dim
        assert [d.dim_param or d.dim_value for d in shape] == ["batch", "sequence", WIDTH]
    longer = torch.randn(2, 9, WIDTH)
    assert_close(run(exported.live, x=longer)["output"], model.live(longer).output)


class BatchedGroups(nn.Module):
    """A kernel for each input, as in CondConv: all inputs in one convolution with as many groups."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4, WIDTH * WIDTH) / 4)

    def forward(self, x):
        weight = torch.sigmoid(self.gate(x.mean((2, 3)))) @ self.experts
        weight = weight.reshape(-1, WIDTH, 1, 1)
        return F.conv2d(x.reshape(1, -1, 5, 5), weight, groups=x.shape[0]).reshape(x.shape)


def test_groups_that_follow_the_batch_are_exported_for_one_input_at_a_time(tmp_path):
    image = torch.randn(2, WIDTH, 5, 5)
    model = frozen(BatchedGroups, (image,))
    assert model.traced.is_batch_dynamic
    exported = export_graphs(model, tmp_path, first_profile(model, lambda v: v[:1]))
    assert (exported.batch, exported.fixed_batch) == (None, 1)
    assert [finding.kind for finding in exported.findings] == ["static-batch-export"]
    other = torch.randn(1, WIDTH, 5, 5)
    for path, wanted in (
        (exported.live, model.live(other).output),
        (exported.baked, model(other, coefficients=exported.profile)),
    ):
        assert_close(run(path, **{names(path)[0][0]: other})["output"], wanted)


PATTERN = """
schema  = 1
name    = "any-gate"
summary = "A gate on a value that need not be computed from what the gate reads."
match   = '''
coefficient = sigmoid(linear(input))
apply       = coefficient * value
'''
[shape]
coefficient = "batch token feature"
[intervene]
axes    = { batch = "sample", token = "position", feature = "unit" }
acts    = "multiply"
neutral = 1.0
range   = [0.0, 1.0]
"""


class Nested(nn.Module):
    """A gate that acts only on the logits of another gate."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = Gate(), Gate()
        self.hidden, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.outer(self.inner(x) * self.hidden(x)) * self.value(x)


def test_a_coefficient_that_acts_only_inside_another_controller_is_no_input_of_bound(tmp_path):
    (tmp_path / "any-gate.toml").write_text(PATTERN)
    torch.manual_seed(0)
    model = fxaudit.freeze(Nested().eval(), (x(),), patterns=[tmp_path / "any-gate.toml"])
    exported = export_graphs(model, tmp_path, first_profile(model, lambda v: v[:1, :1]))
    inner, outer = (coefficient.key for coefficient in model.coefficients)
    assert exported.idle == (inner,)
    assert names(exported.bound)[0] == ["x", exported.coefficient_names[outer]]
    assert {p.module for p in exported.removed_parameters} == {"inner.linear", "outer.linear", "hidden"}
    gate = torch.rand(3, 5, WIDTH)
    found = run(exported.bound, x=x(), **{exported.coefficient_names[outer]: gate})["output"]
    assert_close(found, model(x(), coefficients={inner: torch.rand(3, 5, WIDTH), outer: gate}))


def test_a_profile_of_an_axis_that_holds_samples_and_units_is_repeated_for_each_sample():
    sample = sympy.Symbol("s")
    coefficient = Coefficient(
        key="k",
        name="k",
        node=None,
        dtype=torch.float32,
        axes=(("batch", "head"), ("token",), ("1",)),
        sizes={"batch": sample, "head": 3, "token": 2},
        roles={"batch": "sample", "head": "unit", "token": "position"},
        domain=Domain("real"),
    )
    profile = torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1)
    expected = torch.tensor([1.0, 2.0, 3.0] * 4).reshape(12, 1, 1).expand(12, 2, 1)
    assert torch.equal(expanded(profile, coefficient, sample, 4), expected)
    by_position = torch.arange(6.0).reshape(3, 2, 1)
    assert torch.equal(expanded(by_position, coefficient, sample, 2), by_position.repeat(2, 1, 1))

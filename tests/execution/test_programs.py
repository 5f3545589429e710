"""The bound and baked torch graphs and their .pt2 files, against the model and against the derived ONNX graphs."""

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import fxaudit
from fxaudit.execution.export import export_graphs, files
from fxaudit.execution.export.names import dimension_names
from fxaudit.execution.export.programs import baked_module, bound_module, save_program
from fxaudit.execution.translation import tidy, to_onnx
from fxaudit.model.exported import load_exported
from fxaudit.model.inputs import resampled
from fxaudit.model.settings import exact_numerics, quiet_torch
from tests.acceptance.models.feature_gate import FeatureGateTransformer
from tests.execution.test_export import PATTERN, Nested, Router, SharedGate, first_profile, frozen, x
from tests.third_party import timm, tokens, transformers

MODELS = {
    "seresnet18": timm("seresnet18"),
    "mobilenetv3": timm("mobilenetv3_small_050"),
    "mixtral": transformers("mixtral"),
    "mamba": transformers("mamba"),
    "feature gates": lambda: (FeatureGateTransformer(layers=2).eval(), (tokens(3)["input_ids"],)),
}


def plain_session(path):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def exchanged(values):
    """Each coefficient with its rows in an order of its own, so that two controllers never get the same values."""
    found = {}
    for i, (key, value) in enumerate(values.items()):
        order = torch.randperm(value.shape[0], generator=torch.Generator().manual_seed(i))
        found[key] = value[order].contiguous()
    return found


def named(keys):
    return {key: key for key in keys}


SLOW = {"mobilenetv3", "mixtral", "mamba"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in MODELS])
def test_the_exported_fx_frozen_graph_is_the_derived_bound_graph(name, tmp_path):
    torch.manual_seed(0)
    model = fxaudit.freeze(*MODELS[name]())
    traced = model.traced
    exported = export_graphs(model, tmp_path, graphs=("bound",))
    leaves = traced.flatten(resampled(traced.subject.arguments, 7, 3))
    with exact_numerics():
        values = dict(zip([c.key for c in model.coefficients], model.run_tapped(leaves)[1], strict=False))
        given = exchanged(values)
        expected = model.run_frozen(leaves, list(given.values()))

    # The other way to the same graph: the frozen torch graph itself, exported without a barrier anywhere.
    module = bound_module(model, exported.bound_inputs)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    with exact_numerics(), quiet_torch():
        example = traced.flatten(traced.subject.arguments)
        own = list(model.run_tapped(example)[1])[: len(model.coefficients)]
        read = [v for v, c in zip(own, model.coefficients, strict=True) if c.key in exported.bound_inputs]
        direct = to_onnx(traced, module, [*example, *read], dimension_names(placeholders, traced.sample))
        tidy(direct, set(module.state_dict()))
    files.write_graphs({"direct": direct}, tmp_path, external=False)

    graphs = [onnx.load(tmp_path / f"{form}.onnx").graph for form in ("bound", "direct")]
    bound, other = (Counter(node.op_type for node in graph.node) for graph in graphs)
    assert bound == other
    arrays = [leaf.numpy() for leaf in leaves] + [given[key].numpy() for key in exported.bound_inputs]
    outputs = []
    for form in ("bound", "direct"):
        session = plain_session(tmp_path / f"{form}.onnx")
        feeds = dict(zip([value.name for value in session.get_inputs()], arrays, strict=True))
        outputs.append(session.run(None, feeds))
    for ours, theirs, position in zip(*outputs, exported.output_positions, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        reference = expected[position].numpy()
        assert np.abs(ours - reference).max() <= 1e-5 * np.abs(reference).max()


def test_each_coefficient_reaches_its_own_apply_site_in_onnx(tmp_path):
    # Both gates compute the same values, so that identity alone could not tell them apart.
    model = frozen(SharedGate, (x(),))
    exported = export_graphs(model, tmp_path)
    values = exchanged(model.live(x()).coefficients)
    with torch.no_grad():
        inner = model.traced.subject.module
        first, second = values.values()
        expected = first * inner.first(x()) + second * inner.second(x())
    feeds = {exported.bound_inputs[key]: value.numpy() for key, value in values.items()}
    found = plain_session(exported.bound).run(None, {"x": x().numpy(), **feeds})[0]
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("batch", [1, 3, 7])
def test_a_saved_bound_graph_computes_what_the_frozen_model_computes(batch, tmp_path):
    model = frozen(Router, (x(),))
    values = model.live(x()).coefficients
    save_program(bound_module(model, named(values)), [x(), *values.values()], tmp_path / "bound.pt2")
    loaded, _ = load_exported(tmp_path / "bound.pt2", trust=False)
    given = exchanged(model.live(x(batch)).coefficients)
    found = loaded(x(batch), *given.values())
    assert torch.equal(found[0], model(x(batch), coefficients=given))


@pytest.mark.parametrize("batch", [1, 3, 7])
@pytest.mark.parametrize(("kind", "positions"), [(SharedGate, lambda v: v[:1, :1]), (Router, lambda v: v[:1])])
def test_a_saved_baked_graph_computes_what_the_frozen_model_computes_with_its_profile(kind, positions, batch, tmp_path):
    model = frozen(kind, (x(),))
    profile = first_profile(model, positions)
    module, _ = baked_module(model, profile, named(profile))
    save_program(module, [x()], tmp_path / "baked.pt2")
    loaded, _ = load_exported(tmp_path / "baked.pt2", trust=False)
    # One input and one position were taken, so that the profile repeats along every other axis.
    shapes = {key: value.shape for key, value in model.live(x(batch)).coefficients.items()}
    static = {key: value.expand(shapes[key]) for key, value in profile.items()}
    assert torch.equal(loaded(x(batch))[0], model(x(batch), coefficients=static))


def test_a_baked_graph_holds_its_profile_once_and_leaves_the_model_alone(tmp_path):
    model = frozen(SharedGate, (x(),))
    before = {name: value.clone() for name, value in model.traced.subject.module.state_dict().items()}
    profile = first_profile(model, lambda v: v[:1, :1])
    module, keys = baked_module(model, profile, {key: f"profile {i}" for i, key in enumerate(profile)})
    assert keys == {f"profile_{i}": key for i, key in enumerate(profile)}
    assert [tuple(b.shape) for name, b in module.named_buffers()] == [(1, 1, 16)] * 2
    assert dict(module.named_buffers()).keys() == {"profile_0", "profile_1"}
    assert not any(node.name.startswith("gate") for node in module.graph.nodes)
    after = model.traced.subject.module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_idle_coefficient_is_no_argument_of_the_bound_graph(tmp_path):
    (tmp_path / "any-gate.toml").write_text(PATTERN)
    torch.manual_seed(0)
    model = fxaudit.freeze(Nested().eval(), (x(),), patterns=[tmp_path / "any-gate.toml"])
    module = bound_module(model, {c.key: f"coefficient {i}" for i, c in enumerate(model.coefficients)})
    assert [n.name for n in module.graph.nodes if n.op == "placeholder"] == ["x", "coefficient_1"]


class Counting(nn.Module):
    """Counts its calls in a buffer, and returns a value that is no tensor."""

    def __init__(self):
        super().__init__()
        self.gate, self.value = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return torch.sigmoid(self.gate(x)) * self.value(x) + self.calls, None


def test_every_run_of_a_saved_graph_starts_from_the_state_after_warm_up(tmp_path):
    model = frozen(Counting, (x(),))
    live = model.live(x())
    values = live.coefficients
    save_program(bound_module(model, named(values)), [x(), *values.values()], tmp_path / "bound.pt2")
    loaded, _ = load_exported(tmp_path / "bound.pt2", trust=False)
    for _ in range(2):
        assert torch.equal(loaded(x(), *values.values())[0], live.output[0])

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxaudit import ops
from fxaudit.controllers import structure
from fxaudit.controllers.controller import build_controllers
from fxaudit.controllers.graphs import Dataflow
from fxaudit.controllers.match import find_matches
from fxaudit.controllers.pattern import load_patterns

from .build import Build, pattern, traced

LIBRARY = load_patterns()


class Written(nn.Module):
    """A learned layer, a function written out over its result, and another learned layer."""

    def __init__(self, function, kind):
        super().__init__()
        self.function = function
        if kind == "map":
            self.before, self.after = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        else:
            self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale, self.shift = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.map_scale = nn.Parameter(torch.randn(1, 8, 1, 1))
        self.beta = nn.Parameter(torch.tensor(1.5))
        self.side = nn.Linear(8, 8)

    def forward(self, x):
        return self.after(self.function(self, self.before(x)))


def gelu_tanh(_, x):
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def rms_norm(m, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * m.scale


def layer_norm(m, x):
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6) * m.scale + m.shift


def response_norm(m, x):
    norm = x.pow(2).sum((1, 2), keepdim=True).sqrt()
    return x * (norm / (norm.mean(-1, keepdim=True) + 1e-6)) * m.scale + m.shift + x


def map_response_norm(m, x):
    norm = x.pow(2).sum((2, 3), keepdim=True).sqrt()
    return x * (norm / (norm.mean(1, keepdim=True) + 1e-6)) * m.map_scale + x


def rotary(_, x):
    frequencies = 10000 ** (-torch.arange(0, 8, 2, dtype=torch.float32) / 8)
    angles = torch.arange(x.shape[1], dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat([angles, angles], -1)
    turned = torch.cat([-x[..., 4:], x[..., :4]], -1)
    return x * angles.cos() + turned * angles.sin()


def attention(m, x):
    weights = torch.softmax(x @ m.side(x).transpose(1, 2) / 8**0.5, -1)
    return weights @ x


def masked(_, x):
    keep = torch.tril(torch.ones(x.shape[1], x.shape[1])).sum(-1, keepdim=True)
    return x * (keep > 0) * (x > 0)


def padded(_, x):
    return x * (x.abs().sum(-1, keepdim=True) > 0).to(x.dtype)


LOOK_ALIKES = {
    "SiLU": ("sequence", lambda m, x: x * torch.sigmoid(x)),
    "SiLU on a map": ("map", lambda m, x: x * torch.sigmoid(x)),
    "hard swish": ("sequence", lambda m, x: x * F.relu6(x + 3) / 6),
    "hard swish with a hard sigmoid": ("sequence", lambda m, x: x * F.hardsigmoid(x)),
    "GELU with tanh": ("sequence", gelu_tanh),
    "quick GELU": ("sequence", lambda m, x: x * torch.sigmoid(1.702 * x)),
    "swish with a learned beta": ("sequence", lambda m, x: x * torch.sigmoid(m.beta * x)),
    "swish with a learned beta for each feature": ("sequence", lambda m, x: x * torch.sigmoid(m.scale * x + m.shift)),
    "Mish": ("sequence", lambda m, x: x * torch.tanh(F.softplus(x))),
    "GLU with SiLU": ("sequence", lambda m, x: F.silu(m.side(x)) * x),
    "GLU with GELU": ("sequence", lambda m, x: F.gelu(m.side(x)) * x),
    "bilinear": ("sequence", lambda m, x: m.side(x) * x),
    "RMSNorm": ("sequence", rms_norm),
    "LayerNorm": ("sequence", layer_norm),
    "global response norm": ("sequence", response_norm),
    "global response norm on a map": ("map", map_response_norm),
    "softcap": ("sequence", lambda m, x: 30 * torch.tanh(x / 30)),
    "LayerScale": ("sequence", lambda m, x: x + m.scale * m.side(x)),
    "a gate that is a parameter": ("sequence", lambda m, x: torch.sigmoid(m.scale) * x),
    "a gate that is a learned function of a parameter": ("sequence", lambda m, x: torch.sigmoid(m.side(m.scale)) * x),
    "rotary positions": ("sequence", rotary),
    "attention": ("sequence", attention),
    "a causal mask": ("sequence", masked),
    "a padding mask": ("sequence", padded),
    "dropout": ("sequence", lambda m, x: F.dropout(x, 0.5, training=False)),
}


class Together(nn.Module):
    """Many small models over one input, so that one trace serves them all; each is found again by its module path."""

    def __init__(self, parts, maps=()):
        super().__init__()
        self.parts, self.maps = nn.ModuleDict({key(name): part for name, part in parts.items()}), set(map(key, maps))

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2)
        return tuple(part(x if name in self.maps else tokens) for name, part in self.parts.items())


def key(name):
    return name.replace(" ", "_").replace(",", "").replace(".", "")


def part_of(node):
    return next((step.split(".")[1] for step in ops.module_path(node) if step.startswith("parts.")), "")


def together(parts, maps=()):
    return traced(Together(parts, maps), torch.randn(2, 8, 2, 3))


def controllers(patterns, graph):
    """Controllers by the part they are in."""
    dataflow = Dataflow(graph.graph_module)
    found, _ = build_controllers([find_matches(chosen, dataflow, graph.sample) for chosen in patterns], dataflow)
    by_part = {}
    for controller in found:
        by_part.setdefault(part_of(controller.coefficients[0].node), []).append(controller)
    return by_part


@pytest.fixture(scope="module")
def look_alikes():
    parts = {name: Written(function, kind) for name, (kind, function) in LOOK_ALIKES.items()}
    return together(parts, [name for name, (kind, _) in LOOK_ALIKES.items() if kind == "map"])


@pytest.fixture(scope="module")
def of_the_library(look_alikes):
    return controllers(LIBRARY, look_alikes)


@pytest.fixture(scope="module")
def of_anything(look_alikes):
    return controllers([ANYTHING], look_alikes)


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_look_alike_is_no_controller_of_the_shipped_library(of_the_library, name):
    assert [c.pattern for c in of_the_library.get(key(name), [])] == []


def test_each_look_alike_is_found_in_the_trace_by_its_own_name(look_alikes):
    assert {part_of(node) for node in look_alikes.graph.nodes} - {""} == set(map(key, LOOK_ALIKES))


# A pattern that takes any pointwise result for a coefficient: only the structural tests stand in its way.
ANYTHING = pattern(
    "coefficient = pointwise(_)\napply = coefficient * value",
    shape={"coefficient": "batch a b c | batch a b"},
    axes={"batch": "sample", "a": "unit", "b": "unit", "c": "unit"},
)


@pytest.mark.parametrize(
    "name",
    [
        "SiLU",
        "SiLU on a map",
        "hard swish",
        "hard swish with a hard sigmoid",
        "quick GELU",
        "GELU with tanh",
        "Mish",
        "swish with a learned beta",
        "swish with a learned beta for each feature",
        "softcap",
    ],
)
def test_the_structural_tests_alone_refuse_a_function_of_the_value_itself(of_anything, name):
    assert [c.coefficients[0].node.name for c in of_anything.get(key(name), [])] == []


def test_the_pattern_that_takes_anything_does_find_a_gated_linear_unit(of_anything):
    assert len(of_anything[key("GLU with GELU")]) == 1


class Gate(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.gate, self.value, self.both = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, x):
        return self.function(self, x)


def packed(split):
    def function(m, x):
        value, gate = split(m.both(x))
        return value * torch.sigmoid(gate)

    return function


CONTROLLERS = {
    "a gate on another projection": lambda m, x: torch.sigmoid(m.gate(x)) * m.value(x),
    "a gate on its own input": lambda m, x: torch.sigmoid(m.gate(x)) * x,
    "a gate made from the value": lambda m, x: (lambda v: torch.sigmoid(m.gate(v)) * v)(m.value(x)),
    "a packed gate, chunked": packed(lambda y: y.chunk(2, -1)),
    "a packed gate, split": packed(lambda y: y.split(8, -1)),
    "a packed gate, sliced": packed(lambda y: (y[..., :8], y[..., 8:])),
    "a packed gate, unbound": packed(lambda y: y.unflatten(-1, (2, 8)).unbind(-2)),
    "a packed gate, selected": packed(lambda y: (y.unflatten(-1, (2, 8))[:, :, 0], y.unflatten(-1, (2, 8))[:, :, 1])),
    "a packed gate, by F.glu written out": lambda m, x: (lambda y: y[..., :8] * y[..., 8:].sigmoid())(m.both(x)),
}


@pytest.fixture(scope="module")
def gates():
    return controllers(LIBRARY, together({name: Gate(function) for name, function in CONTROLLERS.items()}))


@pytest.mark.parametrize("name", CONTROLLERS)
def test_a_gate_of_its_own_is_a_controller(gates, name):
    assert [c.pattern for c in gates.get(key(name), [])] == ["feature-gate"]


def test_a_packed_gate_removes_no_parameter(gates):
    (found,) = gates[key("a packed gate, chunked")]
    assert found.parameters == 0


def test_a_gate_with_a_linear_of_its_own_removes_its_parameters(gates):
    (found,) = gates[key("a gate on another projection")]
    assert found.parameters == 8 * 8 + 8


# --- one test at a time ---------------------------------------------------------------------------------------------


def refusal(make):
    build = Build()
    coefficient, value = make(build)
    apply = build.mul(value, coefficient)
    return structure.refusal(build.dataflow(apply), coefficient, apply)


def test_a_mask_is_refused_by_its_dtype():
    def make(build):
        x = build.input(2, 4)
        return build("gt.Scalar", build.linear(x, 4), 0), x

    assert refusal(make) == "`coefficient` is torch.bool, a mask or an index, not a coefficient (T6)"


def test_a_constant_is_refused_because_no_input_reaches_it():
    def make(build):
        return build("sigmoid", build.parameter(2, 4)), build.input(2, 4)

    assert refusal(make) == "`coefficient` does not depend on the values of any input (T1)"


def test_a_function_of_the_value_is_refused_because_nothing_in_it_is_learned():
    def make(build):
        x = build.input(2, 4)
        return build("sigmoid", x), x

    assert refusal(make) == (
        "`coefficient` has no learned op of its own: it is a function of the value that it multiplies (T2)"
    )


def test_a_learned_function_of_another_value_is_not_refused():
    def make(build):
        return build("sigmoid", build.linear(build.input(2, 4), 4)), build.input(2, 4)

    assert refusal(make) is None


def test_a_learned_function_of_the_value_is_not_refused():
    def make(build):
        x = build.input(2, 4)
        return build("sigmoid", build.linear(x, 4)), x

    assert refusal(make) is None


def test_a_learned_op_that_the_value_shares_does_not_count():
    def make(build):
        hidden = build.linear(build.input(2, 4), 4)
        return build("sigmoid", hidden), build("relu", hidden)

    assert "(T2)" in refusal(make)


def test_the_other_half_of_a_split_counts_as_learned():
    def make(build):
        both = build("split.Tensor", build.linear(build.input(2, 4), 8), 4, -1)
        return build("sigmoid", build.item(both, 1)), build.item(both, 0)

    assert refusal(make) is None


def test_the_same_half_of_a_split_does_not_count_as_learned():
    def make(build):
        half = build.item(build("split.Tensor", build.linear(build.input(2, 4), 8), 4, -1), 0)
        return build("sigmoid", half), half

    assert "(T2)" in refusal(make)


def test_a_value_that_is_a_parameter_may_be_gated():
    def make(build):
        return build("sigmoid", build.linear(build.input(2, 4), 4)), build.parameter(2, 4)

    assert refusal(make) is None


def test_the_coefficient_is_recognised_in_another_layout():
    build = Build()
    gate = build("sigmoid", build.linear(build.input(2, 4), 4))
    carried = build("expand", build("unsqueeze", gate, 1), [2, 3, 4])
    assert structure.carries(build.dataflow(carried), carried, gate)


def test_a_function_of_the_coefficient_does_not_carry_it():
    build = Build()
    gate = build("sigmoid", build.linear(build.input(2, 4), 4))
    other = build("relu", gate)
    assert not structure.carries(build.dataflow(other), other, gate)


def test_the_value_is_the_operand_that_does_not_carry_the_coefficient():
    build = Build()
    x = build.input(2, 3, 4)
    gate = build("sigmoid", build.linear(build.input(2, 4), 4))
    apply = build.mul(build("unsqueeze", gate, 1), x)
    assert structure.value_operands(build.dataflow(apply), gate, apply) == [x]


def test_the_path_of_a_value_ends_at_its_first_learned_op():
    build = Build()
    first = build.linear(build.input(2, 4), 4)
    second = build.linear(first, 4)
    value = build("relu", second)
    path = structure.same_path(build.dataflow(value), [value])
    assert (second in path, first in path) == (True, False)

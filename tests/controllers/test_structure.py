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

LIBRARY = [chosen for chosen in load_patterns() if chosen.family_class == "default"]


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
        self.side, self.score = nn.Linear(8, 8), nn.Linear(8, 1)
        self.pair_bias, self.kernel = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(8, 8))
        self.register_buffer("coordinates", torch.randn(6, 8))

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


def head_norm(m, x):
    heads = m.side(x).unflatten(-1, (2, 4))
    centred = heads - heads.mean(-1, keepdim=True)
    return (centred * torch.rsqrt(heads.var(-1, keepdim=True, unbiased=False) + 1e-6)).flatten(-2)


def matched_magnitudes(m, x):
    other = m.side(x)
    wanted = x.pow(2).mean(-1, keepdim=True).sqrt()
    return other * (wanted / other.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(1e-6))


def halves(m, x):
    return torch.cat([m.side(x), x], -1).chunk(2, -1)


def masked_attention(m, x):
    mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
    return torch.softmax(x @ m.side(x).transpose(1, 2) / 8**0.5 + mask, -1) @ x


def capped_attention(m, x):
    return torch.softmax(20 * torch.tanh(x @ m.side(x).transpose(1, 2) / 20), -1) @ x


def biased_attention(m, x):
    return torch.softmax(torch.einsum("bqd,bkd->bqk", m.side(x), x) + m.pair_bias, -1) @ x


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
    "l2 norm": ("sequence", lambda m, x: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-6)),
    "l2 norm, multiplied": ("sequence", lambda m, x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)),
    "norm of each head": ("sequence", head_norm),
    "norm of another projection": ("sequence", lambda m, x: m.side(x) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-6)),
    "matched magnitudes": ("sequence", matched_magnitudes),
    "global response norm after GELU": ("sequence", lambda m, x: response_norm(m, F.gelu(m.side(x)))),
    "dynamic tanh": ("sequence", lambda m, x: torch.tanh(m.beta * x) * m.scale + m.shift),
    "snake": ("sequence", lambda m, x: x + torch.sin(m.beta * x).pow(2) / m.beta),
    "PReLU": ("sequence", lambda m, x: F.relu(x) + m.scale * torch.minimum(x, torch.zeros(()))),
    "hard swish with a clamp": ("sequence", lambda m, x: x * torch.clamp(x + 3, 0, 6) / 6),
    "GELU with erf": ("sequence", lambda m, x: x * 0.5 * (1 + torch.erf(x / 2**0.5))),
    "swish of one half of a split": ("sequence", lambda m, x: (lambda a, b: a * torch.sigmoid(a) + b)(*halves(m, x))),
    "attention with a mask": ("sequence", masked_attention),
    "attention with a soft cap": ("sequence", capped_attention),
    "attention with a learned bias": ("sequence", biased_attention),
    "pooling by attention": ("sequence", lambda m, x: x + (torch.softmax(m.score(x), 1) * x).sum(1, keepdim=True)),
    "a residual scaled by tanh of a parameter": ("sequence", lambda m, x: x + torch.tanh(m.beta) * m.side(x)),
    "a bias over coordinates": ("sequence", lambda m, x: x * 16 * torch.sigmoid(m.side(m.coordinates))),
    "a static hypernetwork": ("sequence", lambda m, x: F.linear(x, m.side(m.kernel))),
    "a floating-point mask of the tokens": ("sequence", lambda m, x: m.side(x) * (m.score(x) > 0).to(x.dtype)),
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


# A pattern that takes any elementwise result or softmax for a coefficient, and any product for an apply site: only the
# structural tests stand in its way.
MATCH = """
coefficient = (pointwise | softmax)(_)
apply       = coefficient * value | matmul(coefficient, value) | coefficient / value
"""
SHAPES = {"coefficient": "batch a b c | batch a b | batch position position_2 | batch position feature"}
ROLES = {"batch": "sample", "a": "position", "b": "unit", "c": "unit", "position": "position", "position_2": "position"}
ANYTHING = pattern(MATCH, shape=SHAPES, axes={**ROLES, "feature": "unit"})
ANY_FACTOR = pattern(MATCH, shape=SHAPES, axes={**ROLES, "feature": "unit"}, head='class = "opt-in"\nwaives = ["T4"]')


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_the_structural_tests_alone_refuse_a_look_alike(of_anything, name):
    assert [c.coefficients[0].node.name for c in of_anything.get(key(name), [])] == []


def test_without_the_fourth_test_a_gated_linear_unit_is_found(look_alikes):
    assert len(controllers([ANY_FACTOR], look_alikes)[key("GLU with GELU")]) == 1


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
    build = Build()
    x = build.input(2, 4)
    gate = build("sigmoid", build.linear(x, 1))
    apply = build.mul(build.parameter(2, 4), gate)
    assert structure.refusal(build.dataflow(build.add(x, apply)), gate, apply) is None


def test_data_that_a_parameter_scales_is_refused():
    build = Build()
    x = build.input(2, 4)
    data = build("tanh", build.linear(x, 4))
    apply = build.mul(data, build.parameter(4))
    found = structure.refusal(build.dataflow(build.add(x, apply)), data, apply)
    assert found == "`coefficient` is the data, scaled by a constant (T4)"


def test_a_constant_scale_of_an_output_is_refused():
    def make(build):
        return build("sigmoid", build.linear(build.input(2, 4), 1)), build.parameter(2, 4)

    assert refusal(make) == "`coefficient` only scales a model output: an output head (T7)"


def test_a_number_is_no_value():
    build = Build()
    gate = build("sigmoid", build.linear(build.input(2, 4), 4))
    apply = build.mul(gate, 30.0)
    assert "nothing but a scale (T7)" in structure.refusal(build.dataflow(apply), gate, apply)


def test_a_gate_whose_result_nothing_reads_is_refused():
    build = Build()
    x = build.input(2, 4)
    gate = build("sigmoid", build.linear(x, 4))
    apply = build.mul(x, gate)
    assert "never reaches a model output (T7)" in structure.refusal(build.dataflow(x), gate, apply)


def test_an_inverse_of_a_reduction_is_refused_although_other_learned_ops_precede_it():
    def make(build):
        x = build.linear(build.input(2, 4), 4)
        return build("rsqrt", build("mean.dim", x, [-1], True)), build.linear(x, 4)

    assert refusal(make) == "`coefficient` is an inverse or a ratio of reductions, as in a norm (T3)"


def test_a_bounded_head_over_a_reduction_is_no_norm():
    def make(build):
        x = build.input(2, 4)
        return build("sigmoid", build("mean.dim", build.linear(x, 4), [-1], True)), x

    assert refusal(make) is None


def test_an_unbounded_factor_as_wide_as_the_value_is_refused():
    def make(build):
        x = build.input(2, 4)
        return build("relu", build.linear(x, 4)), x

    assert refusal(make) == "`coefficient` is as wide as the value and unbounded: half of a GLU (T4)"


def test_an_unbounded_factor_that_is_broadcast_is_narrow():
    def make(build):
        x = build.input(2, 4)
        return build("relu", build.linear(x, 1)), x

    assert refusal(make) is None


def test_a_softmax_of_queries_times_keys_is_refused():
    build = Build()
    x = build.input(2, 3, 4)
    scores = build("bmm", build.linear(x, 4), build("transpose.int", build.linear(x, 4), 1, 2))
    weights = build("softmax.int", build("div.Tensor", scores, 2.0), -1)
    apply = build("bmm", weights, x)
    assert "an attention weight (T5)" in structure.refusal(build.dataflow(apply), weights, apply)


def test_a_softmax_over_positions_is_refused_and_over_another_axis_is_not():
    build = Build()
    x = build.input(2, 3, 4)
    weights = build("softmax.int", build.linear(x, 4), 1)
    apply = build.mul(weights, x)
    flow = build.dataflow(apply)
    found = [structure.refusal(flow, weights, apply, positions=positions) for positions in ([1], [2])]
    assert found == ["`coefficient` is a softmax over positions: pooling by attention (T5)", None]


def test_a_mask_made_by_a_comparison_is_refused_unless_the_family_selects():
    build = Build()
    x = build.input(2, 4)
    mask = build("to.dtype", build("gt.Scalar", build.linear(x, 4), 0), torch.float32)
    apply = build.mul(x, mask)
    flow = build.dataflow(apply)
    assert "a mask that a comparison made, not a coefficient (T6)" in structure.refusal(flow, mask, apply)
    assert structure.refusal(flow, mask, apply, selects=True, waives=["T4"]) is None


def test_an_input_that_holds_positions_is_no_content():
    build = Build()
    positions = build.graph.placeholder("position_ids")
    positions.meta["val"] = torch.empty(2, 4, device="meta")
    gate = build("sigmoid", build.linear(positions, 4))
    apply = build.mul(build.input(2, 4), gate)
    assert "positions or masks only" in structure.refusal(build.dataflow(apply), gate, apply)


def test_what_passed_through_a_choice_is_discrete():
    build = Build()
    x = build.input(2, 4)
    scores = build("softmax.int", build.linear(x, 4), -1)
    weights = build.item(build("topk", scores, 2), 0)
    apply = build.mul(build.linear(x, 2), weights)
    flow = build.dataflow(apply)
    assert structure.is_discrete(flow, [weights], apply)
    assert structure.is_discrete(flow, [scores], apply)


def test_a_gate_is_not_discrete():
    build = Build()
    x = build.input(2, 4)
    gate = build("sigmoid", build.linear(x, 4))
    apply = build.mul(x, gate)
    assert not structure.is_discrete(build.dataflow(apply), [gate], apply)


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


def test_a_mask_beside_the_coefficient_is_no_value():
    build = Build()
    gate, mask = build("sigmoid", build.linear(build.input(2, 8), 8)), build.input(2, 8, dtype=torch.bool)
    apply = build("where.self", mask, gate, build.input(2, 8))
    (value,) = structure.value_operands(build.dataflow(apply), gate, apply)
    assert value.meta["val"].dtype == torch.float32


def test_a_sum_whose_terms_all_carry_the_coefficient_is_applied_to_what_each_term_scales():
    build = Build()
    old = build.input(2, 8)
    new, gate = build.linear(old, 8), build("sigmoid", build.linear(old, 8))
    apply = build.add(build.mul(gate, new), build.mul(build("rsub.Scalar", gate, 1.0), old))
    assert structure.value_operands(build.dataflow(apply), gate, apply) == [new, old]


def test_the_path_of_a_value_ends_at_its_first_learned_op():
    build = Build()
    first = build.linear(build.input(2, 4), 4)
    second = build.linear(first, 4)
    value = build("relu", second)
    path = structure.same_path(build.dataflow(value), [value])
    assert (second in path, first in path) == (True, False)


def test_indices_by_which_a_value_was_gathered_are_no_part_of_its_path():
    # The score decides which rows are gathered, and scales them: it has a learned op of its own all the same.
    build = Build()
    x = build.input(2, 5, 4)
    chosen = build("topk", build("sigmoid", build("squeeze.dim", build.linear(x, 1), -1)), 2)
    rows = build("expand", build("unsqueeze", build.item(chosen, 1), -1), [2, 2, 4])
    coefficient = build.item(chosen, 0)
    apply = build.mul(build("gather", x, 1, rows), build("unsqueeze", coefficient, -1))
    assert structure.refusal(build.dataflow(apply), coefficient, apply) is None


@pytest.mark.parametrize("is_narrow", [True, False])
def test_a_narrow_coefficient_stays_narrow_when_a_wider_constant_is_added(is_narrow):
    build = Build()
    x = build.input(2, 3, 4)
    coefficient = build.add(build.linear(x, 1 if is_narrow else 4), build.parameter(4))
    apply = build.mul(build("relu", build.linear(x, 4)), coefficient)
    assert (structure.refusal(build.dataflow(apply), coefficient, apply) is None) is is_narrow

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxaudit.controllers import match, unify
from fxaudit.controllers.anchors import plan
from fxaudit.controllers.graphs import Dataflow
from fxaudit.controllers.match import find_matches
from fxaudit.controllers.pattern import load_patterns
from fxaudit.errors import PatternError

from .build import Build, matched, pattern, traced
from .generated import transformer

LIBRARY = {chosen.name: chosen for chosen in load_patterns()}


class Excite(nn.Module):
    def __init__(self, channels=4, squash=torch.sigmoid):
        super().__init__()
        self.fc1, self.fc2, self.squash = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1), squash

    def forward(self, x):
        return x * self.squash(self.fc2(F.relu(self.fc1(x.mean((2, 3), keepdim=True)))))


@pytest.fixture(scope="module")
def stack():
    """Squeeze-excite networks of 4 and of 8 blocks."""
    image = torch.randn(2, 4, 3, 3)
    return {n: traced(nn.Sequential(*(Excite() for _ in range(n))), image) for n in (4, 8)}


def gate(build, x=None, value=None):
    """value * sigmoid(linear(x))."""
    x = build.input(2, 4) if x is None else x
    value = build.input(2, 4) if value is None else value
    return build.mul(value, build("sigmoid", build.linear(x, 4)))


GATE = "coefficient = sigmoid(linear(input))\napply = value * coefficient"
SEQUENCE = {
    "shape": {"coefficient": "batch token feature"},
    "axes": {"batch": "sample", "token": "position", "feature": "unit"},
}
SEQUENCE_GATE = pattern(GATE, **SEQUENCE)


def find(chosen, build, *outputs):
    return find_matches(chosen, build.dataflow(*outputs), 2)


# --- matches --------------------------------------------------------------------------------------------------------


def test_each_block_of_a_stack_matches_once(stack):
    assert len(matched(LIBRARY["se-gate"], stack[8]).matches) == 8


def test_a_match_knows_its_coefficient_and_its_apply_site():
    build = Build()
    node = gate(build)
    (found,) = find(pattern(GATE), build, node).matches
    assert (found.apply, found.coefficient) == (node, node.args[1])


def test_a_match_knows_the_sizes_of_its_axes():
    build = Build()
    (found,) = find(pattern(GATE, shape={"coefficient": "batch feature"}), build, gate(build)).matches
    assert found.sizes == {"batch": 2, "feature": 4}


def test_a_match_knows_the_axis_names_of_its_tensors():
    build = Build()
    (found,) = find(pattern(GATE, shape={"coefficient": "batch feature"}), build, gate(build)).matches
    assert found.layouts == {"coefficient": (("batch",), ("feature",))}


def test_matches_stand_in_graph_order():
    build = Build()
    nodes = [gate(build) for _ in range(3)]
    assert [m.apply for m in find(pattern(GATE), build, *nodes).matches] == nodes


def test_one_apply_site_matches_once_however_many_ways_it_can_be_read():
    build = Build()
    node = build.mul(
        build("sigmoid", build.linear(build.input(2, 4), 4)), build("sigmoid", build.linear(build.input(2, 4), 4))
    )
    assert len(find(pattern(GATE), build, node).matches) == 1


def test_the_batch_is_bound_before_any_shape_is_read():
    build = Build()
    result = find_matches(pattern(GATE), build.dataflow(gate(build)), 3)
    assert result.matches == ()


def test_a_rest_is_the_same_in_all_shapes():
    build = Build()
    value = build.input(2, 3, 4)
    node = build.mul(value, build("sigmoid", build.linear(build.input(2, 1, 4), 4)))
    shape = {"value": "batch ... feature", "input": "batch ... feature", "coefficient": "batch token feature"}
    assert find(pattern(GATE, shape=shape), build, node).matches == ()


TURNED = """
gate        = sigmoid(linear(input))
turned      = transpose(gate)
coefficient = turned | gate
apply       = value * coefficient
"""
EITHER_WAY = {
    "shape": {"turned": "batch feature token", "coefficient": "batch token feature | batch feature token"},
    "axes": {"batch": "sample", "token": "position", "feature": "unit"},
}


@pytest.mark.parametrize("is_turned", [True, False])
def test_two_names_of_one_node_read_its_axes_alike_where_sizes_cannot_tell(is_turned):
    build = Build()
    coefficient = build("sigmoid", build.linear(build.input(2, 4, 4), 4))
    if is_turned:
        coefficient = build("transpose.int", coefficient, 1, 2)
    node = build.mul(build.input(2, 4, 4), coefficient)
    (found,) = find(pattern(TURNED, **EITHER_WAY), build, node).matches
    expected = (("batch",), ("feature",), ("token",)) if is_turned else (("batch",), ("token",), ("feature",))
    assert found.layouts["coefficient"] == expected


def test_names_of_one_node_that_cannot_read_it_alike_are_a_miss_that_says_so():
    build = Build()
    gate = build("sigmoid", build.linear(build.input(2, 4, 4), 4))
    node = build.mul(build.input(2, 4, 4), build("transpose.int", gate, 1, 2))
    shape = {"turned": "batch feature token", "coefficient": "batch token feature"}
    result = find(pattern(TURNED, **(EITHER_WAY | {"shape": shape})), build, node)
    assert result.matches == ()
    assert "[shape] coefficient names the axes of" in result.near_misses[0].reason
    assert "otherwise than turned" in result.near_misses[0].reason


# --- over -----------------------------------------------------------------------------------------------------------


def pooled(dims, *, keepdim=True, op="mean.dim"):
    build = Build()
    x = build.input(2, 4, 5, 6)
    args = (x, dims) if op == "adaptive_avg_pool2d" else (x, dims, keepdim)
    node = build.mul(x, build("sigmoid", build("conv2d", build(op, *args), build.parameter(4, 4, 1, 1))))
    return build, node


POOL = {
    "direct": "pooled = pool(input, over=[height, width])\ncoefficient = sigmoid(linear(pooled))",
    "nested": "coefficient = sigmoid(linear(pool(input, over=[height, width])))",
    "alternatives": (
        "pooled = mean(input, over=[height, width]) | amax(input, over=[height, width])\n"
        "coefficient = sigmoid(linear(pooled))"
    ),
    "under a chain": "coefficient = sigmoid(chain(linear)(pool(input, over=[height, width])))",
}


@pytest.mark.parametrize("form", POOL)
@pytest.mark.parametrize(
    ("dims", "same"), [([2, 3], True), ([-1, -2], True), ([3, 2], True), ([2], False), ([3], False), ([1, 2, 3], False)]
)
def test_over_names_exactly_the_axes_that_are_reduced(form, dims, same):
    build, node = pooled(dims) if 1 not in dims else pooled_to_one(dims)
    shape = {"input": "batch channel height width", "coefficient": "batch channel a b"}
    axes = {"batch": "sample", "channel": "unit", "a": "position", "b": "position"}
    chosen = pattern(f"{POOL[form]}\napply = input * coefficient", shape=shape, axes=axes)
    assert bool(find(chosen, build, node).matches) is same


def pooled_to_one(dims):
    build = Build()
    x = build.input(2, 4, 5, 6)
    weight = build.parameter(4, 1, 1, 1)
    node = build.mul(x, build("sigmoid", build("conv2d", build("mean.dim", x, dims, True), weight)))
    return build, node


@pytest.mark.parametrize(("size", "same"), [([1, 1], True), ([5, 1], False), ([5, 6], False)])
def test_over_reads_the_output_size_of_adaptive_pooling(size, same):
    build, node = pooled(size, op="adaptive_avg_pool2d")
    shape = {"input": "batch channel height width", "coefficient": "batch channel a b"}
    axes = {"batch": "sample", "channel": "unit", "a": "position", "b": "position"}
    chosen = pattern(f"{POOL['direct']}\napply = input * coefficient", shape=shape, axes=axes)
    assert bool(find(chosen, build, node).matches) is same


# --- prefilter ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("match", "missing"),
    [
        ("coefficient = softmax(linear(input))\napply = value * coefficient", "softmax"),
        ("coefficient = sigmoid(chain(norm)(input))\napply = value * coefficient", "norm"),
        ("hidden = tanh(input)\ncoefficient = sigmoid(hidden)\napply = value * coefficient", "tanh"),
        ("coefficient = sigmoid(topk(input)[0])\napply = value * coefficient", "topk"),
        ("coefficient = tanh(input) | cos(input)\napply = value * coefficient", "tanh | cos"),
        ("coefficient = sigmoid(input)\napply = fold(sub)(value * coefficient)", "sub"),
    ],
)
def test_a_pattern_whose_ops_do_not_occur_costs_no_visit(match, missing):
    build = Build()
    result = find(pattern(match), build, gate(build))
    assert (result.visits, result.near_misses[0].reason) == (0, f"no `{missing}` in the graph")


def test_a_chain_that_may_be_empty_does_not_have_to_occur():
    build = Build()
    match = "coefficient = sigmoid(chain(norm, least=0)(linear(input)))\napply = value * coefficient"
    assert len(find(pattern(match), build, gate(build)).matches) == 1


def test_a_region_that_may_be_empty_does_not_have_to_occur():
    build = Build()
    x = build.input(2, 4)
    match = "coefficient = sigmoid(linear(input))\napply = coefficient * region(input, via=norm)"
    assert len(find(pattern(match), build, gate(build, x, x)).matches) == 1


def test_one_alternative_that_occurs_is_enough():
    build = Build()
    match = "coefficient = sigmoid(linear(input)) | softmax(input)\napply = value * coefficient"
    assert len(find(pattern(match), build, gate(build)).matches) == 1


def test_a_graph_without_an_anchor_costs_no_visit():
    build = Build()
    node = build("sigmoid", build.linear(build.input(2, 4), 4))
    assert find(pattern(GATE), build, node).visits == 0


# --- cost -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generated():
    return {layers: Dataflow(transformer(layers)) for layers in (90, 180, 360)}  # 5,000, 10,000 and 20,000 nodes


def test_all_of_the_library_takes_at_most_2_2_times_the_visits_on_twice_the_graph(generated):
    assert [len(flow.nodes) // 1000 for flow in generated.values()] == [5, 10, 21]
    visits = [sum(find_matches(p, flow, 2).visits for p in LIBRARY.values()) for flow in generated.values()]
    assert 0 < visits[1] <= 2.2 * visits[0]
    assert visits[2] <= 2.2 * visits[1]


def test_every_layer_of_a_generated_graph_has_one_gate(generated):
    found = find_matches(SEQUENCE_GATE, generated[90], 2)
    assert len({match.coefficient for match in found.matches}) == 90


def test_matching_starts_from_the_rarest_op_that_a_pattern_needs(generated):
    # A layer has eight products. Its sigmoid is read by one of them, that of the angles by four in each layer.
    assert len(plan(SEQUENCE_GATE, generated[90]).anchors) == 90 + 4 * 90
    assert len(generated[90].nodes_of("mul")) == 90 * 9


def test_a_pattern_without_an_end_stops_at_the_budget_with_its_line_on_a_large_graph(generated):
    chains = "chain(pointwise | layout | linear, most=99)("
    hostile = pattern(f"coefficient = {chains * 8}silu(softmax(_)){')' * 8}\napply = value * coefficient", **SEQUENCE)
    with pytest.raises(PatternError, match="one anchor took more than 10,000 visits") as caught:
        find_matches(hostile, generated[90], 2)
    assert "family.toml:6" in caught.value.where


def test_a_pattern_that_takes_many_visits_everywhere_stops_at_the_budget_of_the_graph(generated, monkeypatch):
    monkeypatch.setattr(match, "GRAPH_BUDGET", 0)
    monkeypatch.setattr(match, "BUDGET", 100)
    with pytest.raises(PatternError, match=r"is too ambiguous: it took 1\d\d visits of 5,314 nodes"):
        find_matches(SEQUENCE_GATE, generated[90], 2)


def test_a_pattern_with_too_many_readings_of_one_anchor_is_an_error(monkeypatch):
    monkeypatch.setattr(unify, "READINGS", 2)
    build = Build()
    x = build.linear(build.input(2, 4), 4)
    for _ in range(5):
        x = build("cos", x)
    node = build.mul(build("sigmoid", x), build.input(2, 4))
    with pytest.raises(PatternError, match="one anchor took more than 2 readings"):
        find(
            pattern("coefficient = sigmoid(chain(cos)(_))\napply = value * coefficient", where=["rank(value) == 9"]),
            build,
            node,
        )


@pytest.mark.parametrize("name", LIBRARY)
def test_twice_the_blocks_take_at_most_2_2_times_the_visits(stack, name):
    small, large = (matched(LIBRARY[name], stack[n]).visits for n in (4, 8))
    assert large <= 2.2 * small


@pytest.mark.parametrize("name", ["se-gate", "feature-gate"])
def test_the_cost_is_measured_on_a_graph_that_the_pattern_does_visit(stack, name):
    assert matched(LIBRARY[name], stack[4]).visits > 0


@pytest.mark.parametrize("name", LIBRARY)
def test_the_visits_are_the_same_every_time(stack, name):
    assert matched(LIBRARY[name], stack[4]).visits == matched(LIBRARY[name], stack[4]).visits


def test_the_time_of_day_has_no_part_in_the_visits(stack, monkeypatch):
    import time

    before = matched(LIBRARY["se-gate"], stack[4]).visits
    for clock in ("time", "perf_counter", "monotonic", "process_time"):
        monkeypatch.setattr(time, clock, lambda: 1e12)
    assert matched(LIBRARY["se-gate"], stack[4]).visits == before


def test_a_pattern_that_is_too_ambiguous_is_an_error_with_its_line():
    build = Build()
    left, right = build.input(2, 4), build.input(2, 4)
    for _ in range(40):
        left, right = build.add(left, right), build.add(right, left)
    node = build.mul(build("sigmoid", left), build("cos", right))
    chosen = pattern(
        "coefficient = sigmoid(hidden)\nhidden = "
        + "chain(add)(" * 6
        + "cos(_)"
        + ")" * 6
        + "\napply = coefficient * _"
    )
    with pytest.raises(PatternError) as raised:
        find(chosen, build, node)
    assert raised.value.where.splitlines()[0] == chosen.where_in_file(2)


# --- where and exclude ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("predicate", "same"), [("feature == 4", True), ("feature > 4", False), ("depends(apply, input)", True)]
)
def test_every_predicate_must_hold(predicate, same):
    build = Build()
    chosen = pattern(GATE, where=["feature > 1", predicate])
    assert bool(find(chosen, build, gate(build)).matches) is same


@pytest.mark.parametrize(
    ("exclude", "same"),
    [
        ("coefficient = sigmoid(_)", False),
        ("coefficient = softmax(_)", True),
        ("apply = input * _", False),
        ("value = relu(_)", True),
    ],
)
def test_what_is_excluded_must_not_also_match(exclude, same):
    build = Build()
    x = build.input(2, 4)
    match = "coefficient = sigmoid(linear(input))\nvalue = chain(pointwise, least=0)(_)\napply = value * coefficient"
    chosen = pattern(match, exclude=[exclude])
    assert bool(find(chosen, build, gate(build, x, x)).matches) is same


def test_over_in_an_exclusion_is_obeyed_or_refused():
    # Excluding a mean over width must not exclude a mean over height.
    build, node = pooled([2])
    match = "pooled = mean(input)\ncoefficient = sigmoid(linear(pooled))\napply = input * coefficient"
    shape = {"input": "batch channel height width", "coefficient": "batch channel a b"}
    axes = {"batch": "sample", "channel": "unit", "a": "position", "b": "position"}
    try:
        chosen = pattern(match, shape=shape, axes=axes, exclude=["pooled = mean(input, over=[width])"])
    except PatternError:
        return
    assert len(find(chosen, build, node).matches) == 1


# --- near misses ----------------------------------------------------------------------------------------------------


def test_the_nearest_miss_comes_first():
    build = Build()
    far = build.mul(build.input(2, 4), build("cos", build.input(2, 4)))
    near = build.mul(build("sigmoid", build.linear(build("cos", build.input(2, 4)), 4)), build.input(2, 4))
    match = "hidden = tanh(input)\nmiddle = linear(hidden)\ncoefficient = sigmoid(middle)\napply = value * coefficient"
    build("tanh", far)
    result = find(pattern(match), build, far, near)
    assert [miss.anchor for miss in result.near_misses] == [near, far]


def test_near_misses_are_ranked_by_names_bound():
    build = Build()
    nodes = [build.mul(build.input(2, 4), build("cos", build.input(2, 4))), gate(build, value=build.input(1, 4))]
    result = find(pattern(GATE, where=["feature > 100"]), build, *nodes)
    bound = [len(miss.bound) for miss in result.near_misses]
    assert bound == sorted(bound, reverse=True)


def test_what_matches_is_no_near_miss():
    build = Build()
    assert find(pattern(GATE), build, gate(build)).near_misses == ()


def test_every_anchor_is_a_match_or_a_near_miss():
    build = Build()
    nodes = [gate(build), build.mul(build.input(2, 4), build("cos", build.input(2, 4))), gate(build)]
    result = find(pattern(GATE), build, *nodes)
    assert {m.apply for m in result.matches} | {m.anchor for m in result.near_misses} == set(nodes)


class WrongPool(nn.Module):
    """Squeeze-excite but for the pooling, which leaves the width."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.fc(x.mean(2, keepdim=True)))


class Cosine(nn.Module):
    """Squeeze-excite but for an op in the chain that belongs to no class of it."""

    def __init__(self, gate_left):
        super().__init__()
        self.fc1, self.fc2, self.gate_left = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), gate_left

    def forward(self, x):
        scale = torch.sigmoid(self.fc2(torch.cos(self.fc1(x.mean((2, 3), keepdim=True)))))
        return scale * x if self.gate_left else x * scale


@pytest.mark.parametrize("gate_left", [False, True])
def test_the_nearest_miss_names_the_op_that_broke_the_chain(gate_left):
    result = matched(LIBRARY["se-gate"], traced(Cosine(gate_left), torch.randn(2, 4, 3, 3)))
    assert "cos `cos`" in result.near_misses[0].reason


def test_the_nearest_miss_of_a_wrong_pooling_is_its_shape():
    result = matched(LIBRARY["se-gate"], traced(WrongPool(), torch.randn(2, 4, 3, 3)))
    assert result.near_misses[0].reason.startswith("[shape] pooled = ")


def test_a_near_miss_knows_the_users_source_line():
    result = matched(LIBRARY["se-gate"], traced(WrongPool(), torch.randn(2, 4, 3, 3)))
    assert "return x * torch.sigmoid(self.fc(x.mean(2, keepdim=True)))" in result.near_misses[0].source


def test_a_predicate_that_fails_is_the_reason():
    build = Build()
    result = find(pattern(GATE, where=["feature > 100"]), build, gate(build))
    assert result.near_misses[0].reason == "where `feature > 100` is false (feature=4)"


def test_an_exclusion_that_matches_is_the_reason():
    build = Build()
    result = find(pattern(GATE, exclude=["coefficient = sigmoid(_)"]), build, gate(build))
    assert result.near_misses[0].reason == "excluded: `coefficient = sigmoid(_)`"


def test_one_dataflow_serves_many_patterns(stack):
    dataflow = Dataflow(stack[4].graph_module)
    found = {name: len(find_matches(chosen, dataflow, stack[4].sample).matches) for name, chosen in LIBRARY.items()}
    assert found["se-gate"] == 4


class TwoTowers(nn.Module):
    """Two inputs that share no op: torch.export gives each a batch symbol of its own."""

    def __init__(self):
        super().__init__()
        self.left, self.right = Excite(), Excite()

    def forward(self, a, b):
        return self.left(a), self.right(b)


def test_a_gate_in_each_of_two_towers_is_found():
    graph = traced(TwoTowers(), torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3))
    assert len(matched(LIBRARY["se-gate"], graph).matches) == 2


def test_the_way_from_the_rarest_op_passes_through_a_norm_of_several_outputs():
    class Normed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.second = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4)

        def forward(self, x):
            for _ in range(4):  # so that the pooling is rarer than the rest
                x = x * torch.sigmoid(x)
            return x * torch.sigmoid(self.second(self.norm(self.first(x.mean(1)))))[:, None]

    match = (
        "pooled = mean(_)\ncoefficient = sigmoid(chain(linear | norm)(pooled))\napply = _ * chain(layout)(coefficient)"
    )
    assert len(matched(pattern(match), traced(Normed(), torch.randn(2, 3, 4))).matches) == 1

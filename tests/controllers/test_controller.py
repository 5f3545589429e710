import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxaudit import ops
from fxaudit.controllers.controller import build_controllers
from fxaudit.controllers.graphs import Dataflow
from fxaudit.controllers.match import find_matches
from fxaudit.controllers.pattern import load_patterns

from .build import pattern, traced

LIBRARY = [chosen for chosen in load_patterns() if chosen.family_class == "default"]


def built(module, *inputs, patterns=LIBRARY):
    """The controllers and findings of a module."""
    graph = traced(module, *inputs)
    dataflow = Dataflow(graph.graph_module)
    return build_controllers([find_matches(chosen, dataflow, graph.sample) for chosen in patterns], dataflow)


class Excite(nn.Module):
    """Squeeze-excite with all its layers in one submodule."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Sequential(nn.Conv2d(4, 2, 1), nn.ReLU(), nn.Conv2d(2, 4, 1))

    def forward(self, x):
        return x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))


class Spread(nn.Module):
    """The same with its layers apart: the deepest module that holds both is the block."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.second(F.relu(self.first(x.mean((2, 3), keepdim=True)))))


class Nets(nn.Module):
    """Every place that a squeeze-excite block can be in, and one of them called twice."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Excite(), Spread()])
        self.shared = Excite()
        self.conv = nn.Conv2d(4, 4, 1)
        self.weight = nn.Parameter(torch.randn(4, 4, 1, 1))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        x = self.shared(self.conv(self.shared(x)))
        return x * torch.sigmoid(F.conv2d(x.mean((2, 3), keepdim=True), self.weight))


@pytest.fixture(scope="module")
def nets():
    return built(Nets(), torch.randn(2, 4, 3, 3))[0]


def test_controllers_stand_in_the_order_of_the_graph(nets):
    assert [c.id for c in nets] == ["blocks.0.gate#0", "blocks.1#0", "shared.gate#0", "shared.gate#1", "<root>#0"]


def test_a_controller_is_named_after_the_deepest_module_that_holds_its_learned_ops(nets):
    assert [c.module for c in nets[:2]] == ["blocks.0.gate", "blocks.1"]


def test_a_module_that_is_called_twice_is_two_controllers(nets):
    assert [(c.module, c.call) for c in nets[2:4]] == [("shared.gate", 0), ("shared.gate", 1)]


def test_two_calls_of_one_module_read_the_same_parameters(nets):
    assert nets[2].parameter_names == nets[3].parameter_names


def test_learned_ops_of_the_model_itself_have_the_root_for_a_place(nets):
    assert nets[4].module == "<root>"


def test_the_parameters_of_a_controller_are_counted(nets):
    assert nets[0].parameters == (4 * 2 + 2) + (2 * 4 + 4)


def test_the_cone_holds_the_controllers_own_ops_and_nothing_of_the_value(nets):
    names = sorted(ops.op_name(node) for node in nets[0].cone if node.op == "call_function")
    assert names == ["conv2d", "conv2d", "mean", "relu", "sigmoid"]


def test_a_coefficient_has_a_key_of_controller_and_name(nets):
    assert nets[0].coefficients[0].key == "blocks.0.gate#0/coefficient"


def test_a_coefficient_knows_the_role_of_each_axis(nets):
    assert nets[0].coefficients[0].roles == {"batch": "sample", "channel": "unit"}


def test_a_coefficient_has_the_shape_of_its_node(nets):
    coefficient = nets[0].coefficients[0]
    assert coefficient.shape == ops.sizes(coefficient.node)


def test_a_coefficient_knows_its_domain_from_the_pattern(nets):
    assert str(nets[0].coefficients[0].domain) == "[0, 1]"


class TwoGates(nn.Module):
    """Two controllers whose layers are in one module call, and one coefficient that is applied twice."""

    def __init__(self):
        super().__init__()
        self.fc, self.value = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x):
        first, second = self.fc(x).chunk(2, -1)
        value = self.value(x)
        once, twice = torch.sigmoid(first), torch.sigmoid(second)
        return value * once + torch.relu(value) * twice + torch.tanh(value) * twice


@pytest.fixture(scope="module")
def two_gates():
    return built(TwoGates(), torch.randn(2, 5, 8))[0]


def test_two_controllers_in_one_module_call_have_different_ids(two_gates):
    assert len({c.id for c in two_gates}) == 2


def test_the_keys_of_all_coefficients_are_different(two_gates):
    assert len({c.key for k in two_gates for c in k.coefficients}) == 2


def test_a_coefficient_that_is_applied_twice_is_one_controller_with_two_apply_sites(two_gates):
    assert sorted(len(c.applies) for c in two_gates) == [1, 2]


class VectorGate(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.value = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return torch.sigmoid(self.gate(x)) * self.value(x)


def test_a_gate_over_inputs_without_positions_has_no_position_axis():
    (found,) = built(VectorGate(), torch.randn(2, 8))[0]
    assert found.coefficients[0].axes == (("batch",), ("feature",))


def test_a_gate_over_positions_has_a_position_axis():
    (found,) = built(VectorGate(), torch.randn(2, 5, 8))[0]
    assert found.coefficients[0].axes == (("batch",), ("token",), ("feature",))


class FlatGate(VectorGate):
    def forward(self, x):
        return super().forward(x.reshape(-1, 8)).view_as(x)


def test_inputs_and_positions_in_one_axis_are_told_apart():
    (found,) = built(FlatGate(), torch.randn(2, 5, 8))[0]
    assert found.coefficients[0].axes == (("batch", "token"), ("feature",))


def test_the_number_of_positions_in_a_shared_axis_is_known():
    (found,) = built(FlatGate(), torch.randn(2, 5, 8))[0]
    assert found.coefficients[0].sizes["token"] == 5


# --- overlaps -------------------------------------------------------------------------------------------------------

GATE = "coefficient = sigmoid({})\napply = value * coefficient"
THREE = {"shape": {"coefficient": "batch token feature"}}


@pytest.fixture(scope="module")
def overlap():
    patterns = [pattern(GATE.format("linear(_)"), name=name, **THREE) for name in ("zebra", "antelope")]
    return built(VectorGate(), torch.randn(2, 5, 8), patterns=patterns)


def test_two_patterns_on_one_coefficient_are_one_controller(overlap):
    assert len(overlap[0]) == 1


def test_of_two_patterns_with_equal_cones_the_first_by_name_stays(overlap):
    assert overlap[0][0].pattern == "antelope"


def test_the_pattern_that_lost_an_overlap_is_reported_with_the_one_that_won(overlap):
    texts = [finding.text for finding in overlap[1] if finding.kind == "overlap"]
    assert texts == ["`zebra` also matches `sigmoid`, claimed by `antelope`"]


def test_the_pattern_that_binds_more_wins_an_overlap():
    # `wide` binds the linear as well, so nothing of the controller is left; `narrow` comes first by name.
    wide = pattern(
        "hidden = linear(_)\ncoefficient = sigmoid(hidden)\napply = value * coefficient",
        name="wide",
        shape={"coefficient": "batch token feature", "hidden": "batch token feature"},
        intervene='coupled = ["hidden"]',
    )
    narrow = pattern(GATE.format("linear(_)"), name="narrow", **THREE)

    class Shared(VectorGate):
        def forward(self, x):
            hidden = self.gate(x)
            return torch.sigmoid(hidden) * self.value(x) + torch.tanh(hidden)

    found, _ = built(Shared(), torch.randn(2, 5, 8), patterns=[narrow, wide])
    assert [c.pattern for c in found] == ["wide"]


# --- leaks ----------------------------------------------------------------------------------------------------------


class Leaky(nn.Module):
    def __init__(self, leak):
        super().__init__()
        self.gate, self.middle, self.value, self.leak = nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(8, 8), leak

    def forward(self, x):
        hidden = self.gate(x)
        score = self.middle(F.silu(hidden))
        coefficient = torch.sigmoid(score)
        return coefficient * self.value(x), *self.leak(hidden, score, coefficient)


LEAKS = {
    "none": lambda hidden, score, coefficient: (),
    "returned": lambda hidden, score, coefficient: (coefficient,),
    "read by a loss": lambda hidden, score, coefficient: (coefficient.mean(),),
    "returned in another layout": lambda hidden, score, coefficient: (coefficient.transpose(1, 2),),
    "score returned": lambda hidden, score, coefficient: (score,),
    "score read": lambda hidden, score, coefficient: (torch.tanh(score),),
    "both": lambda hidden, score, coefficient: (coefficient.mean(), score),
    # Before the first learned op that is the controller's own, so no way round it: the controller is what comes after.
    "hidden state returned": lambda hidden, score, coefficient: (hidden,),
}


@pytest.fixture(scope="module")
def leaks():
    return {name: built(Leaky(leak), torch.randn(2, 5, 8)) for name, leak in LEAKS.items()}


EXPECTED_LEAKS = {
    "none": [],
    "returned": [("use", "sigmoid", "output")],
    "read by a loss": [("use", "sigmoid", "mean")],
    "returned in another layout": [("use", "transpose", "output")],
    "score returned": [("path", "linear", "output")],
    "score read": [("path", "linear", "tanh")],
    "both": [("use", "sigmoid", "mean"), ("path", "linear", "output")],
    "hidden state returned": [],
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_leaked_coefficient_is_reported_not_rejected(leaks, name):
    assert [c.pattern for c in leaks[name][0]] == ["feature-gate"]


@pytest.mark.parametrize(("name", "expected"), EXPECTED_LEAKS.items(), ids=EXPECTED_LEAKS)
def test_a_leak_names_what_is_read_and_by_what(leaks, name, expected):
    (found,) = leaks[name][0]
    assert [(k.kind, ops.op_name(k.node), ops.op_name(k.reader)) for k in found.leaks] == expected


@pytest.mark.parametrize(("name", "expected"), EXPECTED_LEAKS.items(), ids=EXPECTED_LEAKS)
def test_a_path_leak_makes_a_controller_partially_frozen(leaks, name, expected):
    (found,) = leaks[name][0]
    assert found.is_partially_frozen is any(kind == "path" for kind, _, _ in expected)


@pytest.mark.parametrize(("name", "expected"), EXPECTED_LEAKS.items(), ids=EXPECTED_LEAKS)
def test_each_leak_is_a_finding(leaks, name, expected):
    assert [f.kind for f in leaks[name][1]] == [f"{kind}-leak" for kind, _, _ in expected]


def test_where_a_coupled_capture_is_applied_is_no_leak():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.other, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.value(torch.sigmoid(self.gate(x)) * x) * torch.tanh(self.other(x))

    both = pattern(
        "coefficient = sigmoid(linear(x))\nsecond = tanh(linear(x))\nlast = _ * second\napply = value * coefficient",
        shape={"coefficient": "batch token feature", "second": "batch token feature"},
        axes={"batch": "sample", "token": "position", "feature": "unit"},
        intervene='coupled = ["second"]',
    )
    (found,), _ = built(Twice(), torch.randn(2, 5, 8), patterns=[both])
    assert [c.name for c in found.coefficients] == ["coefficient", "second"]
    assert not found.leaks


def test_what_a_pattern_names_between_the_coefficient_and_the_apply_is_no_leak():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.value = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return (1 + torch.tanh(self.gate(x))) * self.value(x)

    match = "coefficient = tanh(linear(_))\n{}apply = value * {}"
    shape, axes = {"coefficient": "batch token feature"}, {"batch": "sample", "token": "position", "feature": "unit"}
    named = pattern(match.format("scale = 1.0 + coefficient\n", "scale"), shape=shape, axes=axes)
    (found,), _ = built(Scaled(), torch.randn(2, 5, 8), patterns=[named])
    assert not found.leaks


def test_a_returned_coefficient_is_said_to_be_the_bound_value(leaks):
    assert leaks["returned"][1][0].text == (
        "<root>#0: a model output also reads the coefficient, and reads the bound value once frozen"
    )


def test_a_leak_knows_the_users_source_line(leaks):
    assert leaks["read by a loss"][1][0].where.endswith("*self.leak(hidden, score, coefficient)")


def test_a_layer_that_something_else_reads_is_not_counted_among_what_is_removed(leaks):
    # `gate` survives, `middle` goes.
    assert leaks["hidden state returned"][0][0].parameters == 4 * 8 + 8


def test_nothing_learned_is_removed_when_the_last_score_survives(leaks):
    assert leaks["score returned"][0][0].parameters == 0


def test_what_does_not_leak_is_removed_whole(leaks):
    assert leaks["none"][0][0].parameters == (8 * 4 + 4) + (4 * 8 + 8)


class Router(nn.Module):
    """A top-k router as in Mixtral: flat tokens, softmax, two of four experts, weights that sum to one."""

    def __init__(self, returns_logits=False):
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4, bias=False), nn.Parameter(torch.randn(4, 8, 8))
        self.returns_logits = returns_logits

    def forward(self, x):
        flat = x.reshape(-1, 8)
        logits = self.router(flat)
        weights, indices = logits.softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        outputs = (flat[:, None, None] @ self.experts[indices]).squeeze(2)
        y = (outputs * weights.unsqueeze(-1)).sum(1).view_as(x)
        return (y, logits) if self.returns_logits else y


@pytest.fixture(scope="module")
def routers():
    return {returns: built(Router(returns), torch.randn(2, 5, 8)) for returns in (False, True)}


def test_a_router_binds_its_weights_and_its_indices(routers):
    (found,) = routers[False][0]
    assert [c.name for c in found.coefficients] == ["coefficient", "indices"]


def test_a_router_taps_its_scores(routers):
    (found,) = routers[False][0]
    assert [(t.name, t.key) for t in found.taps] == [("scores", "router#0/scores")]


def test_the_indices_of_a_router_are_an_index_not_a_number(routers):
    (found,) = routers[False][0]
    assert [c.domain.kind for c in found.coefficients] == ["simplex", "index"]


def test_a_router_dies_only_with_weights_and_indices_together(routers):
    (found,) = routers[False][0]
    assert found.parameter_names == {"router.weight"}


def test_a_router_of_its_own_does_not_leak(routers):
    assert routers[False][0][0].leaks == ()


def test_a_router_whose_logits_are_returned_is_partially_frozen(routers):
    assert routers[True][0][0].is_partially_frozen


def test_a_router_whose_logits_are_returned_keeps_its_parameters(routers):
    assert routers[True][0][0].parameters == 0


def test_the_path_leak_of_a_router_is_at_its_logits(routers):
    (leak,) = routers[True][0][0].leaks
    assert (ops.op_name(leak.node), ops.op_name(leak.reader)) == ("linear", "output")


class DenseRouter(nn.Module):
    """Scores of the two chosen experts, zero for the others, scale what every expert reads, as in Llama 4."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4, bias=False), nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x):
        flat = x.reshape(-1, 8)
        logits = self.router(flat)
        values, indices = logits.topk(2, -1)
        scores = torch.full_like(logits, float("-inf")).scatter_(1, indices, values).sigmoid()
        return torch.bmm(flat * scores.t().unsqueeze(-1), self.experts).sum(0).view_as(x)


def test_indices_that_nothing_reads_beside_a_dense_coefficient_are_not_bound():
    ((found,), _) = built(DenseRouter(), torch.randn(2, 5, 8))
    assert [(c.name, c.axes) for c in found.coefficients] == [("coefficient", (("batch", "token"), ("expert_count",)))]


def test_a_router_dies_with_its_dense_coefficient():
    ((found,), _) = built(DenseRouter(), torch.randn(2, 5, 8))
    assert found.parameter_names == {"router.weight"}


HIGHWAY = """
gate        = chain(layout, least=0)(coefficient)
kept        = 1.0 - gate
opened      = gate * new
closed      = kept * old
coefficient = sigmoid(linear(input))
apply       = opened + closed
"""


class Highway(nn.Module):
    """A gate that is read twice on its way to one apply site, and a third time where it is returned."""

    def __init__(self, returns_kept):
        super().__init__()
        self.gate, self.value, self.returns_kept = nn.Linear(8, 8), nn.Linear(8, 8), returns_kept

    def forward(self, x):
        gate = torch.sigmoid(self.gate(x))
        y = gate * self.value(x) + (1 - gate) * x
        return (y, (1 - gate).sum()) if self.returns_kept else y


@pytest.mark.parametrize("returns_kept", [False, True])
def test_what_a_pattern_names_on_the_way_to_its_apply_site_is_no_leak(returns_kept):
    highway = pattern(HIGHWAY, name="highway")
    ((found,), _) = built(Highway(returns_kept), torch.randn(2, 8), patterns=[highway])
    assert [(leak.kind, ops.op_name(leak.reader)) for leak in found.leaks] == [("use", "sub")] * returns_kept


class SkippingRouter(Router):
    """The last expert means: no expert. Its weight is set to zero and its index to an expert that exists."""

    def forward(self, x):
        flat = x.reshape(-1, 8)
        scores = self.router(flat).softmax(-1)
        indices = scores.topk(1, -1)[1]
        skipped = indices == 3
        weights = scores.gather(1, indices).masked_fill(skipped, 0.0)
        outputs = (flat[:, None, None] @ self.experts[indices.masked_fill(skipped, 0)]).squeeze(2)
        return (outputs * weights.unsqueeze(-1)).sum(1).view_as(x)


def test_a_mask_of_the_bound_indices_is_no_path_leak():
    ((found,), _) = built(SkippingRouter(), torch.randn(2, 5, 8))
    assert found.leaks == ()


class Nested(nn.Module):
    """A gate that acts only on the way to another gate."""

    def __init__(self):
        super().__init__()
        self.inner, self.middle, self.outer, self.value = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        inner = torch.sigmoid(self.inner(x)) * self.middle(x)
        return torch.sigmoid(self.outer(inner)) * self.value(x)


def test_a_controller_inside_another_is_reported():
    gates = pattern(GATE.format("linear(_)"), **THREE)
    _, findings = built(Nested(), torch.randn(2, 5, 8), patterns=[gates])
    assert [f.text for f in findings if f.kind == "nested"] == [
        # The outer gate's learned ops are its own and, through its input, those of the inner one: the root holds both.
        "inner#0 acts only inside <root>#0; freezing both leaves it without effect"
    ]

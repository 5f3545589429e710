"""What the pattern language can say, on small eager modules: coefficients that travel together, scans, log space."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxaudit import stages
from fxaudit.controllers.controller import build_controllers
from fxaudit.controllers.graphs import Dataflow
from fxaudit.controllers.match import find_matches
from fxaudit.replay.dependence import measure_dependence
from fxaudit.replay.intervene import parse_interventions

from .build import pattern, traced

ROLES = {"batch": "sample", "token": "position", "feature": "unit", "stream": "unit", "stream_2": "unit"}


def found(module, chosen, *inputs):
    graph = traced(module, *inputs)
    dataflow = Dataflow(graph.graph_module)
    return build_controllers([find_matches(chosen, dataflow, graph.sample)], dataflow)


class SharedSigmoid(nn.Module):
    """One sigmoid, cut into two gates."""

    def __init__(self):
        super().__init__()
        self.gates, self.value, self.out = nn.Linear(4, 8), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        first, second = torch.sigmoid(self.gates(x)).chunk(2, -1)
        return self.out(self.value(x) * first + x.cos() * second)


PAIR = """
gates       = sigmoid(linear(input))
parts       = pieces(gates)
coefficient = parts[0]
second      = parts[1]
apply       = value * coefficient | value * second
"""
SHAPES = {"coefficient": "batch token feature", "second": "batch token feature"}


@pytest.fixture(scope="module")
def shared_sigmoid():
    return SharedSigmoid(), torch.randn(2, 3, 4)


def test_one_sigmoid_cut_into_two_gates_may_be_one_coefficient_with_two_sites(shared_sigmoid):
    whole = pattern(
        "coefficient = sigmoid(linear(input))\napply = value * chain(layout, least=0)(coefficient)",
        shape={"coefficient": "batch token feature"},
        axes=ROLES,
    )
    ((controller,), findings) = found(shared_sigmoid[0], whole, shared_sigmoid[1])
    assert (len(controller.applies), controller.coefficients[0].shape[2], findings) == (2, 8, ())


def test_one_sigmoid_cut_into_two_gates_may_be_one_controller_with_two_coefficients(shared_sigmoid):
    chosen = pattern(PAIR, shape=SHAPES, axes=ROLES, intervene='coupled = ["second"]')
    ((controller,), findings) = found(shared_sigmoid[0], chosen, shared_sigmoid[1])
    assert [c.name for c in controller.coefficients] == ["coefficient", "second"]
    assert len(controller.applies) == 2
    assert findings == ()


def test_each_coupled_coefficient_has_a_range_of_its_own(shared_sigmoid):
    chosen = pattern(
        PAIR,
        shape=SHAPES,
        axes=ROLES,
        intervene='coupled = ["second"]\nrange = { coefficient = [0.0, 1.0], second = [-1.0, 2.0] }\n'
        "neutral = { second = 0.5 }",
    )
    ((controller,), _) = found(shared_sigmoid[0], chosen, shared_sigmoid[1])
    assert [str(c.domain) for c in controller.coefficients] == ["[0, 1]", "[-1, 2]"]
    assert [controller.intervene.neutral_of(name) for name in ("coefficient", "second")] == [None, 0.5]


class Mixed(nn.Module):
    """One linear whose pieces become three coefficients with heads of their own, as in manifold hyper-connections."""

    def __init__(self):
        super().__init__()
        self.mix, self.body = nn.Linear(8, 8), nn.Linear(4, 4)

    def forward(self, streams):  # batch token stream feature
        before, after, between = self.mix(streams.flatten(-2)).split([2, 2, 4], -1)
        before, after = torch.sigmoid(before) + 1e-6, 2 * torch.sigmoid(after)
        between = torch.softmax(between.unflatten(-1, (2, 2)), -1)
        state = (streams * before.unsqueeze(-1)).sum(-2)
        return self.body(state).unsqueeze(-2) * after.unsqueeze(-1) + between @ streams


MIXED = """
raw         = linear(input)
parts       = pieces(raw)
coefficient = sigmoid(parts[0]) + _
after       = sigmoid(parts[1]) * _
between     = softmax(chain(layout)(parts[2]), dim=-1)
apply       = value * chain(layout)(coefficient) | value * chain(layout)(after) | matmul(between, value)
"""


def test_one_linear_may_feed_three_coefficients_that_are_bound_together():
    chosen = pattern(
        MIXED,
        shape={
            "coefficient": "batch token stream",
            "after": "batch token stream",
            "between": "batch token stream stream_2",
        },
        axes=ROLES,
        intervene='coupled = ["after", "between"]\ndomain = { between = "doubly-stochastic" }',
    )
    ((controller,), findings) = found(Mixed(), chosen, torch.randn(2, 3, 2, 4))
    assert [c.name for c in controller.coefficients] == ["coefficient", "after", "between"]
    assert controller.coefficients[2].domain.kind == "doubly-stochastic"
    assert (len(controller.applies), controller.parameters, findings) == (3, 8 * 8 + 8, ())


class Scan(nn.Module):
    """A gated linear recurrence, unrolled: the decay is the exponential of a log-sigmoid."""

    def __init__(self):
        super().__init__()
        self.decay, self.value = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):  # batch token feature
        logs, values = F.logsigmoid(self.decay(x)) / 16, self.value(x)
        state, states = values[:, 0], []
        for t in range(x.shape[1]):
            state = torch.exp(logs[:, t]) * state + values[:, t]
            states.append(state)
        return torch.stack(states, 1)


SCAN = """
coefficient = log_sigmoid(linear(input)) / _
decay       = exp(chain(layout)(coefficient))
apply       = state * decay
"""


def test_an_unrolled_scan_is_one_controller_with_a_site_for_each_step():
    chosen = pattern(
        SCAN,
        shape={"coefficient": "batch token feature"},
        axes=ROLES,
        intervene='domain = "log-decay"\nrange = [-inf, 0.0]',
    )
    ((controller,), findings) = found(Scan(), chosen, torch.randn(2, 5, 4))
    assert (len(controller.applies), controller.coefficients[0].domain.kind) == (5, "log-decay")
    assert findings == ()


class Highway(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.body = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        gate = torch.sigmoid(self.gate(x))
        return gate * self.body(x) + (1 - gate) * x


HIGHWAY = """
coefficient = sigmoid(linear(input))
apply       = value * coefficient | value * (1 - coefficient)
"""


def test_both_uses_of_a_highway_gate_are_sites_and_none_is_a_leak():
    ((controller,), findings) = found(Highway(), pattern(HIGHWAY), torch.randn(2, 4))
    assert (len(controller.applies), findings) == (2, ())


def test_a_use_that_is_no_site_is_a_leak():
    chosen = pattern("coefficient = sigmoid(linear(input))\napply = value * coefficient")
    ((controller,), _) = found(Highway(), chosen, torch.randn(2, 4))
    assert [(leak.kind, leak.reader.name) for leak in controller.leaks] == [("use", "rsub")]


LATER = """
scores      = softmax(linear(input))
coefficient = amax(scores)
total       = exp(sum(scores))
apply       = value * coefficient
"""


def test_an_equation_two_steps_behind_what_is_bound_is_found():
    class Later(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(4, 4)

        def forward(self, x):
            scores = self.router(x).softmax(-1)
            return x * scores.amax(-1, keepdim=True) + scores.sum(-1, keepdim=True).exp().tanh()

    chosen = pattern(
        LATER,
        shape={"coefficient": "batch 1", "total": "batch 1"},
        axes=ROLES,
        intervene='coupled = ["total"]',
    )
    ((controller,), _) = found(Later(), chosen, torch.randn(2, 4))
    assert [c.node.name for c in controller.coefficients] == ["amax", "exp"]


def test_the_neutral_replay_keeps_a_coupled_coefficient_that_has_no_neutral_value(shared_sigmoid, tmp_path):
    module, inputs = shared_sigmoid[0].eval(), torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(1))
    chosen = pattern(PAIR, shape=SHAPES, axes=ROLES, intervene='coupled = ["second"]\nneutral = { second = 0.25 }')
    frozen = stages.freeze(stages.match(stages.trace(module, inputs), [chosen]))
    targets = torch.randint(0, 4, (4, 3), generator=torch.Generator().manual_seed(2))
    data = stages.load_data({"x": inputs, "targets": targets}, frozen.traced)
    recording = stages.record(frozen, data, tmp_path / "store", batch_size=2)
    asked = parse_interventions("identity,neutral")
    found = measure_dependence(frozen, data, recording.store, None, asked, seeds=(0,), scopes=("joint",))
    (result,) = [row for row in found.results if row.intervention == "neutral"]
    with torch.no_grad():
        first = torch.sigmoid(module.gates(inputs)).chunk(2, -1)[0]
        logits = module.out(module.value(inputs) * first + inputs.cos() * 0.25)
    expected = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)
    assert torch.allclose(torch.tensor(result.per_input, dtype=torch.float32), expected, atol=1e-5)

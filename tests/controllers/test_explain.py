"""Near misses and the edits that mend them: each edit is applied to the pattern's text, and then it matches."""

import pytest
import torch
from torch import nn

from fxaudit import ops
from fxaudit.controllers.explain import explain
from fxaudit.controllers.graphs import Dataflow
from fxaudit.controllers.match import find_matches
from fxaudit.controllers.pattern import load_pattern, parse_pattern

from .build import pattern_text, traced


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.value = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):  # batch token feature
        return self.value(x) * torch.tanh(self.gate(x))


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 8)

    def forward(self, x):
        return x * torch.sigmoid(self.gate(x.mean(1)))[:, None]


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 8)

    def forward(self, x):
        return x * torch.softmax(self.router(x), 1)


GRAPHS = dict.fromkeys((Gate, Pooled, Mixture))
ROLES = {"batch": "sample", "token": "position", "feature": "unit"}
SEQUENCE = {"coefficient": "batch token feature"}
GATE = "coefficient = {}\napply = value * coefficient"


def graph_of(kind):
    if GRAPHS[kind] is None:
        torch.manual_seed(0)
        GRAPHS[kind] = traced(kind(), torch.randn(2, 5, 8))
    return GRAPHS[kind]


def explained(tmp_path, kind, match, **parts):
    path = tmp_path / "family.toml"
    path.write_text(pattern_text(match, **{"axes": ROLES, "shape": SEQUENCE, **parts}), encoding="utf-8")
    graph = graph_of(kind)
    return explain(load_pattern(path), Dataflow(graph.graph_module), graph.sample)


EDITS = {
    "another op": (Gate, GATE.format("sigmoid(linear(input))"), {}, "(sigmoid | tanh)(linear(input))"),
    "an op more in a group": (
        Gate,
        GATE.format("(sigmoid | softmax)(linear(input))"),
        {},
        "(sigmoid | softmax | tanh)(linear(input))",
    ),
    "an op more in a chain": (
        Pooled,
        "coefficient = sigmoid(chain(linear | norm, least=2)(input))\napply = value * chain(layout)(coefficient)",
        {"shape": {"coefficient": "batch feature"}},
        "chain(linear | norm | mean, least=2)",
    ),
    "another layout": (
        Pooled,
        "coefficient = sigmoid(linear(input))\napply = value * chain(layout)(coefficient)",
        {"shape": {"value": "batch token feature", "coefficient": "batch token feature"}},
        'coefficient = "batch token feature | batch feature"',
    ),
    "another axis of a softmax": (
        Mixture,
        GATE.format("softmax(linear(input), dim=-1)"),
        {"axes": {**ROLES, "token": "unit"}},
        "softmax(linear(input), dim=1)",
    ),
    "other axes of a reduction": (
        Pooled,
        "pooled = mean(input, over=[feature])\ncoefficient = sigmoid(linear(pooled))\n"
        "apply = value * chain(layout)(coefficient)",
        {"shape": {"input": "batch token feature", "coefficient": "batch feature"}},
        "over=[token]",
    ),
    "a comparison": (Gate, GATE.format("tanh(linear(input))"), {"where": ["feature > 8"]}, "feature >= 8"),
    "an exclusion": (Gate, GATE.format("tanh(linear(input))"), {"exclude": ["coefficient = tanh(_)"]}, "exclude = []"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_suggested_edit_makes_the_pattern_match(tmp_path, name):
    kind, match, parts, written = EDITS[name]
    found = explained(tmp_path, kind, match, **parts)
    assert found.matches == ()
    edit = found.explanations[0].edit
    assert edit is not None
    assert written in edit.after
    graph = graph_of(kind)
    text = edit.apply(found.pattern.path.read_text(encoding="utf-8"))
    edited = parse_pattern(found.pattern.path, text)
    assert len(find_matches(edited, Dataflow(graph.graph_module), graph.sample).matches) == 1


def test_an_edit_changes_one_line(tmp_path):
    edit = explained(tmp_path, Gate, GATE.format("sigmoid(linear(input))")).explanations[0].edit
    text = (tmp_path / "family.toml").read_text(encoding="utf-8")
    changed = [(a, b) for a, b in zip(text.split("\n"), edit.apply(text).split("\n"), strict=True) if a != b]
    assert changed == [(edit.before, edit.after)]


def test_where_no_single_token_would_do_nothing_is_suggested(tmp_path):
    found = explained(tmp_path, Gate, GATE.format("sigmoid(softmax(relu(input)))"))
    assert [e.edit for e in found.explanations] == [None]


def test_a_near_miss_shows_what_was_bound_what_failed_and_the_users_line(tmp_path):
    (found,) = explained(tmp_path, Gate, GATE.format("sigmoid(linear(input))")).explanations
    assert dict(found.captures)["value"].startswith("linear `linear")
    assert found.miss.reason.startswith("expected sigmoid, found tanh `tanh`")
    assert "self.value(x) * torch.tanh(self.gate(x))" in found.miss.source


def test_the_nearest_miss_comes_first(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = x * torch.cos(x)
            return x * torch.sigmoid(torch.relu(self.b(x)))

    GRAPHS[Two] = None
    found = explained(tmp_path, Two, GATE.format("sigmoid(relu(norm(input)))"))
    assert found.explanations[0].miss.reason.startswith("expected norm, found linear")


def test_sites_that_miss_alike_are_told_once(tmp_path):
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.gates = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            for gate in self.gates:
                x = x * torch.tanh(gate(x))
            return x

    GRAPHS[Many] = None
    (first, *_) = explained(tmp_path, Many, GATE.format("sigmoid(linear(input))")).explanations
    assert first.sites >= 3


def test_an_op_that_the_graph_lacks_still_has_a_nearest_miss(tmp_path):
    found = explained(tmp_path, Gate, GATE.format("tanh(topk(input)[0])"))
    assert found.explanations[0].miss.reason.startswith("expected output [0] of a multi-output op, found linear")


def test_matches_are_told_beside_the_misses(tmp_path):
    found = explained(tmp_path, Gate, GATE.format("tanh(linear(input))"))
    assert [ops.op_name(match.apply) for match in found.matches] == ["mul"]

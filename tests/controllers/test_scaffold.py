"""Drafted patterns: each loads, and matches the site that the user pointed at."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxaudit import stages
from fxaudit.controllers.graphs import Dataflow
from fxaudit.controllers.match import find_matches
from fxaudit.controllers.pattern import load_pattern
from fxaudit.errors import PatternError, UsageError

from .build import traced


class Unseen(nn.Module):
    """Gates of several kinds, each in a module of its own or beside the block."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.head = nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 8), nn.Tanh())
        self.shift, self.mix, self.out = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 8)

    def forward(self, x):  # batch token feature
        x = self.inner(x)
        x = x * self.head(x.mean(1))[:, None]
        x = x + torch.sigmoid(self.shift(x.amax(1))).unsqueeze(1)
        weights = torch.softmax(self.mix(x), -1)
        x = torch.einsum("btk,kbtd->btd", weights, torch.stack([x, x.sin(), x.cos()]))
        return self.out(F.silu(x))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.gate(x))


@pytest.fixture(scope="module")
def unseen():
    return traced(Unseen(), torch.randn(2, 5, 8))


@pytest.mark.parametrize(
    ("target", "coefficient", "apply"),
    [
        ("inner", "sigmoid 0", "mul 0"),
        ("inner.gate", "sigmoid 0", "mul 0"),
        ("head", "tanh 0", "mul 1"),
        ("mul 1", "tanh 0", "mul 1"),
        ("sigmoid 1", "sigmoid 1", "add 0"),
        ("einsum 0", "softmax 0", "einsum 0"),
        ("mix", "softmax 0", "einsum 0"),
    ],
)
def test_a_drafted_pattern_matches_at_least_the_site(unseen, tmp_path, target, coefficient, apply):
    flow = Dataflow(unseen.graph_module)

    def node(text):
        """The n-th node of an op; what is no such text is a module path."""
        op, _, number = text.partition(" ")
        return flow.nodes_of(op)[int(number)].name if number else text

    path = tmp_path / "mine.toml"
    path.write_text(stages.draft(unseen, node(target), "mine"), encoding="utf-8")
    found = find_matches(load_pattern(path), flow, unseen.sample)
    assert (node(coefficient), node(apply)) in {(match.coefficient.name, match.apply.name) for match in found.matches}


def test_a_draft_says_what_kind_of_ops_lead_to_the_coefficient(unseen):
    text = stages.draft(unseen, "head", "mine")
    assert "coefficient = tanh(chain(linear | activation)(input))" in text
    assert 'coefficient = "batch feature"' in text
    assert "range   = [-1.0, 1.0]" in text


def test_a_draft_quotes_the_users_line(unseen):
    assert "x * torch.sigmoid(self.gate(x))" in stages.draft(unseen, "inner", "mine")


def test_an_unknown_place_is_refused_with_the_nearest(unseen):
    with pytest.raises(UsageError, match="there is no node and no module `hed`; did you mean `head`"):
        stages.draft(unseen, "hed", "mine")


def test_a_place_without_a_controller_is_refused_with_the_reason(unseen):
    with pytest.raises(PatternError, match="nothing at `out` can be drafted as a controller"):
        stages.draft(unseen, "out", "mine")


def test_a_draft_states_a_neutral_value_only_where_the_coefficient_itself_is_applied(unseen, tmp_path):
    def drafted(target):
        path = tmp_path / "mine.toml"
        path.write_text(stages.draft(unseen, target, "mine"), encoding="utf-8")
        return load_pattern(path).intervene

    assert drafted("head").neutral == 1.0
    assert drafted("sigmoid_1").neutral == 0.0  # it is added
    mix = drafted("mix")  # shares of three: none of them means nothing
    assert (mix.neutral, mix.simplex_sum) == (None, 1.0)


class _Raised(nn.Module):
    def __init__(self, widened):
        super().__init__()
        self.fc, self.out, self.widened = nn.Linear(8, 1), nn.Linear(8, 8), widened

    def forward(self, x):
        gate = torch.tanh(self.fc(x))
        return self.out(x * (1 + (gate.repeat_interleave(8, -1) if self.widened else gate)))


@pytest.mark.parametrize(("widened", "bound", "states"), [(False, "add", True), (True, "tanh", False)])
def test_a_draft_of_what_is_applied_as_a_function_of_itself_states_no_neutral_value(widened, bound, states):
    discovery = stages.discover(traced(_Raised(widened), torch.randn(2, 5, 8)), patterns=[])
    (draft,) = stages.draft_discovered(discovery)
    assert draft.covers[0].name.startswith(bound)
    assert ("neutral = 1.0" in draft.text) == states

"""What happens where several patterns claim one controller, and which class a controller is counted in."""

import pytest
import torch
from torch import nn

from fxaudit import stages
from fxaudit.controllers.controller import build_controllers
from fxaudit.controllers.graphs import Dataflow
from fxaudit.controllers.match import find_matches
from fxaudit.errors import UsageError

from .build import pattern, traced

GATE = "coefficient = sigmoid(linear(input))\napply = value * coefficient"
DERIVED = "coefficient = neg(sigmoid(linear(input)))\napply = value * coefficient"


class TwoUses(nn.Module):
    """One sigmoid, which scales one value, and another through its negative."""

    def __init__(self):
        super().__init__()
        self.gate, self.value = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        gate = torch.sigmoid(self.gate(x))
        return self.value(x) * gate + x.cos() * gate.neg()


class Conditioned(nn.Module):
    """A condition modulates a state twice, as adaLN does; a gate of the state itself follows."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.own, self.mix = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, condition):
        x = self.mix(x * torch.sigmoid(self.first(condition)))
        x = self.mix(x * torch.sigmoid(self.second(condition)))
        return self.mix(x) * torch.sigmoid(self.own(x))


def built(module, patterns, *inputs, enabled=()):
    graph = traced(module, *inputs)
    dataflow = Dataflow(graph.graph_module)
    return build_controllers([find_matches(p, dataflow, graph.sample) for p in patterns], dataflow, enabled)


@pytest.fixture(scope="module")
def two_uses():
    return TwoUses()


@pytest.fixture(scope="module")
def conditioned():
    module = Conditioned().eval()
    return stages.trace(module, (torch.randn(2, 4), torch.randn(2, 4)))


def names(controllers):
    return [controller.pattern for controller in controllers]


def test_a_coefficient_that_is_computed_from_another_alone_competes_with_it(two_uses):
    found, findings = built(two_uses, [pattern(GATE, name="gate"), pattern(DERIVED, name="derived")], torch.randn(2, 4))
    # The sigmoid survives when only its negative is replaced, so the cone of the negative is the smaller one.
    assert names(found) == ["gate"]
    (lost,) = [finding for finding in findings if finding.kind == "overlap"]
    assert "`derived` also matches `neg`, claimed by `gate` with `sigmoid`" in lost.text


def test_the_pattern_of_higher_priority_keeps_the_coefficient(two_uses):
    chosen = [pattern(GATE, name="gate"), pattern(DERIVED, name="derived", head="priority = 1")]
    assert names(built(two_uses, chosen, torch.randn(2, 4))[0]) == ["derived"]


def test_an_audited_family_keeps_the_coefficient_from_one_that_is_only_counted(two_uses):
    head = 'class = "report-only"\npriority = 9'
    chosen = [pattern(GATE, name="gate"), pattern(DERIVED, name="derived", head=head)]
    assert names(built(two_uses, chosen, torch.randn(2, 4))[0]) == ["gate"]


def test_an_enabled_family_competes_as_a_default_one_does(two_uses):
    chosen = [pattern(GATE, name="gate"), pattern(DERIVED, name="derived", head='class = "report-only"\npriority = 9')]
    assert names(built(two_uses, chosen, torch.randn(2, 4), enabled=["derived"])[0]) == ["derived"]


def test_a_gate_on_another_gates_way_is_a_controller_of_its_own():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return x.cos() * torch.sigmoid(self.b(x.sin() * torch.sigmoid(self.a(x))))

    assert len(built(Nested(), [pattern(GATE)], torch.randn(2, 4))[0]) == 2


def test_what_lies_inside_a_claimed_region_belongs_to_its_owner():
    class Scan(nn.Module):
        def __init__(self):
            super().__init__()
            self.decay, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            decayed = x * torch.sigmoid(self.decay(x))
            inner = decayed * torch.tanh(self.other(decayed))
            return inner.cumsum(-1)

    owner = f"{GATE}\nscanned = cumsum(scaled)\nscaled = apply * _"
    inner = pattern("coefficient = tanh(linear(input))\napply = value * coefficient", name="inner")
    inputs = torch.randn(2, 4)
    assert len(built(Scan(), [pattern(owner, name="owner"), inner], inputs)[0]) == 2
    found, findings = built(
        Scan(), [pattern(owner, name="owner", head='claims = ["scanned"]\npriority = 1'), inner], inputs
    )
    assert names(found) == ["owner"]
    assert [finding.kind for finding in findings].count("overlap") == 1


def test_a_family_driven_by_a_condition_is_external_and_not_audited(conditioned):
    found = stages.match(conditioned, [pattern(GATE, name="modulation", head='class = "external"')])
    assert [controller.family_class for controller in found.others] == ["external", "external"]
    assert found.other == {"modulation": 2}


def test_a_member_of_an_external_family_that_reads_its_own_input_is_a_default_controller(conditioned):
    found = stages.match(conditioned, [pattern(GATE, name="modulation", head='class = "external"')])
    assert found.counts == {"modulation": 1}


def test_enabled_external_controllers_are_audited_and_counted_as_other(conditioned):
    chosen = [pattern(GATE, name="modulation", head='class = "external"')]
    found = stages.match(conditioned, chosen, enable=["modulation"])
    assert (len(found.controllers), found.other) == (3, {"modulation": 2})


@pytest.mark.parametrize(
    ("family_class", "enable", "audited", "counts", "other"),
    [
        ("default", [], 3, {"family": 3}, {}),
        ("opt-in", [], 0, {}, {}),
        ("opt-in", ["family"], 3, {}, {"family": 3}),
        ("report-only", [], 0, {}, {"family": 3}),
        ("report-only", ["family"], 3, {}, {"family": 3}),
        ("detect-only", [], 0, {}, {"family": 3}),
    ],
)
def test_the_class_of_a_family_decides_what_is_counted_and_audited(
    conditioned, family_class, enable, audited, counts, other
):
    chosen = [pattern(GATE, head=f'class = "{family_class}"')]
    found = stages.match(conditioned, chosen, enable=enable)
    assert (len(found.controllers), found.counts, found.other) == (audited, counts, other)


def test_a_detect_only_family_cannot_be_enabled(conditioned):
    with pytest.raises(UsageError, match="`family` cannot be enabled: it is only ever detected"):
        stages.match(conditioned, [pattern(GATE, head='class = "detect-only"')], enable=["family"])


def test_an_unknown_family_cannot_be_enabled(conditioned):
    with pytest.raises(UsageError, match="is no pattern; did you mean `family`"):
        stages.match(conditioned, [pattern(GATE, head='class = "opt-in"')], enable=["famly"])


def test_without_any_audited_controller_the_error_says_what_may_be_enabled(conditioned):
    found = stages.match(conditioned, [pattern(GATE, head='class = "report-only"')])
    with pytest.raises(Exception, match="no controller found") as caught:
        stages.freeze(found)
    assert caught.value.remedy == "--enable family audits what was only counted"

import pytest

from fxaudit.controllers.lint import lint
from fxaudit.controllers.pattern import load_patterns

from .build import pattern

EXAMPLES = """
[[example]]
why    = "one"
expect = 1
inputs = ["2 4"]
code   = "model = nn.Identity()"

[[example]]
why    = "none"
expect = 0
inputs = ["2 4"]
code   = "model = nn.Identity()"
"""
GATE = "coefficient = sigmoid(linear(input))\napply = value * coefficient"
CITED = 'cite = "Somebody 2026"'


def kinds(match=GATE, **parts):
    chosen = pattern(match, **{"head": CITED, "examples": EXAMPLES, **parts})
    return [complaint.kind for complaint in lint(chosen) if complaint.kind != "no-summary"]


def test_a_good_pattern_has_no_complaint():
    assert kinds() == []


def test_a_missing_cite_is_told():
    assert kinds(head="") == ["no-cite"]


def test_a_summary_that_says_nothing_is_told():
    assert [complaint.kind for complaint in lint(pattern(GATE, head=CITED, examples=EXAMPLES))] == ["no-summary"]


@pytest.mark.parametrize(("kept", "missing"), [(0, "no-negative-example"), (1, "no-positive-example")])
def test_a_missing_kind_of_example_is_told(kept, missing):
    parts = EXAMPLES.split("\n\n")
    assert kinds(examples=parts[kept]) == [missing]


def test_an_equation_that_shares_no_name_with_the_rest_is_told_with_its_line():
    chosen = pattern(f"idle = relu(other)\n{GATE}", head=CITED, examples=EXAMPLES)
    (complaint,) = [c for c in lint(chosen) if c.kind == "unused-capture"]
    assert complaint.where.endswith("family.toml:6")
    assert "`idle`" in complaint.text


@pytest.mark.parametrize("condition", ["condition = relu(input)", "condition = relu(outer)\nouter = exp(coefficient)"])
def test_an_equation_about_something_that_is_captured_is_a_condition(condition):
    assert kinds(f"{condition}\n{GATE}") == []


def tree(height):
    """A symmetric tree of sums: the subtrees of each may change places."""
    return f"({tree(height - 1)} + {tree(height - 1)})" if height else "_"


@pytest.mark.parametrize(("height", "expected"), [(4, []), (5, ["commutativity"])])
def test_many_commutative_ops_on_one_path_are_told(height, expected):
    assert kinds(f"coefficient = sigmoid({tree(height)})\napply = value * coefficient") == expected


def test_operands_of_different_kinds_cannot_change_places():
    deep = "coefficient = sigmoid(a * (b + c * (d + e * (f + g * (h + 1.0)))))\napply = value * coefficient"
    assert kinds(deep) == []


def test_a_reduced_axis_that_the_shape_still_has_is_told():
    match = "pooled = mean(input, over=[token])\ncoefficient = sigmoid(linear(pooled))\napply = value * coefficient"
    shape = {"input": "batch token feature", "pooled": "batch token feature", "coefficient": "batch feature"}
    assert kinds(match, shape=shape) == ["impossible-shape"]


def test_two_shapes_that_can_never_have_the_same_rank_are_told():
    match = "logits = linear(input)\ncoefficient = sigmoid(logits)\napply = value * coefficient"
    assert kinds(match, shape={"logits": "batch token feature", "coefficient": "batch feature"}) == ["impossible-shape"]


@pytest.mark.parametrize("chosen", load_patterns(), ids=lambda chosen: chosen.name)
def test_a_shipped_pattern_has_no_complaint(chosen):
    assert lint(chosen) == []

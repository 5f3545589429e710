"""The texts of errors and near misses, word for word: what a user reads is part of what fxaudit promises."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxaudit
from fxaudit.errors import AuditError

PATTERN = """\
schema  = 1
name    = "gate"
summary = "A gate."

match = '''
pooled      = mean(input, over=[token])
coefficient = sigmoid(linear(pooled))
apply       = input * chain(layout, least=0)(coefficient)
'''

where   = ["feature > 1"]

[shape]
input       = "batch token feature"
pooled      = "batch 1 feature"
coefficient = "batch 1 feature"

[intervene]
axes    = { batch = "sample", feature = "unit" }
acts    = "multiply"
"""


@pytest.fixture
def message(tmp_path):
    """What the error of a changed pattern says, with the folder it lies in left out."""

    def of(old, new):
        assert PATTERN.count(old) == 1, old
        path = tmp_path / "gate.toml"
        path.write_text(PATTERN.replace(old, new), encoding="utf-8")
        with pytest.raises(AuditError) as raised:
            fxaudit.load_patterns(path)
        return str(raised.value).replace(f"{tmp_path}/", "")

    return of


# What is replaced, by what, and the whole message.
MESSAGES = {
    "unknown key": (
        'summary = "A gate."',
        'summary = "A gate."\nexamples = 1',
        """\
unknown key `examples`; did you mean `example`?
  where:    gate.toml:4
  expected: a pattern has schema, name, summary, cite, class, priority, requires, waives, match, shape, where, exclude, claims, intervene, example
  found:    examples
  next:     docs/patterns.md lists every key and construct""",  # noqa: E501
    ),
    "unknown op class": (
        "sigmoid(linear(pooled))",
        "sigmoid(linaer(pooled))",
        """\
unknown op or op class `linaer`; did you mean `linear`?
  where:    gate.toml:7
  expected: an equation `name = expression`
  found:    see above
  next:     docs/patterns.md lists every key and construct""",
    ),
    "missing equation": (
        "coefficient = sigmoid(linear(pooled))",
        "coefficients = sigmoid(linear(pooled))",
        """\
`match` never defines `coefficient`
  where:    gate.toml:5
  expected: coefficient = ...
  found:    pooled, coefficients, apply
  next:     docs/patterns.md lists every key and construct""",
    ),
    "shape with commas": (
        'input       = "batch token feature"',
        'input       = "batch, token, feature"',
        """\
"batch, token, feature": cannot read the axis `batch,`; axes are separated by spaces, not commas
  where:    gate.toml:14
  expected: axes separated by spaces, such as "batch token feature"
  found:    batch, token, feature
  next:     docs/patterns.md lists every key and construct""",
    ),
    "axis without a role": (
        'feature = "unit" }',
        'channel = "unit" }',
        """\
axis `feature` of `coefficient` has no role
  where:    gate.toml:19
  expected: sample, position, unit, slot
  found:    {'batch': 'sample', 'channel': 'unit'}
  next:     docs/patterns.md lists every key and construct""",
    ),
    "no sample role": (
        'batch = "sample"',
        'batch = "position"',
        """\
one axis must have the role `sample`
  where:    gate.toml:19
  expected: axes = { batch = "sample", ... }
  found:    {'batch': 'position', 'feature': 'unit'}
  next:     docs/patterns.md lists every key and construct""",
    ),
    "unknown role": (
        'feature = "unit" }',
        'feature = "units" }',
        """\
axis `feature` has no such role; did you mean `unit`?
  where:    gate.toml:19
  expected: sample, position, unit, slot
  found:    units
  next:     docs/patterns.md lists every key and construct""",
    ),
    "broken TOML": (
        'acts    = "multiply"',
        "acts    = multiply",
        """\
gate.toml is not TOML
  where:    gate.toml:20
  expected: TOML 1.0
  found:    Invalid value (at line 20, column 11)
  next:     check the quotes; the match block stands between ''' and '''""",
    ),
    "unknown predicate": (
        'where   = ["feature > 1"]',
        'where   = ["sizes(feature) > 1"]',
        """\
`where` has no predicate `sizes`; did you mean `size`?
  where:    gate.toml:11
  expected: a predicate such as `channel > 1` or `depends(value, input)`
  found:    sizes(feature) > 1
  next:     docs/patterns.md lists every key and construct""",
    ),
    "over an unknown axis": (
        "over=[token]",
        "over=[tokens]",
        """\
`over` names `tokens`, no axis of `input`; did you mean `token`?
  where:    gate.toml:6
  expected: batch, feature, token
  found:    tokens
  next:     docs/patterns.md lists every key and construct""",
    ),
    "another name": (
        'name    = "gate"',
        'name    = "gates"',
        """\
the name of a pattern is the name of its file
  where:    gate.toml:2
  expected: gate
  found:    gates
  next:     docs/patterns.md lists every key and construct""",
    ),
    "unreadable equation": (
        "coefficient = sigmoid(linear(pooled))",
        "coefficient = sigmoid(linear(pooled) ** 2)",
        """\
`linear(pooled) ** 2` is not part of the pattern language
  where:    gate.toml:7
  expected: an equation `name = expression`
  found:    see above
  next:     docs/patterns.md lists every key and construct""",
    ),
    "chain without classes": (
        "chain(layout, least=0)(coefficient)",
        "chain(coefficient)",
        """\
`chain` takes classes, then an operand: `chain(linear)(x)`
  where:    gate.toml:8
  expected: an equation `name = expression`
  found:    see above
  next:     docs/patterns.md lists every key and construct""",
    ),
}


@pytest.mark.parametrize(("old", "new", "text"), MESSAGES.values(), ids=MESSAGES)
def test_the_message_of_a_wrong_pattern_reads(message, old, new, text):
    assert message(old, new) == text


# --- near misses ----------------------------------------------------------------------------------------------------


class Pooled(nn.Module):
    """The gate of the pattern above, with one step left open."""

    def __init__(self, pool=lambda m, x: x.mean(1, keepdim=True), squash=torch.sigmoid, width=8):
        super().__init__()
        self.pool, self.squash, self.fc = pool, squash, nn.Linear(width, width)

    def forward(self, x):
        scale = self.squash(self.fc(self.pool(self, x)))
        return scale * x


class OwnPath(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        x = self.fc(x)
        return torch.sigmoid(x) * x


@pytest.fixture
def near_miss(tmp_path):
    def of(model, text=PATTERN, size=(2, 5, 8)):
        path = tmp_path / "gate.toml"
        path.write_text(text, encoding="utf-8")
        traced = fxaudit.trace(model.eval(), torch.randn(size))
        (result,) = fxaudit.match(traced, [path]).results
        reason = result.near_misses[0].reason
        return reason.replace(str(traced.sample), "B") if traced.is_batch_dynamic else reason

    return of


def test_the_near_miss_of_an_op_reads(near_miss):
    found = near_miss(Pooled(squash=lambda x: torch.sigmoid(F.relu(x))))
    assert found == "expected linear, found relu `relu` [B, 1, 8]"


def test_the_near_miss_of_an_op_that_the_graph_lacks_reads(near_miss):
    assert near_miss(Pooled(squash=torch.tanh)) == "no `sigmoid` in the graph"


def test_the_near_miss_of_a_shape_reads(near_miss):
    text = PATTERN.replace('coefficient = "batch 1 feature"', 'coefficient = "batch feature"')
    assert near_miss(Pooled(), text) == (
        '[shape] coefficient = "batch feature" does not fit [B, 1, 8]: 3 axes, 2 wanted'
        " where batch=B, token=5, feature=8"
    )


def test_the_near_miss_of_a_pooling_that_drops_its_axis_reads(near_miss):
    # [5, 8] broadcasts over [5, 5, 8], which fixes the batch at 5.
    assert near_miss(Pooled(lambda m, x: x.mean(1)), size=(5, 5, 8)) == (
        '[shape] pooled = "batch 1 feature" does not fit [5, 8]: 2 axes, 3 wanted where batch=5, token=5, feature=8'
    )


def test_the_near_miss_of_a_reduction_over_other_axes_reads(near_miss):
    text = PATTERN.replace('"batch 1 feature"', '"batch a b"').replace('feature = "unit"', 'a = "unit", b = "unit"')
    assert near_miss(Pooled(lambda m, x: x.mean(2, keepdim=True), width=1), text, (2, 5, 1)) == (
        "expected a reduction over token, found one over feature in mean `mean` [B, 5, 1]"
    )


def test_the_near_miss_of_a_predicate_reads(near_miss):
    assert near_miss(Pooled(), PATTERN.replace("feature > 1", "feature > 8")) == (
        "where `feature > 8` is false (feature=8)"
    )


def test_the_near_miss_of_an_exclusion_reads(near_miss):
    text = PATTERN.replace("[shape]", 'exclude = ["coefficient = sigmoid(_)"]\n\n[shape]')
    assert near_miss(Pooled(), text) == "excluded: `coefficient = sigmoid(_)`"


def test_the_near_miss_of_a_function_of_the_value_itself_reads(near_miss):
    text = PATTERN.replace("pooled      = mean(input, over=[token])\n", "").replace(
        "sigmoid(linear(pooled))", "sigmoid(_)"
    )
    text = text.replace('pooled      = "batch 1 feature"\n', "").replace('"batch 1 feature"', '"batch token feature"')
    text = text.replace('feature = "unit"', 'feature = "unit", token = "position"')
    assert near_miss(OwnPath(), text) == (
        "`coefficient` has no learned op of its own: it is a function of the value that it multiplies (T2)"
    )


# --- frozen models --------------------------------------------------------------------------------------------------


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.value = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return torch.sigmoid(self.gate(x)) * self.value(x)


@pytest.fixture(scope="module")
def frozen():
    return fxaudit.freeze(Gate().eval(), torch.randn(2, 5, 8))


def refusal(frozen, coefficients, batch=2):
    with pytest.raises(AuditError) as raised:
        frozen(torch.randn(batch, 5, 8), coefficients=coefficients)
    return str(raised.value)


def test_the_message_of_a_wrong_key_reads(frozen):
    assert (
        refusal(frozen, {"gate/coefficient": torch.zeros(2, 5, 8)})
        == """\
the coefficients are not those of this model
  expected: 1 keys: gate#0/coefficient
  found:    missing gate#0/coefficient; unknown gate/coefficient
  next:     start from `frozen.live(inputs).coefficients`"""
    )


def test_the_message_of_a_wrong_shape_reads(frozen):
    assert (
        refusal(frozen, {"gate#0/coefficient": torch.zeros(2, 4, 8)})
        == """\
`gate#0/coefficient` does not fit
  expected: [2, 5, 8] (batch token feature), torch.float32
  found:    [2, 4, 8], torch.float32
  next:     keep the shape and dtype of the recorded coefficient"""
    )


def test_the_message_of_a_wrong_dtype_reads(frozen):
    assert (
        refusal(frozen, {"gate#0/coefficient": torch.zeros(2, 5, 8, dtype=torch.float64)})
        == """\
`gate#0/coefficient` does not fit
  expected: [2, 5, 8] (batch token feature), torch.float32
  found:    [2, 5, 8], torch.float64
  next:     keep the shape and dtype of the recorded coefficient"""
    )


def test_the_message_when_there_is_no_controller_reads(tmp_path):
    path = tmp_path / "gate.toml"
    path.write_text(PATTERN, encoding="utf-8")
    with pytest.raises(AuditError) as raised:
        fxaudit.freeze(nn.Linear(8, 8), torch.randn(2, 5, 8), patterns=[path])
    assert (
        str(raised.value)
        == """\
no controller found in torch.nn.modules.linear.Linear
  expected: a match of one of gate
  found:    nearest misses:
            gate: no `mul` in the graph
  next:     --patterns FILE adds a family of your own; docs/patterns.md shows how to write one"""
    )

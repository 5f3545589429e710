"""Each row of the acceptance table: exact counts, exact replay, and controllers that matter.

`make test` checks the rows `in_sample`; `make acceptance` checks all and prints the table.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from fxaudit import load_patterns
from tests.acceptance.check import Outcome, check
from tests.acceptance.row import Row
from tests.acceptance.rows import ROWS


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.id, marks=[] if row.in_sample else [pytest.mark.acceptance]) for row in ROWS],
)
def test_a_row_is_as_the_table_says(row: Row) -> None:
    assert check(row).failures == []


def test_row_ids_are_distinct() -> None:
    ids = [row.id for row in ROWS]
    assert len(ids) == len(set(ids))


def test_every_row_with_controllers_names_the_modules_that_hold_them() -> None:
    unnamed = [row.id for row in ROWS if set(row.expected) - set(row.modules)]
    assert unnamed == ["G10-SkipNet"]  # its gate is one module for all blocks, called once more than it is used


# Whose smallest row takes too long for `make test`, where their examples run, and most are compared with hooks.
BEYOND_THE_SAMPLE = {"compressor", "grn", "moe-top1-capacity", "mudd-dense"}


def test_every_family_has_a_row_and_all_but_the_named_a_sampled_one() -> None:
    library = {pattern.name for pattern in load_patterns()}
    assert {family for row in ROWS for family in row.expected} == library
    assert library - {family for row in ROWS if row.in_sample for family in row.expected} == BEYOND_THE_SAMPLE


GATED = Row("0", "gated", lambda: (nn.Identity(), {}), {"se-gate": 2}, {"glu-gate": 1}, modules={"se-gate": "Gate"})
RIGHT: dict[str, Any] = {
    "census": {"se-gate": 2},
    "counts": {"se-gate": 2},
    "other": {"glu-gate": 1},
    "identity": True,
    "moved": {"se-gate": 0.1},
}


def test_a_row_found_as_expected_has_no_failure() -> None:
    assert Outcome(GATED, 0.0, **RIGHT).failures == []


@pytest.mark.parametrize(
    ("found", "failure"),
    [
        ({"counts": {"se-gate": 1}}, "se-gate: expected 2, found 1"),
        ({"counts": {"se-gate": 2, "eca-gate": 1}}, "eca-gate: expected 0, found 1"),
        ({"other": {}}, "other glu-gate: expected 1, found 0"),
        ({"census": {"se-gate": 3}}, "the eager model has 3 modules of se-gate, the row says 2"),
        ({"identity": False}, "identity replay differs"),
        ({"moved": {"se-gate": 0.0}}, "se-gate: another input's coefficients change nothing"),
        ({"empty_cones": ("gate#0",)}, "empty cones: gate#0"),
        ({"held": ("gate.weight",)}, "the frozen graph holds gate.weight"),
        ({"missing": ("glu-gate",)}, "no pattern glu-gate"),
        ({"error": "TraceError: no"}, "TraceError: no"),
    ],
)
def test_each_way_to_differ_from_the_table_is_a_failure(found: dict[str, Any], failure: str) -> None:
    assert Outcome(GATED, 0.0, **{**RIGHT, **found}).failures == [failure]

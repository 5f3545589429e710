"""The document about exported models of the zoo says what its results say, and hides nothing."""

from __future__ import annotations

import re
from typing import Any

from tests.zoo import exported, render

ROW: dict[str, Any] = {
    "name": "a:one",
    "outcome": "agrees",
    "seconds": 1.0,
    "controllers": 2,
    "nodes": 50,
    "removed": 8,
    "verdict": "PROVEN_STATIC",
    "flops": [2_000_000_000, 1_000_000_000],
    "unknown": [],
    "bitwise": True,
    "fidelity": {
        "relative_max": 2e-6,
        "referee": {"heard": 2, "torch_error": 1e-6, "onnx_error": 3e-6, "share_of_limit": 0.5, "unheard": ""},
    },
}


def test_the_table_is_what_the_results_say() -> None:
    assert exported.TABLE.read_text(encoding="utf-8") == exported.page(exported.read())


def test_the_results_are_of_the_first_40_models_with_a_controller() -> None:
    assert [row["name"] for row in exported.read()] == exported.chosen()
    with_controllers = sorted(row["name"] for row in render.read() if row["controllers"])
    assert exported.chosen() == with_controllers[:40]


def test_every_model_that_does_not_agree_says_why_and_at_which_node() -> None:
    for row in exported.read():
        if row["outcome"] == "agrees":
            assert row["bitwise"] in (True, None)
            referee = row["fidelity"]["referee"]
            assert referee is None or not referee["heard"] or referee["share_of_limit"] <= 1
        else:
            assert row["reason"]
        if row["outcome"] == "differs":
            assert "first at `" in row["reason"] or "no node" in row["reason"]


def test_a_row_shows_errors_of_both_sides_and_the_largest_work() -> None:
    line = exported.page([ROW]).splitlines()[-3]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["`a:one`", "agrees", "PROVEN_STATIC", "2", "50", "8", "2", "1e-06", "3e-06", "2e-06", "1.0"]


def test_a_failure_is_named_and_does_not_break_the_table() -> None:
    failed = {"name": "a:two", "outcome": "differs", "reason": "an op | of | bars", "seconds": 2.0}
    text = exported.page([ROW, failed])
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({re.sub(r"\\\|", "", line).count("|") for line in lines}) == 1
    assert "differs: an op \\| of \\| bars" in text
    assert text.endswith("2 models: 1 agrees, 1 differs.\n")


def test_a_referee_that_was_not_heard_is_said() -> None:
    row = {**ROW, "fidelity": {"relative_max": 0.0, "referee": {"heard": 0, "unheard": "too large"}}}
    assert "agrees (no referee: too large)" in exported.page([row])

"""The acceptance table goes on where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.acceptance import table

ROW = "33-torchvision-resnet50"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The rows that were run, `run` being replaced."""
    seen: list[str] = []

    def each(_: Any, names: Any, **__: Any):
        for name in names:
            seen.append(name)
            yield name, {"row": name, "expected": "none", "found": "none", "outcome": table.AS_EXPECTED, "seconds": 1}

    monkeypatch.setattr(table, "each", each)
    return seen


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(table.main, [str(argument) for argument in arguments])


def test_a_row_that_the_file_has_is_not_run_again_unless_asked(tmp_path: Path, ran: list[str]) -> None:
    file = tmp_path / "rows.jsonl"
    assert call("-o", file, ROW).exit_code == 0
    assert call("-o", file, ROW).exit_code == 0
    assert ran == [ROW]
    assert call("-o", file, "--again", ROW).exit_code == 0
    assert ran == [ROW, ROW]


def test_a_row_of_other_code_is_run_again_unless_asked(
    tmp_path: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.jsonl"
    call("-o", file, ROW)
    monkeypatch.setattr(table, "code", lambda: "another")
    call("-o", file, "--any-code", ROW)
    assert ran == [ROW]
    call("-o", file, ROW)
    assert ran == [ROW, ROW]
    assert [json.loads(line)["code"] == "another" for line in file.read_text().splitlines()] == [False, True]


def test_the_latest_result_of_a_row_holds(tmp_path: Path, ran: list[str]) -> None:
    file = tmp_path / "rows.jsonl"
    call("-o", file, ROW)
    wrong = {**json.loads(file.read_text()), "outcome": "se-gate: expected 0, found 1"}
    file.write_text(file.read_text() + json.dumps(wrong) + "\n")
    result = call("-o", file, ROW)
    assert "found 1" in result.output
    assert result.exit_code == 1


def test_a_row_without_a_result_is_a_named_failure(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lost = table.Lost("more than 1 s", timed_out=True)
    monkeypatch.setattr(table, "each", lambda _, names, **__: ((name, lost) for name in names))
    result = call(ROW)
    assert "more than 1 s" in result.output
    assert result.exit_code == 1


def test_rows_with_few_controllers_come_first(ran: list[str]) -> None:
    call()
    expected = {row.id: sum(row.expected.values()) for row in table.ROWS}
    counts = [expected[row] for row in ran]
    assert len(counts) == len(table.ROWS)
    assert counts == sorted(counts)

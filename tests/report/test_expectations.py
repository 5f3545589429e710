"""`--expect` and `--config`."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from fxaudit.cli import main
from fxaudit.errors import ExpectationError, UsageError
from fxaudit.report.expectations import check_expectations, parse_expectation

RESULT = {
    "counts": {"se-gate": 9, "moe-topk": 0},
    "verdict": {"execution": "PROVEN_STATIC"},
    "identity": {"bitwise": True, "max_abs_diff": None},
    "controllers": [{"id": "a.0#0", "by_id": {"a.0#0": 4}}, {"id": "a.1#0"}],
}


@pytest.mark.parametrize(
    "text",
    [
        "counts.se-gate==9",
        " counts.se-gate == 9 ",
        "counts.se-gate>=9",
        "counts.se-gate<10",
        "counts.moe-topk!=1",
        "verdict.execution==PROVEN_STATIC",
        'verdict.execution=="PROVEN_STATIC"',
        "identity.bitwise==true",
        "identity.max_abs_diff==null",
        "controllers.1.id==a.1#0",
        "controllers.0.by_id.a.0#0==4",
        'counts=={"se-gate": 9, "moe-topk": 0}',
    ],
)
def test_what_holds_passes(text):
    check_expectations([parse_expectation(text)], RESULT)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("counts.se-gate==8", "counts.se-gate is 9"),
        ("counts.se-gate>9", "counts.se-gate is 9"),
        ("counts.se-gate==nine", "counts.se-gate is 9"),
        ("verdict.execution<3", 'verdict.execution is "PROVEN_STATIC"'),
        ("counts.se-gat==9", "no key `se-gat`; did you mean `se-gate`?; there are se-gate, moe-topk"),
        ("counts.se-gat!=9", "no key `se-gat`; did you mean `se-gate`?; there are se-gate, moe-topk"),
        ("controllers.2.id==b", "no item `2` in a list of 2"),
        ("counts.se-gate.deep==9", "no key `deep` in 9"),
    ],
)
def test_what_does_not_hold_says_what_was_found(text, found):
    with pytest.raises(ExpectationError) as caught:
        check_expectations([parse_expectation(text)], RESULT)
    assert (caught.value.expected, caught.value.found) == (text, found)


def test_every_broken_expectation_is_named():
    stated = [
        parse_expectation(text) for text in ("counts.se-gate==8", "counts.moe-topk==0", "identity.bitwise==false")
    ]
    with pytest.raises(ExpectationError, match="2 expectations are not met") as caught:
        check_expectations(stated, RESULT)
    assert caught.value.expected == "counts.se-gate==8\nidentity.bitwise==false"


@pytest.mark.parametrize("text", ["", "counts", "==3", "counts==", "counts=3"])
def test_what_is_no_expectation_is_refused(text):
    with pytest.raises(UsageError, match="is no expectation"):
        parse_expectation(text)


def run(*arguments: str):
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def test_a_broken_expectation_ends_with_exit_code_1_after_the_result():
    outcome = run("doctor", "--json", "--expect", "schema==another")
    assert outcome.exit_code == 1
    assert json.loads(outcome.stdout)["schema"].startswith("fxaudit.doctor/")
    assert "expected: schema==another" in outcome.stderr
    assert run("doctor", "--expect", "schema!=another").exit_code == 0


def test_a_file_gives_options_and_the_command_line_wins(tmp_path):
    config = tmp_path / "fxaudit.toml"
    config.write_text('json = true\n[doctor]\nexpect = ["schema==another"]\n[audit]\nlimit = 3\n')
    outcome = run("doctor", "--config", str(config))
    assert outcome.exit_code == 1
    assert json.loads(outcome.stdout)["schema"].startswith("fxaudit.doctor/")
    assert run("doctor", "--config", str(config), "--expect", "schema!=another").exit_code == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("jsn = true\n", "`jsn` in .* is no option; did you mean `json`"),
        ("[doctor]\nlimit = 3\n", r"`doctor\.limit` in .* is no option"),
        ("[doctr]\njson = true\n", "`doctr` in .* is no option; did you mean `doctor`"),
        ("json =\n", "cannot read"),
    ],
)
def test_a_file_with_a_mistake_is_refused(tmp_path, text, message):
    config = tmp_path / "fxaudit.toml"
    config.write_text(text)
    outcome = run("doctor", "--config", str(config))
    assert outcome.exit_code == 2
    assert re.search(message, outcome.stderr), outcome.stderr


def test_a_file_that_does_not_exist_is_refused(tmp_path):
    outcome = run("doctor", "--config", str(tmp_path / "none.toml"))
    assert outcome.exit_code == 2
    assert "FileNotFoundError" in outcome.stderr

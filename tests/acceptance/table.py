"""``python -m tests.acceptance.table [-o FILE] [ROW...]`` checks rows of the acceptance table and prints what came out.

Each row has a process of its own, those with few controllers come first; a row that kills its process or does not end
is a result that says so. With a file, each row is appended to it as it ends, and rows that are there already, of the
same code, are not run again. Exit status 1 when a row is not as expected.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from fxaudit.provenance import environment, json_digest
from tests.acceptance.check import check
from tests.acceptance.row import Row
from tests.acceptance.rows import ROWS
from tests.acceptance.show import chosen
from tests.processes import GIBIBYTE, Lost, each

ROOT = Path(__file__).parents[2]
AS_EXPECTED = "as expected"
MEMORY = 12 * GIBIBYTE
SECONDS = 3600
# Discover finds at least this share of all controllers, and of its sites at most this share is none.
LEAST_FOUND = 0.95
MOST_FALSE = 0.2

Result = dict[str, Any]


def run(row_id: str) -> Result:
    """What `check` finds in one row, as plain data."""
    row = next(row for row in ROWS if row.id == row_id)
    try:
        outcome = check(row)
    except Exception as error:  # the table goes on with the next row
        return _failed(row, f"{type(error).__name__}: {error}".splitlines()[0])
    return {
        "row": row.id,
        "source": row.source,
        "expected": _text(row.expected),
        "found": _text({**outcome.counts, **outcome.other}),
        "outcome": "; ".join(outcome.failures) or AS_EXPECTED,
        "moved": {name: float(f"{change:.3g}") for name, change in outcome.moved.items()},
        "seconds": round(outcome.seconds),
        "discovered": None if outcome.discovered is None else dataclasses.asdict(outcome.discovered),
    }


def _failed(row: Row, reason: str) -> Result:
    return {
        "row": row.id,
        "source": row.source,
        "expected": _text(row.expected),
        "found": "",
        "outcome": reason,
        "seconds": 0,
    }


def _text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{family} {count}" for family, count in counts.items()) or "none"


@functools.cache
def code() -> str:
    """A digest of everything that a row's result depends on: this repository's code and the versions of others'."""
    folders = [ROOT / "fxaudit", ROOT / "patterns", ROOT / "tests" / "acceptance"]
    files = [*(f for folder in folders for f in sorted(folder.rglob("*.*"))), ROOT / "tests" / "third_party.py"]
    sources = {
        str(f.relative_to(ROOT)): hashlib.sha256(f.read_bytes()).hexdigest()
        for f in files
        if f.suffix in (".py", ".toml")
    }
    return json_digest([sources, environment()])


def earlier(file: Path, *, of_any_code: bool) -> dict[str, Result]:
    """The latest result of each row in `file`, of this code only unless `of_any_code`."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    results = [json.loads(line) for line in lines]
    return {result["row"]: result for result in results if of_any_code or result.get("code") == code()}


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Append each row to this file, a JSON line each.")
@click.option("--again", is_flag=True, help="Run also rows that the file has.")
@click.option("--any-code", is_flag=True, help="Do not run rows that the file has, even if the code was another.")
@click.option("--processes", default=2, show_default=True, help="Rows at a time.")
@click.argument("words", nargs=-1)
def main(output: Path | None, again: bool, any_code: bool, processes: int, words: tuple[str, ...]) -> None:
    rows = sorted(chosen(list(words)) if words else ROWS, key=lambda row: sum(row.expected.values()))
    done = {} if output is None or again else earlier(output, of_any_code=any_code)
    results = [done[row.id] for row in rows if row.id in done]
    for result in results:
        _print(result)
    results += _run([row for row in rows if row.id not in done], output, processes)
    wrong = sum(result["outcome"] != AS_EXPECTED for result in results)
    print(f"{len(results)} rows, {len(results) - wrong} as expected")
    sys.exit(1 if _discovery(results) or wrong else 0)


def _run(rows: Sequence[Row], output: Path | None, processes: int) -> list[Result]:
    by_id = {row.id: row for row in rows}
    for library in ("transformers", "torchvision", "timm"):
        importlib.import_module(library)  # once, not in each process
    results = []
    for row_id, found in each(run, by_id, seconds=SECONDS, memory=MEMORY, processes=processes):
        result = _failed(by_id[row_id], found.reason) if isinstance(found, Lost) else found
        results.append(result)
        _print(result)
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**result, "code": code()}) + "\n")
    return results


def _print(result: Result) -> None:
    print(f"{result['row']:45} {result['expected']:45} {result['outcome']}", flush=True)


def _discovery(results: Sequence[Mapping[str, Any]]) -> bool:
    """Prints what `discover` found without the library; whether that is less than it has to be."""
    found = [result["discovered"] for result in results if result.get("discovered")]
    controllers = sum(one["controllers"] for one in found)
    missed = sum(len(one["missed"]) for one in found)
    false = sum(len(one["false"]) for one in found)
    print(f"discover finds {controllers - missed} of {controllers} controllers, and {false} sites that are none")
    for result in results:
        one = result.get("discovered") or {}
        for word in ("missed", "false"):
            if one.get(word):
                print(f"  {result['row']}: {word} {', '.join(one[word][:4])}{' ...' if len(one[word]) > 4 else ''}")
    return missed > (1 - LEAST_FOUND) * controllers or false > MOST_FALSE * (false + controllers - missed)


if __name__ == "__main__":
    main()

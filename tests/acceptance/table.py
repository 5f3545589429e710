"""``python -m tests.acceptance.table [-o FILE] [ROW...]`` checks rows of the acceptance table and prints what came out.

Each row runs in a process of a small pool, so that memory is given back. Exit status 1 when a row is not as expected.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch

from tests.acceptance.check import check
from tests.acceptance.rows import ROWS
from tests.acceptance.show import chosen

PROCESSES = 2
ROWS_OF_A_PROCESS = 8
# Discover finds at least this share of all controllers, and of its sites at most this share is none.
LEAST_FOUND = 0.95
MOST_FALSE = 0.2


def run(index: int) -> dict[str, Any]:
    """What `check` finds in one row, as plain data."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    row = ROWS[index]
    try:
        outcome = check(row)
    except Exception as error:  # the table goes on with the next row
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
        return {"row": row.id, "expected": _text(row.expected), "found": "", "outcome": failure, "seconds": 0}
    return {
        "row": row.id,
        "source": row.source,
        "expected": _text(row.expected),
        "found": _text({**outcome.counts, **outcome.other}),
        "outcome": "; ".join(outcome.failures) or "as expected",
        "moved": {name: float(f"{change:.3g}") for name, change in outcome.moved.items()},
        "seconds": round(outcome.seconds),
        "discovered": None if outcome.discovered is None else dataclasses.asdict(outcome.discovered),
    }


def _text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{family} {count}" for family, count in counts.items()) or "none"


@click.command()
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Also write the table to this file, as JSON lines."
)
@click.argument("words", nargs=-1)
def main(output: Path | None, words: tuple[str, ...]) -> None:
    rows = chosen(list(words)) if words else list(ROWS)
    results = []
    with multiprocessing.get_context("spawn").Pool(PROCESSES, maxtasksperchild=ROWS_OF_A_PROCESS) as pool:
        for result in pool.imap(run, [ROWS.index(row) for row in rows]):
            results.append(result)
            print(f"{result['row']:45} {result['expected']:45} {result['outcome']}", flush=True)
    if output is not None:
        output.write_text("".join(json.dumps(result) + "\n" for result in results), encoding="utf-8")
    wrong = sum(result["outcome"] != "as expected" for result in results)
    print(f"{len(results)} rows, {len(results) - wrong} as expected")
    sys.exit(1 if _discovery(results) or wrong else 0)


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

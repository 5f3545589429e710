"""``python -m tests.acceptance.show ROW...`` builds rows of the acceptance table and prints what is found in them.

ROW is the number of a row, or part of its model's name; without one, the table is listed.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Mapping

from fxaudit.stages import Matched
from tests.acceptance.check import check
from tests.acceptance.row import Row
from tests.acceptance.rows import ROWS

SHOWN = 5  # controllers of each family


def chosen(words: list[str]) -> list[Row]:
    """The rows that any of `words` names: by number, or by part of the model's name."""
    return [row for row in ROWS if any(word == row.number or word in row.id for word in words)]


def show(row: Row) -> None:
    """Print what is expected of a row and found, and the first controllers of each family."""
    print(f"{row.id}  expected {_counts(row.counts)}, other {_counts(row.other)}  ({row.source})")
    outcome = check(row)
    print(f"  found {_counts(outcome.counts)}, other {_counts(outcome.other)}  [{outcome.seconds:.0f} s]")
    for failure in outcome.failures:
        print(f"  DIFFERENT: {failure}")
    if outcome.matched is not None:
        _show_controllers(outcome.matched)
        found = {**outcome.counts, **outcome.other}
        _show_misses(outcome.matched, [name for name, count in row.expected.items() if found.get(name, 0) < count])
    print()


def _show_controllers(matched: Matched) -> None:
    shown: collections.Counter[str] = collections.Counter()
    for controller in (*matched.controllers, *matched.others):
        shown[controller.pattern] += 1
        if shown[controller.pattern] > SHOWN:
            continue
        shapes = ", ".join(f"{c.name} {list(map(str, c.shape))} {c.domain}" for c in controller.coefficients)
        leaks = f", leaks {[leak.kind for leak in controller.leaks]}" if controller.leaks else ""
        print(f"    {controller.pattern:18} {controller.id}: {shapes}; cone {len(controller.cone)}{leaks}")
    for finding in matched.findings:
        print(f"    {finding.kind}: {finding.text}")


def _show_misses(matched: Matched, families: list[str]) -> None:
    for result in matched.results:
        if result.pattern.name in families:
            for miss in result.near_misses[:2]:
                print(f"    near miss of {result.pattern.name}: {miss.reason}\n      {miss.source}")


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{family} {count}" for family, count in counts.items()) or "nothing"


def main(words: list[str]) -> None:
    for row in chosen(words) if words else ():
        show(row)
    if not words:
        for row in ROWS:
            print(f"{row.id:60} {_counts(row.expected):40} {row.source}")


if __name__ == "__main__":
    main(sys.argv[1:])

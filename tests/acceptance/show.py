"""``python -m tests.acceptance.show ROW...`` builds rows of the acceptance table and prints what is found in them.

ROW is the number of a row, or part of its model's name; without one, the table is listed.
"""

from __future__ import annotations

import collections
import sys
import time

from fxaudit.errors import AuditError
from tests.acceptance.row import Found, Row, find
from tests.acceptance.rows import ROWS

SHOWN = 5  # controllers of each family


def chosen(words: list[str]) -> list[Row]:
    """The rows that any of `words` names: by number, or by part of the model's name."""
    return [row for row in ROWS if any(word == row.number or word in row.id for word in words)]


def show(row: Row) -> None:
    """Print expected and found counts of a row, and the first controllers of each family."""
    print(f"{row.id}  expected {_counts(row.counts)}, other {_counts(row.other)}  ({row.source})")
    started = time.perf_counter()
    try:
        found = find(row)
    except AuditError as error:
        print(f"  {error}\n")
        return
    verdict = "as expected" if not found.differences else f"DIFFERENT {found.differences}"
    print(f"  found {_counts(found.counts)}: {verdict}  [{time.perf_counter() - started:.0f} s]")
    _show_details(found)


def _show_details(found: Found) -> None:
    shown: collections.Counter[str] = collections.Counter()
    for controller in found.matched.controllers:
        shown[controller.pattern] += 1
        if shown[controller.pattern] > SHOWN:
            continue
        shapes = ", ".join(f"{c.name} {list(map(str, c.shape))} {c.domain}" for c in controller.coefficients)
        leaks = f", leaks {[leak.kind for leak in controller.leaks]}" if controller.leaks else ""
        print(f"    {controller.pattern:18} {controller.id}: {shapes}; cone {len(controller.cone)}{leaks}")
    missing = [family for family, (expected, count) in found.differences.items() if expected > count]
    for result in found.matched.results:
        if result.pattern.name in missing:
            for miss in result.near_misses[:2]:
                print(f"    near miss of {result.pattern.name}: {miss.reason}\n      {miss.source}")
    for finding in found.matched.findings:
        print(f"    {finding.kind}: {finding.text}")
    print()


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{family} {count}" for family, count in counts.items()) or "nothing"


def main(words: list[str]) -> None:
    for row in chosen(words) if words else ():
        show(row)
    if not words:
        for row in ROWS:
            print(f"{row.id:60} {_counts(row.expected):40} {row.source}")


if __name__ == "__main__":
    main(sys.argv[1:])

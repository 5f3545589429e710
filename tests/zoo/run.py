"""``python -m tests.zoo.run [--results FOLDER] [NAME...]`` traces the whole zoo and writes what came out to docs/.

Each model has a process of its own, two at a time; one that kills its process or does not end gets a result that says
so. Results that are there already are kept: a run that was stopped goes on where it was.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import click

from tests.processes import GIBIBYTE, Lost, each
from tests.zoo import render
from tests.zoo.models import ZOO
from tests.zoo.one import examine

MEMORY = 10 * GIBIBYTE
SECONDS = 300


def path_of(folder: Path, name: str) -> Path:
    """Where the result of a model lies."""
    return folder / f"{name.replace(':', '-')}.json"


def run(folder: Path, names: list[str]) -> None:
    """Examine those of `names` that have no result yet."""
    folder.mkdir(parents=True, exist_ok=True)
    left = [name for name in names if not path_of(folder, name).exists()]
    for library in ("transformers", "torchvision", "timm"):
        importlib.import_module(library)  # once, not in each process
    for name, result in each(examine, left, seconds=SECONDS, memory=MEMORY):
        row = _lost(name, result) if isinstance(result, Lost) else result
        path = path_of(folder, name)
        path.with_suffix(".part").write_text(json.dumps(row), encoding="utf-8")
        path.with_suffix(".part").rename(path)
        print(f"{name:50} {row['outcome']:12} {row['seconds']:6} s  {row.get('reason', '')[:100]}", flush=True)


def _lost(name: str, lost: Lost) -> dict[str, Any]:
    outcome = "timed out" if lost.timed_out else "crashed"
    return {"name": name, "outcome": outcome, "seconds": SECONDS if lost.timed_out else 0, "reason": lost.reason}


@click.command()
@click.option("--results", type=click.Path(path_type=Path), default=Path("build/zoo"), show_default=True)
@click.argument("names", nargs=-1)
def main(results: Path, names: tuple[str, ...]) -> None:
    run(results, list(names or ZOO))
    rows = [json.loads(path_of(results, name).read_text(encoding="utf-8")) for name in names or ZOO]
    if names:
        print(render.table(rows))
    else:
        render.write(rows)
        print(render.summary(rows))


if __name__ == "__main__":
    main()

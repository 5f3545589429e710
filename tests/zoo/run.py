"""``python -m tests.zoo.run [--results FOLDER] [NAME...]`` traces the whole zoo and writes what came out to docs/.

Several processes work through chunks of models, two at a time. A model that kills its process gets a result that says
so, and the rest of its chunk a process of its own. Results that are there already are kept: a run that was stopped goes
on where it was.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from tests.zoo import render
from tests.zoo.models import ZOO
from tests.zoo.one import SECONDS, path_of

PROCESSES = 2
MODELS_OF_A_PROCESS = 12


def run(folder: Path, names: list[str]) -> None:
    """Trace `names`, each in a process with others of its chunk."""
    folder.mkdir(parents=True, exist_ok=True)
    left = [name for name in names if not path_of(folder, name).exists()]
    # Dealt out like cards, so that the slow models, which stand together, come into different chunks.
    count = max(1, -(-len(left) // MODELS_OF_A_PROCESS))
    with ThreadPoolExecutor(PROCESSES) as pool:
        list(pool.map(lambda chunk: _chunk(folder, chunk), [left[i::count] for i in range(count)]))


def _chunk(folder: Path, names: list[str]) -> None:
    while names:
        command = [sys.executable, "-m", "tests.zoo.one", str(folder), *names]
        limit = (SECONDS + 60) * len(names)
        try:
            code: int | str = subprocess.run(command, stderr=subprocess.DEVNULL, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            code = f"did not end within {limit} s"
        done = [name for name in names if path_of(folder, name).exists()]
        for name in done:
            row = json.loads(path_of(folder, name).read_text(encoding="utf-8"))
            print(f"{name:50} {row['outcome']:12} {row['seconds']:6} s  {row.get('reason', '')[:100]}", flush=True)
        names = [name for name in names if name not in done]
        if names:
            lost = {"name": names[0], "outcome": "crashed", "seconds": 0, "reason": f"the process ended with {code}"}
            path_of(folder, names[0]).write_text(json.dumps(lost), encoding="utf-8")
            print(f"{names[0]:50} crashed  {lost['reason']}", flush=True)
            names = names[1:]


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

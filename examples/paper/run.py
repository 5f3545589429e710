"""Trains and audits every model of the table that has no stored audit yet, then writes the table.

    python -m examples.paper.run [NAME ...] [--again]

A run that was stopped goes on where it was: training from its last checkpoint, recording from its last batch. What is
finished is not done again, unless it is named with `--again`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys

import numpy as np
from safetensors.numpy import load_file

from examples.paper import table
from examples.paper.models import MODELS, ROOT, WORK, Model

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1"}


def call(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, env=ENVIRONMENT, check=True)


def train(model: Model) -> None:
    """Train a model unless its record is there, and check that the weights are those of the record."""
    home = ROOT / model.home
    if not (home / "training.json").exists():
        call(*model.training, "--out", str(model.home))
    record = json.loads((home / "training.json").read_text(encoding="utf-8"))
    found = hashlib.sha256((home / "weights.safetensors").read_bytes()).hexdigest()
    if found != record["weights_sha256"]:
        raise SystemExit(f"{home / 'weights.safetensors'} is not what {home / 'training.json'} tells of")


def audit(model: Model) -> None:
    """Audit a model by the command line, and keep its record, its audit and, with its weights, the permutations."""
    report = WORK / model.name / "report"
    call("fxaudit", *model.command(report))
    found = json.loads((ROOT / report / "audit.json").read_text(encoding="utf-8"))
    model.audit.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / model.home / "training.json", model.record)
    if model.kept:
        keep_permutations(model, ROOT / report / found["dependence"]["permutations"]["file"])
    # Last, since an audit that is there counts as done; without blanks, and without the place of this checkout.
    text = json.dumps(found, separators=(",", ":")).replace(f"{ROOT}{os.sep}", "")
    model.audit.write_text(f"{text}\n", encoding="utf-8")


def keep_permutations(model: Model, file: os.PathLike[str]) -> None:
    arrays = {name: value.astype(np.min_scalar_type(int(value.max()))) for name, value in load_file(file).items()}
    np.savez_compressed(model.audit.parent / "permutations.npz", allow_pickle=False, **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and audit the models of the table, then write it.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="models to go through; all by default")
    parser.add_argument("--again", action="store_true", help="audit anew what has a stored audit")
    arguments = parser.parse_args()
    known = {model.name: model for model in MODELS}
    if unknown := [name for name in arguments.names if name not in known]:
        parser.error(f"no model is called {', '.join(unknown)}; there are {', '.join(known)}")
    for model in [known[name] for name in arguments.names] or MODELS:
        if model.audit.exists() and not arguments.again:
            print(f"{model.name}: has its audit", file=sys.stderr)
            continue
        train(model)
        audit(model)
        table.write()
    table.write()


if __name__ == "__main__":
    main()

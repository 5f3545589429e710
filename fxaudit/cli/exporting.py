"""fxaudit export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fxaudit import stages
from fxaudit.cli.console import show, working
from fxaudit.cli.options import frozen_of, model_options, result_options
from fxaudit.errors import UsageError
from fxaudit.replay.store import open_store
from fxaudit.report import as_json, as_text


@click.command()
@model_options
@click.option(
    "--form",
    type=click.Choice(["live", "bound", "baked"]),
    multiple=True,
    help="Which graphs to write; by default all that can be made.",
)
@click.option("--profile", type=click.Path(path_type=Path), metavar="STORE", help="The store whose means are baked in.")
@click.option(
    "-o", "--onnx", "directory", required=True, type=click.Path(path_type=Path), metavar="DIR", help="The ONNX files."
)
@result_options
def export(form: tuple[str, ...], profile: Path | None, directory: Path, as_json_: bool, **options: Any) -> None:
    """Write MODEL as ONNX: live, bound (coefficients are inputs), baked (coefficients are calibration means).

    Example: fxaudit export torchvision:mobilenet_v3_small --random-init --form live --form bound -o onnx
    """
    if "baked" in form and profile is None:
        raise UsageError(
            "a baked graph needs a profile",
            expected="--profile STORE, recorded on calibration data",
            found="no --profile",
            remedy="record one: fxaudit record MODEL --data DATA -o STORE",
        )
    frozen = frozen_of(options)
    with working("exporting"):
        exported = stages.export(frozen, directory, open_store(profile) if profile is not None else None)
    described = as_json.export(exported, frozen.traced, form)
    show(as_json_, lambda: described, lambda console: as_text.export(described, console))

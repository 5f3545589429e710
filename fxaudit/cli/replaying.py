"""fxaudit record and fxaudit replay."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from fxaudit import stages
from fxaudit.audit import Clock, ReplayOptions
from fxaudit.audit import replay as replay_frozen
from fxaudit.cli.console import progress, show, working
from fxaudit.cli.options import data_options, frozen_of, model_options, replay_options, replaying_of, result_options
from fxaudit.replay.permutations import write_permutations
from fxaudit.replay.run import bytes_needed
from fxaudit.replay.store import open_store
from fxaudit.report import as_json, as_text, audit_json


@click.command()
@model_options
@data_options
@click.option(
    "-o",
    "--store",
    "directory",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The store to write; one begun there is continued.",
)
@result_options
def record(directory: Path, as_json_: bool, **options: Any) -> None:
    """Record the coefficients of MODEL on DATA into a store, and replay them from there.

    Example: fxaudit record torchvision:mobilenet_v3_small --random-init --data resampled:8 -o store
    """
    frozen = frozen_of(options)
    data = stages.load_data(options["data"], frozen.traced).limited(options["limit"])
    need = bytes_needed(frozen, data, options["batch_size"])
    click.echo(f"recording {data.count:,} inputs needs up to {need:,} bytes in {directory}", err=True)
    with progress("recording") as advance:
        recording = stages.record(frozen, data, directory, batch_size=options["batch_size"], progress=advance)
    with working("replaying"):
        replayed = stages.verify_recording(frozen, data, recording)
    show(
        as_json_,
        lambda: as_json.record(recording, frozen.traced, replayed),
        lambda console: as_text.record(recording, replayed, console),
    )


@click.command()
@model_options
@data_options
@click.option("--calibration", metavar="DATA", help="Other inputs, over which static profiles are averaged.")
@replay_options
@click.option("--store", type=click.Path(path_type=Path), metavar="DIR", help="A store to reuse, or to write.")
@click.option(
    "--write-permutations",
    "written",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where the permutations that were used go, too; --json holds them anyway.",
)
@result_options
def replay(store: Path | None, as_json_: bool, calibration: str | None, written: Path | None, **options: Any) -> None:
    """Replay the frozen MODEL with recorded and with intervened coefficients.

    Example: fxaudit replay torchvision:mobilenet_v3_small --random-init --data resampled:8
    """
    asked = replaying_of(options)
    frozen = frozen_of(options)
    data = stages.load_data(options["data"], frozen.traced).limited(options["limit"])
    calibrating = None
    if calibration is not None:
        calibrating = stages.load_data(calibration, frozen.traced).limited(options["limit"])
    batch_size = options["batch_size"]
    if batch_size is None and store is not None and (store / "manifest.json").exists():
        batch_size = int(open_store(store).manifest["batch_size"])
    with tempfile.TemporaryDirectory() as scratch:
        found = replay_frozen(
            frozen,
            data,
            calibrating,
            Path(scratch),
            # Identity is always replayed; alone it needs no scores.
            replace(asked, interventions=()) if _is_identity(asked) else asked,
            Clock(progress),
            store=store,
            batch_size=batch_size,
            seed=options["seed"],
        )
    if written is not None and found.dependence is not None:
        write_permutations(written, found.dependence.draws)
    show(
        as_json_,
        lambda: audit_json.replay(frozen, data, found.identity, found.dependence),
        lambda console: as_text.replay(found.identity, found.dependence, console),
    )


def _is_identity(asked: ReplayOptions) -> bool:
    return asked.interventions is not None and all(one.name == "identity" for one in asked.interventions)

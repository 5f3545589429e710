"""fxaudit discover."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fxaudit import stages
from fxaudit.cli.console import show, working
from fxaudit.cli.options import model_options, patterns_of, result_options, traced_of
from fxaudit.errors import UsageError
from fxaudit.report import as_json, as_text


@click.command()
@model_options
@click.option(
    "--write",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Draft a pattern file in DIR for each form of candidate that no pattern describes.",
)
@result_options
def discover(directory: Path | None, as_json_: bool, **options: Any) -> None:
    """Find what may be controllers of MODEL without any pattern, from dataflow alone.

    Example: fxaudit discover timm:seresnet18 --random-init --write drafts
    """
    traced = traced_of(options)
    # Without any pattern every candidate is unclaimed.
    patterns = [] if options["no_library"] and not options["patterns"] else patterns_of(options)
    with working("looking for controllers"):
        discovery = stages.discover(traced, patterns=patterns, enable=options["enable"])
        drafts = stages.draft_discovered(discovery) if directory is not None else None
    if directory is not None and drafts is not None:
        directory.mkdir(parents=True, exist_ok=True)
        for drafted in drafts:
            path = directory / f"{drafted.name}.toml"
            if path.exists():
                raise UsageError(
                    f"{path} exists",
                    expected="a folder without drafts of the same names",
                    found=str(path),
                    remedy="name another folder, or remove the file",
                )
        for drafted in drafts:
            (directory / f"{drafted.name}.toml").write_text(drafted.text, encoding="utf-8")
    show(
        as_json_,
        lambda: as_json.discover(discovery, drafts),
        lambda console: as_text.discover(discovery, drafts or (), directory, console),
    )

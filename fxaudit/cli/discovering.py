"""fxaudit discover."""

from __future__ import annotations

from typing import Any

import click

from fxaudit import stages
from fxaudit.cli.console import show, working
from fxaudit.cli.options import json_option, model_options, subject_of
from fxaudit.report import as_json, as_text


@click.command()
@model_options
@json_option
def discover(as_json_: bool, **options: Any) -> None:
    """Find what may be controllers of MODEL without any pattern, from dataflow alone.

    Example: fxaudit discover torchvision:mobilenet_v3_small --random-init
    """
    subject = subject_of(options)
    with working("tracing"):
        discovery = stages.discover(subject, patterns=options["patterns"] or None, seed=options["seed"])
    show(as_json_, lambda: as_json.discover(discovery), lambda console: as_text.discover(discovery, console))

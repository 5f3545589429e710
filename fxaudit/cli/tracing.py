"""fxaudit trace."""

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
def trace(as_json_: bool, **options: Any) -> None:
    """Trace MODEL, find its controllers, and check that frozen equals live.

    Example: fxaudit trace torchvision:mobilenet_v3_small --random-init
    """
    subject = subject_of(options)
    with working("tracing"):
        report = stages.inspect(
            subject, patterns=options["patterns"] or None, enable=options["enable"], seed=options["seed"]
        )
    show(as_json_, lambda: as_json.trace(report), lambda console: as_text.trace(report, console))

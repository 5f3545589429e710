"""fxaudit trace and fxaudit explain."""

from __future__ import annotations

from typing import Any

import click

from fxaudit import stages
from fxaudit.cli.console import show, working
from fxaudit.cli.options import chosen_pattern, model_options, patterns_of, result_options, traced_of
from fxaudit.report import as_json, as_text


@click.command()
@model_options
@result_options
def trace(as_json_: bool, **options: Any) -> None:
    """Trace MODEL, find its controllers, and check that frozen equals live.

    Example: fxaudit trace torchvision:mobilenet_v3_small --random-init
    """
    traced = traced_of(options)
    with working("finding controllers"):
        report = stages.inspect(traced, patterns=patterns_of(options), enable=options["enable"], seed=options["seed"])
    show(as_json_, lambda: as_json.trace(report), lambda console: as_text.trace(report, console))


@click.command()
@click.argument("pattern", metavar="PATTERN")
@model_options
@result_options
def explain(pattern: str, as_json_: bool, **options: Any) -> None:
    """Explain where PATTERN (a name or a file) matches in MODEL, where it nearly does, and what stops it there.

    Example: fxaudit explain se-gate torchvision:resnet18 --random-init
    """
    chosen = chosen_pattern(pattern, patterns_of(options))
    traced = traced_of(options)
    with working("explaining"):
        found = stages.explain(traced, chosen)
    show(as_json_, lambda: as_json.explain(found), lambda console: as_text.explain(found, console))

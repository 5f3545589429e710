"""fxaudit audit, fxaudit report and fxaudit doctor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from fxaudit.audit import audit as run_audit
from fxaudit.cli.console import finite, progress, show
from fxaudit.cli.options import (
    data_options,
    execution_options,
    model_options,
    patterns_of,
    replay_options,
    replaying_of,
    result_options,
    subject_of,
    trace_options_of,
)
from fxaudit.controllers.pattern import library_path
from fxaudit.errors import DataError
from fxaudit.execution.options import ExecutionOptions
from fxaudit.execution.providers import provider_named
from fxaudit.report import as_text, audit_json

AUDIT, REPORT = "audit.json", "report.html"


@click.command()
@model_options
@data_options
@click.option("--calibration", required=True, metavar="DATA", help="Other inputs, over which profiles are averaged.")
@replay_options
@execution_options
@click.option(
    "-o", "--report", "directory", required=True, type=click.Path(path_type=Path), metavar="DIR", help="The report."
)
@result_options
def audit(directory: Path, as_json_: bool, calibration: str, **options: Any) -> None:
    """Audit MODEL: do its coefficients vary, does it depend on them, does the compute that runs depend on the input?

    Example: fxaudit audit FILE.py:build --data evaluation.safetensors --calibration calibration.safetensors -o report
    """
    from fxaudit.report import html

    asked = replaying_of(options)
    executing = ExecutionOptions(
        provider=provider_named(options["provider"]), timed=options["timed"], seed=options["seed"]
    )
    report = run_audit(
        subject_of(options),
        options["data"],
        calibration,
        directory,
        patterns=patterns_of(options),
        enable=options["enable"],
        batch_size=options["batch_size"],
        limit=options["limit"],
        replaying=asked,
        executing=executing,
        seed=options["seed"],
        tracing=trace_options_of(options),
        watch=progress,
    )
    found = finite(audit_json.audit(report))
    (directory / AUDIT).write_text(json.dumps(found, indent=1), encoding="utf-8")
    (directory / REPORT).write_text(html.render(found), encoding="utf-8")
    show(as_json_, lambda: found, lambda console: as_text.audit(found, directory / REPORT, console))


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
def report(directory: Path) -> None:
    """Write report.html again from the audit.json in DIRECTORY.

    Example: fxaudit report report
    """
    from fxaudit.report import html

    path = directory / AUDIT
    try:
        found = json.loads(path.read_bytes())
        if found["schema"] != audit_json.AUDIT_SCHEMA:
            raise ValueError(f"schema {found['schema']}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{directory} holds no audit",
            where=str(path),
            expected=f"an audit.json of schema {audit_json.AUDIT_SCHEMA}",
            found=f"{type(error).__name__}: {error}",
            remedy="run `fxaudit audit MODEL --data D --calibration C -o DIRECTORY` first",
        ) from error
    (directory / REPORT).write_text(html.render(found), encoding="utf-8")
    click.echo(directory / REPORT)


@click.command()
@result_options
def doctor(as_json_: bool) -> None:
    """Show what is installed, what fits what, and what is missing.

    Example: fxaudit doctor
    """
    from fxaudit.report import doctor as examine

    found = examine.examine(library_path())
    show(as_json_, lambda: found, lambda console: examine.show(found, console))

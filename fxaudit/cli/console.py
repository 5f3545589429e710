"""What commands print: data to stdout, progress to stderr."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fxaudit.report.expectations import check_expectations

# Where the options of a command leave what --expect states.
EXPECTED = "fxaudit.expected"


def show(as_json_: bool, data: Callable[[], dict[str, Any]], text: Callable[[Console], None]) -> None:
    """Print a result as JSON or as text, then hold it against what was expected of it."""
    expected = click.get_current_context().meta.get(EXPECTED, ())
    result = data() if as_json_ or expected else {}
    if as_json_:
        print_json(result)
    else:
        text(stdout())
    check_expectations(expected, finite(result))


def stdout() -> Console:
    """Standard output; wide where it is not a terminal, so that piped tables are not folded."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def print_json(data: dict[str, Any]) -> None:
    # Infinities are not JSON; a reader gets null and the `bitwise` flag beside it.
    click.echo(json.dumps(finite(data), indent=1))


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))) else value


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on stderr while something of unknown length runs; nothing where stderr is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, shown where stderr is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)

"""The command line: parse, call one function, print. Data goes to stdout, progress to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fxaudit import __version__, stages
from fxaudit.controllers.examples import run_example
from fxaudit.controllers.pattern import Pattern, library_path, load_patterns
from fxaudit.errors import AuditError, PatternError, nearest
from fxaudit.report import as_json, as_text

Command = TypeVar("Command", bound=Callable[..., Any])


class _Group(click.Group):
    """A group that turns an `AuditError` into its four parts on stderr and its exit code; other errors are ours."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AuditError as error:
            click.echo(f"{type(error).__name__}: {error}", err=True)
            ctx.exit(error.exit_code)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise click.UsageError(f"no such command `{args[0]}`{nearest(args[0], self.list_commands(ctx))}", ctx)
        return super().resolve_command(ctx, args)


def _options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def apply(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return apply


_json = click.option("--json", "as_json_", is_flag=True, help="Print JSON on stdout instead of text.")
_patterns = click.option(
    "--patterns",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE|DIR",
    help="Pattern files or folders to use instead of the shipped ones; may be repeated.",
)
_model_options = _options(
    click.argument("model"),
    click.option(
        "--weights", type=click.Path(path_type=Path), metavar="FILE", help="Weights to load: a safetensors state dict."
    ),
    click.option("--random-init", is_flag=True, help="Build a zoo model without its pretrained weights."),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of random weights and inputs."),
    _patterns,
)
_data = click.option(
    "--data",
    required=True,
    metavar="DATA",
    help="A .safetensors or .npz file with an array for each input, file.py:function, `example`, or `resampled:N`.",
)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fxaudit")
def main() -> None:
    """Audit the controllers of a PyTorch model: the parts that compute coefficients from the input.

    MODEL is torchvision:NAME, timm:NAME, path/to/file.py:function or package.module:function (a function that returns a
    module, or a module and its example inputs).
    """


@main.command()
@_model_options
@_json
def trace(
    model: str, weights: Path | None, random_init: bool, seed: int, patterns: tuple[Path, ...], as_json_: bool
) -> None:
    """Trace MODEL, find its controllers, and check that frozen equals live.

    Example: fxaudit trace torchvision:mobilenet_v3_small --random-init
    """
    subject = stages.load(model, weights=weights, random_init=random_init, seed=seed)
    with _working("tracing"):
        report = stages.inspect(subject, patterns=patterns or None, seed=seed)
    _show(as_json_, lambda: as_json.trace(report), lambda console: as_text.trace(report, console))


@main.command()
@_model_options
@_data
@click.option(
    "-o",
    "--output",
    "directory",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The store; one begun there is continued.",
)
@click.option("--batch-size", type=int, help="Inputs recorded at once; part of what replay must repeat.")
@_json
def record(
    model: str,
    weights: Path | None,
    random_init: bool,
    seed: int,
    patterns: tuple[Path, ...],
    data: str,
    directory: Path,
    batch_size: int | None,
    as_json_: bool,
) -> None:
    """Record the coefficients of MODEL on DATA into a store, and replay them from there.

    Example: fxaudit record torchvision:mobilenet_v3_small --random-init --data resampled:8 -o store
    """
    frozen = _frozen(model, weights, random_init, seed, patterns)
    loaded = stages.load_data(data, frozen.traced)
    with _progress("recording") as advance:
        recording = stages.record(frozen, loaded, directory, batch_size=batch_size, progress=advance)
    with _working("replaying"):
        replayed = stages.replay(frozen, loaded, recording.store)
    deterministic = not any(finding.kind == "nondeterministic" for finding in recording.findings)
    if deterministic:
        stages.require_identity(replayed, model)
    _show(
        as_json_,
        lambda: as_json.record(recording, frozen.traced, replayed),
        lambda console: as_text.record(recording, replayed, console),
    )


@main.command()
@_model_options
@_data
@click.option(
    "--store",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A store written by `fxaudit record`.",
)
@_json
def replay(
    model: str,
    weights: Path | None,
    random_init: bool,
    seed: int,
    patterns: tuple[Path, ...],
    data: str,
    store: Path,
    as_json_: bool,
) -> None:
    """Feed the frozen MODEL its recorded coefficients and compare with the live model, bit for bit.

    Example: fxaudit replay torchvision:mobilenet_v3_small --random-init --data resampled:8 --store store
    """
    frozen = _frozen(model, weights, random_init, seed, patterns)
    loaded = stages.load_data(data, frozen.traced)
    with _working("replaying"):
        replayed = stages.replay(frozen, loaded, store)
    stages.require_identity(replayed, model)
    _show(
        as_json_,
        lambda: as_json.replay(replayed, frozen.traced, loaded.count),
        lambda console: as_text.replay(replayed, console),
    )


@main.group(cls=_Group)
def pattern() -> None:
    """List, show and test pattern files."""


@pattern.command("list")
@_patterns
@_json
def pattern_list(patterns: tuple[Path, ...], as_json_: bool) -> None:
    """List the patterns that are searched for.

    Example: fxaudit pattern list
    """
    loaded = load_patterns(*patterns)
    described = [{"name": p.name, "summary": p.summary, "cite": p.cite, "path": str(p.path)} for p in loaded]
    _show(
        as_json_,
        lambda: {"schema": "fxaudit.pattern-list/1", "patterns": described},
        lambda console: as_text.pattern_list(loaded, console),
    )


@pattern.command("show")
@click.argument("name")
@_patterns
@_json
def pattern_show(name: str, patterns: tuple[Path, ...], as_json_: bool) -> None:
    """Print the pattern file NAME.

    Example: fxaudit pattern show se-gate
    """
    (chosen,) = _named(name, patterns)
    text = chosen.path.read_text(encoding="utf-8")
    if as_json_:
        _print_json({"schema": "fxaudit.pattern-show/1", "name": chosen.name, "path": str(chosen.path), "text": text})
    else:
        click.echo(text, nl=False)


@pattern.command("test")
@click.argument("name", required=False)
@_patterns
@_json
def pattern_test(name: str | None, patterns: tuple[Path, ...], as_json_: bool) -> None:
    """Run the inline examples of the pattern NAME (of all, without NAME). This runs the code in those files.

    Example: fxaudit pattern test se-gate
    """
    chosen = _named(name, patterns) if name else load_patterns(*patterns)
    results = []
    console = Console(highlight=False, soft_wrap=True)
    for one in chosen:
        for example in one.examples:
            outcome = run_example(one, example)
            results.append((one, outcome))
            if not as_json_:
                as_text.outcome(one, outcome, console)
    failed = [r for _, r in results if r.label != "ok"]
    if as_json_:
        rows = [
            {"pattern": p.name, "why": r.example.why, "expect": r.example.expect, "found": r.found, "outcome": r.label}
            for p, r in results
        ]
        _print_json({"schema": "fxaudit.pattern-test/1", "examples": rows, "failed": len(failed)})
    if failed:
        raise PatternError(
            f"{len(failed)} of {len(results)} examples failed",
            expected="as many controllers as each example states",
            found=", ".join(f"{r.label}: {r.example.why}" for r in failed[:3]),
            remedy="correct the pattern, or the example's `expect`",
        )


@main.command()
@_json
def doctor(as_json_: bool) -> None:
    """Show what is installed, what fits what, and what is missing.

    Example: fxaudit doctor
    """
    from fxaudit.report import doctor as examine

    found = examine.examine(library_path())
    _show(as_json_, lambda: found, lambda console: examine.show(found, console))


# --- shared ---------------------------------------------------------------------------------------------------------


def _frozen(
    model: str, weights: Path | None, random_init: bool, seed: int, patterns: tuple[Path, ...]
) -> stages.FrozenModel:
    subject = stages.load(model, weights=weights, random_init=random_init, seed=seed)
    with _working("tracing"):
        return stages.freeze(subject, patterns=patterns or None, seed=seed)


def _named(name: str, places: tuple[Path, ...]) -> list[Pattern]:
    loaded = load_patterns(*places)
    chosen = [p for p in loaded if p.name == name]
    if not chosen:
        names = [p.name for p in loaded]
        raise PatternError(
            f"there is no pattern `{name}`{nearest(name, names)}",
            expected=", ".join(names),
            found=name,
            remedy="`fxaudit pattern list` shows them",
        )
    return chosen


def _show(as_json_: bool, data: Callable[[], dict[str, Any]], text: Callable[[Console], None]) -> None:
    if as_json_:
        _print_json(data())
    else:
        text(Console(highlight=False, soft_wrap=False))


def _print_json(data: dict[str, Any]) -> None:
    # Infinities are not JSON; a reader gets null and the `bitwise` flag beside it.
    click.echo(json.dumps(_finite(data), indent=1))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))) else value


@contextmanager
def _working(what: str) -> Iterator[None]:
    """A spinner on stderr while something of unknown length runs; nothing where stderr is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, shown where stderr is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


if __name__ == "__main__":
    sys.exit(main())

"""The command line: parse, call one function, print. Data goes to stdout, progress to stderr."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fxaudit import __version__, stages
from fxaudit.audit import Clock
from fxaudit.audit import audit as run_audit
from fxaudit.audit import replay as replay_frozen
from fxaudit.controllers.examples import run_example
from fxaudit.controllers.pattern import Pattern, library_path, load_patterns
from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.errors import AuditError, DataError, PatternError, UsageError, nearest
from fxaudit.model.load import Subject
from fxaudit.replay.intervene import Intervention, default_interventions, parse_interventions
from fxaudit.replay.store import open_store
from fxaudit.report import as_json, as_text, audit_json

AUDIT, REPORT = "audit.json", "report.html"

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
    click.option("--weights", type=click.Path(path_type=Path), metavar="FILE", help="Safetensors weights to load."),
    click.option("--random-init", is_flag=True, help="Build the model without its pretrained weights."),
    click.option("--window", type=click.IntRange(min=1), metavar="N", help="Tokens in each input of a text model."),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of random weights, inputs and draws."),
    _patterns,
)
_data_help = (
    "A .safetensors or .npz file with an array for each input (and `targets`), a .txt file, file.py:function,"
    " `example`, or `resampled:N`."
)
_data_options = _options(
    click.option("--data", required=True, metavar="DATA", help=_data_help),
    click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Use at most N inputs."),
    click.option(
        "--batch-size", type=click.IntRange(min=1), metavar="N", help="Inputs run at once; recorded with them."
    ),
)
_replay_options = _options(
    click.option("--output", metavar="NAME|INDEX", help="The output that holds the logits."),
    click.option("--margin", type=click.FloatRange(min=0, min_open=True), help="Effects within it count as none."),
    click.option(
        "--interventions",
        metavar="LIST",
        help="Comma-separated: identity, reassign, shuffle-tokens, static[:LEVEL], neutral. All by default.",
    ),
)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fxaudit")
def main() -> None:
    """Audit the controllers of a PyTorch model: the parts that compute coefficients from the input.

    MODEL is torchvision:NAME, timm:NAME, a Hugging Face directory, path/to/file.py:function or package.module:function
    (a function that returns a module, or a module and its example inputs).
    """


@main.command()
@_model_options
@_json
def trace(as_json_: bool, **options: Any) -> None:
    """Trace MODEL, find its controllers, and check that frozen equals live.

    Example: fxaudit trace torchvision:mobilenet_v3_small --random-init
    """
    subject = _subject(options)
    with _working("tracing"):
        report = stages.inspect(subject, patterns=options["patterns"] or None, seed=options["seed"])
    _show(as_json_, lambda: as_json.trace(report), lambda console: as_text.trace(report, console))


@main.command()
@_model_options
@_data_options
@click.option(
    "-o",
    "--store",
    "directory",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The store to write; one begun there is continued.",
)
@_json
def record(directory: Path, as_json_: bool, **options: Any) -> None:
    """Record the coefficients of MODEL on DATA into a store, and replay them from there.

    Example: fxaudit record torchvision:mobilenet_v3_small --random-init --data resampled:8 -o store
    """
    frozen = _frozen(options)
    data = stages.load_data(options["data"], frozen.traced).limited(options["limit"])
    with _progress("recording") as advance:
        recording = stages.record(frozen, data, directory, batch_size=options["batch_size"], progress=advance)
    with _working("replaying"):
        replayed = stages.verify(frozen, data, recording)
    _show(
        as_json_,
        lambda: as_json.record(recording, frozen.traced, replayed),
        lambda console: as_text.record(recording, replayed, console),
    )


@main.command()
@_model_options
@_data_options
@click.option("--calibration", metavar="DATA", help="Other inputs, over which static profiles are averaged.")
@_replay_options
@click.option("--store", type=click.Path(path_type=Path), metavar="DIR", help="A store to reuse, or to write.")
@_json
def replay(store: Path | None, as_json_: bool, calibration: str | None, **options: Any) -> None:
    """Replay the frozen MODEL with recorded and with intervened coefficients.

    Example: fxaudit replay torchvision:mobilenet_v3_small --random-init --data resampled:8
    """
    wanted = _interventions(options)
    frozen = _frozen(options)
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
            wanted if any(intervention.name != "identity" for intervention in wanted) else (),
            Clock(_progress),
            store=store,
            batch_size=batch_size,
            output=options["output"],
            margin=options["margin"],
            seed=options["seed"],
        )
    _show(
        as_json_,
        lambda: audit_json.replay(frozen, data, found.identity, found.dependence),
        lambda console: as_text.replay(found.identity, found.dependence, console),
    )


@main.command()
@_model_options
@_data_options
@click.option("--calibration", required=True, metavar="DATA", help="Other inputs, over which profiles are averaged.")
@_replay_options
@click.option(
    "-o", "--report", "directory", required=True, type=click.Path(path_type=Path), metavar="DIR", help="The report."
)
@_json
def audit(directory: Path, as_json_: bool, calibration: str, **options: Any) -> None:
    """Audit MODEL: do its coefficients vary, does it depend on them, does the compute that runs depend on the input?

    Example: fxaudit audit FILE.py:build --data evaluation.safetensors --calibration calibration.safetensors -o report
    """
    from fxaudit.report import html

    wanted = _interventions(options)
    report = run_audit(
        _subject(options),
        options["data"],
        calibration,
        directory,
        patterns=options["patterns"] or None,
        interventions=wanted,
        batch_size=options["batch_size"],
        limit=options["limit"],
        output=options["output"],
        margin=options["margin"],
        seed=options["seed"],
        watch=_progress,
    )
    found = _finite(audit_json.audit(report))
    (directory / AUDIT).write_text(json.dumps(found, indent=1), encoding="utf-8")
    (directory / REPORT).write_text(html.render(found), encoding="utf-8")
    _show(as_json_, lambda: found, lambda console: as_text.audit(found, directory / REPORT, console))


@main.command()
@_model_options
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
@_json
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
    frozen = _frozen(options)
    with _working("exporting"):
        exported = stages.export(frozen, directory, open_store(profile) if profile is not None else None)
    described = as_json.export(exported, frozen.traced, form)
    _show(as_json_, lambda: described, lambda console: as_text.export(described, console))


@main.command()
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
    console = _stdout()
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


def _subject(options: dict[str, Any]) -> Subject:
    return stages.load(
        options["model"],
        weights=options["weights"],
        random_init=options["random_init"],
        window=options["window"],
        seed=options["seed"],
    )


def _frozen(options: dict[str, Any]) -> FrozenModel:
    subject = _subject(options)
    with _working("tracing"):
        return stages.freeze(subject, patterns=options["patterns"] or None, seed=options["seed"])


def _interventions(options: dict[str, Any]) -> tuple[Intervention, ...]:
    if options["interventions"] is None:
        return default_interventions(options["seed"])
    return parse_interventions(options["interventions"], options["seed"])


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
        text(_stdout())


def _stdout() -> Console:
    """Standard output; wide where it is not a terminal, so that piped tables are not folded."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


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

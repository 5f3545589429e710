"""fxaudit pattern list, show, new, lint and test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fxaudit import stages
from fxaudit.cli.console import print_json, show, stdout, working
from fxaudit.cli.group import Group
from fxaudit.cli.options import (
    chosen_pattern,
    library_option,
    model_options,
    patterns_of,
    patterns_option,
    result_options,
    subject_of,
)
from fxaudit.controllers.examples import run_example
from fxaudit.controllers.lint import lint
from fxaudit.controllers.pattern import Pattern, load_patterns
from fxaudit.errors import PatternError, UsageError
from fxaudit.report import as_text


@click.group(cls=Group)
def pattern() -> None:
    """List, show, draft, check and test pattern files."""


@pattern.command("list")
@patterns_option
@library_option
@result_options
def pattern_list(as_json_: bool, **options: Any) -> None:
    """List the patterns that are searched for: shipped, of installed packages, and your own.

    Example: fxaudit pattern list
    """
    loaded = patterns_of(options)
    described = [
        {"name": p.name, "class": p.family_class, "summary": p.summary, "cite": p.cite, "path": str(p.path)}
        for p in loaded
    ]
    show(
        as_json_,
        lambda: {"schema": "fxaudit.pattern-list/1", "patterns": described},
        lambda console: as_text.pattern_list(loaded, console),
    )


@pattern.command("show")
@click.argument("name")
@patterns_option
@library_option
@result_options
def pattern_show(name: str, as_json_: bool, **options: Any) -> None:
    """Print the pattern file NAME.

    Example: fxaudit pattern show se-gate
    """
    chosen = chosen_pattern(name, patterns_of(options))
    text = chosen.path.read_text(encoding="utf-8")
    if as_json_:
        print_json({"schema": "fxaudit.pattern-show/1", "name": chosen.name, "path": str(chosen.path), "text": text})
    else:
        click.echo(text, nl=False)


@pattern.command("new")
@model_options
@click.argument("target", metavar="NODE|MODULE-PATH")
@click.option(
    "-o", "--pattern", "path", type=click.Path(path_type=Path), metavar="FILE", help="Write here, not to stdout."
)
def pattern_new(target: str, path: Path | None, **options: Any) -> None:
    """Draft a pattern file from a place in MODEL: a module path, or a node that `trace --json` names.

    Example: fxaudit pattern new torchvision:mobilenet_v3_small features.1.block.1 --random-init
    """
    if path is not None and path.suffix != ".toml":
        raise UsageError(
            f"{path} is no name of a pattern file",
            expected="NAME.toml",
            found=path.name,
            remedy="the stem of the file becomes the name of the pattern",
        )
    if path is not None and path.exists():
        raise UsageError(
            f"{path} exists already", expected="a new file", found=str(path), remedy="name another, or remove it"
        )
    subject = subject_of(options)
    with working("tracing"):
        traced = stages.trace(subject, seed=options["seed"])
    text = stages.draft(traced, target, path.stem if path is not None else "new-pattern")
    if path is None:
        click.echo(text, nl=False)
    else:
        path.write_text(text, encoding="utf-8")
        click.echo(path)


@pattern.command("lint")
@click.argument("name", required=False)
@patterns_option
@library_option
@result_options
def pattern_lint(name: str | None, as_json_: bool, **options: Any) -> None:
    """Check the pattern NAME (your own with --patterns; all, without either) without a model.

    Example: fxaudit pattern lint se-gate
    """
    found = [complaint for one in _chosen(name, options) for complaint in lint(one)]
    if as_json_:
        rows = [{"kind": c.kind, "where": c.where, "text": c.text} for c in found]
        print_json({"schema": "fxaudit.pattern-lint/1", "complaints": rows})
    else:
        for complaint in found:
            click.echo(f"{complaint.where}: {complaint.kind}: {complaint.text}")
    if found:
        raise PatternError(
            f"{len(found)} complaints",
            expected="none",
            found=", ".join(dict.fromkeys(complaint.kind for complaint in found)),
            remedy="docs/patterns.md shows a whole pattern",
        )


@pattern.command("test")
@click.argument("name", required=False)
@patterns_option
@library_option
@result_options
def pattern_test(name: str | None, as_json_: bool, **options: Any) -> None:
    """Run the inline examples of the pattern NAME (your own with --patterns; all, without either).

    This runs the code in those files.

    Example: fxaudit pattern test se-gate
    """
    results = []
    console = stdout()
    chosen = _chosen(name, options)
    if not any(one.examples for one in chosen):
        raise PatternError(
            f"there is nothing to run: no example in {', '.join(one.name for one in chosen)}",
            where="\n".join(str(one.path) for one in chosen),
            expected="at least one [[example]]",
            found="none",
            remedy="write two that match and two near misses that must not: docs/patterns.md shows one",
        )
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
        print_json({"schema": "fxaudit.pattern-test/1", "examples": rows, "failed": len(failed)})
    if failed:
        raise PatternError(
            f"{len(failed)} of {len(results)} examples failed",
            expected="as many controllers as each example states",
            found=", ".join(f"{r.label}: {r.example.why}" for r in failed[:3]),
            remedy="correct the pattern, or the example's `expect`",
        )


def _chosen(name: str | None, options: dict[str, Any]) -> list[Pattern]:
    """The one that is named; else the user's own, where some are given; else all."""
    if name is not None:
        return [chosen_pattern(name, patterns_of(options))]
    return load_patterns(*options["patterns"]) if options["patterns"] else patterns_of(options)

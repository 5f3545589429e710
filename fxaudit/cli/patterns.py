"""fxaudit pattern list, show and test."""

from __future__ import annotations

from pathlib import Path

import click

from fxaudit.cli.console import print_json, show, stdout
from fxaudit.cli.group import Group
from fxaudit.cli.options import json_option, patterns_option
from fxaudit.controllers.examples import run_example
from fxaudit.controllers.pattern import Pattern, load_patterns
from fxaudit.errors import PatternError, nearest
from fxaudit.report import as_text


@click.group(cls=Group)
def pattern() -> None:
    """List, show and test pattern files."""


@pattern.command("list")
@patterns_option
@json_option
def pattern_list(patterns: tuple[Path, ...], as_json_: bool) -> None:
    """List the patterns that are searched for.

    Example: fxaudit pattern list
    """
    loaded = load_patterns(*patterns)
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
@json_option
def pattern_show(name: str, patterns: tuple[Path, ...], as_json_: bool) -> None:
    """Print the pattern file NAME.

    Example: fxaudit pattern show se-gate
    """
    (chosen,) = named(name, patterns)
    text = chosen.path.read_text(encoding="utf-8")
    if as_json_:
        print_json({"schema": "fxaudit.pattern-show/1", "name": chosen.name, "path": str(chosen.path), "text": text})
    else:
        click.echo(text, nl=False)


@pattern.command("test")
@click.argument("name", required=False)
@patterns_option
@json_option
def pattern_test(name: str | None, patterns: tuple[Path, ...], as_json_: bool) -> None:
    """Run the inline examples of the pattern NAME (of all, without NAME). This runs the code in those files.

    Example: fxaudit pattern test se-gate
    """
    chosen = named(name, patterns) if name else load_patterns(*patterns)
    results = []
    console = stdout()
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


def named(name: str, places: tuple[Path, ...]) -> list[Pattern]:
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

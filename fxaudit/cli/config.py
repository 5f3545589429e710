"""Options from a file: `--config FILE`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import click

from fxaudit.errors import UsageError, nearest


def read_config(ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Make the options in a TOML file the defaults of the command that runs.

    Options stand under their long names without dashes in front. Those of one verb stand in a table of that name,
    `[audit]`, those above the tables are for every verb that has them.

    Raises:
        UsageError: the file cannot be read, or names an option that no command has.
    """
    if path is None:
        return
    try:
        stated = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--config cannot read {path}",
            where=str(path),
            expected="a TOML file of options: limit = 8",
            found=f"{type(error).__name__}: {error}",
            remedy="name another file, or correct this one",
        ) from error
    own = _options(ctx.command)
    verbs = _verbs(ctx)
    anywhere = {name for verb in verbs.values() for name in _options(verb)}
    known = anywhere | set(verbs)
    for name in stated:
        if name not in known or (name in verbs and not isinstance(stated[name], dict) and name not in anywhere):
            raise _unknown(path, name, known)
    verb = str(ctx.command.name)
    table = stated.get(verb, {})
    for name in table if isinstance(table, dict) else {}:
        if name not in own:
            raise _unknown(path, f"{verb}.{name}", set(own))
    shared = {name: value for name, value in stated.items() if name in own and not isinstance(value, dict)}
    given = shared | (table if isinstance(table, dict) else {})
    ctx.default_map = {own[name]: value for name, value in given.items()} | dict(ctx.default_map or {})


def _options(command: click.Command) -> dict[str, str]:
    """The parameters of a command by the long names of their options."""
    return {
        name.removeprefix("--"): str(parameter.name)
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in parameter.opts
        if name.startswith("--") and name != "--config"
    }


def _verbs(ctx: click.Context) -> dict[str, click.Command]:
    group: Any = ctx.find_root().command
    return dict(group.commands) if isinstance(group, click.Group) else {}


def _unknown(path: Path, name: str, known: set[str]) -> UsageError:
    return UsageError(
        f"`{name}` in {path} is no option{nearest(name.rpartition('.')[2], known)}",
        where=str(path),
        expected="long names of options, and tables named after commands",
        found=name,
        remedy="--help lists a command's options",
    )

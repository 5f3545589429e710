"""The group of commands, which translates errors into exit codes."""

from __future__ import annotations

from typing import Any

import click

from fxaudit.errors import AuditError, nearest


class Group(click.Group):
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

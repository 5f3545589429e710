"""The command line: parse, call one function, print."""

from __future__ import annotations

import click

from fxaudit import __version__
from fxaudit.cli.auditing import audit, doctor, report
from fxaudit.cli.discovering import discover
from fxaudit.cli.exporting import export, verify
from fxaudit.cli.group import Group
from fxaudit.cli.patterns import pattern
from fxaudit.cli.replaying import record, replay
from fxaudit.cli.tracing import explain, trace


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fxaudit")
def main() -> None:
    """Audit the controllers of a PyTorch model: the parts that compute coefficients from the input.

    MODEL is torchvision:NAME, timm:NAME, a Hugging Face directory, path/to/file.py:function or package.module:function
    (a function that returns a module, or a module and its example inputs).
    """


for _command in (trace, explain, discover, record, replay, audit, export, verify, report, pattern, doctor):
    main.add_command(_command)

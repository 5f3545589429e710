"""The options that commands share, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from fxaudit import stages
from fxaudit.audit import ReplayOptions
from fxaudit.cli.config import read_config
from fxaudit.cli.console import EXPECTED, working
from fxaudit.controllers.library import available_patterns
from fxaudit.controllers.pattern import Pattern, load_pattern
from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.errors import PatternError, nearest
from fxaudit.execution.providers import PROVIDERS
from fxaudit.model.load import Subject
from fxaudit.model.placement import DTYPES
from fxaudit.model.settings import ATTENTION, CODE, DECOMPOSE, EXPERTS, TraceOptions
from fxaudit.model.trace import TracedModel
from fxaudit.replay.intervene import parse_interventions
from fxaudit.replay.metrics import load_metric
from fxaudit.replay.permutations import read_permutations
from fxaudit.replay.plan import SCOPES, parse_scopes
from fxaudit.report.expectations import parse_expectation

Command = TypeVar("Command", bound=Callable[..., Any])


def options_of(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def apply(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return apply


def _expect(ctx: click.Context, _: click.Parameter, stated: tuple[str, ...]) -> None:
    ctx.meta[EXPECTED] = tuple(map(parse_expectation, stated))


result_options = options_of(
    click.option("--json", "as_json_", is_flag=True, help="Print JSON on stdout instead of text."),
    click.option(
        "--expect",
        multiple=True,
        metavar="KEY==VALUE",
        expose_value=False,
        callback=_expect,
        help="End with exit code 1 unless this holds of the result; a dotted key of the JSON, == != < <= > >=, a JSON"
        " value or a word. May be repeated.",
    ),
    click.option(
        "--config",
        type=click.Path(path_type=Path),
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=read_config,
        help="A TOML file of options of this command, by their long names; those on the command line win.",
    ),
)
patterns_option = click.option(
    "--patterns",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE|DIR",
    help="Pattern files or folders of your own, beside the shipped ones; may be repeated.",
)
library_option = click.option(
    "--no-library", is_flag=True, help="Leave out the shipped patterns and those of installed packages."
)
enable_option = click.option(
    "--enable",
    multiple=True,
    metavar="NAME",
    help="Audit a family outside the default set, too; may be repeated. `pattern list` shows them.",
)
INPUTS_HELP = "A .safetensors, .npz or .pt file of example inputs, by argument name or position (0, 1, ...)."
trace_options = options_of(
    click.option(
        "--attention", type=click.Choice(ATTENTION), help="Attention of a transformers model; its own by default."
    ),
    click.option(
        "--experts", type=click.Choice(EXPERTS), help="Experts of a transformers model; batched_mm by default."
    ),
    click.option(
        "--code",
        type=click.Choice(CODE),
        help="Where a model has other code for export than for eager mode: the one to trace; eager by default, export"
        " where only that can be written as ONNX.",
    ),
    click.option(
        "--decompose",
        type=click.Choice(DECOMPOSE),
        multiple=True,
        help="Trace a fused op as its parts: lstm unrolls LSTM and GRU layers into their gates.",
    ),
    click.option(
        "--dynamic-sequence", is_flag=True, help="Trace axes after the first with any size, where the model allows it."
    ),
)
model_options = options_of(
    click.argument("model"),
    click.option("--weights", type=click.Path(path_type=Path), metavar="FILE", help="A state dict to load into MODEL."),
    click.option("--random-init", is_flag=True, help="Build the model without its pretrained weights."),
    click.option("--inputs", type=click.Path(path_type=Path), metavar="FILE", help=INPUTS_HELP),
    click.option("--window", type=click.IntRange(min=1), metavar="N", help="Tokens in each input of a text model."),
    click.option("--prepare", metavar="FILE.py:FUNCTION", help="Called on the module before its first forward call."),
    click.option("--dtype", type=click.Choice(list(DTYPES)), help="Convert weights and example inputs."),
    click.option("--device", metavar="DEVICE", help="cpu, cuda, cuda:N, or meta: shapes without values."),
    click.option("--trust-pickle", is_flag=True, help="Unpickle MODEL, which may run any code that the file carries."),
    click.option("--trust-remote-code", is_flag=True, help="Run code that a Hugging Face directory or hub id brings."),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of random weights, inputs and draws."),
    trace_options,
    patterns_option,
    library_option,
    enable_option,
)
DATA_HELP = (
    "A .safetensors or .npz file with an array for each input (and `targets`), a .txt file, a folder of images or of a"
    " saved Hugging Face data set, file.py:function, `example`, or `resampled:N[:SEED]`."
)
data_options = options_of(
    click.option("--data", required=True, metavar="DATA", help=DATA_HELP),
    click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Use at most N inputs."),
    click.option(
        "--batch-size", type=click.IntRange(min=1), metavar="N", help="Inputs run at once; recorded with them."
    ),
)
replay_options = options_of(
    click.option("--output", metavar="NAME|INDEX", help="The output that holds the logits."),
    click.option(
        "--metric", metavar="FILE.py:FUNCTION", help="Scores (outputs, targets, live outputs) for each input."
    ),
    click.option("--margin", type=click.FloatRange(min=0, min_open=True), help="Effects within it count as none."),
    click.option(
        "--interventions",
        metavar="LIST",
        help="Comma-separated: identity, reassign, shuffle-tokens, static[:LEVEL], neutral, resample, permute-units,"
        " swap-controllers; draws of its own for `:each` controller; `:weights` or `:indices` of a choice alone. All by"
        " default.",
    ),
    click.option(
        "--scope",
        metavar="LIST",
        default=",".join(SCOPES),
        show_default=True,
        help="Which controllers are intervened on together.",
    ),
    click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Draws of random ones."),
    click.option("--live", is_flag=True, help="Also with the other controllers recomputed, and with values in flight."),
    click.option(
        "--permutations",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="An .npz or .safetensors file with `donors` [inputs], `positions` [inputs, tokens] and others.",
    ),
    click.option("--compile", "compiled", is_flag=True, help="Run the replayed graphs through torch.compile."),
)
execution_options = options_of(
    click.option(
        "--provider",
        type=click.Choice(list(PROVIDERS)),
        default="cpu",
        show_default=True,
        help="Where onnxruntime runs optimised graphs and takes times; FLOPs are always counted on the CPU.",
    ),
    click.option(
        "--time",
        "timed",
        is_flag=True,
        help="Also measure what a controller costs in time and what a static profile gains; takes a minute or more.",
    ),
)


def patterns_of(options: dict[str, Any]) -> list[Pattern]:
    return available_patterns(options["patterns"], shipped=not options["no_library"])


def chosen_pattern(name: str, patterns: list[Pattern]) -> Pattern:
    """The pattern of that name, or in that file."""
    if name.endswith(".toml"):
        return load_pattern(name)
    by_name = {pattern.name: pattern for pattern in patterns}
    if name not in by_name:
        raise PatternError(
            f"there is no pattern `{name}`{nearest(name, set(by_name))}",
            expected=", ".join(by_name),
            found=name,
            remedy="`fxaudit pattern list` shows them; a file is named with its .toml",
        )
    return by_name[name]


def subject_of(options: dict[str, Any]) -> Subject:
    return stages.load(
        options["model"],
        weights=options["weights"],
        random_init=options["random_init"],
        inputs=options["inputs"],
        window=options["window"],
        prepare=options["prepare"],
        dtype=options["dtype"],
        device=options["device"],
        trust_pickle=options["trust_pickle"],
        trust_remote_code=options["trust_remote_code"],
        seed=options["seed"],
    )


def trace_options_of(options: dict[str, Any]) -> TraceOptions:
    return TraceOptions(
        attention=options["attention"],
        experts=options["experts"],
        code=options["code"],
        decompose=tuple(options["decompose"]),
        dynamic_sequence=options["dynamic_sequence"],
    )


def traced_of(options: dict[str, Any]) -> TracedModel:
    subject = subject_of(options)
    with working("tracing"):
        return stages.trace(subject, seed=options["seed"], options=trace_options_of(options))


def frozen_of(options: dict[str, Any]) -> FrozenModel:
    traced = traced_of(options)
    with working("finding controllers"):
        return stages.freeze(traced, patterns=patterns_of(options), enable=options["enable"], seed=options["seed"])


def replaying_of(options: dict[str, Any]) -> ReplayOptions:
    """What the replay options ask for."""
    listed, file, metric = options["interventions"], options["permutations"], options["metric"]
    return ReplayOptions(
        interventions=parse_interventions(listed) if listed is not None else None,
        scopes=parse_scopes(options["scope"]),
        seeds=options["seeds"],
        live=options["live"],
        permutations=read_permutations(file) if file is not None else {},
        output=options["output"],
        metric=load_metric(metric) if metric is not None else None,
        margin=options["margin"],
        compiled=options["compiled"],
    )

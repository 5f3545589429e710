"""fxaudit export and fxaudit verify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fxaudit import stages
from fxaudit.cli.console import show, working
from fxaudit.cli.options import DATA_HELP, frozen_of, model_options, result_options
from fxaudit.errors import ExportError, UsageError
from fxaudit.replay.store import open_store
from fxaudit.report import as_json, as_text

ALL = "all"
PRECISIONS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@click.command()
@model_options
@click.option(
    "--form",
    type=click.Choice([*stages.FORMS, ALL]),
    multiple=True,
    help="Which graphs to write; may be repeated. By default all that can be made.",
)
@click.option("--profile", type=click.Path(path_type=Path), metavar="STORE", help="The store whose means are baked in.")
@click.option("--fold", is_flag=True, help="Fold baked coefficients into weights, where that is exact up to rounding.")
@click.option(
    "--opset", type=click.IntRange(18, 25), default=20, show_default=True, help="Version of the ONNX operators."
)
@click.option(
    "--precision",
    type=click.Choice(list(PRECISIONS)),
    help="Convert weights and inputs before tracing, as --dtype does; that of the model by default.",
)
@click.option(
    "--external-data", is_flag=True, help="One file for the weights of all graphs; without it only above 1 GiB."
)
@click.option("--data", metavar="DATA", help=f"Inputs of the samples; by default made from the example. {DATA_HELP}")
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=stages.SAMPLES,
    show_default=True,
    help="At most this many inputs of --data.",
)
@click.option("--no-verify", is_flag=True, help="Write the files without running them.")
@click.option(
    "-o", "--onnx", "directory", required=True, type=click.Path(path_type=Path), metavar="DIR", help="The bundle."
)
@result_options
def export(
    form: tuple[str, ...],
    profile: Path | None,
    fold: bool,
    opset: int,
    precision: str | None,
    external_data: bool,
    data: str | None,
    samples: int,
    no_verify: bool,
    directory: Path,
    as_json_: bool,
    **options: Any,
) -> None:
    """Write MODEL as ONNX graphs and torch programs: live, bound (coefficients are inputs), baked (coefficients are
    calibration means); with samples and a manifest, and checked.

    Example: fxaudit export torchvision:mobilenet_v3_small --random-init --form live --form bound -o onnx
    """
    forms = stages.FORMS if ALL in form or not form else form
    if profile is None and (fold or "baked" in form or ALL in form):
        raise UsageError(
            "a baked graph needs a profile",
            expected="--profile STORE, recorded on calibration data",
            found="no --profile",
            remedy="record one: fxaudit record MODEL --data DATA -o STORE",
        )
    if fold and "baked" not in forms:
        raise UsageError(
            "--fold has no meaning without a baked graph",
            expected="--form baked",
            found=", ".join(forms),
            remedy="add --form baked, or leave --fold out",
        )
    if precision is not None:
        if options["dtype"] not in (None, PRECISIONS[precision]):
            raise UsageError(
                "--precision and --dtype contradict each other",
                expected=f"--dtype {PRECISIONS[precision]}, or none",
                found=f"--dtype {options['dtype']}",
                remedy="leave one of them out",
            )
        options["dtype"] = PRECISIONS[precision]
    store = open_store(profile) if profile is not None else None
    frozen = frozen_of(options)
    with working("exporting"):
        bundle = stages.export(
            frozen,
            directory,
            store,
            forms=forms,
            opset=opset,
            fold=fold,
            external=external_data or None,
            data=data,
            samples=samples,
            seed=options["seed"],
        )
    verification = None
    if not no_verify:
        try:
            with working("running the exported graphs"):
                verification = stages.verify(directory)
        except ExportError as error:
            stages.discard(directory)
            error.remedy = f"{error.remedy}; --no-verify writes what this machine cannot run"
            raise
    described = as_json.export(bundle, verification)
    show(as_json_, lambda: described, lambda console: as_text.export(described, console))
    if verification is not None:
        verification.require()


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@result_options
def verify(directory: Path, as_json_: bool) -> None:
    """Check the exported files in DIRECTORY from themselves alone: hashes, onnx.checker, outputs, identity, counts,
    proofs.

    DIRECTORY is what `fxaudit export` wrote, or the report of `fxaudit audit`.

    Example: fxaudit verify onnx
    """
    with working("running the exported graphs"):
        verification = stages.verify(directory)
    show(as_json_, verification.to_json, lambda console: as_text.verify(verification.to_json(), console))
    verification.require()

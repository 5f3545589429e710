"""One export of a frozen model, and every graph that is derived from it."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
from torch import Tensor
from torch.fx import GraphModule

from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.errors import DataError, ExportError
from fxaudit.execution.export import derived
from fxaudit.execution.export.cut import idle_keys, module_of, with_barriers
from fxaudit.execution.export.exported import GRAPHS, ExportedGraphs
from fxaudit.execution.export.files import write_graphs
from fxaudit.execution.export.names import check_ends, dimension_names, own_names, rename_ends, safe_name
from fxaudit.execution.export.programs import baked_module, bound_module
from fxaudit.execution.folding import Folding, fold_checked
from fxaudit.execution.translation import BATCH, OPSET, tidy, to_onnx
from fxaudit.model.inputs import batch_of, resampled
from fxaudit.model.settings import exact_numerics, quiet_torch
from fxaudit.model.trace import Finding, TracedModel

Dimensions = tuple[Mapping[int, str], ...]


def export_graphs(
    frozen: FrozenModel,
    directory: Path,
    profile: Mapping[str, Tensor] | None = None,
    *,
    graphs: Collection[str] = GRAPHS,
    opset: int = OPSET,
    external: bool | None = None,
    fold: bool = False,
) -> ExportedGraphs:
    """`frozen` as ``live.onnx``, ``tapped.onnx``, ``bound.onnx`` and, with `profile`, ``baked.onnx`` in `directory`.

    Args:
        profile: by coefficient key, a tensor in the coefficient's own dimension order, of size 1 along sample axes and
            of size 1 or full along position axes.
        graphs: the graphs to write, of `GRAPHS`.
        opset: the version of the ONNX operators.
        external: whether all graphs share one file for their tensors; by default where one graph exceeds 1 GiB.
        fold: fold the profile into weights where that is exact up to rounding; ``baked.onnx`` is then exported from the
            folded torch graph.

    Raises:
        ExportError: torch or onnxscript cannot express the model in ONNX.
        DataError: the profile does not fit the coefficients.
        SelfCheckError: a coefficient was lost on the way.
    """
    started = time.perf_counter()
    traced = frozen.traced
    if profile is not None:
        derived.check_profile(profile, frozen.coefficients)
    pure = with_barriers(frozen)
    module = module_of(frozen, pure.graph, traced.graph_module, "Cut")
    names = tuple(traced.input_names[i] for i in pure.input_positions)
    output_names = own_names([traced.output_names[i] for i in pure.output_positions], names)
    translated = _translated(traced, module, pure.input_positions, opset)
    model, dimensions = translated.model, translated.dimensions
    taken = {*names, *output_names}
    coefficient_names: dict[str, str] = {}
    for coefficient in frozen.coefficients:
        coefficient_names[coefficient.key] = safe_name(coefficient.key, taken)
        taken.add(coefficient_names[coefficient.key])
    rename_ends(model, names, output_names, taken)
    check_ends(model, names, output_names, dimensions)

    idle = idle_keys(frozen)
    live = derived.without_barriers(model)
    bound = derived.bound_graph(model, frozen.coefficients, coefficient_names, idle)
    taps = [coefficient_names[c.key] for c in frozen.coefficients]
    models: dict[str, ir.Model] = {"live": live, "tapped": derived.without_barriers(model, taps), "bound": bound}
    programs = {"bound": bound_module(frozen, coefficient_names)}
    expanded: tuple[str, ...] = ()
    folding: Folding | None = None
    if profile is not None:
        programs["baked"], buffers = baked_module(frozen, profile, coefficient_names)
        if fold:
            folding = fold_checked(programs["baked"], buffers, translated.leaves)
            models["baked"] = _folded_model(traced, folding, translated, opset)
            rename_ends(models["baked"], names, output_names, {*names, *output_names})
            check_ends(models["baked"], names, output_names, dimensions)
        else:
            models["baked"], expanded = derived.baked_graph(
                model, frozen, coefficient_names, profile, idle, translated.batch
            )
    removed_nodes = derived.removed_nodes(live, bound)
    removed_parameters = derived.removed_parameters(live, bound, module)
    live_nodes = len(live.graph)
    models = {name: graph_model for name, graph_model in models.items() if name in graphs}
    external_file = write_graphs(models, directory, external=external)
    return ExportedGraphs(
        paths={name: directory / f"{name}.onnx" for name in models},
        profile=profile,
        input_names=names,
        input_positions=pure.input_positions,
        output_names=output_names,
        output_positions=pure.output_positions,
        coefficient_names=coefficient_names,
        idle=idle,
        expanded=expanded,
        dimensions=dimensions,
        batch=BATCH if any(BATCH in axes.values() for axes in dimensions) else None,
        fixed_batch=translated.batch,
        opset=opset,
        external=external_file,
        live_nodes=live_nodes,
        removed_nodes=removed_nodes,
        removed_parameters=removed_parameters,
        programs={form: program for form, program in programs.items() if form in graphs},
        folding=folding,
        findings=translated.findings,
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True, slots=True)
class _Translated:
    """The cut graph in ONNX; `batch` is the number of inputs that it takes, None where it takes any."""

    model: ir.Model
    dimensions: Dimensions
    leaves: Sequence[Tensor]
    batch: int | None
    findings: tuple[Finding, ...] = ()


def _translated(traced: TracedModel, module: GraphModule, positions: Sequence[int], opset: int) -> _Translated:
    """The cut graph in ONNX for inputs of any number, or for one at a time where ONNX lacks the former.

    Raises:
        ExportError: it cannot be expressed for a fixed number of inputs, either.
    """
    dimensions = dimension_names([n for n in module.graph.nodes if n.op == "placeholder"], traced.sample)
    leaves = traced.flatten(traced.subject.arguments)
    example = [leaves[i] for i in positions]
    batch = traced.sample if isinstance(traced.sample, int) else None
    try:
        return _Translated(_to_onnx(traced, module, example, dimensions, opset), dimensions, example, batch)
    except ExportError as error:
        if not any(dimensions) or not error.facts.get("follows_batch"):
            raise
        fixed = _one_input(traced)
        batch = batch_of((tuple(fixed), {}))
        example = [fixed[i] for i in positions]
        model = _to_onnx(traced, module, example, None, opset)
        what = f"`{error.facts['op']}` has an attribute that follows it" if error.facts["op"] else error.found
        text = (
            f"the ONNX graphs take a batch of {batch}: with any number of inputs they cannot be written, since {what}"
        )
        finding = Finding("static-batch-export", text, error.where)
        return _Translated(model, tuple({} for _ in dimensions), example, batch, (finding,))


def _one_input(traced: TracedModel) -> list[Any]:
    """The leaves of one input, or of as many as the example has where the trace does not cover one."""
    try:
        return traced.flatten(resampled(traced.subject.arguments, 0, 1))
    except DataError:
        return traced.flatten(traced.subject.arguments)


def _to_onnx(
    traced: TracedModel, module: GraphModule, leaves: Sequence[Tensor], dimensions: Dimensions | None, opset: int
) -> ir.Model:
    with exact_numerics(), quiet_torch():
        model = to_onnx(traced, module, leaves, dimensions, opset)
        tidy(model, set(module.state_dict()))
    return model


def _folded_model(traced: TracedModel, folding: Folding, cut: _Translated, opset: int) -> ir.Model:
    is_fixed = bool(cut.findings)
    return _to_onnx(traced, folding.module, cut.leaves, None if is_fixed else cut.dimensions, opset)

"""A frozen model as ONNX files: live, bound and baked, all derived from one export.

Each coefficient is cut by a *barrier* in the traced graph: a custom op that the exporter turns into a custom ONNX op,
so that no pass can merge, fold or remove what stands before and after it. Only when every pass is done are the barriers
taken out (live, tapped), or replaced by inputs (bound) or constants (baked). The graphs then share their node names,
and what a controller costs is the set difference between them.

Shared sub-expressions are left apart and parameters as they are: the ONNX graph does what the torch graph does.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes import common as passes
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fxaudit import ops
from fxaudit.controllers.controller import Coefficient
from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.errors import DataError, ExportError, SelfCheckError
from fxaudit.execution.baking import bake, profile_factors
from fxaudit.execution.proof import scope_path
from fxaudit.execution.translation import BATCH, DOMAIN, barrier_op, tidy, to_onnx
from fxaudit.model.settings import exact_numerics, quiet_torch
from fxaudit.model.trace import restore_state

# Larger weights go to a file of their own: a protobuf message ends at 2 GiB.
_INLINE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class RemovedNode:
    """A node of the live graph that the bound graph lacks."""

    name: str
    op: str
    module: str


@dataclass(frozen=True, slots=True)
class RemovedParameter:
    """A parameter or buffer of the live graph that the bound graph lacks; `elements` is its size."""

    name: str
    elements: int
    module: str


@dataclass(frozen=True, slots=True)
class ExportedGraphs:
    """The files of one export, and how their inputs and outputs relate to the model's.

    `live`, `bound` and `baked` take the model's own inputs, bound also the coefficients; `tapped` is live with the
    coefficients as further outputs. `input_positions` and `output_positions` say which flat leaf of the model each
    input and output is. `coefficient_names` maps keys to ONNX names; `idle` are the keys of coefficients that nothing
    reads once all are frozen, which bound therefore does not take. `expanded` are the keys whose profile had to be
    expanded to the size of the input before use; `batch` names the dynamic input axis, None when the size is fixed.
    """

    live: Path
    tapped: Path
    bound: Path
    baked: Path | None
    profile: Mapping[str, Tensor] | None
    input_names: tuple[str, ...]
    input_positions: tuple[int, ...]
    output_names: tuple[str, ...]
    output_positions: tuple[int, ...]
    coefficient_names: Mapping[str, str]
    idle: tuple[str, ...]
    expanded: tuple[str, ...]
    batch: str | None
    live_nodes: int
    removed_nodes: tuple[RemovedNode, ...]
    removed_parameters: tuple[RemovedParameter, ...]
    seconds: float

    @property
    def removed_by_module(self) -> list[dict[str, Any]]:
        """``module``, ``nodes`` and ``parameters`` (elements) that live has and bound has not, module by module."""
        nodes = Counter(node.module for node in self.removed_nodes)
        parameters: Counter[str] = Counter()
        for parameter in self.removed_parameters:
            parameters[parameter.module] += parameter.elements
        return [
            {"module": module, "nodes": nodes[module], "parameters": parameters[module]}
            for module in sorted({*nodes, *parameters})
        ]

    @property
    def bound_inputs(self) -> dict[str, str]:
        """The ONNX input of each coefficient that bound takes, by key."""
        return {key: name for key, name in self.coefficient_names.items() if key not in self.idle}


def export_graphs(frozen: FrozenModel, directory: Path, profile: Mapping[str, Tensor] | None = None) -> ExportedGraphs:
    """`frozen` as ``live.onnx``, ``tapped.onnx``, ``bound.onnx`` and, with `profile`, ``baked.onnx`` in `directory`.

    Args:
        profile: by coefficient key, a tensor in the coefficient's own dimension order, of size 1 along sample axes and
            of size 1 or full along position axes.

    Raises:
        ExportError: torch or onnxscript cannot express the model in ONNX.
        DataError: the profile does not fit the coefficients.
        SelfCheckError: a coefficient was lost on the way.
    """
    started = time.perf_counter()
    traced = frozen.traced
    if profile is not None:
        _check_profile(profile, frozen.coefficients)
    leaves = list(traced.flatten(traced.subject.arguments))
    graph, positions, output_positions = _with_barriers(frozen)
    module = GraphModule(traced.graph_module, graph, class_name="Cut").eval()
    names = tuple(traced.input_names[i] for i in positions)
    output_names = _own_names([traced.output_names[i] for i in output_positions], names)
    buffers = dict(module.named_buffers())
    restore_state(module, {name: value for name, value in traced.initial_state.items() if name in buffers})
    with exact_numerics(), quiet_torch():
        model = to_onnx(traced, module, [leaves[i] for i in positions])
        tidy(model, set(module.state_dict()))
    taken = {*names, *output_names}
    coefficient_names: dict[str, str] = {}
    for coefficient in frozen.coefficients:
        coefficient_names[coefficient.key] = _safe_name(coefficient.key, taken)
        taken.add(coefficient_names[coefficient.key])
    _rename_ends(model, names, output_names, taken)
    is_dynamic = traced.is_batch_dynamic
    _check_ends(model, names, output_names, is_dynamic)

    directory.mkdir(parents=True, exist_ok=True)
    idle = _idle(frozen)
    live = _without_barriers(model)
    tapped = _without_barriers(model, taps=[coefficient_names[c.key] for c in frozen.coefficients])
    bound = _bound(model, frozen.coefficients, coefficient_names, idle)
    files = {"live": live, "tapped": tapped, "bound": bound}
    expanded: tuple[str, ...] = ()
    if profile is not None:
        files["baked"], expanded = _baked(model, frozen, coefficient_names, profile, idle)
    removed = _removed_nodes(live, bound)
    for name, graph_model in files.items():
        _save(graph_model, directory / f"{name}.onnx")
    return ExportedGraphs(
        live=directory / "live.onnx",
        tapped=directory / "tapped.onnx",
        bound=directory / "bound.onnx",
        baked=directory / "baked.onnx" if profile is not None else None,
        profile=profile,
        input_names=names,
        input_positions=positions,
        output_names=output_names,
        output_positions=output_positions,
        coefficient_names=coefficient_names,
        idle=idle,
        expanded=expanded,
        batch=BATCH if is_dynamic else None,
        live_nodes=len(live.graph),
        removed_nodes=removed,
        removed_parameters=_removed_parameters(live, bound, module),
        seconds=time.perf_counter() - started,
    )


# --- the cut graph --------------------------------------------------------------------------------------------------


def _with_barriers(frozen: FrozenModel) -> tuple[Graph, tuple[int, ...], tuple[int, ...]]:
    """A copy of the traced graph with a barrier after each coefficient, and the positions of the inputs and outputs
    that are tensors.

    Writes to buffers and inputs are left out: they are the last thing that a run does, and no run sees another's.
    """
    traced = frozen.traced
    graph = Graph()
    copied: dict[Node, Node] = {}
    found = graph.graph_copy(traced.graph, copied)
    outputs = list(found) if isinstance(found, tuple | list) else [found]
    output_positions = tuple(i for i, value in enumerate(outputs) if _is_tensor(value))
    graph.output(tuple(outputs[i] for i in output_positions))
    for node in list(graph.nodes):
        if ops.op_name(node) == "copy_" and not node.users:
            graph.erase_node(node)
    for i, coefficient in enumerate(frozen.coefficients):
        node = copied[coefficient.node]
        with graph.inserting_after(node):
            barrier = graph.call_function(barrier_op(), (node, i))
        barrier.meta = dict(node.meta)
        for user in [user for user in node.users if user is not barrier]:
            user.replace_input_with(node, barrier)
    positions = []
    for i, node in enumerate(n for n in list(graph.nodes) if n.op == "placeholder"):
        if _is_tensor(node):
            positions.append(i)
        elif not node.users:
            graph.erase_node(node)
        else:
            raise ExportError(
                f"input `{node.name}` is not a tensor",
                where=node.name,
                expected="tensors as inputs of an ONNX graph",
                found=str(node.meta.get("val")),
                remedy="fix the value inside the model",
            )
    return graph, tuple(positions), output_positions


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Node) and isinstance(value.meta.get("val"), Tensor)


def _idle(frozen: FrozenModel) -> tuple[str, ...]:
    """The keys of coefficients that nothing reads in the frozen graph: they act only inside another controller."""
    bound = [n for n in frozen.frozen.graph.nodes if n.op == "placeholder"][len(frozen.traced.input_names) :]
    return tuple(c.key for c, node in zip(frozen.coefficients, bound, strict=True) if not node.users)


# --- names ---------------------------------------------------------------------------------------------------------


def _safe_name(key: str, taken: Collection[str]) -> str:
    base = re.sub(r"[^A-Za-z0-9_.]+", "_", key).strip("_")
    return next(n for n in (base, *(f"{base}_{i}" for i in range(2, len(taken) + 3))) if n not in taken)


def _own_names(outputs: Sequence[str], inputs: Sequence[str]) -> tuple[str, ...]:
    """Output names, with ``_output`` after one that an input or an earlier output has: ONNX names are unique."""
    names: list[str] = []
    for name in outputs:
        while name in inputs or name in names:
            name = f"{name}_output"
        names.append(name)
    return tuple(names)


def _rename_ends(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str], reserved: Collection[str]) -> None:
    """Give inputs and outputs the model's own names; any other value that has a reserved name yields it."""
    ends = [*model.graph.inputs, *model.graph.outputs]
    values = [*ends, *(v for node in ir.traversal.RecursiveGraphIterator(model.graph) for v in node.outputs)]
    known = {value.name for value in [*values, *model.graph.initializers.values()]}
    for value in values:
        if value.name in reserved:
            value.name = _safe_name(f"{value.name}_inner", {str(n) for n in (*known, *reserved)})
            known.add(value.name)
    for name in [name for name in model.graph.initializers if name in reserved]:
        value = model.graph.initializers[name]
        value.name = _safe_name(f"{name}_constant", {str(n) for n in (*known, *reserved)})
        known.add(value.name)
    for value, name in zip(ends, [*inputs, *outputs], strict=False):
        value.name = name


def _check_ends(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str], dynamic: bool) -> None:
    found = [v.name for v in model.graph.inputs], [v.name for v in model.graph.outputs]
    if found != (list(inputs), list(outputs)):
        raise SelfCheckError(
            "the exported graph has other inputs or outputs than the model",
            expected=f"{list(inputs)} -> {list(outputs)}",
            found=f"{found[0]} -> {found[1]}",
            remedy="report this model",
        )
    axes = {str(v.shape[0]) for v in model.graph.inputs if v.shape is not None and len(v.shape)}
    if dynamic and BATCH not in axes:
        raise SelfCheckError(
            "the exported graph takes only one number of inputs, although the trace takes any",
            expected=f"an input axis `{BATCH}`",
            found=", ".join(sorted(axes)),
            remedy="report this model",
        )


# --- derived graphs -------------------------------------------------------------------------------------------------


def _barriers(model: ir.Model, coefficients: Sequence[Coefficient]) -> list[ir.Node]:
    """The barrier of each coefficient, in order.

    Raises:
        SelfCheckError: one is missing or there twice.
    """
    found: dict[int, list[ir.Node]] = {i: [] for i in range(len(coefficients))}
    for node in model.graph:
        if node.domain == DOMAIN:
            found[node.attributes["index"].as_int()].append(node)
    for i, nodes in found.items():
        if len(nodes) != 1:
            raise SelfCheckError(
                f"the export lost the cut at `{coefficients[i].key}`",
                where=ops.source_line(coefficients[i].node),
                expected="one barrier",
                found=f"{len(nodes)}",
                remedy="report this model",
            )
    return [nodes[0] for nodes in found.values()]


def _replace_barrier(model: ir.Model, barrier: ir.Node, value: ir.Value) -> None:
    """Let everything that reads a barrier read `value`; a barrier that is itself an output becomes an identity."""
    output = barrier.outputs[0]
    if output.is_graph_output():
        identity = ir.node("Identity", [value], outputs=[ir.Value(type=output.type, shape=output.shape)])
        identity.name = barrier.name
        identity.metadata_props.update(barrier.metadata_props)
        model.graph.insert_before(barrier, identity)
        name = output.name
        output.name = f"{name}_barrier"
        ir.convenience.replace_all_uses_with(output, identity.outputs[0], replace_graph_outputs=True)
        identity.outputs[0].name = name
    else:
        ir.convenience.replace_all_uses_with(output, value)
    model.graph.remove(barrier, safe=True)


def _without_barriers(model: ir.Model, taps: Sequence[str] = ()) -> ir.Model:
    """Live: every reader of a barrier reads what the barrier read; each name in `taps` becomes a further output."""
    derived = model.clone()
    tapped: dict[int, ir.Value] = {}
    for barrier in [node for node in derived.graph if node.domain == DOMAIN]:
        source = barrier.inputs[0]
        assert source is not None
        if taps:
            index = barrier.attributes["index"].as_int()
            value = ir.Value(name=taps[index], type=source.type, shape=source.shape)
            tap = ir.node("Identity", [source], outputs=[value], name=f"tap/{value.name}")
            derived.graph.insert_before(barrier, tap)
            tapped[index] = tap.outputs[0]
        _replace_barrier(derived, barrier, source)
    derived.graph.outputs.extend(tapped[i] for i in sorted(tapped))
    return _cleaned(derived)


def _bound(
    model: ir.Model, coefficients: Sequence[Coefficient], names: Mapping[str, str], idle: Collection[str]
) -> ir.Model:
    """Bound: every barrier is an input, and what only led to it is gone."""
    derived = model.clone()
    for coefficient, barrier in zip(coefficients, _barriers(derived, coefficients), strict=True):
        output = barrier.outputs[0]
        value = ir.Value(name=names[coefficient.key], type=output.type, shape=output.shape)
        if coefficient.key not in idle:
            derived.graph.inputs.append(value)
        else:
            # Read only by nodes that die with another coefficient; those are removed below, and the value with them.
            value.const_value = ir.tensor(0, dtype=output.dtype, name=value.name)
            derived.graph.register_initializer(value)
        _replace_barrier(derived, barrier, value)
    _cleaned(derived)
    used = {coefficient.key for coefficient in coefficients if coefficient.key not in idle}
    for value in derived.graph.inputs[len(model.graph.inputs) :]:
        if not value.uses():
            raise SelfCheckError(
                f"nothing in bound.onnx reads the coefficient `{value.name}`",
                expected=f"readers of each of {len(used)} coefficients",
                found="none",
                remedy="report this model",
            )
    if left := [names[key] for key in idle if names[key] in derived.graph.initializers]:
        raise SelfCheckError(
            f"`{left[0]}` is read in bound.onnx, but not in the frozen torch graph",
            expected="no reader",
            found="a reader",
            remedy="report this model",
        )
    return derived


def _baked(
    model: ir.Model,
    frozen: FrozenModel,
    names: Mapping[str, str],
    profile: Mapping[str, Tensor],
    idle: Collection[str],
) -> tuple[ir.Model, tuple[str, ...]]:
    """Baked: every barrier is a constant, and the keys of those that are expanded to the size of the input."""
    derived = model.clone()
    expanded = []
    for coefficient, barrier in zip(frozen.coefficients, _barriers(derived, frozen.coefficients), strict=True):
        value, remaining = bake(
            derived, barrier, coefficient, names[coefficient.key], profile[coefficient.key], frozen.traced.sample
        )
        _replace_barrier(derived, barrier, value)
        if remaining and coefficient.key not in idle:
            expanded.append(coefficient.key)
    return _cleaned(derived), tuple(expanded)


def _check_profile(profile: Mapping[str, Tensor], coefficients: Sequence[Coefficient]) -> None:
    known = {coefficient.key for coefficient in coefficients}
    if set(profile) != known:
        missing, unknown = sorted(known - set(profile)), sorted(set(profile) - known)
        raise DataError(
            "the profile is not one of this model",
            expected=f"{len(known)} keys, one for each coefficient",
            found=f"missing {missing[:3] or 'none'}; unknown {unknown[:3] or 'none'}",
            remedy="make the profile from coefficients recorded with this model",
        )
    for coefficient in coefficients:
        profile_factors(profile[coefficient.key], coefficient)


def _cleaned(model: ir.Model) -> ir.Model:
    passes.RemoveUnusedNodesPass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    return model


# --- differences and files ------------------------------------------------------------------------------------------


def _removed_nodes(live: ir.Model, bound: ir.Model) -> tuple[RemovedNode, ...]:
    kept = {node.name for node in bound.graph}
    known = {node.name for node in live.graph}
    if added := kept - known:
        raise SelfCheckError(
            "bound.onnx has nodes that live.onnx has not",
            expected="a subset of the live nodes",
            found=", ".join(sorted(map(str, added))[:3]),
            remedy="report this model",
        )
    return tuple(
        RemovedNode(str(node.name), node.op_type, scope_path(node.metadata_props.get("pkg.torch.onnx.name_scopes", "")))
        for node in live.graph
        if node.name not in kept
    )


def _removed_parameters(live: ir.Model, bound: ir.Model, module: GraphModule) -> tuple[RemovedParameter, ...]:
    """The tensors of the torch module among the initializers that only live holds."""
    owned = module.state_dict()
    names = [name for name in live.graph.initializers if name in owned and name not in bound.graph.initializers]
    return tuple(RemovedParameter(name, owned[name].numel(), name.rpartition(".")[0]) for name in names)


def _save(model: ir.Model, path: Path) -> None:
    """Write a model and check what was written.

    Raises:
        ExportError: the file is not a valid ONNX model.
    """
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    data = f"{path.name}.data" if size > _INLINE_BYTES else None
    ir.save(model, path, external_data=data)
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise ExportError(
            f"{path.name} is not a valid ONNX model",
            where=str(path),
            expected="a model that onnx.checker accepts",
            found=str(error).splitlines()[0],
            remedy="report this model",
        ) from error

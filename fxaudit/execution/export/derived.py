"""Live, tapped, bound and baked graphs, made from one ONNX graph with barriers by edits alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir
from onnx_ir.passes import common as passes
from torch import Tensor
from torch.fx import GraphModule

from fxaudit import ops
from fxaudit.axes import Size
from fxaudit.controllers.controller import Coefficient
from fxaudit.controllers.rewrite import FrozenModel, concrete_shape
from fxaudit.errors import DataError, SelfCheckError
from fxaudit.execution.baking import bake, profile_factors
from fxaudit.execution.export.exported import RemovedNode, RemovedParameter
from fxaudit.execution.proof import scope_path
from fxaudit.execution.translation import DOMAIN


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


def without_barriers(model: ir.Model, taps: Sequence[str] = ()) -> ir.Model:
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


def bound_graph(
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


def baked_graph(
    model: ir.Model,
    frozen: FrozenModel,
    names: Mapping[str, str],
    profile: Mapping[str, Tensor],
    idle: Collection[str],
    batch: int | None,
) -> tuple[ir.Model, tuple[str, ...]]:
    """Baked: every barrier is a constant, and the keys of those that are expanded to the size of the input.

    `batch` is the number of inputs that `model` takes, None where it takes any.
    """
    derived = model.clone()
    expanded = []
    sample = frozen.traced.sample
    for coefficient, barrier in zip(frozen.coefficients, _barriers(derived, frozen.coefficients), strict=True):
        sized = coefficient if batch is None else _at_batch(coefficient, sample, batch)
        value, remaining = bake(derived, barrier, sized, names[coefficient.key], profile[coefficient.key], sample)
        _replace_barrier(derived, barrier, value)
        if remaining and coefficient.key not in idle:
            expanded.append(coefficient.key)
    return _cleaned(derived), tuple(expanded)


def _at_batch(coefficient: Coefficient, sample: Size | None, batch: int) -> Coefficient:
    """A coefficient of a graph that takes `batch` inputs."""
    sizes = zip(coefficient.sizes, concrete_shape(list(coefficient.sizes.values()), sample, batch), strict=True)
    return replace(coefficient, sizes=dict(sizes))


def check_profile(profile: Mapping[str, Tensor], coefficients: Sequence[Coefficient]) -> None:
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


# --- differences ----------------------------------------------------------------------------------------------------


def removed_nodes(live: ir.Model, bound: ir.Model) -> tuple[RemovedNode, ...]:
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


def removed_parameters(live: ir.Model, bound: ir.Model, module: GraphModule) -> tuple[RemovedParameter, ...]:
    """The tensors of the torch module among the initializers that only live holds."""
    owned = module.state_dict()
    names = [name for name in live.graph.initializers if name in owned and name not in bound.graph.initializers]
    return tuple(
        RemovedParameter(name, owned[name].numel(), owned[name].nbytes, name.rpartition(".")[0]) for name in names
    )

"""The frozen torch graph with coefficients as inputs (bound) or as constants (baked), as modules and as .pt2 files."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxaudit import ops
from fxaudit.axes import Size, divide
from fxaudit.controllers.controller import Coefficient
from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.errors import ExportError
from fxaudit.execution.baking import coefficient_sizes, profile_factors, size_product
from fxaudit.execution.export.cut import PureGraph, module_of, pure_graph
from fxaudit.execution.translation import dynamic_axes
from fxaudit.model.settings import exact_numerics, quiet_torch

_BROADCASTING = frozenset(["add", "sub", "mul", "div"])


def live_module(frozen: FrozenModel) -> GraphModule:
    """The traced graph as a function of the model's own tensor inputs."""
    return module_of(frozen, pure_graph(frozen.traced.graph).graph, frozen.traced.graph_module, "Live")


def bound_module(frozen: FrozenModel, names: Mapping[str, str]) -> GraphModule:
    """The frozen graph as a function of the model's own tensor inputs, then of each coefficient that something reads.

    Args:
        names: by coefficient key, the name of its argument.
    """
    pure, arguments = _frozen_graph(frozen)
    taken = {node.name for node in pure.graph.nodes if node not in arguments.values()}
    for key, argument in arguments.items():
        argument._rename(identifier(names[key], taken))
        argument.target = argument.name
        taken.add(argument.name)
    return module_of(frozen, pure.graph, frozen.frozen, "Bound")


def baked_module(
    frozen: FrozenModel, profile: Mapping[str, Tensor], names: Mapping[str, str]
) -> tuple[GraphModule, dict[str, str]]:
    """The frozen graph with `profile` as buffers, broadcast where their readers broadcast, otherwise expanded; and the
    key of each buffer.

    Raises:
        ExportError: the expanded size cannot be computed from the size of the input.
        DataError: the profile does not fit.
    """
    pure, arguments = _frozen_graph(frozen)
    graph = pure.graph
    module = module_of(frozen, graph, frozen.frozen, "Baked")
    own = [n for n in graph.nodes if n.op == "placeholder" and n not in arguments.values()]
    taken = {*(node.name for node in graph.nodes), *(name for name, _ in module.named_modules())}
    buffers: dict[str, str] = {}
    for coefficient in frozen.coefficients:
        argument = arguments.get(coefficient.key)
        if argument is None:
            continue
        name = identifier(names[coefficient.key], taken)
        taken.add(name)
        buffers[name] = coefficient.key
        module.register_buffer(name, profile[coefficient.key].detach().clone())
        with graph.inserting_before(argument):
            constant = graph.get_attr(name)
            constant.meta["val"] = profile[coefficient.key]
            _place(argument, constant, coefficient, frozen.traced.sample, own)
        graph.erase_node(argument)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    return module, buffers


def _frozen_graph(frozen: FrozenModel) -> tuple[PureGraph, dict[str, Node]]:
    """The frozen graph without side effects, and the placeholder of each coefficient that something reads, by key."""
    source = frozen.frozen.graph
    bound = [n for n in source.nodes if n.op == "placeholder"][len(frozen.traced.input_names) :]
    pure = pure_graph(source, keep=bound)
    left = set(pure.graph.nodes)
    copies = zip(frozen.coefficients, (pure.copied[node] for node in bound), strict=True)
    return pure, {coefficient.key: node for coefficient, node in copies if node in left}


def identifier(name: str, taken: Sequence[str] | set[str]) -> str:
    """`name` as a Python identifier that is not taken."""
    base = re.sub(r"\W+", "_", name)
    base = base if base[:1].isalpha() or base[:1] == "_" else f"_{base}"
    return next(n for n in (base, *(f"{base}_{i}" for i in range(2, len(taken) + 3))) if n not in taken)


def _place(argument: Node, constant: Node, coefficient: Coefficient, sample: Size | None, own: Sequence[Node]) -> None:
    """Let the readers of `argument` read `constant`, those that do not broadcast an expanded one."""
    factors = profile_factors(constant.meta["val"], coefficient)
    if tuple(constant.meta["val"].shape) == tuple(coefficient.shape):
        argument.replace_all_uses_with(constant)
        return
    for user in list(argument.users):
        if _broadcasts(user, argument):
            user.replace_input_with(argument, constant)
    if argument.users:
        argument.replace_all_uses_with(_expanded(constant, factors, coefficient, sample, own))


def _broadcasts(user: Node, argument: Node) -> bool:
    """Whether a node broadcasts `argument` to a size that its other operand has already."""
    if user.op != "call_function" or ops.op_name(user) not in _BROADCASTING or user.all_input_nodes.count(argument) > 1:
        return False
    others = [arg for arg in user.args if arg is not argument]
    if len(others) != 1 or not isinstance(others[0], Node):
        return False
    sizes = ops.sizes(others[0])
    return sizes is not None and sizes == ops.sizes(user)


def _expanded(
    constant: Node,
    factors: Sequence[tuple[int, ...]],
    coefficient: Coefficient,
    sample: Size | None,
    own: Sequence[Node],
) -> Node:
    graph = constant.graph
    full = [coefficient_sizes(coefficient, axis) for axis in coefficient.axes]
    batch: list[Node] = []

    def concrete(size: Size) -> Any:
        if isinstance(size, int):
            return size
        factor = divide(size, sample) if sample is not None else None
        source = next(((n, i) for n in own for i, s in enumerate(ops.sizes(n) or ()) if s == sample), None)
        if not isinstance(factor, int) or source is None:
            raise ExportError(
                f"a static profile cannot be expanded to the size {size}",
                where=coefficient.key,
                expected=f"a multiple of the number of inputs, {sample}",
                found=str(size),
                remedy="export without a profile: the live and bound graphs do not need this size",
            )
        if not batch:
            batch.append(graph.call_function(torch.ops.aten.sym_size.int, source))
            batch[0].meta["val"] = source[0].meta["val"].shape[source[1]]
        if factor == 1:
            return batch[0]
        product = graph.call_function(operator.mul, (batch[0], factor))
        product.meta["val"] = batch[0].meta["val"] * factor
        return product

    def call(op: Callable[..., Any], value: Node, sizes: Sequence[Any]) -> Node:
        return graph.call_function(op, (value, list(sizes)))

    apart = [size for axis in factors for size in axis]
    value = call(torch.ops.aten.view.default, constant, apart)
    value = call(torch.ops.aten.expand.default, value, [concrete(size) for axis in full for size in axis])
    return call(torch.ops.aten.reshape.default, value, [concrete(size_product(axis)) for axis in full])


# --- files ----------------------------------------------------------------------------------------------------------


def save_program(module: GraphModule, leaves: Sequence[Tensor], path: Path) -> None:
    """Write a module as an exported program, every axis that its graph leaves open dynamic.

    Raises:
        ExportError: torch cannot export it, or its ops cannot be saved.
    """
    try:
        with exact_numerics(), quiet_torch():
            program = torch.export.export(module, tuple(leaves), dynamic_shapes=dynamic_axes(module), strict=False)
            _admit_single_inputs(program)
            torch.export.save(program, path)
    except Exception as error:
        raise ExportError(
            f"{path.name} could not be written",
            where=str(path),
            expected=f"a graph that torch {torch.__version__} exports and saves",
            found=next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__),
            remedy="the ONNX graphs do not need it",
        ) from error


def _admit_single_inputs(program: torch.export.ExportedProgram) -> None:
    """Let an axis whose size is a multiple of the number of inputs be that of one input: torch.export takes every
    symbol for at least 2 and checks the multiple, though not the symbol itself."""
    for size, bounds in list(program.range_constraints.items()):
        if not size.is_Symbol:
            program.range_constraints[size] = type(bounds)(0, bounds.upper)

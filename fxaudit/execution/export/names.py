"""The names of inputs, outputs, coefficients and dynamic axes in an ONNX graph."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir
import sympy
from torch.fx import Node

from fxaudit import ops
from fxaudit.axes import Size
from fxaudit.errors import SelfCheckError
from fxaudit.execution.translation import BATCH, SEQUENCE


def safe_name(key: str, taken: Collection[str]) -> str:
    """`key` in the characters that every runtime takes, with a number behind it where that name is taken."""
    base = re.sub(r"[^A-Za-z0-9_.]+", "_", key).strip("_")
    return next(n for n in (base, *(f"{base}_{i}" for i in range(2, len(taken) + 3))) if n not in taken)


def own_names(outputs: Sequence[str], inputs: Sequence[str]) -> tuple[str, ...]:
    """Output names, with ``_output`` after one that an input or an earlier output has: ONNX names are unique."""
    names: list[str] = []
    for name in outputs:
        while name in inputs or name in names:
            name = f"{name}_output"
        names.append(name)
    return tuple(names)


def dimension_names(placeholders: Sequence[Node], sample: Size | None) -> tuple[dict[int, str], ...]:
    """The names of the dynamic axes of each placeholder, by place; an axis whose size is computed has no name.

    The input axis is ``batch``, other symbols are ``sequence``, ``sequence_2`` and so on (``batch_2`` for the first
    axis of an input that shares its size with no other).
    """
    names: dict[sympy.Symbol, str] = {sample: BATCH} if isinstance(sample, sympy.Symbol) else {}
    found = []
    for node in placeholders:
        axes: dict[int, str] = {}
        for axis, size in enumerate(ops.sizes(node) or ()):
            if not isinstance(size, sympy.Symbol):
                continue
            if size not in names:
                base = BATCH if axis == 0 else SEQUENCE
                names[size] = safe_name(base, set(names.values()))
            axes[axis] = names[size]
        found.append(axes)
    return tuple(found)


def rename_ends(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str], reserved: Collection[str]) -> None:
    """Give inputs and outputs the model's own names; any other value that has a reserved name yields it."""
    ends = [*model.graph.inputs, *model.graph.outputs]
    values = [*ends, *(v for node in ir.traversal.RecursiveGraphIterator(model.graph) for v in node.outputs)]
    known = {value.name for value in [*values, *model.graph.initializers.values()]}
    for value in values:
        if value.name in reserved:
            value.name = safe_name(f"{value.name}_inner", {str(n) for n in (*known, *reserved)})
            known.add(value.name)
    for name in [name for name in model.graph.initializers if name in reserved]:
        value = model.graph.initializers[name]
        value.name = safe_name(f"{name}_constant", {str(n) for n in (*known, *reserved)})
        known.add(value.name)
    for value, name in zip(ends, [*inputs, *outputs], strict=False):
        value.name = name


def check_ends(
    model: ir.Model, inputs: Sequence[str], outputs: Sequence[str], dimensions: Sequence[Mapping[int, str]]
) -> None:
    """Raise unless a graph has these inputs and outputs, and these dynamic axes.

    Raises:
        SelfCheckError: with what it has instead.
    """
    found = [v.name for v in model.graph.inputs], [v.name for v in model.graph.outputs]
    if found != (list(inputs), list(outputs)):
        raise SelfCheckError(
            "the exported graph has other inputs or outputs than the model",
            expected=f"{list(inputs)} -> {list(outputs)}",
            found=f"{found[0]} -> {found[1]}",
            remedy="report this model",
        )
    for value, axes in zip(model.graph.inputs, dimensions, strict=True):
        sizes = [str(size) for size in value.shape or ()]
        if any(sizes[axis] != name for axis, name in axes.items()):
            raise SelfCheckError(
                f"the exported graph fixes a size of input `{value.name}` that the trace leaves open",
                expected=", ".join(f"axis {axis} `{name}`" for axis, name in axes.items()),
                found=f"[{', '.join(sizes)}]",
                remedy="report this model",
            )

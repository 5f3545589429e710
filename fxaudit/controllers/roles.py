"""What each axis of each tensor in a graph holds, followed from the inputs through views, contractions and stacks.

An axis holds *samples* (the inputs of a batch), *positions* (tokens, pixels), a *window* (positions near another, as an
unfolding lays them out), *units* (what a learned op, a stack of tensors or a parameter makes), or a product of these,
as a router's rows hold samples and positions. The size of an axis does not tell: six heads and six tokens are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch.fx import Node

from fxaudit import ops
from fxaudit.axes import Size, divide, same_size
from fxaudit.controllers.graphs import Dataflow

SAMPLE, POSITION, WINDOW, UNIT = "sample", "position", "window", "unit"

_REGROUPED = frozenset("view reshape flatten unflatten squeeze unsqueeze view_as reshape_as".split())
_CONVOLUTIONS = frozenset("conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d".split())
_PRODUCTS = frozenset("matmul mm bmm baddbmm addmm".split())
_TRANSPOSED = frozenset("transpose swapaxes swapdims t".split())


@dataclass(frozen=True, slots=True)
class Factor:
    """A size, and what it counts; an axis is a product of factors, the outermost first."""

    size: Size
    holds: frozenset[str]


Axis: TypeAlias = tuple[Factor, ...]


class AxisRoles:
    """The axes of every tensor of one graph."""

    def __init__(self, dataflow: Dataflow) -> None:
        self._dataflow = dataflow
        self._axes: dict[Node, tuple[Axis, ...]] = {}
        for node in dataflow.nodes:
            sizes = ops.sizes(node)
            if sizes is None:
                continue
            found = self._of(node, sizes)
            # An op whose axes are not told apart here: of equal rank, each axis holds what the first operand's does.
            self._axes[node] = found if len(found) == len(sizes) else self._elementwise(node, sizes)

    def axes(self, node: Node) -> tuple[Axis, ...]:
        """The factors of each axis of a tensor, those of size 1 left out; empty for what is not one tensor."""
        return self._axes.get(node, ())

    def holds(self, node: Node, dim: int) -> frozenset[str]:
        """What an axis of a tensor holds; nothing where that is unknown, or the axis has one element."""
        axes = self._axes.get(node, ())
        return _held(axes[dim]) if -len(axes) <= dim < len(axes) else frozenset()

    def is_spread(self, node: Node, dim: int) -> bool:
        """Whether an axis runs over positions, or over a window of them, and over nothing that was learned."""
        held = self.holds(node, dim)
        return bool(held & {POSITION, WINDOW}) and UNIT not in held

    def _of(self, node: Node, sizes: tuple[Size, ...]) -> tuple[Axis, ...]:
        if node.op == "placeholder":
            return _of_input(node, sizes)
        if node.op == "get_attr":
            return tuple(_axis(size, UNIT) for size in sizes)
        name, operands = ops.op_name(node), self._dataflow.operands(node)
        if not operands:
            return tuple(_axis(size) for size in sizes)
        given = ops.attributes(node)
        axes = self._axes.get(operands[0], ())
        if name in _REGROUPED:
            return _regrouped(axes, sizes)
        if name == "permute" and axes:
            return tuple(axes[dim] for dim in given["dims"])
        if name in _TRANSPOSED and axes:
            return _swapped(axes, given.get("dim0", given.get("axis0", -1)), given.get("dim1", given.get("axis1", -2)))
        if name in ("linear", "embedding"):
            kept = axes[:-1] if name == "linear" else self.axes(operands[-1])
            return (*_resized(kept, sizes[: len(kept)]), _axis(sizes[-1], UNIT))
        if name == "index":
            return self._indexed(node, axes)
        if name in _CONVOLUTIONS and len(sizes) > 2:
            spatial = tuple(_axis(size, POSITION) for size in sizes[2:])
            return (*_resized(axes[:1], sizes[:1]), _axis(sizes[1], UNIT), *spatial)
        if name in _PRODUCTS:
            return self._product(operands[-2:], sizes)
        if name == "einsum":
            return self._einsum(str(given["equation"]), operands, sizes)
        if name in ("cat", "stack"):
            return self._joined(name, operands, int(given.get("dim") or 0), sizes)
        if name == "unfold" and axes:
            dim = int(given["dimension"]) % len(axes)
            return (*_resized(axes, sizes[:-1]), _axis(sizes[-1], *_windowed(_held(axes[dim]))))
        if name == "im2col" and axes:
            window = divide(sizes[1], _size(axes[1]))
            inner = axes[1] if window is None else (*axes[1], Factor(window, frozenset([WINDOW])))
            return (*axes[:1], inner, _axis(sizes[2], POSITION))
        return self._dropped(node, axes, sizes)

    def _indexed(self, node: Node, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """The axes of one index tensor in the place of the axis that it selects from."""
        chosen = [(dim, ids) for dim, ids in enumerate(node.args[1]) if isinstance(ids, Node)]  # type: ignore[arg-type]
        if len(chosen) != 1:
            return ()
        dim, ids = chosen[0]
        return (*axes[:dim], *self.axes(ids), *axes[dim + 1 :])

    def _dropped(self, node: Node, axes: tuple[Axis, ...], sizes: tuple[Size, ...]) -> tuple[Axis, ...]:
        """What a reduction, a selection or one piece of a split leaves of its operand's axes."""
        source = node
        if ops.op_name(node) == "getitem":
            source = next(iter(self._dataflow.operands(node)), node)
            whole = self._dataflow.operands(source)[:1] if source.op == "call_function" else []
            axes = self._axes.get(whole[0], ()) if whole else ()
        if len(sizes) >= len(axes):
            return _resized(axes, sizes) if source is not node else ()
        given = ops.attributes(source)
        dims = given.get("dim", given.get("dims"))
        chosen = [dims] if isinstance(dims, int) else list(dims or [])
        gone = {dim % len(axes) for dim in chosen if isinstance(dim, int)}
        return _resized(tuple(axis for dim, axis in enumerate(axes) if dim not in gone), sizes)

    def _elementwise(self, node: Node, sizes: tuple[Size, ...]) -> tuple[Axis, ...]:
        """The axes of operands broadcast against each other, those of computed ones before those of parameters."""
        operands = sorted(self._dataflow.operands(node), key=lambda n: not self._dataflow.is_dynamic(n))
        found = []
        for back in range(len(sizes), 0, -1):
            size = sizes[-back]
            aligned = [axes[-back] for n in operands if len(axes := self.axes(n)) >= back]
            held = [axis for axis in aligned if _held(axis)]
            fitting = [axis for axis in held if same_size(_size(axis), size)]
            found.append(_resized((fitting or held)[:1], (size,))[0] if held else _axis(size))
        return tuple(found)

    def _product(self, operands: Sequence[Node], sizes: tuple[Size, ...]) -> tuple[Axis, ...]:
        left, right = (self.axes(node) for node in operands) if len(operands) == 2 else ((), ())
        if len(left) < 2 or len(right) < 2 or len(sizes) < 2:
            return ()
        is_learned = not self._dataflow.is_dynamic(operands[1])
        column = _axis(sizes[-1], UNIT) if is_learned else _resized(right[-1:], sizes[-1:])[0]
        row = _resized(left[-2:-1], sizes[-2:-1])[0]
        batch = []
        for back in range(len(sizes), 2, -1):
            both = [axes[-back] for axes in (left, right) if len(axes) >= back and _held(axes[-back])]
            batch.append(_resized(both[:1], (sizes[-back],))[0] if both else _axis(sizes[-back]))
        return (*batch, row, column)

    def _einsum(self, equation: str, operands: Sequence[Node], sizes: tuple[Size, ...]) -> tuple[Axis, ...]:
        terms, arrow, result = equation.replace(" ", "").partition("->")
        if not arrow or "." in equation or len(result) != len(sizes):
            return ()
        known: dict[str, Axis] = {}
        pairs = list(zip(terms.split(","), operands, strict=False))
        for letters, operand in sorted(pairs, key=lambda pair: not self._dataflow.is_dynamic(pair[1])):
            for letter, axis in zip(letters, self.axes(operand), strict=False):
                if _held(axis):
                    known.setdefault(letter, axis)
        return tuple(known.get(letter, _axis(size)) for letter, size in zip(result, sizes, strict=True))

    def _joined(self, name: str, operands: Sequence[Node], dim: int, sizes: tuple[Size, ...]) -> tuple[Axis, ...]:
        dim %= len(sizes)
        first = next((n for n in operands if self._dataflow.is_dynamic(n)), operands[0])
        axes = list(self.axes(first))
        if name == "stack":
            axes.insert(dim, _axis(sizes[dim], UNIT))
        elif len(axes) == len(sizes):
            held = frozenset().union(*(self.holds(n, dim) for n in operands))
            # Single tensors joined along an axis of their own are stacked.
            axes[dim] = (Factor(sizes[dim], held or frozenset([UNIT])),)
        return _resized(tuple(axes), sizes) if len(axes) == len(sizes) else ()


def _of_input(node: Node, sizes: tuple[Size, ...]) -> tuple[Axis, ...]:
    dtype = ops.dtype(node)
    is_float = dtype is not None and dtype.is_floating_point
    rest: tuple[str, ...]
    match len(sizes):
        case 0 | 1:
            rest = ()
        case 2:
            rest = (UNIT,) if is_float else (POSITION,)
        case 3:
            rest = (POSITION, UNIT)
        case n:
            rest = (UNIT, *[POSITION] * (n - 2))
    return tuple(_axis(size, held) for size, held in zip(sizes, (SAMPLE, *rest), strict=False))


def _axis(size: Size, *held: str) -> Axis:
    return () if size == 1 else (Factor(size, frozenset(held)),)


def _held(axis: Axis) -> frozenset[str]:
    return frozenset().union(*(factor.holds for factor in axis))


def _size(axis: Axis) -> Size:
    size: Size = 1
    for factor in axis:
        size = size * factor.size
    return size


def _windowed(held: frozenset[str]) -> frozenset[str]:
    return held - {POSITION} | {WINDOW} if held & {POSITION, WINDOW} else held


def _swapped(axes: tuple[Axis, ...], first: Any, second: Any) -> tuple[Axis, ...]:
    found = list(axes)
    if len(found) > 1:
        found[first], found[second] = found[second], found[first]
    return tuple(found)


def _resized(axes: Sequence[Axis], sizes: Sequence[Size]) -> tuple[Axis, ...]:
    """The same axes, cut, padded or repeated to other sizes; nothing where their number differs."""
    if len(axes) != len(sizes):
        return ()
    return tuple(
        axis if same_size(_size(axis), size) else _axis(size, *_held(axis))
        for axis, size in zip(axes, sizes, strict=True)
    )


def _regrouped(axes: tuple[Axis, ...], sizes: tuple[Size, ...]) -> tuple[Axis, ...]:
    """The factors of all axes in their order, grouped anew, those that a new axis ends within split in two."""
    factors = [factor for axis in axes for factor in axis]
    found = []
    for size in sizes:
        axis: list[Factor] = []
        left = size
        while left != 1 and factors:
            factor = factors.pop(0)
            if (rest := divide(left, factor.size)) is not None:
                axis.append(factor)
                left = rest
            elif (rest := divide(factor.size, left)) is not None:
                axis.append(replace(factor, size=left))
                factors.insert(0, replace(factor, size=rest))
                left = 1
            elif factors:
                factors[0] = Factor(factor.size * factors[0].size, factor.holds | factors[0].holds)
            else:
                axis.append(replace(factor, size=left))
                left = 1
        found.append(tuple(axis))
    return tuple(found)

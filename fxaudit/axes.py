"""Named-axis shape strings: parse, unify with sizes, factor products.

A shape string names the axes of a tensor, einops style: ``"batch channel 1 1 | batch channel"``. A name means the
same size wherever it appears in one pattern; a number is that size; ``_`` is any size; ``...`` is any number of axes,
the same sizes wherever it appears; ``a*b`` is one axis that holds the product of two; ``|`` separates alternatives,
the first that fits wins.

Sizes are integers, or sympy expressions where an axis is dynamic. Nothing here evaluates a torch `SymInt`: comparing
one would install a guard in the graph it came from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import sympy

Size: TypeAlias = int | sympy.Expr

ANY = "_"
REST = "..."
_NAME = r"[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)*"
_TOKEN = re.compile(rf"^(?:\d+|_|\.\.\.|{_NAME}(?:\*{_NAME})*)$")


class ShapeSyntaxError(ValueError):
    """A shape string that cannot be read; the message says which token and why."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One alternative of a shape string: a tuple of axes, each a tuple of factor names."""

    axes: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(f for axis in self.axes for f in axis if f not in (ANY, REST) and not f.isdigit())

    def __str__(self) -> str:
        return " ".join("*".join(axis) for axis in self.axes)


@dataclass(frozen=True, slots=True)
class Shape:
    """A parsed shape string."""

    text: str
    layouts: tuple[Layout, ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset().union(*(layout.names for layout in self.layouts))

    @property
    def has_rest(self) -> bool:
        return any((REST,) in layout.axes for layout in self.layouts)


@dataclass(frozen=True, slots=True)
class Unified:
    """A shape string that fits: the sizes now known by name, and the factor names of each axis of the tensor.

    The axes that `...` stands for are each named ``...``; their sizes are in `rest`.
    """

    sizes: Mapping[str, Size]
    axes: tuple[tuple[str, ...], ...]
    rest: tuple[Size, ...] | None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A shape string that does not fit, and why, one reason for each alternative."""

    shape: str
    found: tuple[Size, ...]
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        why = self.reasons[0] if len(self.reasons) == 1 else "; ".join(self.reasons)
        return f'"{self.shape}" does not fit [{format_sizes(self.found)}]: {why}'


def parse_shape(text: str) -> Shape:
    """The shape that `text` denotes.

    Raises:
        ShapeSyntaxError: an empty alternative, an unreadable token, or two `...` in one alternative.
    """
    layouts = []
    for alternative in text.split("|"):
        tokens = alternative.split()
        if not tokens:
            raise ShapeSyntaxError(f'"{text}": an alternative is empty')
        for token in tokens:
            if not _TOKEN.match(token):
                hint = "; axes are separated by spaces, not commas" if "," in token else ""
                raise ShapeSyntaxError(f'"{text}": cannot read the axis `{token}`{hint}')
        if tokens.count(REST) > 1:
            raise ShapeSyntaxError(f'"{text}": `...` may stand once in an alternative')
        layouts.append(Layout(tuple(tuple(token.split("*")) for token in tokens)))
    return Shape(text, tuple(layouts))


def unify(
    shape: Shape, sizes: Sequence[Size], known: Mapping[str, Size], rest: tuple[Size, ...] | None = None
) -> Unified | Mismatch:
    """The first alternative of `shape` that fits `sizes`, given the axis sizes that are already `known`."""
    fitting, mismatch = fits(shape, sizes, known, rest)
    return fitting[0] if fitting else mismatch


def fits(
    shape: Shape, sizes: Sequence[Size], known: Mapping[str, Size], rest: tuple[Size, ...] | None = None
) -> tuple[list[Unified], Mismatch]:
    """Every alternative of `shape` that fits `sizes`, in order, and why the others do not."""
    results = [_unify_layout(layout, tuple(sizes), known, rest) for layout in shape.layouts]
    reasons = tuple(dict.fromkeys(result for result in results if isinstance(result, str)))
    return [r for r in results if isinstance(r, Unified)], Mismatch(shape.text, tuple(sizes), reasons)


def _unify_layout(
    layout: Layout, sizes: tuple[Size, ...], known: Mapping[str, Size], rest: tuple[Size, ...] | None
) -> Unified | str:
    axes = layout.axes
    if (REST,) in axes:
        position = axes.index((REST,))
        width = len(sizes) - len(axes) + 1
        if width < 0:
            return f"{len(sizes)} axes, at least {len(axes) - 1} wanted"
        found_rest = sizes[position : position + width]
        if rest is not None and not (len(rest) == width and all(map(same_size, rest, found_rest))):
            return f"`...` is [{format_sizes(found_rest)}], elsewhere [{format_sizes(rest)}]"
        rest = found_rest
        axes = axes[:position] + ((REST,),) * width + axes[position + 1 :]
    if len(axes) != len(sizes):
        return f"{len(sizes)} axes, {len(axes)} wanted"
    bound = dict(known)
    # Single names first: a product can then be divided by the factors that are known, and may make others known.
    pending = [(a, s) for a, s in zip(axes, sizes, strict=True) if a not in ((ANY,), (REST,))]
    pending.sort(key=lambda pair: len(pair[0]))
    while pending:
        ready = [pair for pair in pending if _unknown_factors(pair[0], bound) <= 1]
        for axis, size in ready or pending[:1]:
            if (reason := _bind(axis, size, bound)) is not None:
                return reason
        pending = [pair for pair in pending if pair not in ready]
    return Unified(bound, axes, rest)


def _unknown_factors(axis: tuple[str, ...], bound: Mapping[str, Size]) -> int:
    return sum(not name.isdigit() and name not in bound for name in axis)


def _bind(axis: tuple[str, ...], size: Size, bound: dict[str, Size]) -> str | None:
    """Bind the one unknown factor of `axis`, or say why it cannot be."""
    label = "*".join(axis)
    unknown = [name for name in axis if not name.isdigit() and name not in bound]
    product: Size = 1
    for name in axis:
        if name not in unknown:
            product = product * (int(name) if name.isdigit() else bound[name])
    if not unknown:
        if same_size(product, size):
            return None
        return f"{label} is {format_size(product)}, found {format_size(size)}"
    if len(unknown) > 1:
        return f"{label} cannot be factored: {' and '.join(unknown)} are both unknown"
    quotient = divide(size, product)
    if quotient is None:
        return f"{label} cannot be factored: {format_size(size)} is no multiple of {format_size(product)}"
    bound[unknown[0]] = quotient
    return None


def divide(size: Size, factor: Size) -> Size | None:
    """`size` / `factor` when that is a whole number for every value of the symbols in it, else None."""
    if isinstance(size, int) and isinstance(factor, int):
        return size // factor if factor and size % factor == 0 else None
    quotient = sympy.cancel(sympy.sympify(size) / sympy.sympify(factor))
    numerator, denominator = sympy.fraction(quotient)
    return plain_size(numerator) if denominator == 1 else None


def same_size(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for every value of the symbols in them."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(sympy.expand(sympy.sympify(a) - sympy.sympify(b)) == 0)


def plain_size(size: object) -> Size:
    """An `int` where the size is one, otherwise the sympy expression behind it (of a torch `SymInt`, too)."""
    if isinstance(size, int):
        return size
    expression = sympy.sympify(getattr(getattr(size, "node", None), "expr", size))
    return int(expression) if expression.is_Integer else expression


def format_size(size: Size) -> str:
    return str(size)


def format_sizes(sizes: Sequence[Size]) -> str:
    return ", ".join(format_size(size) for size in sizes)

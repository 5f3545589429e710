"""Two runs of what should be the same computation, compared bit by bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two runs of what should be the same computation differ."""

    inputs: str
    max_abs_diff: float
    bitwise: bool


@dataclass(frozen=True, slots=True)
class Comparisons:
    """Several comparisons, and what they say together."""

    comparisons: tuple[Comparison, ...]

    @property
    def is_measured(self) -> bool:
        """Whether there was anything to compare: on the meta device there are no values."""
        return bool(self.comparisons)

    @property
    def bitwise(self) -> bool:
        return self.is_measured and all(comparison.bitwise for comparison in self.comparisons)

    @property
    def max_abs_diff(self) -> float:
        return max((comparison.max_abs_diff for comparison in self.comparisons), default=float("inf"))


def compare(name: str, expected: list[Any] | tuple[Any, ...], found: list[Any] | tuple[Any, ...]) -> Comparison:
    """How two lists of output leaves differ: the largest absolute difference, and whether every bit agrees."""
    if len(expected) != len(found):
        return Comparison(name, float("inf"), False)
    worst, bitwise = 0.0, True
    for a, b in zip(expected, found, strict=True):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            same = not isinstance(a, Tensor) and not isinstance(b, Tensor) and _equal_values(a, b)
            worst, bitwise = (worst, bitwise) if same else (float("inf"), False)
        elif a.shape != b.shape or a.dtype != b.dtype:
            return Comparison(name, float("inf"), False)
        elif not same_bits(a, b):
            bitwise = False
            worst = max(worst, _max_abs_diff(a, b))
    return Comparison(name, worst, bitwise)


def _equal_values(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (ValueError, RuntimeError):  # arrays and the like, which compare element by element
        return False


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree bit for bit: equal NaNs are equal, and 0.0 is not -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.detach().contiguous(), b.detach().contiguous()
    if a.dtype == torch.bool or not a.numel():
        return torch.equal(a, b)
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _max_abs_diff(a: Tensor, b: Tensor) -> float:
    if a.dtype == torch.bool:
        return float((a != b).any())
    wide = torch.complex128 if a.is_complex() else torch.float64
    difference = (a.to(wide) - b.to(wide)).abs()
    # Where both are the same infinity or NaN there is no difference; where only one is, it is infinite.
    difference = torch.where((a == b) | (a.isnan() & b.isnan()), torch.zeros_like(difference), difference)
    return float(difference.nan_to_num(nan=float("inf"), posinf=float("inf")).max()) if difference.numel() else 0.0


def largest_finite(value: Any) -> float:
    """The largest absolute value of a floating-point tensor, infinities and NaN left out; 0 for anything else."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return 0.0
    finite = value[value.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0

"""How close two results of the same computation must be: rounding apart, and no closer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Relative errors that are rounding, by dtype. Float32: 6 to 40 times what eight models showed; others: in proportion
# for float64, and ten roundings of the largest element for the short ones, of which every op makes one.
LIMITS = {"float64": 1e-13, "float32": 1e-5, "float16": 1e-2, "bfloat16": 8e-2}
# Or this many times what torch itself is off from float64, and one rounding of the largest element.
REFEREE_FACTOR = 4.0
# In turn, torch may not be off by more than this many times what the other is: then what is called torch's is not.
_REVERSE_FACTOR = 100.0
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True, slots=True)
class Closeness:
    """The errors of a result relative to what was expected: in L2, and of the largest element; and what is allowed.

    `referee` holds the largest errors of (expected, found) against float64, None where there is no referee.
    """

    l2: float
    largest: float
    limit: float
    referee: tuple[float, float] | None = None
    rounding: float = 0.0

    @property
    def holds(self) -> bool:
        if max(self.l2, self.largest) <= self.limit:
            return True
        if self.referee is None:
            return False
        expected, found = self.referee
        return (
            found <= REFEREE_FACTOR * expected + self.rounding
            and expected <= _REVERSE_FACTOR * found + REFEREE_FACTOR * self.rounding
        )

    def __str__(self) -> str:
        text = f"{self.l2:.2g} in L2, {self.largest:.2g} of the largest element"
        if self.referee is not None and max(self.l2, self.largest) > self.limit:
            text += f"; off from float64 by {self.referee[1]:.2g}, torch by {self.referee[0]:.2g}"
        return text


def closeness(expected: np.ndarray, found: np.ndarray, dtype: str, referee: np.ndarray | None = None) -> Closeness:
    """How close `found` is to `expected`; whole numbers and truth values must be equal.

    Args:
        dtype: the name of the dtype in which both were computed.
        referee: the same computed in float64.
    """
    limit = LIMITS.get(dtype, 0.0)
    l2, largest = relative_errors(expected, found)
    if referee is None or expected.shape != found.shape or dtype not in LIMITS:
        return Closeness(l2, largest, limit)
    errors = largest_difference(expected, referee), largest_difference(found, referee)
    return Closeness(l2, largest, limit, errors, EPSILON[dtype] * largest_finite(referee))


def relative_errors(expected: np.ndarray, found: np.ndarray) -> tuple[float, float]:
    """The L2 error relative to the L2 norm, and the largest error relative to the largest element; infinite where the
    shapes differ, or where only one of the two is a number."""
    if expected.shape != found.shape:
        return float("inf"), float("inf")
    difference = _differences(expected, found)
    if not difference.any():
        return 0.0, 0.0
    wide = expected.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    norm, largest = float(np.linalg.norm(finite)), float(np.abs(finite).max(initial=0.0))
    errors = float(np.linalg.norm(difference)), float(difference.max())
    return (errors[0] / norm if norm else float("inf")), (errors[1] / largest if largest else float("inf"))


def largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(_differences(a, b).max(initial=0.0)) if a.shape == b.shape else float("inf")


def largest_finite(a: np.ndarray) -> float:
    wide = a.astype(np.float64)
    return float(np.abs(wide[np.isfinite(wide)]).max(initial=0.0))


def _differences(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    x, y = a.astype(np.float64), b.astype(np.float64)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(np.where(same, 0.0, np.abs(np.where(same, 0.0, x) - np.where(same, 0.0, y))), nan=np.inf)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()

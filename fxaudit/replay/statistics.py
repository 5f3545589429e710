"""Paired statistics over inputs: the mean effect, its bootstrap interval, sign-flip tests, Holm's correction."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 9999
_HELD = 1_000_000  # numbers of resamples that are in memory at once


@dataclass(frozen=True, slots=True)
class Effect:
    """The mean of paired differences, its 95 % BCa bootstrap interval, and a two-sided sign-flip p-value.

    `interval` is None for fewer than two inputs, and one point where all differences are equal; `p` is None for fewer
    than two inputs. Both are None where a difference is not finite.
    """

    mean: float
    interval: tuple[float, float] | None
    p: float | None


def paired_effect(differences: Sequence[float], seed: int = 0) -> Effect:
    """The effect behind per-input differences.

    BCa intervals (Efron 1987) by scipy.stats.bootstrap; the test flips the signs of the differences, exactly for few
    inputs, by 9,999 random flips for more (scipy.stats.permutation_test).
    """
    values = np.asarray(differences, dtype=np.float64)
    mean = float(values.mean())
    if len(values) < 2 or not np.isfinite(values).all():
        return Effect(mean, None, None)
    batch = max(1, _HELD // len(values))
    if np.ptp(values) == 0:
        interval = (mean, mean)
    else:
        interval = _interval(values, "BCa", batch, seed)
        if not np.isfinite(interval).all():
            interval = _interval(values, "percentile", batch, seed)  # BCa is undefined for some few-valued samples
    test = stats.permutation_test(
        (values,), np.mean, permutation_type="samples", n_resamples=RESAMPLES, batch=batch, vectorized=True, rng=seed
    )
    return Effect(mean, interval, float(test.pvalue))


def _interval(values: np.ndarray, method: str, batch: int, seed: int) -> tuple[float, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a degenerate BCa is seen by the caller, as a NaN
        found = stats.bootstrap(
            (values,),
            np.mean,
            n_resamples=RESAMPLES,
            batch=batch,
            confidence_level=CONFIDENCE,
            method=method,
            rng=seed,
        ).confidence_interval
    return float(found.low), float(found.high)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values (Holm 1979), in the order given."""
    order = np.argsort(p_values, kind="stable")
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * float(p_values[index])))
        adjusted[index] = highest
    return adjusted

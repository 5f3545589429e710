"""Paired statistics over inputs: the mean effect, its bootstrap interval, sign-flip tests, Holm's correction, and how
many inputs an open question would take."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 9999
POWER = 0.8
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


def needed_inputs(
    differences: Sequence[float], margin: float | None = None, *, tests: int = 1, is_divergence: bool = False
) -> int | None:
    """How many inputs would resolve an effect like this one with a power of 80 % at the 5 % level; None when no number
    would: fewer than two inputs, no spread, no distance, or a divergence without a margin.

    n = ((z_{1-a/2m} + z_power) s / d)^2 for one of m tests (Chow, Shao, Wang 2008, chapter 3), and no fewer than let a
    sign-flip test reach a/m: 2^(1-n) < a/m. The distance d is that of the mean from zero, or with a margin from the
    margin where that is farther; a divergence is told from the margin only.
    """
    values = np.asarray(differences, dtype=np.float64)
    if len(values) < 2 or not np.isfinite(values).all() or (is_divergence and margin is None):
        return None
    mean, spread = float(values.mean()), float(values.std(ddof=1))
    distances = [] if is_divergence else [abs(mean)]
    if margin is not None:
        distances.append(abs(margin - mean) if is_divergence else margin - abs(mean))
    distance = max(distances)
    if spread == 0 or distance <= 0:
        return None
    level = (1 - CONFIDENCE) / tests
    z = float(stats.norm.ppf(1 - level / 2) + stats.norm.ppf(POWER))
    needed = (z * spread / distance) ** 2
    fewest = math.floor(1 - math.log2(level)) + 1
    return max(fewest, math.ceil(needed)) if needed < 1e15 else None

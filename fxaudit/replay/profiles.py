"""Static profiles: means of recorded coefficients over calibration data, accumulated in float64 and rounded once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fxaudit.controllers.controller import Coefficient
from fxaudit.replay.intervene import position_count
from fxaudit.replay.store import CoefficientStore, stored_axes


@dataclass(frozen=True, slots=True)
class Profile:
    """A mean with the input axis first, averaged axes of size 1, and how many of its positions no calibration input
    had (they hold the mean over all positions)."""

    value: Tensor
    absent: int


def static_profiles(
    store: CoefficientStore, coefficients: Sequence[Coefficient], level: str, valid: Tensor | None = None
) -> dict[str, Tensor]:
    """The mean of each coefficient over a recorded data set, by key, with size-1 axes where it was averaged.

    The input axis comes first. One pass in float64, rounded once to the coefficient's dtype.
    """
    return {key: profile.value for key, profile in measure_profiles(store, coefficients, level, valid).items()}


def measure_profiles(
    store: CoefficientStore, coefficients: Sequence[Coefficient], level: str, valid: Tensor | None = None
) -> dict[str, Profile]:
    """Static profiles by key; with `valid` ([inputs, positions]) only valid positions count."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    for batch in store.batches:
        tensors = store.samples(batch)
        for coefficient in coefficients:
            rows = tensors[coefficient.key][: batch.real].double()
            # Summed over inputs only; the rest of the level follows at the end, so that positions can be told apart.
            weight = _weight(rows, coefficient, valid, batch.start)
            total, count = (torch.where(weight > 0, rows, 0.0)).sum(0, keepdim=True), weight.sum(0, keepdim=True)
            key = coefficient.key
            sums[key] = sums[key] + total if key in sums else total
            counts[key] = counts[key] + count if key in counts else count
    return {c.key: _profile(sums[c.key], counts[c.key], c, level) for c in coefficients}


def _weight(rows: Tensor, coefficient: Coefficient, valid: Tensor | None, start: int) -> Tensor:
    """1 where a value counts, else 0; broadcastable to `rows`."""
    if valid is None or position_count(coefficient) != valid.shape[1]:
        return torch.ones(rows.shape[0], *[1] * (rows.ndim - 1), dtype=torch.float64)
    names = stored_axes(coefficient)
    shape = [n if coefficient.roles.get(name) == "position" else 1 for n, name in zip(rows.shape, names, strict=True)]
    return valid[start : start + rows.shape[0]].double().reshape(rows.shape[0], *shape[1:])


def _profile(total: Tensor, count: Tensor, coefficient: Coefficient, level: str) -> Profile:
    axes = averaged_axes(coefficient, level)
    whole = count.expand_as(total)
    mean = total.sum(axes, keepdim=True) / whole.sum(axes, keepdim=True)
    absent = 0
    if level == "unit-position" and not bool(count.all()):
        units = averaged_axes(coefficient, "unit")
        overall = total.sum(units, keepdim=True) / whole.sum(units, keepdim=True)
        mean = torch.where(whole > 0, mean, overall)
        absent = int((count == 0).sum())
    return Profile(mean.to(coefficient.dtype), absent)


def in_graph_order(profile: Tensor, coefficient: Coefficient) -> Tensor:
    """A stored profile in the dimension order of the coefficient itself; averaged axes have size 1 in products, too."""
    factors = [name for axis in coefficient.axes for name in axis]
    factored = profile.movedim(0, factors.index(coefficient.sample_axis))
    shape, start = [], 0
    for axis in coefficient.axes:
        shape.append(math.prod(factored.shape[start : start + len(axis)]))
        start += len(axis)
    return factored.reshape(shape).contiguous()


def averaged_axes(coefficient: Coefficient, level: str) -> tuple[int, ...]:
    """The axes of the stored tensor that a static profile of this level averages over."""
    names = stored_axes(coefficient)
    if level == "controller":
        return tuple(range(len(names)))
    averaged = {"unit": ("sample", "position"), "unit-position": ("sample",)}[level]
    return tuple(i for i, name in enumerate(names) if coefficient.roles.get(name) in averaged)

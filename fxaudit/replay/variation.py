"""Variation: do the coefficients vary, and along what? One streaming pass over a store, in float64.

Let c[k, i, t, u] be the coefficient of controller k on input i at position t for unit u. Two questions are answered.

*How much of the variance is layer identity?* The share of the total sum of squares that lies between controllers,

    share = sum_k n_k (mean_k - mean)^2 / sum (value - mean)^2,

for four kinds of values: `element`, the single coefficients; `mean_input_position`, averages over inputs and positions;
`mean_unit`, averages over units; `mean_unit_position`, averages over units and positions. A published share means
nothing without its level, so all are reported.

*Within one controller, what does it follow?* For a full grid of N inputs, T positions, U units, the total sum of
squares splits into unit (N T sum_u (mean_u - mean)^2), position, input, and the residual, which holds all
interactions. Shares sum to one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxaudit.controllers.controller import Coefficient, Controller
from fxaudit.replay.store import CoefficientStore, stored_axes

LEVELS = ("element", "mean_input_position", "mean_unit", "mean_unit_position")
_SATURATED = 0.01  # a value within this share of its range from a bound


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations of some values; two of them merge exactly (Chan et al. 1979)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @staticmethod
    def of(values: Tensor) -> Moments:
        mean = values.mean()
        return Moments(values.numel(), float(mean), float(((values - mean) ** 2).sum()))

    def merge(self, other: Moments) -> Moments:
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        shift = other.mean - self.mean
        return Moments(
            count,
            self.mean + shift * other.count / count,
            self.squares + other.squares + shift * shift * self.count * other.count / count,
        )


@dataclass(frozen=True, slots=True)
class ControllerVariation:
    """What one controller's coefficients do; `shares` sum to one, or are None when the coefficient never varies."""

    controller: str
    pattern: str
    mean: float
    std: float
    minimum: float
    maximum: float
    saturated: float | None
    shares: dict[str, float] | None
    moves: bool
    unit_means: tuple[float, ...]
    position_means: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PatternVariation:
    """The share of variance between the controllers of one pattern at every level; None for a single controller.

    `accuracy` of the sums is that of float64.
    """

    pattern: str
    controllers: int
    domain: str
    layer_share: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Variation:
    """The variation claim: per controller, and layer identity per pattern and, where domains agree, overall."""

    inputs: int
    controllers: tuple[ControllerVariation, ...]
    patterns: tuple[PatternVariation, ...]
    overall: PatternVariation | None
    skipped: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """VARYING when some coefficient takes more than one value on some unit, else CONSTANT."""
        return "VARYING" if any(c.moves for c in self.controllers) else "CONSTANT"


@dataclass(slots=True)
class _Accumulator:
    coefficient: Coefficient
    elements: Moments = field(default_factory=Moments)
    by_token: Moments = field(default_factory=Moments)
    by_input: Moments = field(default_factory=Moments)
    unit_sum: Tensor | None = None
    position_sum: Tensor | None = None
    minimum: float = math.inf
    maximum: float = -math.inf
    saturated: int = 0
    inputs: int = 0
    unit_low: Tensor | None = None
    unit_high: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """Take in a batch, [inputs, positions, units]."""
        self.inputs += rows.shape[0]
        self.elements = self.elements.merge(Moments.of(rows))
        self.by_token = self.by_token.merge(Moments.of(rows.mean(2)))
        self.by_input = self.by_input.merge(Moments.of(rows.mean((1, 2))))
        unit, position = rows.sum((0, 1)), rows.sum((0, 2))
        self.unit_sum = unit if self.unit_sum is None else self.unit_sum + unit
        self.position_sum = position if self.position_sum is None else self.position_sum + position
        low, high = rows.amin((0, 1)), rows.amax((0, 1))
        self.unit_low = low if self.unit_low is None else self.unit_low.minimum(low)
        self.unit_high = high if self.unit_high is None else self.unit_high.maximum(high)
        self.minimum, self.maximum = min(self.minimum, float(rows.min())), max(self.maximum, float(rows.max()))
        domain = self.coefficient.domain
        if domain.low is not None and domain.high is not None and math.isfinite(domain.high - domain.low):
            edge = _SATURATED * (domain.high - domain.low)
            self.saturated += int(((rows < domain.low + edge) | (rows > domain.high - edge)).sum())

    @property
    def moves(self) -> bool:
        """Whether some unit takes more than one value."""
        assert self.unit_low is not None
        assert self.unit_high is not None
        return not torch.equal(self.unit_low, self.unit_high)

    @property
    def rounding(self) -> float:
        """The square of a rounding error of the coefficient: averages that vary by less do not vary."""
        return float((torch.finfo(self.coefficient.dtype).eps * max(abs(self.minimum), abs(self.maximum))) ** 2)

    @property
    def unit_means(self) -> Tensor:
        assert self.unit_sum is not None
        return self.unit_sum / (self.elements.count / self.unit_sum.numel())

    @property
    def position_means(self) -> Tensor:
        assert self.position_sum is not None
        return self.position_sum / (self.elements.count / self.position_sum.numel())

    def level(self, name: str) -> Moments:
        match name:
            case "element":
                return self.elements
            case "mean_input_position":
                return Moments.of(self.unit_means)
            case "mean_unit":
                return self.by_token
        return self.by_input


def measure_variation(store: CoefficientStore, controllers: Sequence[Controller]) -> Variation:
    """The variation of every recorded coefficient but indices, over the inputs of a store, repetitions left out."""
    accumulators: dict[str, _Accumulator] = {}
    chosen: dict[str, Controller] = {}
    skipped = []
    for controller in controllers:
        for coefficient in controller.coefficients:
            if coefficient.domain.kind == "index":
                skipped.append(f"{coefficient.key}: indices have no mean")
            else:
                accumulators[coefficient.key] = _Accumulator(coefficient)
                chosen[coefficient.key] = controller
    for batch in store.batches:
        tensors = store.samples(batch)
        for key, accumulator in accumulators.items():
            accumulator.add(as_grid(tensors[key][: batch.real].double(), accumulator.coefficient))
    rows = tuple(_controller(chosen[key], accumulator) for key, accumulator in accumulators.items())
    groups: dict[str, list[_Accumulator]] = {}
    for key, accumulator in accumulators.items():
        groups.setdefault(chosen[key].pattern, []).append(accumulator)
    patterns = tuple(_layer_identity(name, group) for name, group in groups.items())
    together = list(accumulators.values())
    comparable = len({str(a.coefficient.domain) for a in together}) == 1
    overall = _layer_identity("all", together) if comparable and len(groups) > 1 else None
    return Variation(int(store.manifest["count"]), rows, patterns, overall, tuple(skipped))


def as_grid(rows: Tensor, coefficient: Coefficient) -> Tensor:
    """Stored rows as [inputs, positions, units]: every axis that is neither input nor position is a unit."""
    names = stored_axes(coefficient)
    positions = [i for i, name in enumerate(names) if i and coefficient.roles.get(name) == "position"]
    units = [i for i in range(1, len(names)) if i not in positions]
    count = math.prod(rows.shape[i] for i in positions)
    return rows.permute(0, *positions, *units).reshape(rows.shape[0], count, -1)


def _controller(controller: Controller, accumulator: _Accumulator) -> ControllerVariation:
    total, count = accumulator.elements.squares, accumulator.elements.count
    shares = None
    if accumulator.minimum < accumulator.maximum:
        parts = {
            "unit": Moments.of(accumulator.unit_means).squares * count / accumulator.unit_means.numel(),
            "position": Moments.of(accumulator.position_means).squares * count / accumulator.position_means.numel(),
            "input": accumulator.by_input.squares * count / accumulator.inputs,
        }
        shares = {name: part / total for name, part in parts.items()}
        shares["residual"] = 1.0 - sum(shares.values())
    bounded = accumulator.coefficient.domain.kind in ("interval", "simplex")
    return ControllerVariation(
        controller=controller.id,
        pattern=controller.pattern,
        mean=accumulator.elements.mean,
        std=math.sqrt(total / count),
        minimum=accumulator.minimum,
        maximum=accumulator.maximum,
        saturated=accumulator.saturated / count if bounded else None,
        shares=shares,
        moves=accumulator.moves,
        unit_means=tuple(accumulator.unit_means.tolist()),
        position_means=tuple(accumulator.position_means.tolist()),
    )


def _layer_identity(name: str, group: Sequence[_Accumulator]) -> PatternVariation:
    shares: dict[str, float | None] = {}
    for level in LEVELS:
        moments = [accumulator.level(level) for accumulator in group]
        total = Moments()
        for part in moments:
            total = total.merge(part)
        if level == "element":
            varies = len({bound for a in group for bound in (a.minimum, a.maximum)}) > 1
        else:
            varies = total.squares > total.count * max(a.rounding for a in group)
        between = sum(part.count * (part.mean - total.mean) ** 2 for part in moments)
        shares[level] = between / total.squares if len(group) > 1 and varies else None
    return PatternVariation(name, len(group), str(group[0].coefficient.domain), shares)

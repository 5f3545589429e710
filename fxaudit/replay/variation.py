"""Variation: do the coefficients vary, and along what? One streaming pass over a store, in float64.

Let c[k, i, t, u] be the coefficient of controller k on input i at position t for unit u. Two questions are answered.

*How much of the variance is layer identity?* The share of the total sum of squares that lies between controllers,

    share = sum_k n_k (mean_k - mean)^2 / sum (value - mean)^2,

for four kinds of values: `element`, the single coefficients; `mean_input_position`, averages over inputs and positions;
`mean_unit`, averages over units; `mean_unit_position`, averages over units and positions. A published share means
nothing without its level, so all are reported.

*Within one controller, what does it follow?* For a full grid of N inputs, T positions, U units, the total sum of
squares splits into unit (N T sum_u (mean_u - mean)^2), position, input, and the residual, which holds all
interactions. Inputs of different lengths are no full grid: they are split within buckets of equal length, and the sum
of squares between buckets is a term of its own, `bucket`. Shares sum to one. docs/statistics.md has the formulas.

The first position of each input and special tokens are also told apart from the rest: they may dominate all of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxaudit.controllers.controller import Coefficient, Controller
from fxaudit.replay.choices import ChoiceCounts, choice_counts
from fxaudit.replay.intervene import position_count
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
class PartVariation:
    """What the coefficients at some positions do: how many values, their mean and deviation, and their shares."""

    count: int
    mean: float
    std: float
    shares: dict[str, float] | None


@dataclass(frozen=True, slots=True)
class RouterVariation:
    """How often each expert was chosen in how many choices, and which never; None where scores were not recorded.

    `ties` are choices in which the last chosen and the first rejected expert had one score; None where the router does
    not rank by the recorded scores.
    """

    controller: str
    choices: int
    load: tuple[int, ...] | None
    never_used: tuple[int, ...] | None
    ties: int | None


@dataclass(frozen=True, slots=True)
class ControllerVariation:
    """What one controller's coefficients do; `shares` sum to one, or are None when the coefficient never varies.

    `entropy` is the mean entropy of a simplex in nats, of at most `entropy_limit`. `apart` holds the first position,
    special tokens and the rest by themselves.
    """

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
    entropy: float | None = None
    entropy_limit: float | None = None
    apart: dict[str, PartVariation] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PatternVariation:
    """The share of variance between the controllers of one pattern at every level; None for a single controller.

    `apart` holds the shares of the first position, special tokens and the rest by themselves.
    """

    pattern: str
    controllers: int
    domain: str
    layer_share: dict[str, float | None]
    apart: dict[str, dict[str, float | None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Variation:
    """The variation claim: per controller, and layer identity per pattern and, where domains agree, overall."""

    inputs: int
    controllers: tuple[ControllerVariation, ...]
    patterns: tuple[PatternVariation, ...]
    overall: PatternVariation | None
    skipped: tuple[str, ...]
    routers: tuple[RouterVariation, ...] = ()

    @property
    def verdict(self) -> str:
        """VARYING when some coefficient takes more than one value on some unit, else CONSTANT."""
        return "VARYING" if any(c.moves for c in self.controllers) else "CONSTANT"


@dataclass(slots=True)
class _Bucket:
    """Sums over the inputs of one length."""

    length: int
    elements: Moments = field(default_factory=Moments)
    by_input: Moments = field(default_factory=Moments)
    unit_sum: Tensor | None = None
    position_sum: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        self.elements = self.elements.merge(Moments.of(rows))
        self.by_input = self.by_input.merge(Moments.of(rows.mean((1, 2))))
        unit, position = rows.sum((0, 1)), rows.sum((0, 2))
        self.unit_sum = unit if self.unit_sum is None else self.unit_sum + unit
        self.position_sum = position if self.position_sum is None else self.position_sum + position

    def terms(self) -> dict[str, float]:
        """The sums of squares of the means of units, positions and inputs."""
        assert self.unit_sum is not None
        assert self.position_sum is not None
        count = self.elements.count
        means = {
            "unit": Moments.of(self.unit_sum / (count / len(self.unit_sum))),
            "position": Moments.of(self.position_sum / (count / len(self.position_sum))),
            "input": self.by_input,
        }
        return {name: moments.squares * count / moments.count for name, moments in means.items()}


@dataclass(slots=True)
class _Accumulator:
    coefficient: Coefficient
    elements: Moments = field(default_factory=Moments)
    by_token: Moments = field(default_factory=Moments)
    by_input: Moments = field(default_factory=Moments)
    buckets: dict[int, _Bucket] = field(default_factory=dict)
    unit_sum: Tensor | None = None
    position_sum: Tensor | None = None
    position_counts: Tensor | None = None
    minimum: float = math.inf
    maximum: float = -math.inf
    saturated: int = 0
    unit_low: Tensor | None = None
    unit_high: Tensor | None = None
    entropy: Moments = field(default_factory=Moments)

    def add(self, rows: Tensor, valid: Tensor | None = None) -> None:
        """Take in a batch, [inputs, positions, units]; of `valid` ([inputs, positions]) only what is True."""
        if valid is None:
            self._add_positions(rows.sum((0, 2)), torch.full(rows.shape[1:2], float(rows.shape[0] * rows.shape[2])))
            self._add_bucket(rows)
            return
        counts = valid.sum(1)
        units = rows.shape[2]
        self._add_positions(torch.where(valid[..., None], rows, 0.0).sum((0, 2)), valid.sum(0).double() * units)
        for length in counts.unique().tolist():
            if length:
                of_length = counts == length
                self._add_bucket(rows[of_length][valid[of_length]].reshape(-1, length, units))

    def _add_positions(self, sums: Tensor, counts: Tensor) -> None:
        self.position_sum = sums if self.position_sum is None else self.position_sum + sums
        self.position_counts = counts if self.position_counts is None else self.position_counts + counts

    def _add_bucket(self, rows: Tensor) -> None:
        self.buckets.setdefault(rows.shape[1], _Bucket(rows.shape[1])).add(rows)
        self.elements = self.elements.merge(Moments.of(rows))
        self.by_token = self.by_token.merge(Moments.of(rows.mean(2)))
        self.by_input = self.by_input.merge(Moments.of(rows.mean((1, 2))))
        unit = rows.sum((0, 1))
        self.unit_sum = unit if self.unit_sum is None else self.unit_sum + unit
        low, high = rows.amin((0, 1)), rows.amax((0, 1))
        self.unit_low = low if self.unit_low is None else self.unit_low.minimum(low)
        self.unit_high = high if self.unit_high is None else self.unit_high.maximum(high)
        self.minimum, self.maximum = min(self.minimum, float(rows.min())), max(self.maximum, float(rows.max()))
        domain = self.coefficient.domain
        if domain.low is not None and domain.high is not None and math.isfinite(domain.high - domain.low):
            edge = _SATURATED * (domain.high - domain.low)
            self.saturated += int(((rows < domain.low + edge) | (rows > domain.high - edge)).sum())

    def add_entropy(self, rows: Tensor, valid: Tensor | None) -> None:
        """Take in the entropy along the simplex axis of a batch of stored rows."""
        domain, names = self.coefficient.domain, stored_axes(self.coefficient)
        if domain.kind != "simplex":
            return
        axis = names.index(str(domain.axis))
        p = (rows / (domain.total or 1.0)).movedim(axis, -1)
        entropies = torch.special.entr(p).sum(-1)
        if valid is not None:
            left = [name for name in names if name != domain.axis]
            shape = [
                n if i == 0 or self.coefficient.roles.get(left[i]) == "position" else 1
                for i, n in enumerate(entropies.shape)
            ]
            entropies = entropies[valid.reshape(shape).expand_as(entropies)]
        if entropies.numel():
            self.entropy = self.entropy.merge(Moments.of(entropies))

    def shares(self) -> dict[str, float] | None:
        """The shares of the total sum of squares; None when no value differs from another."""
        if not self.minimum < self.maximum:
            return None
        terms = dict.fromkeys(("unit", "position", "input"), 0.0)
        between = 0.0
        for bucket in self.buckets.values():
            between += bucket.elements.count * (bucket.elements.mean - self.elements.mean) ** 2
            for name, squares in bucket.terms().items():
                terms[name] += squares
        if len(self.buckets) > 1:
            terms["bucket"] = between
        found = {name: squares / self.elements.squares for name, squares in terms.items()}
        found["residual"] = 1.0 - sum(found.values())
        return found

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
        assert self.position_counts is not None
        return self.position_sum / self.position_counts

    def level(self, name: str) -> Moments:
        match name:
            case "element":
                return self.elements
            case "mean_input_position":
                return Moments.of(self.unit_means)
            case "mean_unit":
                return self.by_token
        return self.by_input


def measure_variation(
    store: CoefficientStore,
    controllers: Sequence[Controller],
    valid: Tensor | None = None,
    special: Tensor | None = None,
) -> Variation:
    """The variation of every recorded coefficient but indices, over the inputs of a store, repetitions left out.

    Args:
        valid: which positions count, [inputs, positions]; all do without it.
        special: positions of special tokens, told apart.
    """
    accumulators: dict[str, dict[str, _Accumulator]] = {}
    chosen: dict[str, Controller] = {}
    skipped = []
    for controller in controllers:
        for coefficient in controller.coefficients:
            if coefficient.domain.kind == "index":
                skipped.append(f"{coefficient.key}: indices have no mean")
            else:
                parts = ("all", "first", "special", "rest")
                accumulators[coefficient.key] = {part: _Accumulator(coefficient) for part in parts}
                chosen[coefficient.key] = controller
    routers = [counts for controller in controllers if (counts := choice_counts(controller)) is not None]
    for batch in store.batches:
        tensors = store.samples(batch)
        rows_of = slice(batch.start, batch.start + batch.real)
        mask = valid[rows_of] if valid is not None else None
        for router in routers:
            router.add(tensors, batch.real, mask)
        for key, by_part in accumulators.items():
            coefficient = by_part["all"].coefficient
            rows = tensors[key][: batch.real].double()
            grid = as_grid(rows, coefficient)
            own = mask if mask is not None and position_count(coefficient) == mask.shape[1] else None
            by_part["all"].add(grid, own)
            by_part["all"].add_entropy(rows, own)
            for part, places in _parts(grid, own, special[rows_of] if special is not None else None).items():
                by_part[part].add(grid, places)
    whole = {key: by_part["all"] for key, by_part in accumulators.items()}
    groups: dict[str, list[str]] = {}
    for key in accumulators:
        groups.setdefault(chosen[key].pattern, []).append(key)
    patterns = tuple(_pattern(name, [accumulators[key] for key in keys]) for name, keys in groups.items())
    comparable = len({str(a.coefficient.domain) for a in whole.values()}) == 1
    overall = _pattern("all", list(accumulators.values())) if comparable and len(groups) > 1 else None
    return Variation(
        int(store.manifest["count"]),
        tuple(_controller(chosen[key], by_part) for key, by_part in accumulators.items()),
        patterns,
        overall,
        tuple(skipped),
        tuple(map(_router, routers)),
    )


def _parts(grid: Tensor, valid: Tensor | None, special: Tensor | None) -> dict[str, Tensor]:
    """Which positions are first, special, and neither; nothing for coefficients with one position."""
    if grid.shape[1] < 2:
        return {}
    counted = torch.ones(grid.shape[:2], dtype=torch.bool) if valid is None else valid
    first = counted & (counted.cumsum(1) == 1)
    marked = torch.zeros_like(counted)
    if special is not None and special.shape == counted.shape:
        marked = special & counted
    return {"first": first, "special": marked, "rest": counted & ~first & ~marked}


def _router(counts: ChoiceCounts) -> RouterVariation:
    load = tuple(counts.load.tolist()) if counts.experts is not None else None
    never = tuple(i for i, n in enumerate(load) if not n) if load is not None else None
    ties = counts.ties if counts.experts is not None and counts.ranked_by_scores else None
    return RouterVariation(counts.controller.id, counts.choices, load, never, ties)


def as_grid(rows: Tensor, coefficient: Coefficient) -> Tensor:
    """Stored rows as [inputs, positions, units]: every axis that is neither input nor position is a unit."""
    names = stored_axes(coefficient)
    positions = [i for i, name in enumerate(names) if i and coefficient.roles.get(name) == "position"]
    units = [i for i in range(1, len(names)) if i not in positions]
    count = math.prod(rows.shape[i] for i in positions)
    return rows.permute(0, *positions, *units).reshape(rows.shape[0], count, -1)


def _controller(controller: Controller, by_part: Mapping[str, _Accumulator]) -> ControllerVariation:
    accumulator = by_part["all"]
    total, count = accumulator.elements.squares, accumulator.elements.count
    domain = accumulator.coefficient.domain
    entropy = accumulator.entropy
    along = accumulator.coefficient.sizes.get(str(domain.axis)) if domain.kind == "simplex" else None
    return ControllerVariation(
        controller=controller.id,
        pattern=controller.pattern,
        mean=accumulator.elements.mean,
        std=math.sqrt(total / count),
        minimum=accumulator.minimum,
        maximum=accumulator.maximum,
        saturated=accumulator.saturated / count if domain.kind in ("interval", "simplex") else None,
        shares=accumulator.shares(),
        moves=accumulator.moves,
        unit_means=tuple(accumulator.unit_means.tolist()),
        position_means=tuple(accumulator.position_means.tolist()),
        entropy=entropy.mean if entropy.count else None,
        entropy_limit=math.log(along) if entropy.count and isinstance(along, int) else None,
        apart={
            part: PartVariation(
                found.elements.count,
                found.elements.mean,
                math.sqrt(found.elements.squares / found.elements.count),
                found.shares(),
            )
            for part, found in by_part.items()
            if part != "all" and found.elements.count
        },
    )


def _pattern(name: str, group: Sequence[Mapping[str, _Accumulator]]) -> PatternVariation:
    whole = [by_part["all"] for by_part in group]
    apart = {}
    for part in ("first", "special", "rest"):
        found = [by_part[part] for by_part in group if by_part[part].elements.count]
        if found:
            apart[part] = _layer_identity(found)
    return PatternVariation(name, len(group), str(whole[0].coefficient.domain), _layer_identity(whole), apart)


def _layer_identity(group: Sequence[_Accumulator]) -> dict[str, float | None]:
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
    return shares

"""Interventions: pure functions from recorded to replayed coefficients, on tensors with the input axis first.

    identity          the recorded coefficients
    reassign          those of another input: replayed[i] = recorded[donor[i]]; no input is its own donor
    shuffle-tokens    those of other positions: replayed[i, t] = recorded[i, position[i, t]]
    static            a mean over calibration data: one number for a `controller`, one for each `unit`, or one for each
                      `unit-position`; for a choice of experts the top k of the mean scores
    neutral           the value at which the controller does nothing, as its pattern states it
    resample          draws from the marginal of the unit: replayed[i, t, u] = recorded[donor[i, u], position[i, t], u]
    permute-units     those of other units: replayed[i, t, u] = recorded[i, t, unit[u]]
    swap-controllers  those of another controller of the same shape

Draws are shared by all controllers, or made for `each`. A choice of experts is exchanged as a `pair` of weights and
indices, or only its `weights` or only its `indices`, slot by slot. An intervention that has no meaning for a
coefficient is refused, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fxaudit.controllers.controller import Coefficient, Controller
from fxaudit.errors import UsageError, nearest
from fxaudit.replay.store import stored_axes

LEVELS = ("controller", "unit", "unit-position")
NAMES = (
    "identity",
    "reassign",
    "shuffle-tokens",
    "static",
    "neutral",
    "resample",
    "permute-units",
    "swap-controllers",
)
# Those whose draws all controllers can share, or that a choice can be exchanged by in part.
DRAWN = ("reassign", "shuffle-tokens", "permute-units")
EXCHANGED = ("reassign", "shuffle-tokens", "swap-controllers")
RANDOM = (*DRAWN, "resample", "swap-controllers")
PARTS = ("pair", "weights", "indices")
SUM_TOLERANCE, SINKHORN_STEPS = 1e-7, 1000


@dataclass(frozen=True, slots=True)
class Intervention:
    """An intervention by name, with the level of a static profile, whether each controller has draws of its own, and
    which part of a discrete choice is exchanged."""

    name: str
    level: str | None = None
    each: bool = False
    part: str = "pair"

    def __str__(self) -> str:
        options = [self.level or "", "each" if self.each else "", self.part if self.part != "pair" else ""]
        return ":".join([self.name, *filter(None, options)])

    @property
    def is_random(self) -> bool:
        return self.name in RANDOM


def default_interventions(controllers: Sequence[Controller] = ()) -> tuple[Intervention, ...]:
    """Every intervention that changes something; those on parts of a choice where some controller chooses."""
    found = [
        Intervention("reassign"),
        Intervention("shuffle-tokens"),
        *(Intervention("static", level) for level in LEVELS),
        Intervention("neutral"),
        Intervention("resample"),
        Intervention("permute-units"),
        Intervention("swap-controllers"),
    ]
    if any(map(is_discrete, controllers)):
        whole = [Intervention(name) for name in ("reassign", "shuffle-tokens")]
        found += [replace(intervention, part=part) for intervention in whole for part in ("weights", "indices")]
    return tuple(found)


def parse_interventions(text: str) -> tuple[Intervention, ...]:
    """The interventions that a comma-separated list names: ``reassign``, ``static:unit``, ``reassign:each:weights``.

    ``static`` stands for its three levels.

    Raises:
        UsageError: an unknown name or option.
    """
    parsed: list[Intervention] = []
    for item in (part.strip() for part in text.split(",")):
        name, *options = item.split(":")
        found = [Intervention(name)]
        if name == "static" and not options:
            found = [Intervention(name, level) for level in LEVELS]
        for option in options:
            found = [changed for one in found if (changed := _with_option(one, option)) is not None]
        if name not in NAMES or not found:
            raise UsageError(
                f"unknown intervention `{item}`{nearest(item, _known())}",
                expected=", ".join(_known()),
                found=item,
                remedy="name them separated by commas",
            )
        parsed += found
    return tuple(dict.fromkeys(parsed))


def _with_option(intervention: Intervention, option: str) -> Intervention | None:
    if intervention.name == "static" and option in LEVELS and intervention.level is None:
        return replace(intervention, level=option)
    if intervention.name in DRAWN and option == "each":
        return replace(intervention, each=True)
    if intervention.name in EXCHANGED and option in PARTS:
        return replace(intervention, part=option)
    return None


def _known() -> list[str]:
    levels = [f"static:{level}" for level in LEVELS]
    each = [f"{name}:each" for name in DRAWN]
    parts = [f"{name}:{part}" for name in EXCHANGED for part in PARTS[1:]]
    return [n for n in NAMES if n != "static"] + levels + each + parts


# --- what a coefficient is ------------------------------------------------------------------------------------------


def is_choice(coefficient: Coefficient) -> bool:
    """Whether the coefficient holds the indices of chosen experts, one for each slot."""
    return coefficient.domain.kind == "index" and "slot" in coefficient.roles.values()


def is_discrete(controller: Controller) -> bool:
    """Whether a controller hands over indices or masks, which have no mean."""
    return any(c.domain.kind == "index" for c in controller.coefficients)


def scores_of(controller: Controller) -> Coefficient | None:
    """The recorded dense scores that a controller chooses by, one for each expert."""
    return next((tap for tap in controller.taps if tap.name == "scores"), None)


def position_count(coefficient: Coefficient) -> int | None:
    """The number of positions of a coefficient, over all its position axes; None when it has none."""
    sizes = [coefficient.sizes[axis] for axis, role in coefficient.roles.items() if role == "position"]
    count = 1
    for size in sizes:
        if not isinstance(size, int):
            return None
        count *= size
    return count if sizes else None


def unit_dimensions(coefficient: Coefficient) -> list[int]:
    """The dimensions of the stored tensor whose entries trade places when units are permuted.

    All unit axes as one; where values sum to one along a unit axis, only that axis, so that sums stay.
    """
    names = stored_axes(coefficient)
    units = [i for i, name in enumerate(names) if coefficient.roles.get(name) == "unit"]
    if coefficient.domain.kind == "simplex" and coefficient.roles.get(str(coefficient.domain.axis)) == "unit":
        return [names.index(str(coefficient.domain.axis))]
    return units[:1] if coefficient.domain.kind == "doubly-stochastic" else units


def unit_count(controller: Controller) -> int | None:
    """How many units of a controller can trade places: its experts when it chooses; None when it has no unit axis."""
    scores = scores_of(controller)
    coefficient = controller.coefficients[0]
    if is_discrete(controller):
        if scores is None:
            return None
        coefficient = scores
    names = stored_axes(coefficient)
    sizes = [coefficient.sizes[names[i]] for i in unit_dimensions(coefficient)]
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    return math.prod(int(size) for size in sizes)


def shape_of(controller: Controller) -> tuple[object, ...]:
    """What must agree for two controllers to take each other's coefficients: names, sizes, roles, dtypes, domains."""
    parts: list[object] = []
    for coefficient in controller.coefficients:
        names = [name for name in stored_axes(coefficient) if name != coefficient.sample_axis]
        sizes = [(str(coefficient.sizes.get(name, name)), coefficient.roles.get(name)) for name in names]
        kind = (coefficient.domain.kind, coefficient.domain.low, coefficient.domain.high)
        parts.append((coefficient.name, tuple(sizes), coefficient.dtype, kind))
    scores = unit_count(controller) if is_discrete(controller) else None
    return (*parts, scores)


# --- refusal --------------------------------------------------------------------------------------------------------


def refusal(
    intervention: Intervention, controller: Controller, inputs: int, others: Sequence[Controller] = ()
) -> str | None:
    """Why an intervention has no meaning for a controller; None when it has one."""
    discrete = is_discrete(controller)
    if intervention.part != "pair" and not any(map(is_choice, controller.coefficients)):
        return "the controller chooses nothing: it has no slots to exchange one by one"
    if intervention.part != "pair" and not all(
        is_choice(c) or c.dtype.is_floating_point for c in controller.coefficients
    ):
        return "a capacity mask belongs to the choice that it was made for"
    if intervention.part != "pair" and all(map(is_choice, controller.coefficients)):
        return "the choice has no weights"
    match intervention.name:
        case "reassign" if inputs < 2:
            return "reassignment needs two inputs"
        case "shuffle-tokens":
            counts = {position_count(c) for c in controller.coefficients}
            if None in counts:
                return "the coefficient has no position axis"
            if counts == {1}:
                return "the coefficient has one position"
            if len(counts) > 1:
                return "its coefficients differ in their number of positions"
        case "static":
            return _static_refusal(intervention, controller)
        case "neutral" if discrete or all(
            controller.intervene.neutral_of(c.name) is None for c in controller.coefficients
        ):
            return "the family has no neutral value"
        case "resample" if discrete:
            return "a choice is made of all scores at once: its slots have no marginals of their own"
        case "resample" if len({_grid(c) for c in controller.coefficients}) > 1:
            return "its coefficients differ in their number of positions or units"
        case "resample" if inputs < 2 and position_count(controller.coefficients[0]) in (None, 1):
            return "one value of each unit leaves nothing to draw from"
        case "permute-units":
            count = unit_count(controller)
            if discrete and not all(is_choice(c) or c.dtype.is_floating_point for c in controller.coefficients):
                return "a capacity mask belongs to the choice that it was made for"
            if count is None:
                reason = "the dense scores, which would tell the number of experts, are not recorded"
                return reason if discrete else "the coefficient has no unit axis"
            if count == 1:
                return "the coefficient has one unit"
            if not discrete and len({_grid(c) for c in controller.coefficients}) > 1:
                return "its coefficients differ in their number of positions or units"
        case "swap-controllers" if not any(shape_of(o) == shape_of(controller) for o in others if o is not controller):
            return "no other controller has the same shape"
    return None


def _grid(coefficient: Coefficient) -> tuple[int | None, tuple[object, ...]]:
    """How many positions a coefficient has, and the sizes of its other axes."""
    names = [n for n in stored_axes(coefficient)[1:] if coefficient.roles.get(n) != "position"]
    return position_count(coefficient), tuple(str(coefficient.sizes.get(name, name)) for name in names)


def _static_refusal(intervention: Intervention, controller: Controller) -> str | None:
    if is_discrete(controller):
        scores = scores_of(controller)
        if scores is None:
            return "indices are not averaged, and the dense scores of the choice are not recorded"
        if intervention.level == "controller":
            return "one score for all experts chooses none"
        if intervention.level == "unit-position" and position_count(scores) is None:
            return "the coefficient has no position axis"
    elif intervention.level == "unit-position" and position_count(controller.coefficients[0]) is None:
        return "the coefficient has no position axis"
    return None


# --- moving values --------------------------------------------------------------------------------------------------


def permuted_positions(rows: Tensor, coefficient: Coefficient, positions: Tensor) -> Tensor:
    """`rows` with their positions permuted, each input by its own row of `positions` ([inputs, positions])."""
    names = stored_axes(coefficient)
    moved = [i for i, name in enumerate(names) if coefficient.roles.get(name) == "position"]
    kept = [i for i in range(1, rows.ndim) if i not in moved]
    arranged = rows.permute(0, *moved, *kept)
    shape = arranged.shape
    flat = arranged.reshape(shape[0], positions.shape[1], -1)
    taken = flat.gather(1, positions.unsqueeze(-1).expand_as(flat)).reshape(shape)
    return _back(taken, [0, *moved, *kept])


def permuted_units(rows: Tensor, coefficient: Coefficient, units: Tensor) -> Tensor:
    """`rows` with their units permuted: replayed[..., u] = recorded[..., units[u]]. An index to an expert moves with
    it: where expert `units[u]` was chosen, expert u is."""
    if is_choice(coefficient):
        return torch.argsort(units)[rows].to(rows.dtype)
    moved = unit_dimensions(coefficient)
    if coefficient.domain.kind == "index" or not moved or "slot" in coefficient.roles.values():
        return rows  # weights stay in the slot of their expert
    kept = [i for i in range(rows.ndim) if i not in moved]
    arranged = rows.permute(*kept, *moved)
    shape = arranged.shape
    taken = arranged.reshape(*shape[: len(kept)], -1)[..., units].reshape(shape)
    return _back(taken, [*kept, *moved])


def resampled(pool: Tensor, coefficient: Coefficient, donors: Tensor, positions: Tensor | None) -> Tensor:
    """Draws from the marginal of each unit: result[i, t, u] = pool[donors[i, u], positions[i, t], u].

    Args:
        pool: recorded rows, input axis first.
        donors: rows of `pool`, [inputs, units].
        positions: [inputs, positions]; None for a coefficient without positions.
    """
    names = stored_axes(coefficient)
    moved = [i for i in range(1, pool.ndim) if coefficient.roles.get(names[i]) == "position"]
    kept = [i for i in range(1, pool.ndim) if i not in moved]
    arranged = pool.permute(0, *moved, *kept)
    inner = arranged.shape[1:]
    grid = arranged.reshape(len(pool), math.prod(inner[: len(moved)]), -1)
    places = positions if positions is not None else torch.zeros(len(donors), 1, dtype=torch.int64)
    units = torch.arange(grid.shape[2])
    taken = grid[donors[:, None, :], places[:, :, None], units[None, None, :]].reshape(len(donors), *inner)
    return feasible(_back(taken, [0, *moved, *kept]), coefficient)


def _back(arranged: Tensor, order: list[int]) -> Tensor:
    return arranged.permute([order.index(i) for i in range(arranged.ndim)])


def feasible(rows: Tensor, coefficient: Coefficient) -> Tensor:
    """`rows` scaled back to what the coefficient can be: sums along a simplex, rows and columns of a doubly stochastic
    matrix (Sinkhorn and Knopp 1967). Other domains are left alone."""
    domain = coefficient.domain
    names = stored_axes(coefficient)
    if domain.kind == "simplex":
        axis = names.index(str(domain.axis))
        wide = rows.double()
        return (wide * (domain.total or 1.0) / wide.sum(axis, keepdim=True)).to(rows.dtype)
    units = [i for i, name in enumerate(names) if coefficient.roles.get(name) == "unit"]
    if domain.kind == "doubly-stochastic" and len(units) > 1:
        first, second = units[-2:]
        wide = rows.double()
        for _ in range(SINKHORN_STEPS):
            wide = wide / wide.sum(second, keepdim=True)
            columns = wide.sum(first, keepdim=True)
            wide = wide / columns
            if float((columns - 1).abs().max()) < SUM_TOLERANCE:
                break
        return wide.to(rows.dtype)
    return rows

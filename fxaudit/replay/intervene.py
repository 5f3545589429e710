"""Interventions: pure functions from recorded to replayed coefficients, on tensors with the input axis first.

    identity          the recorded coefficients
    reassign          those of another input: replayed[i] = recorded[donor[i]]; no input is its own donor, and all
                      controllers have the same one
    shuffle-tokens    those of other positions: replayed[i, t] = recorded[i, position[i, t]]; one permutation for all
    static            a mean over calibration data: one number for a `controller`, one for each `unit`, or one for each
                      `unit-position`
    neutral           the value at which the controller does nothing, as its pattern states it

Means accumulate in float64 and are rounded once. An intervention that has no meaning for a coefficient is refused,
with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fxaudit.controllers.controller import Coefficient, Controller
from fxaudit.errors import UsageError, nearest
from fxaudit.replay.store import CoefficientStore, stored_axes

LEVELS = ("controller", "unit", "unit-position")
NAMES = ("identity", "reassign", "shuffle-tokens", "static", "neutral")


@dataclass(frozen=True, slots=True)
class Intervention:
    """An intervention by name, with the level of a static profile and the seed of a random one."""

    name: str
    level: str | None = None
    seed: int | None = None

    def __str__(self) -> str:
        return f"{self.name}:{self.level}" if self.level else self.name


@dataclass(frozen=True, slots=True)
class Permutations:
    """Which recorded values take whose place: `donors` [inputs], and `positions` [inputs, positions] by their
    number."""

    donors: Tensor
    positions: Mapping[int, Tensor]


def default_interventions(seed: int) -> tuple[Intervention, ...]:
    """Every intervention that changes something."""
    static = tuple(Intervention("static", level) for level in LEVELS)
    return (
        Intervention("reassign", seed=seed),
        Intervention("shuffle-tokens", seed=seed),
        *static,
        Intervention("neutral"),
    )


def parse_interventions(text: str, seed: int) -> tuple[Intervention, ...]:
    """The interventions that a comma-separated list names; ``static`` stands for its three levels.

    Raises:
        UsageError: an unknown name or level.
    """
    parsed: list[Intervention] = []
    for item in (part.strip() for part in text.split(",")):
        name, _, level = item.partition(":")
        if name not in NAMES or (level and (name != "static" or level not in LEVELS)):
            known = [n for n in NAMES if n != "static"] + [f"static:{level}" for level in LEVELS]
            raise UsageError(
                f"unknown intervention `{item}`{nearest(item, known)}",
                expected=", ".join(known),
                found=item,
                remedy="name them separated by commas",
            )
        if name == "static":
            parsed += [Intervention(name, chosen) for chosen in ([level] if level else LEVELS)]
        else:
            parsed.append(Intervention(name, seed=seed if name in ("reassign", "shuffle-tokens") else None))
    return tuple(dict.fromkeys(parsed))


def draw_permutations(seed: int, inputs: int, position_counts: Sequence[int]) -> Permutations:
    """Donors without fixed points, uniform among such permutations, and for each number of positions one permutation
    of them for each input."""
    generator = np.random.default_rng(seed)
    donors = np.arange(inputs)
    if inputs > 1:
        # Rejection is uniform over derangements; a random permutation is one with probability of about 1/e.
        while (donors == np.arange(inputs)).any():
            donors = generator.permutation(inputs)
    positions = {
        count: torch.from_numpy(np.stack([generator.permutation(count) for _ in range(inputs)]))
        for count in sorted(set(position_counts))
    }
    return Permutations(torch.from_numpy(donors), positions)


def position_count(coefficient: Coefficient) -> int | None:
    """The number of positions of a coefficient, over all its position axes; None when it has none."""
    sizes = [coefficient.sizes[axis] for axis, role in coefficient.roles.items() if role == "position"]
    count = 1
    for size in sizes:
        if not isinstance(size, int):
            return None
        count *= size
    return count if sizes else None


def refusal(intervention: Intervention, controller: Controller, inputs: int) -> str | None:
    """Why an intervention has no meaning for a controller; None when it has one."""
    discrete = any(c.domain.kind == "index" for c in controller.coefficients)
    match intervention.name:
        case "reassign" if inputs < 2:
            return "reassignment needs two inputs"
        case "shuffle-tokens":
            counts = {position_count(c) for c in controller.coefficients}
            if None in counts:
                return "the coefficient has no position axis"
            if counts == {1}:
                return "the coefficient has one position"
        case "static" if discrete:
            return "indices are not averaged; a static choice of experts is not built yet"
        case "static" if intervention.level == "unit-position" and position_count(controller.coefficients[0]) is None:
            return "the coefficient has no position axis"
        case "neutral" if discrete or controller.intervene.neutral is None:
            return "the family has no neutral value"
    return None


def permuted_positions(rows: Tensor, coefficient: Coefficient, positions: Tensor) -> Tensor:
    """`rows` with their positions permuted, each input by its own row of `positions` ([inputs, positions])."""
    names = stored_axes(coefficient)
    moved = [i for i, name in enumerate(names) if coefficient.roles.get(name) == "position"]
    kept = [i for i in range(1, rows.ndim) if i not in moved]
    arranged = rows.permute(0, *moved, *kept)
    shape = arranged.shape
    flat = arranged.reshape(shape[0], positions.shape[1], -1)
    taken = flat.gather(1, positions.unsqueeze(-1).expand_as(flat)).reshape(shape)
    order = [0, *moved, *kept]
    return taken.permute([order.index(i) for i in range(rows.ndim)])


# --- static profiles ------------------------------------------------------------------------------------------------


def static_profiles(store: CoefficientStore, coefficients: Sequence[Coefficient], level: str) -> dict[str, Tensor]:
    """The mean of each coefficient over a recorded data set, by key, with size-1 axes where it was averaged.

    The input axis comes first. One pass in float64, rounded once to the coefficient's dtype.
    """
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    for batch in store.batches:
        tensors = store.samples(batch)
        for coefficient in coefficients:
            rows = tensors[coefficient.key][: batch.real].double()
            axes = averaged_axes(coefficient, level)
            total = rows.sum(axes, keepdim=True)
            sums[coefficient.key] = sums.get(coefficient.key, torch.zeros_like(total)) + total
            counts[coefficient.key] = counts.get(coefficient.key, 0) + rows.numel() // total.numel()
    return {c.key: (sums[c.key] / counts[c.key]).to(c.dtype) for c in coefficients}


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

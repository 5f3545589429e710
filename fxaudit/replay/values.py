"""The value of every coefficient of one batch, under any intervention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxaudit.controllers.controller import Coefficient, Controller
from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.replay import intervene
from fxaudit.replay.choices import Chooser, expert_count, require_choice
from fxaudit.replay.intervene import Intervention, is_choice
from fxaudit.replay.permutations import Permutations
from fxaudit.replay.store import Batch, CoefficientStore, from_samples, to_samples

IDENTITY = Intervention("identity")


class Treatment(NamedTuple):
    """What is done to a coefficient: an intervention with the draws of one seed.

    In flight, values are made from coefficients of the perturbed run itself; `flight` names that run.
    """

    intervention: Intervention
    seed: int
    flight: str | None = None


@dataclass(frozen=True, slots=True)
class Sources:
    """Everything outside a batch that replayed values are made from.

    `profiles` hold static profiles by level and key, of coefficients and of scores; `choosers` the routers' own nodes
    by controller; `pool` the rows that resampling draws from, by key; `flights` the coefficients of runs in flight, by
    name and key, input axis first.
    """

    recording: CoefficientStore
    permutations: Mapping[int, Permutations]
    profiles: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    choosers: Mapping[str, Chooser] = field(default_factory=dict)
    pool: Mapping[str, Tensor] = field(default_factory=dict)
    pool_inputs: Sequence[int] = ()
    flights: Mapping[tuple[str, int], Mapping[str, Tensor]] = field(default_factory=dict)


class Player:
    """The coefficients of one batch; what several replays need is made once."""

    def __init__(self, frozen: FrozenModel, sources: Sources, batch: Batch, leaves: Sequence[Any]) -> None:
        self.frozen, self.sources, self.batch, self.leaves = frozen, sources, batch, leaves
        self.records, self.strides = sources.recording.read(batch)
        # The inputs of the batch; those past the real ones repeat them.
        self.inputs = [batch.start + i % batch.real for i in range(batch.size)]
        self._owner = {c.key: k for k in frozen.controllers for c in k.coefficients}
        self._made: dict[tuple[Treatment | None, str], Tensor] = {}
        self._donors: dict[tuple[int, str | None], dict[str, Tensor]] = {}

    def recorded(self) -> list[Tensor]:
        """The recorded value of every bound coefficient."""
        return [self.value(i, None) for i in range(len(self.frozen.coefficients))]

    def value(self, index: int, treatment: Treatment | None) -> Tensor:
        """The value that the graph takes for a coefficient; None stands for the recorded one."""
        coefficient = self.frozen.coefficients[index]
        place = (treatment, coefficient.key)
        if place not in self._made:
            self._made[place] = self._value(treatment, coefficient)
        return self._made[place]

    def live_value(self, index: int, treatment: Treatment | None, computed: Tensor) -> Tensor:
        """The value that takes the place of one that the live graph `computed`; None leaves it."""
        if treatment is None:
            return computed
        if treatment.flight is None:
            return self.value(index, treatment)
        coefficient = self.frozen.coefficients[index]
        own = to_samples(computed, coefficient, self.batch.size)
        permutations = self.sources.permutations[treatment.seed]
        if treatment.intervention.name == "reassign":
            donors = self._donors_of(permutations, treatment.intervention, coefficient)
            flight = self.sources.flights[treatment.flight, treatment.seed]
            rows = self._part(treatment.intervention, coefficient, own, flight[coefficient.key][donors[self.inputs]])
        else:
            rows = self._moved(treatment, coefficient, own)
        self._check(treatment, coefficient, rows)
        return from_samples(rows, coefficient, computed.stride())

    def _value(self, treatment: Treatment | None, coefficient: Coefficient) -> Tensor:
        controller = self._owner[coefficient.key]
        if treatment is not None and treatment.intervention.name == "static" and intervene.is_discrete(controller):
            for one, value in zip(controller.coefficients, self._chosen(treatment, controller), strict=True):
                self._made[treatment, one.key] = value
            return self._made[treatment, coefficient.key]
        rows = self.records[coefficient.key] if treatment is None else self._rows(treatment, coefficient)
        if treatment is not None:
            self._check(treatment, coefficient, rows)
        return from_samples(rows, coefficient, self.strides[coefficient.key])

    def _chosen(self, treatment: Treatment, controller: Controller) -> tuple[Tensor, ...]:
        """The choice that the mean scores make."""
        scores = intervene.scores_of(controller)
        assert scores is not None  # refused otherwise
        profile = self.sources.profiles[treatment.intervention.level or ""][scores.key]
        rows = profile.expand_as(self.records[scores.key])
        found = self.sources.choosers[controller.id].choose(
            self.leaves, from_samples(rows, scores, self.strides[scores.key])
        )
        for coefficient, value in zip(controller.coefficients, found, strict=True):
            self._check(treatment, coefficient, to_samples(value, coefficient, self.batch.size))
        return found

    def _rows(self, treatment: Treatment, coefficient: Coefficient) -> Tensor:
        own, intervention = self.records[coefficient.key], treatment.intervention
        match intervention.name:
            case "reassign":
                given = self._donated(treatment, coefficient)[coefficient.key]
                return self._part(intervention, coefficient, own, given)
            case "static":
                return self.sources.profiles[intervention.level or ""][coefficient.key].expand_as(own)
            case "neutral":
                neutral = self._owner[coefficient.key].intervene.neutral_of(coefficient.name)
                return own if neutral is None else torch.full_like(own, neutral)
            case "resample":
                permutations, controller = self.sources.permutations[treatment.seed], self._owner[coefficient.key]
                places = permutations.resample_positions.get(controller.id)
                pooled = torch.tensor(self.sources.pool_inputs)
                donors = torch.searchsorted(pooled, permutations.resample_donors[controller.id][self.inputs])
                positions = places[self.inputs] if places is not None else None
                return intervene.resampled(self.sources.pool[coefficient.key], coefficient, donors, positions)
            case "swap-controllers":
                return self._part(intervention, coefficient, own, self.records[self._swapped(treatment, coefficient)])
        return self._moved(treatment, coefficient, own)

    def _moved(self, treatment: Treatment, coefficient: Coefficient, own: Tensor) -> Tensor:
        """Values that only trade places within an input."""
        intervention, controller = treatment.intervention, self._owner[coefficient.key]
        permutations = self.sources.permutations[treatment.seed]
        if intervention.name == "shuffle-tokens":
            count = intervene.position_count(coefficient)
            assert count is not None  # refused otherwise
            own_draw, shared = permutations.own_positions, permutations.positions
            positions = own_draw[controller.id] if intervention.each else shared[count]
            given = intervene.permuted_positions(own, coefficient, positions[self.inputs])
            return self._part(intervention, coefficient, own, given)
        if intervention.name == "permute-units":
            units = permutations.own_units.get(controller.id) if intervention.each else None
            if units is None:
                units = permutations.units[intervene.unit_count(controller) or 1]
            return intervene.permuted_units(own, coefficient, units)
        return own

    def _part(self, intervention: Intervention, coefficient: Coefficient, own: Tensor, given: Tensor) -> Tensor:
        """What is given, of the part that is exchanged: the pair, only weights, or only indices."""
        if intervention.part == "pair":
            return given
        return given if is_choice(coefficient) == (intervention.part == "indices") else own

    def _donors_of(self, permutations: Permutations, intervention: Intervention, coefficient: Coefficient) -> Tensor:
        if intervention.each:
            return permutations.own_donors[self._owner[coefficient.key].id]
        return permutations.donors

    def _donated(self, treatment: Treatment, coefficient: Coefficient) -> dict[str, Tensor]:
        """Recorded rows of the donors; those of all controllers in one reading where they share donors."""
        controller = self._owner[coefficient.key]
        each = treatment.intervention.each
        place = (treatment.seed, controller.id if each else None)
        if place not in self._donors:
            coefficients = controller.coefficients if each else self.frozen.coefficients
            donors = self._donors_of(self.sources.permutations[treatment.seed], treatment.intervention, coefficient)
            self._donors[place] = self.sources.recording.rows(
                [c.key for c in coefficients], donors[self.inputs].tolist()
            )
        return self._donors[place]

    def _swapped(self, treatment: Treatment, coefficient: Coefficient) -> str:
        """The key of the coefficient of the same name that another controller hands over."""
        controllers = self.frozen.controllers
        sources = self.sources.permutations[treatment.seed].controllers
        giver = controllers[int(sources[controllers.index(self._owner[coefficient.key])])]
        return next(c.key for c in giver.coefficients if c.name == coefficient.name)

    def _check(self, treatment: Treatment, coefficient: Coefficient, rows: Tensor) -> None:
        if is_choice(coefficient):
            experts = expert_count(self._owner[coefficient.key])
            require_choice(rows, coefficient, experts, str(treatment.intervention))

"""Dependence: does the function need these coefficients on this input and token?

The frozen model is replayed with intervened coefficients, in the recorded batches; no controller is recomputed on a
perturbed hidden state. Effects are paired by input: the replayed metric minus that of identity replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fxaudit.controllers.controller import Coefficient, Controller
from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.model.compare import same_bits
from fxaudit.model.data import DataSet
from fxaudit.model.settings import exact_numerics
from fxaudit.replay import intervene
from fxaudit.replay.intervene import Intervention, Permutations
from fxaudit.replay.metrics import Score, choose_output, metric_name, output_form, score
from fxaudit.replay.run import Progress
from fxaudit.replay.statistics import holm, paired_effect
from fxaudit.replay.store import Batch, CoefficientStore, from_samples

SIGNIFICANCE = 0.05
# The interventions that give coefficients to other inputs or positions than they were computed for.
ASSIGNMENTS = ("reassign", "shuffle-tokens", "static")


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """One intervention in one scope: the metric of each input, and the effect against identity replay.

    `scope` is ``joint`` or ``controller``; `controllers` are those intervened on, the others keep their records.
    `changed` says whether any bit of the output moved. `refused` is the reason why nothing was run.
    """

    intervention: str
    level: str | None
    scope: str
    controllers: tuple[str, ...]
    discrete: str | None
    seed: int | None
    metric: str
    per_input: tuple[float, ...] = ()
    delta: float | None = None
    interval: tuple[float, float] | None = None
    p: float | None = None
    adjusted_p: float | None = None
    accuracy: float | None = None
    changed: bool | None = None
    refused: str | None = None

    @property
    def label(self) -> str:
        return f"{self.intervention}:{self.level}" if self.level else self.intervention


@dataclass(frozen=True, slots=True)
class Baseline:
    """Identity replay: the output that was scored and what it holds, the metric of each input, its mean over inputs,
    its mean weighted by valid targets, and the accuracy where there are targets."""

    metric: str
    output: str
    form: str
    per_input: tuple[float, ...]
    mean: float
    token_weighted: float
    accuracy: float | None


@dataclass(frozen=True, slots=True)
class Dependence:
    """The dependence claim, with everything needed to compute it again.

    `inert` are controllers whose coefficients were exchanged without any bit of the output moving: what they multiply
    is zero, so nothing can be said about dependence on them.
    """

    baseline: Baseline
    results: tuple[ReplayResult, ...]
    permutations: Permutations
    profiles: Mapping[str, Mapping[str, Tensor]]
    margin: float | None
    inert: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """EQUIVALENT when every reassignment, shuffle and static profile of all controllers stays within the margin,
        DEPENDENT when one of them has an effect, INERT when none moves a bit, otherwise INCONCLUSIVE.

        `neutral` does not count: it removes the controllers, and says nothing about which input a coefficient is for.
        """
        outcomes = {
            self.outcome(r)
            for r in self.results
            if r.scope == "joint" and r.refused is None and r.intervention in ASSIGNMENTS
        }
        if outcomes == {"INERT"}:
            return "INERT"
        # What moves no bit is within any margin.
        if outcomes and outcomes <= {"INERT", "EQUIVALENT"}:
            return "EQUIVALENT"
        return "DEPENDENT" if "DEPENDENT" in outcomes else "INCONCLUSIVE"

    def outcome(self, result: ReplayResult) -> str:
        """What one result says by itself: INERT, EQUIVALENT (with a margin), DEPENDENT, INCONCLUSIVE, or REFUSED."""
        if result.refused is not None:
            return "REFUSED"
        if not result.changed:
            return "INERT"
        low, high = result.interval or (float("-inf"), float("inf"))
        if self.margin is not None and -self.margin < low and high < self.margin:
            return "EQUIVALENT"
        if self.baseline.metric == "kl":
            # A divergence is never negative, and positive as soon as a bit moves: only a margin tells it from rounding.
            return "DEPENDENT" if self.margin is not None and low > self.margin else "INCONCLUSIVE"
        significant = result.adjusted_p is not None and result.adjusted_p < SIGNIFICANCE
        return "DEPENDENT" if significant and (low > 0 or high < 0) else "INCONCLUSIVE"


@dataclass(slots=True)
class _Row:
    """A result while its batches come in."""

    result: ReplayResult
    chosen: frozenset[str]
    intervention: Intervention
    scores: list[Score] = field(default_factory=list)
    changed: bool = False


def measure_dependence(
    frozen: FrozenModel,
    data: DataSet,
    recording: CoefficientStore,
    calibration: CoefficientStore | None,
    interventions: Sequence[Intervention],
    *,
    seed: int = 0,
    output: str | None = None,
    margin: float | None = None,
    scopes: Sequence[str] = ("joint", "controller"),
    progress: Progress | None = None,
) -> Dependence:
    """Replay every intervention on all controllers jointly and on each alone.

    Args:
        calibration: the store that static profiles are averaged over; static interventions are refused without one.
        margin: effects within it count as none, in units of the metric.

    Raises:
        DataError: targets that do not fit the output.
    """
    first_targets = data.targets_of(0, 1)
    metric = metric_name(first_targets)
    rows = _plan(frozen, interventions, scopes, metric, data.count, calibration)
    profiles = _profiles(frozen, rows, calibration)
    counts = [c for c in map(intervene.position_count, frozen.coefficients) if c is not None]
    permutations = intervene.draw_permutations(seed, data.count, counts)
    baseline_scores: list[Score] = []
    chosen_output, form = -1, "logits"
    with exact_numerics():
        for done, batch in enumerate(recording.batches):
            leaves, real = data.leaves(frozen.traced, batch.start, batch.size)
            targets = data.targets_of(batch.start, batch.start + real)
            player = _Player(frozen, recording, batch, permutations, profiles)
            live = frozen.run_frozen(leaves, player.values(Intervention("identity"), frozenset()))
            if chosen_output < 0:
                chosen_output = choose_output(live, frozen.traced.output_names, output)
                form = output_form(frozen.traced.output_leaves()[chosen_output])
            logits = live[chosen_output][:real]
            baseline_scores.append(score(logits, targets, logits, form))
            for row in rows:
                if row.result.refused is None:
                    replayed = frozen.run_frozen(leaves, player.values(row.intervention, row.chosen))
                    row.changed |= any(_differ(a, b) for a, b in zip(live, replayed, strict=True))
                    row.scores.append(score(replayed[chosen_output][:real], targets, logits, form))
            if progress is not None:
                progress(done + 1, len(recording.batches))
    baseline = _baseline(metric, frozen.traced.output_names[chosen_output], form, baseline_scores)
    results = _adjusted([_finish(row, baseline, seed) for row in rows])
    inert = tuple(
        r.controllers[0]
        for r in results
        if r.scope == "controller" and r.intervention == "reassign" and r.changed is False
    )
    return Dependence(baseline, tuple(results), permutations, profiles, margin, inert)


def _differ(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and not same_bits(a, b)


def _plan(
    frozen: FrozenModel,
    interventions: Sequence[Intervention],
    scopes: Sequence[str],
    metric: str,
    inputs: int,
    calibration: CoefficientStore | None,
) -> list[_Row]:
    """One row for each intervention and scope, refused ones with their reason."""
    rows = []
    for intervention in interventions:
        reasons = {k.id: intervene.refusal(intervention, k, inputs) for k in frozen.controllers}
        if intervention.name == "static" and calibration is None:
            reasons = dict.fromkeys(reasons, "a static profile needs calibration data")
        legal = [k for k in frozen.controllers if reasons[k.id] is None]
        if "joint" in scopes:
            refused = None if legal else next(iter(reasons.values()))
            rows.append(_row(intervention, "joint", legal or frozen.controllers, metric, refused))
        if "controller" in scopes:
            rows += [_row(intervention, "controller", [k], metric, reasons[k.id]) for k in frozen.controllers]
    return rows


def _row(
    intervention: Intervention, scope: str, controllers: Sequence[Controller], metric: str, refused: str | None
) -> _Row:
    discrete = any(c.domain.kind == "index" for k in controllers for c in k.coefficients)
    result = ReplayResult(
        intervention=intervention.name,
        level=intervention.level,
        scope=scope,
        controllers=tuple(k.id for k in controllers),
        discrete="pair" if discrete else None,
        seed=intervention.seed,
        metric=metric,
        refused=refused,
    )
    return _Row(result, frozenset(c.key for k in controllers for c in k.coefficients), intervention)


def _profiles(
    frozen: FrozenModel, rows: Sequence[_Row], calibration: CoefficientStore | None
) -> dict[str, dict[str, Tensor]]:
    """Static profiles by level, for the coefficients that some row needs."""
    profiles: dict[str, dict[str, Tensor]] = {}
    for row in rows:
        if row.intervention.name == "static" and row.result.refused is None and calibration is not None:
            level = row.intervention.level or ""
            if level not in profiles:
                keys = {
                    k for r in rows if r.intervention == row.intervention and not r.result.refused for k in r.chosen
                }
                wanted = [c for c in frozen.coefficients if c.key in keys]
                profiles[level] = intervene.static_profiles(calibration, wanted, level)
    return profiles


class _Player:
    """The coefficients of one batch under any intervention; what several rows need is made once."""

    def __init__(
        self,
        frozen: FrozenModel,
        recording: CoefficientStore,
        batch: Batch,
        permutations: Permutations,
        profiles: Mapping[str, Mapping[str, Tensor]],
    ) -> None:
        self.frozen, self.recording, self.batch = frozen, recording, batch
        self.permutations, self.profiles = permutations, profiles
        self.records, self.strides = recording.read(batch)
        # The inputs of the batch; those past the real ones repeat them.
        self.inputs = [batch.start + i % batch.real for i in range(batch.size)]
        self._made: dict[tuple[Intervention, str], Tensor] = {}
        self._donors: dict[str, Tensor] | None = None

    def values(self, intervention: Intervention, chosen: frozenset[str]) -> list[Tensor]:
        """One value for each bound coefficient: intervened where its key is chosen, recorded elsewhere."""
        identity = Intervention("identity")
        return [self._value(intervention if c.key in chosen else identity, c) for c in self.frozen.coefficients]

    def _value(self, intervention: Intervention, coefficient: Coefficient) -> Tensor:
        place = (intervention, coefficient.key)
        if place not in self._made:
            rows = self._rows(intervention, coefficient)
            self._made[place] = from_samples(rows, coefficient, self.strides[coefficient.key])
        return self._made[place]

    def _rows(self, intervention: Intervention, coefficient: Coefficient) -> Tensor:
        own = self.records[coefficient.key]
        match intervention.name:
            case "reassign":
                if self._donors is None:
                    keys = [c.key for c in self.frozen.coefficients]
                    self._donors = self.recording.rows(keys, self.permutations.donors[self.inputs].tolist())
                return self._donors[coefficient.key]
            case "shuffle-tokens":
                count = intervene.position_count(coefficient)
                assert count is not None  # refused otherwise
                return intervene.permuted_positions(own, coefficient, self.permutations.positions[count][self.inputs])
            case "static":
                return self.profiles[intervention.level or ""][coefficient.key].expand_as(own)
            case "neutral":
                controller = next(k for k in self.frozen.controllers if coefficient in k.coefficients)
                return torch.full_like(own, float(controller.intervene.neutral or 0.0))
        return own


def _baseline(metric: str, output: str, form: str, scores: Sequence[Score]) -> Baseline:
    values, weights = torch.cat([s.values for s in scores]), torch.cat([s.weight for s in scores])
    return Baseline(
        metric,
        output,
        form,
        tuple(values.tolist()),
        float(values.mean()),
        float((values * weights).sum() / weights.sum()),
        _accuracy(scores),
    )


def _accuracy(scores: Sequence[Score]) -> float | None:
    found = [s.accuracy for s in scores if s.accuracy is not None]
    return float(torch.cat(found).mean()) if found else None


def _finish(row: _Row, baseline: Baseline, seed: int) -> ReplayResult:
    if row.result.refused is not None:
        return row.result
    values = torch.cat([s.values for s in row.scores])
    differences = values - torch.tensor(baseline.per_input, dtype=torch.float64)
    effect = paired_effect(differences.tolist(), seed)
    return replace(
        row.result,
        per_input=tuple(values.tolist()),
        delta=effect.mean,
        interval=effect.interval,
        p=effect.p,
        accuracy=_accuracy(row.scores),
        changed=row.changed,
    )


def _adjusted(results: list[ReplayResult]) -> list[ReplayResult]:
    """Results with p-values corrected within each family of tests (Holm).

    One family for each intervention holds its controllers; one more holds all joint exchanges, since the verdict is
    DEPENDENT as soon as one of them has an effect.
    """
    families: dict[str, list[int]] = {}
    for i, result in enumerate(results):
        if result.p is not None:
            joint = "joint" if result.intervention in ASSIGNMENTS else f"joint {result.label}"
            families.setdefault(joint if result.scope == "joint" else result.label, []).append(i)
    adjusted = list(results)
    for family in families.values():
        for i, p in zip(family, holm([results[i].p or 0.0 for i in family]), strict=True):
            adjusted[i] = replace(results[i], adjusted_p=p)
    return adjusted

"""Dependence: does the function need these coefficients on this input and token?

The frozen model is replayed with intervened coefficients, in the recorded batches; no controller is recomputed on a
perturbed hidden state, unless asked for as feedback. Effects are paired by input: the replayed metric minus that of
identity replay.
"""

from __future__ import annotations

import statistics as plain_statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxaudit.controllers.controller import Controller
from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.model.compare import same_bits
from fxaudit.model.data import MASK, DataSet
from fxaudit.model.settings import exact_numerics
from fxaudit.model.trace import run_flat
from fxaudit.replay import intervene, profiles
from fxaudit.replay.choices import Chooser, chooser
from fxaudit.replay.flight import fly
from fxaudit.replay.intervene import Intervention
from fxaudit.replay.metrics import Metric, Score, choose_output, output_form
from fxaudit.replay.permutations import Permutations, draw, with_given
from fxaudit.replay.plan import SCOPES, Row, plan_rows
from fxaudit.replay.results import ASSIGNMENTS, Baseline, Dependence, ReplayResult, SeedResult
from fxaudit.replay.run import Progress
from fxaudit.replay.segments import Chain, Explorer, frozen_chain, live_chain
from fxaudit.replay.statistics import holm, needed_inputs, paired_effect
from fxaudit.replay.store import CoefficientStore
from fxaudit.replay.values import Player, Sources, Treatment


@dataclass(frozen=True, slots=True)
class Calibration:
    """A recording that static profiles are averaged over, and its valid positions ([inputs, positions]), if masked."""

    store: CoefficientStore
    valid: Tensor | None = None


@dataclass(slots=True)
class _Run:
    """A row with the draws of one seed, while its batches come in; the baseline is a run without a row."""

    row: Row | None
    seed: int
    signature: tuple[Treatment | None, ...]
    scores: list[Score] = field(default_factory=list)
    changed: bool = False


def measure_dependence(
    frozen: FrozenModel,
    data: DataSet,
    recording: CoefficientStore,
    calibration: Calibration | CoefficientStore | None,
    interventions: Sequence[Intervention],
    *,
    seeds: Sequence[int] = (0,),
    output: str | None = None,
    margin: float | None = None,
    scopes: Sequence[str] = SCOPES,
    live: bool = False,
    given: Mapping[int | None, Mapping[str, Tensor]] | None = None,
    metric: Metric | None = None,
    compiled: bool = False,
    progress: Progress | None = None,
) -> Dependence:
    """Replay every intervention in every scope.

    Args:
        calibration: what static profiles are averaged over; static interventions are refused without one.
        seeds: one draw of every random intervention for each; effects are means over them.
        margin: effects within it count as none, in units of the metric.
        live: also with the other controllers recomputed, and with values made in flight.
        given: permutations by seed, as `read_permutations` returns them; None stands for the first seed.
        metric: by default what the targets call for.
        compiled: run the graphs through torch.compile; then numbers are not those of the eager model to the last bit.

    Raises:
        DataError: targets or permutations that do not fit.
        SelfCheckError: an intervention that makes what the router could not choose.
    """
    calibrating = Calibration(calibration) if isinstance(calibration, CoefficientStore) else calibration
    metric = metric or Metric.of(data.targets_of(0, 1))
    valid = data.valid_positions()
    given = given or {}
    # Given permutations bring their own draws: those of further seeds would be of another kind.
    further = [s for s in given if s is not None] if given else seeds[1:]
    seeds = tuple(dict.fromkeys([seeds[0], *further]))
    draws: dict[int, Permutations] = {}
    for turn, seed in enumerate(seeds):
        drawn = draw(seed, data.count, frozen.controllers, interventions, valid)
        arrays = {**(given.get(None, {}) if turn == 0 else {}), **given.get(seed, {})}
        draws[seed] = with_given(drawn, arrays, frozen.controllers, valid)
    alone = draws[seeds[0]].alone
    movable = data.count - (int(alone.sum()) if alone is not None and data.count > 1 else 0)
    choosers = {k.id: chooser(frozen.traced, k) for k in frozen.controllers if intervene.is_discrete(k)}

    def refusal(intervention: Intervention, controller: Controller) -> str | None:
        reason = intervene.refusal(intervention, controller, movable, frozen.controllers)
        if intervention.name == "static" and calibrating is None:
            return "a static profile needs calibration data"
        if reason is None and intervention.name == "static" and isinstance(choosers.get(controller.id), str):
            return str(choosers[controller.id])
        return reason

    rows = plan_rows(frozen.controllers, interventions, scopes, refusal, metric=metric.name, seed=seeds[0], live=live)
    wanted = [row for row in rows if row.result.refused is None]
    measured, absent = _profiles(frozen, wanted, calibrating)
    sources = Sources(
        recording,
        draws,
        measured,
        {key: found for key, found in choosers.items() if isinstance(found, Chooser)},
        *_pool(frozen, recording, draws, wanted),
        flights={},
    )
    with exact_numerics(), tempfile.TemporaryDirectory() as scratch:
        replays = _Replays(frozen, data, sources, metric, valid, output, compiled)
        runs = replays.runs_of(wanted, seeds, Path(scratch))
        for done, batch in enumerate(recording.batches):
            replays.run(batch, runs)
            if progress is not None:
                progress(done + 1, len(recording.batches))
    baseline = replays.finish_baseline()
    by_row = {id(row): [run for run in runs if run.row is row] for row in wanted}
    results = [
        _finish(row, by_row[id(row)], replays.baseline.scores, draws, absent, seeds[0])
        if row.result.refused is None
        else row.result
        for row in rows
    ]
    inert = tuple(
        r.controllers[0]
        for r in results
        if r.scope == "controller" and r.feedback == "frozen" and r.label == "reassign" and r.changed is False
    )
    return Dependence(
        baseline,
        tuple(_adjusted(results, baseline, margin)),
        draws[seeds[0]],
        measured,
        margin,
        inert,
        draws,
        replays.causal,
    )


class _Replays:
    """Everything that is run on one batch after the other."""

    def __init__(
        self,
        frozen: FrozenModel,
        data: DataSet,
        sources: Sources,
        metric: Metric,
        valid: Tensor | None,
        output: str | None,
        compiled: bool,
    ) -> None:
        self.frozen, self.data, self.sources, self.metric, self.valid = frozen, data, sources, metric, valid
        self.asked, self.compiled = output, compiled
        self.chain = frozen_chain(frozen, compiled=compiled)
        self.live: Chain | None = None
        self.baseline = _Run(None, 0, (None,) * len(self.chain.order))
        self.output, self.form = -1, "logits"
        self.causal: bool | None = None
        self._identity: tuple[Any, ...] = ()

    def runs_of(self, rows: Sequence[Row], seeds: Sequence[int], scratch: Path) -> list[_Run]:
        """One run for each row and seed; what is needed of runs in flight is recorded first."""
        if any(row.result.feedback != "frozen" for row in rows):
            self.live = live_chain(self.frozen, compiled=self.compiled)
        runs = []
        for row in rows:
            chain = self.chain if row.result.feedback == "frozen" or self.live is None else self.live
            keys = [self.frozen.coefficients[i].key for i in chain.order]
            for seed in seeds if row.intervention.is_random else seeds[:1]:
                treatment = row.treatment(seed)
                runs.append(_Run(row, seed, tuple(treatment if key in row.keys else None for key in keys)))
                if treatment is not None and treatment.flight and treatment.intervention.name == "reassign":
                    assert self.live is not None
                    fly(self.frozen, self.live, self.data, self.sources, treatment, runs[-1], scratch)
        return runs

    def run(self, batch: Any, runs: Sequence[_Run]) -> None:
        """Run one batch of the baseline and of every run, and score it."""
        leaves, real = self.data.leaves(self.frozen.traced, batch.start, batch.size)
        player = Player(self.frozen, self.sources, batch, leaves)
        targets = self.data.targets_of(batch.start, batch.start + real)
        valid = self.valid[batch.start : batch.start + real] if self.valid is not None else None

        def finish(done: Sequence[_Run], found: tuple[Any, ...]) -> None:
            if done[0] is self.baseline:
                self._identity = found
                if self.output < 0:
                    self.output = choose_output(found, self.frozen.traced.output_names, self.asked)
                    self.form = output_form(self.frozen.traced.output_leaves()[self.output])
                    self.causal = is_causal(self.frozen, leaves, self.output)
            changed = any(_differ(a, b) for a, b in zip(self._identity, found, strict=True))
            live = self._identity[self.output][:real]
            scored = self.metric.score(found[self.output][:real], targets, live, self.form, valid)
            for run in done:
                run.scores.append(scored)
                run.changed |= changed

        frozen_runs = [run for run in runs if run.row is not None and run.row.result.feedback == "frozen"]
        Explorer(self.chain, lambda i, mark, _: player.value(i, mark), finish).run(
            leaves, [self.baseline, *frozen_runs]
        )
        live_runs = [run for run in runs if run.row is not None and run.row.result.feedback != "frozen"]
        if self.live is not None and live_runs:
            Explorer(self.live, player.live_value, finish).run(leaves, live_runs)

    def finish_baseline(self) -> Baseline:
        scores = self.baseline.scores
        values, weights = torch.cat([s.values for s in scores]), torch.cat([s.weight for s in scores])
        return Baseline(
            self.metric.name,
            self.frozen.traced.output_names[self.output],
            self.form,
            tuple(values.tolist()),
            float(values.mean()),
            float((values * weights).sum() / weights.sum()),
            _accuracy(scores, None),
        )


def is_causal(frozen: FrozenModel, leaves: Sequence[Any], output: int) -> bool | None:
    """Whether an output [inputs, positions, ...] stays the same, but for its last position, when the last position of
    every input changes; None where there are no positions, or where the last one changes nothing either."""
    traced = frozen.traced
    before = run_flat(traced.graph_module, list(leaves), traced.initial_state)[output]
    if not isinstance(before, Tensor) or before.ndim < 3 or before.shape[1] < 2:
        return None
    changed = list(leaves)
    for i, (name, leaf) in enumerate(zip(traced.input_names, leaves, strict=True)):
        if isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.shape[1] == before.shape[1] and name != MASK:
            changed[i] = leaf.clone()
            # The values of another input are as good as its own.
            changed[i][:, -1] = leaf[:, 0] if len(leaf) < 2 else leaf.roll(1, 0)[:, -1]
    after = run_flat(traced.graph_module, changed, traced.initial_state)[output]
    if same_bits(before[:, -1], after[:, -1]):
        return None
    return same_bits(before[:, :-1], after[:, :-1])


def _differ(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and not same_bits(a, b)


def _profiles(
    frozen: FrozenModel, rows: Sequence[Row], calibration: Calibration | None
) -> tuple[dict[str, dict[str, Tensor]], dict[str, int]]:
    """Static profiles by level, for the coefficients and scores that some row needs, and absent positions by level."""
    found: dict[str, dict[str, Tensor]] = {}
    absent: dict[str, int] = {}
    needed: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.intervention.name == "static":
            for controller in row.controllers:
                scores = intervene.scores_of(controller) if intervene.is_discrete(controller) else None
                for coefficient in (scores,) if scores is not None else controller.coefficients:
                    needed.setdefault(row.intervention.level or "", {})[coefficient.key] = coefficient
    for level, coefficients in needed.items():
        assert calibration is not None  # refused otherwise
        measured = profiles.measure_profiles(calibration.store, list(coefficients.values()), level, calibration.valid)
        found[level] = {key: profile.value for key, profile in measured.items()}
        absent[level] = max(profile.absent for profile in measured.values())
    return found, absent


def _pool(
    frozen: FrozenModel, recording: CoefficientStore, draws: Mapping[int, Permutations], rows: Sequence[Row]
) -> tuple[dict[str, Tensor], list[int]]:
    """The recorded rows that resampling draws from, by key, and their inputs."""
    keys = sorted({key for row in rows if row.intervention.name == "resample" for key in row.keys})
    inputs = sorted({i for permutations in draws.values() for i in permutations.pool})
    return (recording.rows(keys, inputs), inputs) if keys else ({}, [])


def _accuracy(scores: Sequence[Score], kept: Tensor | None) -> float | None:
    found = [s.accuracy for s in scores if s.accuracy is not None]
    if not found:
        return None
    values = torch.cat(found)
    return float((values if kept is None else values[kept]).mean())


def _finish(
    row: Row,
    runs: Sequence[_Run],
    baseline: Sequence[Score],
    draws: Mapping[int, Permutations],
    absent: Mapping[str, int],
    seed: int,
) -> ReplayResult:
    own = torch.cat([s.values for s in baseline])
    weights = torch.cat([s.weight for s in baseline])
    kept = torch.ones(len(own), dtype=torch.bool)
    alone = draws[seed].alone
    if row.intervention.name == "reassign" and alone is not None:
        kept = ~alone
    by_seed = torch.stack([torch.cat([s.values for s in run.scores]) for run in runs])
    values = by_seed.mean(0)
    differences = (values - own)[kept]
    effect = paired_effect(differences.tolist(), seed)
    deltas = [float((v - own)[kept].mean()) for v in by_seed]
    accuracies = [a for run in runs if (a := _accuracy(run.scores, kept)) is not None]

    def listed(found: Tensor) -> tuple[float | None, ...]:
        return tuple(v if k else None for v, k in zip(found.tolist(), kept.tolist(), strict=True))

    level = row.intervention.level
    return replace(
        row.result,
        per_input=listed(values),
        left_out=int((~kept).sum()),
        baseline=float(own[kept].mean()),
        delta=effect.mean,
        token_weighted=float((differences * weights[kept]).sum() / weights[kept].sum()),
        interval=effect.interval,
        p=effect.p,
        accuracy=plain_statistics.fmean(accuracies) if accuracies else None,
        changed=any(run.changed for run in runs),
        seeds=tuple(
            SeedResult(run.seed, delta, listed(found)) for run, delta, found in zip(runs, deltas, by_seed, strict=True)
        )
        if len(runs) > 1
        else (),
        spread=plain_statistics.stdev(deltas) if len(deltas) > 1 else None,
        absent_positions=absent.get(level) if level is not None else None,
    )


def _adjusted(results: list[ReplayResult], baseline: Baseline, margin: float | None) -> list[ReplayResult]:
    """Results with p-values corrected within each family of tests (Holm), and the inputs that each would need.

    One family for each intervention, scope and feedback holds its controllers; one more holds all joint exchanges,
    since the verdict is DEPENDENT as soon as one of them has an effect.
    """
    families: dict[tuple[str, ...], list[int]] = {}
    for i, result in enumerate(results):
        if result.p is not None:
            exchanges = result.scope == "joint" and result.intervention in ASSIGNMENTS
            families.setdefault((result.scope, result.feedback, "" if exchanges else result.label), []).append(i)
    adjusted = list(results)
    for family in families.values():
        for i, p in zip(family, holm([results[i].p or 0.0 for i in family]), strict=True):
            pairs = zip(results[i].per_input, baseline.per_input, strict=True)
            differences = [value - own for value, own in pairs if value is not None]
            is_divergence = baseline.metric == "kl"
            needed = needed_inputs(differences, margin, tests=len(family), is_divergence=is_divergence)
            adjusted[i] = replace(results[i], adjusted_p=p, needed=needed)
    return adjusted

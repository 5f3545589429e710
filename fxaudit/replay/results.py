"""What replays say: one result for each intervention, scope and feedback, and the verdict on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fxaudit.replay.permutations import Permutations

SIGNIFICANCE = 0.05
# The interventions that give coefficients to other inputs or positions than they were computed for.
ASSIGNMENTS = ("reassign", "shuffle-tokens", "static")


@dataclass(frozen=True, slots=True)
class SeedResult:
    """The effect of one seed's draws."""

    seed: int
    delta: float
    per_input: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """One intervention in one scope: the metric of each input, and the effect against identity replay.

    `scope` is ``joint``, ``controller``, ``pattern`` or ``cumulative``; `controllers` are those intervened on, the
    others keep their records (`feedback` ``frozen``) or are recomputed (``live``); ``in-flight`` makes the values from
    coefficients of the perturbed run. Over several seeds `per_input` holds means, and `spread` is the standard
    deviation of the effect between seeds. An input that no other one can stand in for is left out: its value is None,
    and `delta` is against the baseline of the others, `baseline`. `changed` says whether any bit of the output moved.
    `refused` is the reason why nothing was run. `needed` is the number of inputs at which an effect of this size would
    be resolved.
    """

    intervention: str
    level: str | None
    scope: str
    controllers: tuple[str, ...]
    discrete: str | None
    seed: int | None
    metric: str
    feedback: str = "frozen"
    each: bool = False
    per_input: tuple[float | None, ...] = ()
    left_out: int = 0
    baseline: float | None = None
    delta: float | None = None
    token_weighted: float | None = None
    interval: tuple[float, float] | None = None
    p: float | None = None
    adjusted_p: float | None = None
    accuracy: float | None = None
    changed: bool | None = None
    seeds: tuple[SeedResult, ...] = ()
    spread: float | None = None
    needed: int | None = None
    absent_positions: int | None = None
    refused: str | None = None

    @property
    def label(self) -> str:
        options = [self.level or "", "each" if self.each else ""]
        if self.discrete in ("weights", "indices"):
            options.append(self.discrete)
        return ":".join([self.intervention, *filter(None, options)])


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
    is zero, so nothing can be said about dependence on them. `permutations` are the draws of the first seed, `draws`
    those of all. `causal` says whether later positions of an input leave the output of earlier ones alone, None where
    it has no positions: a shuffle of a causal model's tokens gives earlier positions what later ones computed.
    """

    baseline: Baseline
    results: tuple[ReplayResult, ...]
    permutations: Permutations
    profiles: Mapping[str, Mapping[str, Tensor]]
    margin: float | None
    inert: tuple[str, ...]
    draws: Mapping[int, Permutations] = field(default_factory=dict)
    causal: bool | None = None

    @property
    def verdict(self) -> str:
        """EQUIVALENT when every reassignment, shuffle and static profile of all controllers stays within the margin,
        DEPENDENT when one of them has an effect, INERT when none moves a bit, otherwise INCONCLUSIVE.

        `neutral` does not count: it removes the controllers, and says nothing about which input a coefficient is for.
        Nor do live controllers: what they recompute is feedback.
        """
        outcomes = {
            self.outcome(r)
            for r in self.results
            if r.scope == "joint"
            and r.feedback == "frozen"
            and r.refused is None
            and r.intervention in ASSIGNMENTS
            and r.discrete not in ("weights", "indices")
        }
        if outcomes == {"INERT"}:
            return "INERT"
        # What moves no bit is within any margin.
        if outcomes and outcomes <= {"INERT", "EQUIVALENT"}:
            return "EQUIVALENT"
        return "DEPENDENT" if "DEPENDENT" in outcomes else "INCONCLUSIVE"

    def is_non_causal(self, result: ReplayResult) -> bool:
        """Whether a row breaks the causality that the model has."""
        moves = result.intervention in ("shuffle-tokens", "resample")
        return bool(self.causal) and moves and result.refused is None

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

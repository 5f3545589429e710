"""The TIME role: what a controller costs and what specialisation gains, in time, with the error of the measurement.

Two sessions of the same model differ by percents, so the unit of replication is a pair of fresh sessions, not a run. A
*block* is a fresh process in which each pair alternates first, second, second, first; beside every comparison stands
the same design with one model in both places (A/A). An effect that the A/A interval reaches is not resolvable, and
nothing is said about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fxaudit.execution.options import BLOCKS, CPU
from fxaudit.execution.runtime import Feed, Runtime

_RESAMPLES = 2000
# For each block: runs that are not counted, rounds of four runs, and the nanoseconds that these may take together.
_DESIGN = {"warm_up": 6, "rounds": 16, "least_rounds": 4, "budget": 4_000_000_000}
# Name, first (the denominator), second.
COMPARISONS = (("controller cost", "live", "bound"), ("specialisation gain", "bound", "baked"))
NOT_RESOLVABLE = "not resolvable"

Model = tuple[Path, Feed]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Times of one model over those of another: the median over blocks with its 95 % interval, and each block's."""

    median: float
    interval: tuple[float, float]
    blocks: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        return {"ratio": self.median, "interval": list(self.interval), "blocks": list(self.blocks)}


@dataclass(frozen=True, slots=True)
class Comparison:
    """`second` against `first`, with the same design run on `first` alone; medians of the runs in microseconds."""

    name: str
    first: str
    second: str
    effect: Ratio
    control: Ratio
    microseconds: Mapping[str, float]

    @property
    def is_resolvable(self) -> bool:
        return is_resolvable(self.effect.interval, self.control.interval)

    @property
    def outcome(self) -> str:
        """The change in percent, or that nothing can be said."""
        return f"{100 * (self.effect.median - 1):+.1f} %" if self.is_resolvable else NOT_RESOLVABLE

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "first": self.first,
            "second": self.second,
            **self.effect.to_json(),
            "control": self.control.to_json(),
            "resolvable": self.is_resolvable,
            "outcome": self.outcome,
            "microseconds": dict(self.microseconds),
        }


def measure_time(
    models: Mapping[str, Model], runtime: Runtime, provider: str = CPU, *, blocks: int = BLOCKS, seed: int = 0
) -> list[Comparison]:
    """Every comparison of `COMPARISONS` whose two models are given, by form.

    Raises:
        RunError: onnxruntime cannot load or run a model.
        ProviderError: `provider` is not used.
    """
    wanted = [(name, a, b) for name, a, b in COMPARISONS if a in models and b in models]
    pairs = dict.fromkeys(pair for _, a, b in wanted for pair in ((a, b), (a, a)))
    times: dict[tuple[str, str], list[tuple[list[int], list[int]]]] = {pair: [] for pair in pairs}
    for block in range(blocks):
        runtime.restart()
        for a, b in pairs:
            times[a, b].append(
                runtime.time(models[a], models[b], provider, swapped=bool(block % 2), **_DESIGN),
            )
    return [
        Comparison(
            name,
            a,
            b,
            ratio_of(times[a, b], seed),
            ratio_of(times[a, a], seed),
            {a: _median_us(times[a, b], 0), b: _median_us(times[a, b], 1)},
        )
        for name, a, b in wanted
    ]


def ratio_of(blocks: Sequence[tuple[Sequence[float], Sequence[float]]], seed: int = 0) -> Ratio:
    """The ratio of medians of each block, second over first; their median, and its bootstrap interval over blocks."""
    ratios = np.array([np.median(second) / np.median(first) for first, second in blocks])
    draws = np.random.default_rng(seed).integers(0, len(ratios), (_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[draws], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), (float(low), float(high)), tuple(float(ratio) for ratio in ratios))


def is_resolvable(effect: tuple[float, float], control: tuple[float, float]) -> bool:
    """Whether an interval of ratios lies apart from that of the A/A control and from 1, no change at all."""
    low, high = min(control[0], 1.0), max(control[1], 1.0)
    return effect[1] < low or effect[0] > high


def _median_us(blocks: Sequence[tuple[Sequence[float], Sequence[float]]], which: int) -> float:
    return float(np.median(np.concatenate([np.asarray(block[which]) for block in blocks]))) / 1e3

"""All stages in order: one call from a model and data to the three claims."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fxaudit import stages
from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.errors import ExportError, ProviderError
from fxaudit.execution.options import CPU, ExecutionOptions
from fxaudit.model.data import DataSet, require_disjoint, special_positions
from fxaudit.model.load import Subject
from fxaudit.model.settings import TraceOptions
from fxaudit.model.trace import Finding
from fxaudit.replay import dependence, intervene, variation
from fxaudit.replay.dependence import Calibration
from fxaudit.replay.intervene import Intervention
from fxaudit.replay.metrics import Metric
from fxaudit.replay.permutations import write_permutations
from fxaudit.replay.plan import SCOPES
from fxaudit.replay.results import Dependence
from fxaudit.replay.run import IdentityReplay, Recording
from fxaudit.replay.store import CoefficientStore
from fxaudit.replay.variation import Variation
from fxaudit.stages import Matched

if TYPE_CHECKING:  # importing it for real would import onnx for every command
    from fxaudit.execution.verdict import ExecutionProfile

Watch = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]
EXECUTED_INPUTS = 8
PERMUTATIONS = "permutations.safetensors"


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What is replayed and how it is judged.

    Without `interventions` every one that has a meaning; an empty tuple replays identity alone. Random ones are drawn
    `seeds` times, the first time with the seed of the run, unless `permutations` are given (by seed, None standing for
    the first). `live` adds rows in which the other controllers are recomputed. Effects within `margin` count as none.
    """

    interventions: tuple[Intervention, ...] | None = None
    scopes: tuple[str, ...] = SCOPES
    seeds: int = 1
    live: bool = False
    permutations: Mapping[int | None, Mapping[str, Tensor]] = field(default_factory=dict)
    output: str | None = None
    metric: Metric | None = None
    margin: float | None = None
    compiled: bool = False


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The three claims about one model, each with its evidence.

    Where the model could not be exported `execution` is INCOMPLETE(export) and says why; the other claims stand.
    """

    matched: Matched
    frozen: FrozenModel
    data: DataSet
    calibration: DataSet
    recording: Recording
    identity: IdentityReplay
    variation: Variation
    dependence: Dependence
    execution: ExecutionProfile
    options: dict[str, Any]
    seconds: dict[str, float]

    @property
    def verdict(self) -> dict[str, str]:
        """One word for each claim; none follows from another."""
        return {
            "variation": self.variation.verdict,
            "dependence": self.dependence.verdict,
            "execution": self.execution.verdict["live"],
        }

    @property
    def findings(self) -> tuple[Finding, ...]:
        return (*self.matched.traced.findings, *self.matched.findings, *self.recording.findings)


@dataclass(slots=True)
class Clock:
    """Wall seconds by stage; `watch` shows a stage's progress while it runs."""

    watch: Watch
    seconds: dict[str, float] = field(default_factory=dict)

    def time(self, name: str, work: Callable[[Callable[[int, int], None]], Any]) -> Any:
        started = time.perf_counter()
        with self.watch(name) as progress:
            result = work(progress)
        self.seconds[name] = round(time.perf_counter() - started, 3)
        return result


def _unwatched(_: str) -> AbstractContextManager[Callable[[int, int], None]]:
    return nullcontext(lambda done, total: None)


def audit(
    subject: Subject | str,
    data: Any,
    calibration: Any,
    directory: str | Path,
    *,
    patterns: Sequence[Any] | None = None,
    enable: Collection[str] = (),
    batch_size: int | None = None,
    limit: int | None = None,
    replaying: ReplayOptions | None = None,
    executing: ExecutionOptions | None = None,
    seed: int = 0,
    tracing: TraceOptions | None = None,
    executed: int = EXECUTED_INPUTS,
    watch: Watch = _unwatched,
) -> AuditReport:
    """Trace, match, record, replay, measure variation and dependence, export and execute.

    Args:
        data, calibration: dicts of tensors by input name, or what `--data` takes; they must not share an input.
        enable: families outside the default set to audit, too.
        directory: where coefficients and ONNX files go.
        limit: use at most this many inputs of each data set.
        replaying: interventions, scopes, seeds, metric and margin.
        executing: the provider of evidence and times, and whether times are measured.
        tracing: how the model is traced, where that is not left to fxaudit.
        executed: how many inputs onnxruntime runs, at most.

    Raises:
        NoControllerError: no pattern matches.
        DataError: data that does not fit, or calibration and evaluation data that overlap.
        SelfCheckError: identity replay is not bitwise, or counts contradict each other.
        ProviderError: the provider asked for is not usable.
    """
    directory = Path(directory)
    replaying = replaying or ReplayOptions()
    executing = executing or ExecutionOptions(seed=seed)
    if executing.provider != CPU:
        _require_usable(executing.provider)
    clock = Clock(watch)
    traced = clock.time("trace", lambda _: stages.trace(subject, seed=seed, options=tracing))
    matched = clock.time("match", lambda _: stages.match(traced, patterns, enable=enable))
    frozen = stages.freeze(matched)
    evaluation, calibrating = (stages.load_data(d, traced).limited(limit) for d in (data, calibration))
    replayed = replay(
        frozen,
        evaluation,
        calibrating,
        directory / "coefficients",
        replaying,
        clock,
        batch_size=batch_size,
        seed=seed,
    )
    assert replayed.profile is not None
    assert replayed.dependence is not None  # calibration data and interventions were given
    write_permutations(directory / PERMUTATIONS, replayed.dependence.draws)
    recording, profile = replayed.recording, replayed.profile.store
    varied: Variation = clock.time(
        "variation",
        lambda _: variation.measure_variation(
            recording.store, frozen.controllers, evaluation.valid_positions(), special_positions(evaluation, traced)
        ),
    )
    execution: ExecutionProfile = clock.time(
        "execution", lambda _: _execute(frozen, evaluation, profile, directory / "onnx", executed, executing)
    )
    options = {
        "batch_size": recording.store.manifest["batch_size"],
        "limit": limit,
        "output": replaying.output,
        "metric": replayed.dependence.baseline.metric,
        "margin": replaying.margin,
        "seed": seed,
        "seeds": list(replayed.dependence.draws),
        "scopes": list(replaying.scopes),
        "live": replaying.live,
        "compiled": replaying.compiled,
        "provider": executing.provider,
        "time": executing.timed,
        "interventions": list(dict.fromkeys(result.label for result in replayed.dependence.results)),
    }
    return AuditReport(
        matched,
        frozen,
        evaluation,
        calibrating,
        recording,
        replayed.identity,
        varied,
        replayed.dependence,
        execution,
        options,
        clock.seconds,
    )


@dataclass(frozen=True, slots=True)
class Replayed:
    """Recorded coefficients, their identity replay, and what interventions on them do.

    `profile` is the recording on calibration data, None without any; `dependence` is None without interventions.
    """

    recording: Recording
    identity: IdentityReplay
    profile: Recording | None
    dependence: Dependence | None


def replay(
    frozen: FrozenModel,
    data: DataSet,
    calibration: DataSet | None,
    directory: Path,
    options: ReplayOptions,
    clock: Clock,
    *,
    store: Path | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> Replayed:
    """Record `frozen` on `data` below `directory`, or into `store`; replay identity, then any interventions.

    Raises:
        DataError: data that does not fit, or calibration and evaluation data that overlap.
        SelfCheckError: identity replay is not bitwise.
    """
    if calibration is not None:
        require_disjoint(data, calibration)
    recording: Recording = clock.time(
        "record",
        lambda advance: stages.record(
            frozen, data, store or directory / "evaluation", batch_size=batch_size, progress=advance
        ),
    )
    identity: IdentityReplay = clock.time("identity", lambda _: stages.verify_recording(frozen, data, recording))
    profile: Recording | None = None
    if calibration is not None:
        profile = clock.time(
            "calibrate",
            lambda advance: stages.record(
                frozen, calibration, directory / "calibration", batch_size=batch_size, progress=advance
            ),
        )
    found: Dependence | None = None
    interventions = options.interventions
    if interventions is None:
        interventions = intervene.default_interventions(frozen.controllers)
    if interventions:
        calibrating = None
        if profile is not None and calibration is not None:
            calibrating = Calibration(profile.store, calibration.valid_positions())
        found = clock.time(
            "dependence",
            lambda advance: dependence.measure_dependence(
                frozen,
                data,
                recording.store,
                calibrating,
                interventions,
                seeds=range(seed, seed + options.seeds),
                output=options.output,
                margin=options.margin,
                scopes=options.scopes,
                live=options.live,
                given=options.permutations,
                metric=options.metric,
                compiled=options.compiled,
                progress=advance,
            ),
        )
    return Replayed(recording, identity, profile, found)


def _require_usable(provider: str) -> None:
    from fxaudit.execution.evidence import require_usable

    require_usable(provider)


def _execute(
    frozen: FrozenModel,
    data: DataSet,
    calibration: CoefficientStore,
    directory: Path,
    inputs: int,
    options: ExecutionOptions,
) -> ExecutionProfile:
    """The execution claim, or why the model could not be exported or run; a failed self-check and a provider that was
    asked for and is not used are errors of the audit."""
    from fxaudit.execution.verdict import unexported

    try:
        return stages.execute(frozen, data, calibration, directory, inputs=inputs, options=options)
    except ProviderError:
        raise
    except ExportError as error:
        return unexported(error)

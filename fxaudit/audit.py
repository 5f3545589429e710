"""All stages in order: one call from a model and data to the three claims."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxaudit import stages
from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.errors import ExportError
from fxaudit.model.data import DataSet, require_disjoint
from fxaudit.model.load import Subject
from fxaudit.model.trace import Finding
from fxaudit.replay import dependence, intervene, variation
from fxaudit.replay.dependence import Dependence
from fxaudit.replay.intervene import Intervention
from fxaudit.replay.run import IdentityReplay, Recording, require_identity
from fxaudit.replay.store import CoefficientStore
from fxaudit.replay.variation import Variation
from fxaudit.stages import Matched

if TYPE_CHECKING:  # importing it for real would import onnx for every command
    from fxaudit.execution.verdict import ExecutionProfile

Watch = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]
EXECUTED_INPUTS = 8


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
class _Clock:
    """Wall seconds by stage."""

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
    interventions: Sequence[Intervention] | None = None,
    batch_size: int | None = None,
    limit: int | None = None,
    output: str | None = None,
    margin: float | None = None,
    seed: int = 0,
    watch: Watch = _unwatched,
) -> AuditReport:
    """Trace, match, record, replay, measure variation and dependence, export and execute.

    Args:
        data, calibration: dicts of tensors by input name, or what `--data` takes; they must not share an input.
        directory: where coefficients and ONNX files go.
        limit: use at most this many inputs of each data set.
        margin: effects within it count as none, in units of the metric.

    Raises:
        NoControllerError: no pattern matches.
        DataError: data that does not fit, or calibration and evaluation data that overlap.
        SelfCheckError: identity replay is not bitwise, or counts contradict each other.
    """
    directory = Path(directory)
    clock = _Clock(watch)
    traced = clock.time("trace", lambda _: stages.trace(subject, seed=seed))
    matched = clock.time("match", lambda _: stages.match(traced, patterns))
    frozen = stages.freeze(matched)
    evaluation, calibrating = (stages.load_data(d, traced).limited(limit) for d in (data, calibration))
    require_disjoint(evaluation, calibrating)
    places = {name: directory / "coefficients" / name for name in ("evaluation", "calibration")}
    recording: Recording = clock.time(
        "record",
        lambda advance: stages.record(
            frozen, evaluation, places["evaluation"], batch_size=batch_size, progress=advance
        ),
    )
    profile: Recording = clock.time(
        "calibrate",
        lambda advance: stages.record(
            frozen, calibrating, places["calibration"], batch_size=batch_size, progress=advance
        ),
    )
    identity: IdentityReplay = clock.time("identity", lambda _: stages.replay(frozen, evaluation, recording.store))
    if not any(finding.kind == "nondeterministic" for finding in recording.findings):
        require_identity(identity, traced.subject.source)
    varied: Variation = clock.time(
        "variation", lambda _: variation.measure_variation(recording.store, frozen.controllers)
    )
    depended: Dependence = clock.time(
        "dependence",
        lambda advance: dependence.measure_dependence(
            frozen,
            evaluation,
            recording.store,
            profile.store,
            interventions or intervene.default_interventions(seed),
            seed=seed,
            output=output,
            margin=margin,
            progress=advance,
        ),
    )
    executed: ExecutionProfile = clock.time(
        "execution", lambda _: _execute(frozen, evaluation, profile.store, directory / "onnx")
    )
    options = {
        "batch_size": recording.store.manifest["batch_size"],
        "limit": limit,
        "output": output,
        "margin": margin,
        "seed": seed,
        "interventions": [str(i) for i in interventions or intervene.default_interventions(seed)],
    }
    return AuditReport(
        matched,
        frozen,
        evaluation,
        calibrating,
        recording,
        identity,
        varied,
        depended,
        executed,
        options,
        clock.seconds,
    )


def _execute(frozen: FrozenModel, data: DataSet, calibration: CoefficientStore, directory: Path) -> ExecutionProfile:
    """The execution claim, or why the model could not be exported; a failed self-check is an error of the audit."""
    from fxaudit.execution.verdict import unexported

    try:
        return stages.execute(frozen, data, calibration, directory, inputs=EXECUTED_INPUTS)
    except ExportError as error:
        return unexported(error)

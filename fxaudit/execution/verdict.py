"""What a frozen model executes, input by input, in torch and in onnxruntime, and the verdict on it.

Two independent counts of the same work must agree exactly, the bound graph must reproduce the live one bit for bit when
both run in onnxruntime, and the live graph must agree with torch: otherwise there is no verdict but an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.errors import DataError, ExportError, RunError, SelfCheckError
from fxaudit.execution import tables
from fxaudit.execution.checks import (
    TorchRun,
    agreement,
    agrees,
    feed_of,
    in_torch,
    require_equal_counts,
    require_same_bits,
)
from fxaudit.execution.closeness import LIMITS
from fxaudit.execution.evidence import gather_evidence
from fxaudit.execution.experts import expert_use
from fxaudit.execution.export import ExportedGraphs
from fxaudit.execution.options import ExecutionOptions
from fxaudit.execution.probes import probes
from fxaudit.execution.profile import CountedRun, CountedRuns, count_runs
from fxaudit.execution.proof import Proof, prove
from fxaudit.execution.runtime import Feed, Runtime
from fxaudit.execution.timing import measure_time
from fxaudit.model.inputs import batch_of
from fxaudit.model.trace import TracedModel

PROVEN_STATIC = "PROVEN_STATIC"
OBSERVED_CONSTANT = "OBSERVED_CONSTANT"
REDISTRIBUTED = "REDISTRIBUTED"
DATA_DEPENDENT_SHAPES = "DATA_DEPENDENT_SHAPES"
DATA_DEPENDENT_KERNELS = "DATA_DEPENDENT_KERNELS"
INCOMPLETE = "INCOMPLETE"
INCOMPLETE_EXPORT = "INCOMPLETE(export)"


@dataclass(frozen=True, slots=True)
class ExecutionProfile:
    """What live, bound and baked execute. Every field holds plain dicts, lists, strings and numbers.

    `verdict` is by form: ``live``, and ``bound`` with its coefficients held at those of the first input. `per_input`
    has one dict for each input: ``flops``, ``setup``, ``fx``, ``elementwise``, ``read`` and ``written`` (bytes) and
    ``nodes``, each by form. FLOPs are those of nodes that the input reaches, setup those of all others. `modules` has
    the same by module, `branches` how often each body of each control-flow node ran, `probes` what was run besides the
    inputs given. `experts` is about routers, `evidence` about the optimised graphs by form, `time` about times.
    `exact` says that ``flops`` and ``fx`` agree for every input and form, None when an op has no formula. `identity`
    compares live with bound, `fidelity` live with torch, `baked` baked with the frozen torch graph under the same
    profile. `removed` counts nodes and parameters that live has and bound has not, in total and by module. `proof` is
    by form; bound is proven given its coefficients. `unknown` lists ops without a formula. `roles` says with which
    provider, optimisation level and precision each kind of figure was made.
    """

    verdict: dict[str, str]
    exact: bool | None = None
    inputs: int = 0
    per_input: list[dict[str, dict[str, int]]] = field(default_factory=list)
    modules: list[dict[str, Any]] = field(default_factory=list)
    branches: list[dict[str, Any]] = field(default_factory=list)
    probes: list[dict[str, Any]] = field(default_factory=list)
    experts: list[dict[str, Any]] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)
    time: list[dict[str, Any]] = field(default_factory=list)
    identity: dict[str, Any] = field(default_factory=dict)
    fidelity: dict[str, Any] = field(default_factory=dict)
    baked: dict[str, Any] = field(default_factory=dict)
    removed: dict[str, Any] = field(default_factory=dict)
    proof: dict[str, Any] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    roles: dict[str, dict[str, str]] = field(default_factory=dict)
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def unexported(error: ExportError) -> ExecutionProfile:
    """The profile of a model that cannot be exported, or not be run once it was: no execution claim, and why."""
    word = INCOMPLETE if isinstance(error, RunError) else INCOMPLETE_EXPORT
    return ExecutionProfile(verdict={"live": word, "bound": word}, reason=str(error))


def one_at_a_time(traced: TracedModel, leaves: Sequence[Any]) -> list[list[Any]]:
    """The inputs among `leaves`, each with a first axis of 1; all of them as one where the graph fixes that axis."""
    count = batch_of(((tuple(leaves)), {}))
    if not traced.is_batch_dynamic or count is None:
        return [list(leaves)]
    return [
        [leaf[i : i + 1] if isinstance(leaf, Tensor) and leaf.ndim else leaf for leaf in leaves] for i in range(count)
    ]


def execute(
    frozen: FrozenModel,
    exported: ExportedGraphs,
    inputs: Sequence[Sequence[Any]],
    coefficients: Sequence[Sequence[Tensor]] | None = None,
    options: ExecutionOptions | None = None,
) -> ExecutionProfile:
    """Count, compare and judge what `exported` executes for each of `inputs`.

    Args:
        inputs: the input leaves of one run each; see `one_at_a_time`.
        coefficients: for each input the recorded coefficients in order; by default the live torch graph computes them.

    Raises:
        DataError: no inputs, or coefficients for another number of them.
        RunError: onnxruntime cannot load or run a graph, or died on it.
        ProviderError: the provider asked for does not run the work.
        SelfCheckError: two counts differ, bound differs from live, live differs from torch, or a proof is contradicted.
    """
    if not inputs or (coefficients is not None and len(coefficients) != len(inputs)):
        raise DataError(
            "there is nothing to execute" if not inputs else "each input needs its coefficients",
            expected="at least one input, and coefficients for each or none",
            found=f"{len(inputs)} inputs, coefficients for {'none' if coefficients is None else len(coefficients)}",
            remedy="pass the input leaves of each run",
        )
    options = options or ExecutionOptions()
    real = [
        in_torch(frozen, exported, list(leaves), None if coefficients is None else coefficients[i])
        for i, leaves in enumerate(inputs)
    ]
    made_up = probes(frozen.traced, inputs[0]) if options.probing else {}
    probed = [in_torch(frozen, exported, leaves, budget=0) for leaves in made_up.values()]
    with Runtime() as runtime:
        return _Execution(frozen, exported, real, dict(zip(made_up, probed, strict=True)), runtime, options).profile()


class _Execution:
    """The runs of one model in onnxruntime, and what they say beside its runs in torch."""

    def __init__(
        self,
        frozen: FrozenModel,
        exported: ExportedGraphs,
        real: Sequence[TorchRun],
        probed: Mapping[str, TorchRun],
        runtime: Runtime,
        options: ExecutionOptions,
    ) -> None:
        self.frozen, self.exported, self.real, self.probed = frozen, exported, real, probed
        self.runtime, self.options = runtime, options
        self.feeds = [feed_of(exported, run.leaves) for run in real]
        self.probe_feeds = [feed_of(exported, run.leaves) for run in probed.values()]
        self.proofs = {"live": prove(exported.live), "bound": prove(exported.bound, set(exported.input_names))}

    def profile(self) -> ExecutionProfile:
        exported, proof = self.exported, self.proofs["live"]
        tapped = self._count(exported.tapped, self.feeds)
        self.bound_feeds: list[Feed] = [
            {**feed, **{name: outputs[name] for name in exported.bound_inputs.values()}}
            for feed, outputs in zip(self.feeds, tapped.outputs, strict=True)
        ]
        live = self._count(exported.live, [*self.feeds, *self.probe_feeds])
        runs = {"live": _first(live, len(self.feeds)), "bound": self._count(exported.bound, self.bound_feeds)}
        if exported.baked is not None:
            runs["baked"] = self._count(exported.baked, self.feeds)
        probe_runs = live.runs[len(self.feeds) :]
        held = self._held()
        unknown = self._unknown([*live.runs, *(run for form in runs.values() for run in form.runs)])
        shown = self._probes(live, unknown)
        if not unknown:
            for form, counted in runs.items():
                require_equal_counts(form, counted.runs, self.real, "input")
        if not proof.random:
            require_same_bits(runs["live"], runs["bound"], exported.output_names)
        judged = {"live": live.runs, "bound": held.runs if held is not None else runs["bound"].runs}
        verdicts = {form: INCOMPLETE if unknown else classify(self.proofs[form], judged[form]) for form in judged}
        return ExecutionProfile(
            verdict=verdicts,
            exact=None if unknown else True,
            inputs=len(self.real),
            per_input=tables.per_input(runs, self.real),
            modules=tables.by_module(runs),
            branches=tables.branches(live.controls, runs["live"].runs, dict(zip(self.probed, probe_runs, strict=True))),
            probes=shown,
            experts=expert_use(
                self.frozen, [run.coefficients for run in self.real], [run.counted for run in self.real]
            ),
            identity={"bitwise": None if proof.random else True, "random": list(proof.random)},
            fidelity=self._fidelity(runs["live"], proof),
            baked=self._baked(runs.get("baked"), proof),
            evidence=self._evidence(runs),
            time=self._time(),
            removed=tables.removed(exported),
            proof={form: tables.proof(found) for form, found in self.proofs.items()},
            unknown=unknown,
            roles=tables.roles(self.frozen.traced, self.options),
        )

    def _count(self, path: Path, feeds: Sequence[Feed]) -> CountedRuns:
        return count_runs(path, feeds, runtime=self.runtime)

    def _held(self) -> CountedRuns | None:
        """Runs of bound in which the inputs change and the coefficients stay those of the first input.

        That is what a proof about bound speaks of. None when coefficients have other shapes for other inputs.
        """
        fixed = {name: self.bound_feeds[0][name] for name in self.exported.bound_inputs.values()}
        if any(feed[name].shape != value.shape for feed in self.bound_feeds for name, value in fixed.items()):
            return None
        return self._count(self.exported.bound, [{**feed, **fixed} for feed in (*self.feeds, *self.probe_feeds)])

    def _unknown(self, runs: Sequence[CountedRun]) -> list[str]:
        """The ops without a formula, in onnxruntime and in torch."""
        found = {f"onnx {op}" for run in runs for op in run.unknown}
        in_torch = (*self.real, *self.probed.values())
        found |= {f"torch {op}" for run in in_torch for count in run.flops.values() for op in count.unknown}
        return sorted(found)

    def _probes(self, live: CountedRuns, unknown: Sequence[str]) -> list[dict[str, Any]]:
        """What the made-up inputs executed; their counts must agree as well, wherever their outputs do."""
        rows = []
        real = live.runs[: len(self.real)]
        for i, (name, run) in enumerate(self.probed.items()):
            counted = live.runs[len(self.real) + i]
            comparable = not self.proofs["live"].random and agrees(live.outputs[len(self.real) + i], run, self.exported)
            if comparable and not unknown:
                require_equal_counts("live", [counted], [run], f"made-up input `{name}`,")
            rows.append(tables.probe(name, counted, real, comparable))
        return rows

    def _fidelity(self, counted: CountedRuns, proof: Proof) -> dict[str, Any]:
        if proof.random:
            return {"relative_l2": None, "relative_max": None, "limit": LIMITS["float32"], "referee": None}
        diverging = {
            "traced": self.frozen.traced,
            "runtime": self.runtime,
            "leaves": [run.leaves for run in self.real],
        }
        expected = [(run.outputs, run.referee) for run in self.real]
        return agreement(counted.outputs, expected, self.exported, "live.onnx", diverging).to_json()

    def _baked(self, counted: CountedRuns | None, proof: Proof) -> dict[str, Any]:
        if counted is None:
            return {}
        found: dict[str, Any] = {"expanded": list(self.exported.expanded)}
        if proof.random:
            return {"relative_l2": None, "relative_max": None, "limit": LIMITS["float32"], "referee": None, **found}
        expected = [(run.baked or [], run.baked_referee) for run in self.real]
        return agreement(counted.outputs, expected, self.exported, "baked.onnx").to_json() | found

    def _models(self) -> dict[str, tuple[Path, Feed]]:
        """Each form with the feed of the first input."""
        found: dict[str, tuple[Path, Feed]] = {
            "live": (self.exported.live, self.feeds[0]),
            "bound": (self.exported.bound, self.bound_feeds[0]),
        }
        if self.exported.baked is not None:
            found["baked"] = (self.exported.baked, self.feeds[0])
        return found

    def _evidence(self, counted: Mapping[str, CountedRuns]) -> dict[str, Any]:
        if not self.options.evident:
            return {}
        feeds: dict[str, Sequence[Feed]] = {"live": self.feeds, "bound": self.bound_feeds, "baked": self.feeds}
        return {
            form: gather_evidence(path, feeds[form], self.runtime, self.options.provider).to_json(counted[form].outputs)
            for form, (path, _) in self._models().items()
        }

    def _time(self) -> list[dict[str, Any]]:
        if not self.options.timed:
            return []
        options = self.options
        found = measure_time(self._models(), self.runtime, options.provider, blocks=options.blocks, seed=options.seed)
        return [comparison.to_json() for comparison in found]


def _first(counted: CountedRuns, count: int) -> CountedRuns:
    return CountedRuns(counted.runs[:count], counted.outputs[:count], counted.controls)


def classify(proof: Proof, runs: Sequence[CountedRun]) -> str:
    """The verdict on runs of one graph, for inputs of one size.

    Raises:
        SelfCheckError: the graph is proven static and two runs differ.
    """
    if any(run.unknown for run in runs):
        return INCOMPLETE
    kernels = {run.op_sequence for run in runs}
    shapes = {run.shape_sequence for run in runs}
    if proof.static:
        if len(shapes) > 1:
            raise SelfCheckError(
                "the proof that the work is static is contradicted by what ran",
                expected="one sequence of ops and shapes",
                found=f"{len(shapes)} in {len(runs)} runs",
                remedy="report this model; inputs of different sizes must be executed apart",
            )
        return PROVEN_STATIC
    if len(shapes) == 1:
        return OBSERVED_CONSTANT
    if len(kernels) > 1:
        return DATA_DEPENDENT_KERNELS
    return REDISTRIBUTED if len({run.flops for run in runs}) == 1 else DATA_DEPENDENT_SHAPES

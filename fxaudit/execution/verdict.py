"""What a frozen model executes, input by input, in torch and in onnxruntime, and the verdict on it.

Two independent counts of the same work must agree exactly, the bound graph must reproduce the live one bit for bit when
both run in onnxruntime, and the live graph must agree with torch: otherwise there is no verdict but an error.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from torch.fx import GraphModule

from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.errors import DataError, ExportError, SelfCheckError
from fxaudit.execution.baking import expanded_all
from fxaudit.execution.export import ExportedGraphs
from fxaudit.execution.flops import FlopCount, executed_nodes, input_dependent, summed
from fxaudit.execution.profile import CountedRun, CountedRuns, Feed, count_runs
from fxaudit.execution.proof import Proof, prove
from fxaudit.model.inputs import batch_of
from fxaudit.model.settings import exact_numerics
from fxaudit.model.trace import TracedModel, restore_state

PROVEN_STATIC = "PROVEN_STATIC"
OBSERVED_CONSTANT = "OBSERVED_CONSTANT"
REDISTRIBUTED = "REDISTRIBUTED"
DATA_DEPENDENT_SHAPES = "DATA_DEPENDENT_SHAPES"
DATA_DEPENDENT_KERNELS = "DATA_DEPENDENT_KERNELS"
INCOMPLETE = "INCOMPLETE"
INCOMPLETE_EXPORT = "INCOMPLETE(export)"

# Float32 on CPU: 6 to 40 times what eight models showed. For both kinds of error.
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class ExecutionProfile:
    """What live, bound and baked execute. Every field holds plain dicts, lists, strings and numbers.

    `verdict` is by form: ``live``, and ``bound`` with its coefficients held at those of the first input. `per_input`
    has one dict for each input: ``flops``, ``setup``, ``fx``, ``elementwise`` and ``nodes``, each by form. FLOPs are
    those of nodes that the input reaches, setup those of all others. `exact` says that ``flops`` and ``fx`` agree for
    every input and form, None when an op has no formula. `identity` compares live with bound, `fidelity` live with
    torch, `baked` baked with the frozen torch graph under the same profile. `removed` counts nodes and parameters that
    live has and bound has not, in total and by module. `proof` is by form; bound is proven given its coefficients.
    `unknown` lists ops without a formula.
    """

    verdict: dict[str, str]
    exact: bool | None = None
    inputs: int = 0
    per_input: list[dict[str, dict[str, int]]] = field(default_factory=list)
    identity: dict[str, Any] = field(default_factory=dict)
    fidelity: dict[str, Any] = field(default_factory=dict)
    baked: dict[str, Any] = field(default_factory=dict)
    removed: dict[str, Any] = field(default_factory=dict)
    proof: dict[str, Any] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def unexported(error: ExportError) -> ExecutionProfile:
    """The profile of a model that cannot be exported: no execution claim, and why."""
    return ExecutionProfile(
        verdict={"live": INCOMPLETE_EXPORT, "bound": INCOMPLETE_EXPORT}, reason=str(error), unknown=[]
    )


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
) -> ExecutionProfile:
    """Count, compare and judge what `exported` executes for each of `inputs`.

    Args:
        inputs: the input leaves of one run each; see `one_at_a_time`.
        coefficients: for each input the recorded coefficients in order; by default the live torch graph computes them.

    Raises:
        DataError: no inputs, or coefficients for another number of them.
        ExportError: onnxruntime cannot run a graph.
        SelfCheckError: two counts differ, bound differs from live, live differs from torch, or a proof is contradicted.
    """
    if not inputs or (coefficients is not None and len(coefficients) != len(inputs)):
        raise DataError(
            "there is nothing to execute" if not inputs else "each input needs its coefficients",
            expected="at least one input, and coefficients for each or none",
            found=f"{len(inputs)} inputs, coefficients for {'none' if coefficients is None else len(coefficients)}",
            remedy="pass the input leaves of each run",
        )
    torch_runs = [
        _in_torch(frozen, exported, list(leaves), None if coefficients is None else coefficients[i])
        for i, leaves in enumerate(inputs)
    ]
    own = set(exported.input_names)
    feeds = [_feed(exported, leaves) for leaves in inputs]
    tapped = count_runs(exported.tapped, feeds)
    bound_feeds = [
        feed | {name: outputs[name] for name in exported.bound_inputs.values()}
        for feed, outputs in zip(feeds, tapped.outputs, strict=True)
    ]
    runs = {"live": count_runs(exported.live, feeds), "bound": count_runs(exported.bound, bound_feeds)}
    if exported.baked is not None:
        runs["baked"] = count_runs(exported.baked, feeds)
    proofs = {"live": prove(exported.live), "bound": prove(exported.bound, own)}
    unknown = _unknown(runs, torch_runs)
    _require_equal_counts(runs, torch_runs, exact=not unknown)
    verdicts = dict.fromkeys(proofs, INCOMPLETE)
    if not unknown:
        held = _held(exported, feeds, bound_feeds)
        verdicts = {
            "live": classify(proofs["live"], runs["live"].runs),
            "bound": classify(proofs["bound"], held.runs if held is not None else runs["bound"].runs),
        }
    return ExecutionProfile(
        verdict=verdicts,
        exact=None if unknown else True,
        inputs=len(inputs),
        per_input=_per_input(runs, torch_runs),
        identity=_identity(runs["live"], runs["bound"], proofs["live"], exported),
        fidelity=_fidelity(runs["live"], [run.outputs for run in torch_runs], proofs["live"], exported, "live.onnx"),
        baked=_baked(runs, torch_runs, proofs["live"], exported),
        removed=_removed(exported),
        proof={form: _proof(proof) for form, proof in proofs.items()},
        unknown=unknown,
    )


def _held(exported: ExportedGraphs, feeds: Sequence[Feed], bound_feeds: Sequence[Feed]) -> CountedRuns | None:
    """Runs of bound in which the inputs change and the coefficients stay those of the first input.

    That is what a proof about bound speaks of. None when coefficients have other shapes for other inputs.
    """
    fixed = {name: bound_feeds[0][name] for name in exported.bound_inputs.values()}
    if any(feed[name].shape != value.shape for feed in bound_feeds for name, value in fixed.items()):
        return None
    return count_runs(exported.bound, [{**feed, **fixed} for feed in feeds])


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


# --- torch ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _TorchRun:
    """One input in torch: the outputs that ONNX also has, and FLOPs by form."""

    outputs: list[Tensor]
    baked_outputs: list[Tensor] | None
    flops: dict[str, FlopCount]


def _in_torch(
    frozen: FrozenModel, exported: ExportedGraphs, leaves: list[Any], given: Sequence[Tensor] | None
) -> _TorchRun:
    traced = frozen.traced
    names = [n.name for n in traced.placeholders()]
    with exact_numerics():
        outputs, values = frozen.run_tapped(leaves)
        values = values[: len(frozen.coefficients)] if given is None else tuple(given)
        flops = {
            "live": _count(traced, traced.graph_module, leaves, None),
            "bound": _count(traced, frozen.frozen, [*leaves, *values], None),
        }
        baked_outputs = None
        if exported.profile is not None:
            batch = batch_of((tuple(leaves), {}))
            static = expanded_all(dict(exported.profile), frozen.coefficients, traced.sample, batch)
            flops["baked"] = _count(traced, frozen.frozen, [*leaves, *static], names)
            baked_outputs = [frozen.run_frozen(leaves, static)[i] for i in exported.output_positions]
    return _TorchRun([outputs[i] for i in exported.output_positions], baked_outputs, flops)


def _count(traced: TracedModel, module: GraphModule, leaves: Sequence[Any], inputs: Sequence[str] | None) -> FlopCount:
    read = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    restore_state(module, {name: value for name, value in traced.initial_state.items() if name in read})
    own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return summed(executed_nodes(module, own), input_dependent(module.graph, inputs))


def _feed(exported: ExportedGraphs, leaves: Sequence[Any]) -> dict[str, np.ndarray]:
    return {
        name: leaves[position].detach().cpu().numpy()
        for name, position in zip(exported.input_names, exported.input_positions, strict=True)
    }


# --- cross-checks ---------------------------------------------------------------------------------------------------


def _unknown(runs: Mapping[str, CountedRuns], torch_runs: Sequence[_TorchRun]) -> list[str]:
    """The ops without a formula, in onnxruntime and in torch."""
    found = {f"onnx {op}" for form in runs.values() for run in form.runs for op in run.unknown}
    found |= {f"torch {op}" for run in torch_runs for count in run.flops.values() for op in count.unknown}
    return sorted(found)


def _require_equal_counts(runs: Mapping[str, CountedRuns], torch_runs: Sequence[_TorchRun], exact: bool) -> None:
    if not exact:
        return
    for form, counted in runs.items():
        for i, (run, in_torch) in enumerate(zip(counted.runs, torch_runs, strict=True)):
            expected = in_torch.flops[form]
            if run.flops == expected.per_input:
                continue
            kinds = sorted({*run.by_class, *expected.by_class})
            kind = next(k for k in kinds if run.by_class.get(k, 0) != expected.by_class.get(k, 0))
            raise SelfCheckError(
                f"torch and onnxruntime do not execute the same work in {form}.onnx",
                where=f"input {i}; first difference: {kind}",
                expected=f"{expected.by_class.get(kind, 0):,} FLOPs of {kind} (torch graph)",
                found=f"{run.by_class.get(kind, 0):,} (onnxruntime)",
                remedy="report this model: one of the two counts, or the export, is wrong",
                form=form,
                kind=kind,
            )


def _identity(live: CountedRuns, bound: CountedRuns, proof: Proof, exported: ExportedGraphs) -> dict[str, Any]:
    """Live against bound fed what live computed, in onnxruntime under the same options; None where numbers are random.

    Raises:
        SelfCheckError: a bit differs.
    """
    if proof.random:
        return {"bitwise": None, "random": list(proof.random)}
    for i, (a, b) in enumerate(zip(live.outputs, bound.outputs, strict=True)):
        for name in exported.output_names:
            if (
                a[name].dtype != b[name].dtype
                or a[name].shape != b[name].shape
                or a[name].tobytes() != b[name].tobytes()
            ):
                raise SelfCheckError(
                    f"bound.onnx does not reproduce live.onnx at output `{name}`",
                    where=f"input {i}",
                    expected="the same bits, with the coefficients that live computed",
                    found=f"a relative difference of {_relative(a[name], b[name])[1]:.3g}",
                    remedy="report this model",
                )
    return {"bitwise": True, "random": []}


def _fidelity(
    counted: CountedRuns, expected: Sequence[Sequence[Tensor]], proof: Proof, exported: ExportedGraphs, file: str
) -> dict[str, Any]:
    """How far onnxruntime is from torch: the worst relative L2 and largest-element errors over inputs and outputs.

    Raises:
        SelfCheckError: one of them is above the limit.
    """
    if proof.random:
        return {"relative_l2": None, "relative_max": None, "limit": TOLERANCE}
    worst = (0.0, 0.0)
    for i, (outputs, tensors) in enumerate(zip(counted.outputs, expected, strict=True)):
        for name, tensor in zip(exported.output_names, tensors, strict=True):
            errors = _relative(tensor.detach().cpu().numpy(), outputs[name])
            if not max(errors) <= TOLERANCE:
                raise SelfCheckError(
                    f"{file} does not compute what the torch graph computes at output `{name}`",
                    where=f"input {i}",
                    expected=f"relative errors of at most {TOLERANCE:g}",
                    found=f"{errors[0]:.3g} in L2, {errors[1]:.3g} of the largest element",
                    remedy="ties in a top-k are broken differently in the two; otherwise report this model",
                )
            worst = max(worst[0], errors[0]), max(worst[1], errors[1])
    return {"relative_l2": worst[0], "relative_max": worst[1], "limit": TOLERANCE}


def _relative(expected: np.ndarray, found: np.ndarray) -> tuple[float, float]:
    """The L2 error relative to the L2 norm, and the largest error relative to the largest element."""
    if expected.shape != found.shape:
        return float("inf"), float("inf")
    a, b = expected.astype(np.float64), found.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    difference = np.nan_to_num(np.where(same, 0.0, np.abs(np.where(same, 0.0, a) - np.where(same, 0.0, b))), nan=np.inf)
    if not difference.any():
        return 0.0, 0.0
    finite = a[np.isfinite(a)]
    norm, largest = float(np.linalg.norm(finite)), float(np.abs(finite).max(initial=0.0))
    errors = float(np.linalg.norm(difference)), float(difference.max())
    return (errors[0] / norm if norm else float("inf")), (errors[1] / largest if largest else float("inf"))


def _baked(
    runs: Mapping[str, CountedRuns], torch_runs: Sequence[_TorchRun], proof: Proof, exported: ExportedGraphs
) -> dict[str, Any]:
    if "baked" not in runs:
        return {}
    expected = [run.baked_outputs or [] for run in torch_runs]
    return _fidelity(runs["baked"], expected, proof, exported, "baked.onnx") | {"expanded": list(exported.expanded)}


# --- report ---------------------------------------------------------------------------------------------------------


def _per_input(runs: Mapping[str, CountedRuns], torch_runs: Sequence[_TorchRun]) -> list[dict[str, dict[str, int]]]:
    rows = []
    for i, in_torch in enumerate(torch_runs):
        own = {form: counted.runs[i] for form, counted in runs.items()}
        rows.append(
            {
                "flops": {form: run.flops for form, run in own.items()},
                "fx": {form: in_torch.flops[form].per_input for form in own},
                "setup": {form: run.setup for form, run in own.items()},
                "elementwise": {form: run.elementwise for form, run in own.items()},
                "nodes": {form: run.nodes for form, run in own.items()},
            }
        )
    return rows


def _removed(exported: ExportedGraphs) -> dict[str, Any]:
    modules = exported.removed_by_module
    return {
        "nodes": sum(row["nodes"] for row in modules),
        "parameters": sum(row["parameters"] for row in modules),
        "ops": dict(sorted(Counter(node.op for node in exported.removed_nodes).items())),
        "modules": modules,
    }


def _proof(proof: Proof) -> dict[str, Any]:
    return {
        "static": proof.static,
        "roots": [dataclasses.asdict(root) for root in proof.roots],
        "random": list(proof.random),
        "opaque": list(proof.opaque),
    }

"""The same inputs in torch and in onnxruntime, and what must agree between the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.fx import GraphModule

from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.errors import RunError, SelfCheckError
from fxaudit.execution.baking import expanded_all
from fxaudit.execution.closeness import largest_difference, relative_errors, same_bits
from fxaudit.execution.divergence import first_divergence
from fxaudit.execution.export import ExportedGraphs
from fxaudit.execution.flops import FlopCount, NodeFlops, executed_nodes, input_dependent, summed
from fxaudit.execution.numerics import (
    BUDGET,
    Limit,
    Referee,
    ask,
    limit_for,
)
from fxaudit.execution.profile import CountedRun, CountedRuns
from fxaudit.execution.runtime import Runtime
from fxaudit.model.inputs import batch_of
from fxaudit.model.settings import exact_numerics
from fxaudit.model.trace import TracedModel, restore_state

_NO_REFEREE = Referee(None)


@dataclass(frozen=True, slots=True)
class TorchRun:
    """One input in torch: outputs that ONNX also has, their float64 values, coefficients by key, FLOPs by form.

    `counted` has the FLOPs of every node of the live graph; `baked` is None without a profile.
    """

    leaves: list[Any]
    outputs: list[Tensor]
    referee: Referee
    baked: list[Tensor] | None
    baked_referee: Referee
    coefficients: dict[str, Tensor]
    flops: dict[str, FlopCount]
    counted: list[NodeFlops]


def in_torch(
    frozen: FrozenModel,
    exported: ExportedGraphs,
    leaves: list[Any],
    given: Sequence[Tensor] | None = None,
    budget: int = BUDGET,
) -> TorchRun:
    """Run one input in torch, with its own coefficients or those `given`; `budget` is the memory for float64."""
    traced = frozen.traced
    names = [n.name for n in traced.placeholders()]
    with exact_numerics():
        outputs, values = frozen.run_tapped(leaves)
        values = values[: len(frozen.coefficients)] if given is None else tuple(given)
        counted, live = _count(traced, traced.graph_module, leaves, None)
        flops = {"live": live, "bound": _count(traced, frozen.frozen, [*leaves, *values], None)[1]}
        baked, baked_referee = None, _NO_REFEREE
        if exported.profile is not None:
            batch = batch_of((tuple(leaves), {}))
            static = expanded_all(dict(exported.profile), frozen.coefficients, traced.sample, batch)
            flops["baked"] = _count(traced, frozen.frozen, [*leaves, *static], names)[1]
            baked = [frozen.run_frozen(leaves, static)[i] for i in exported.output_positions]
            baked_referee = ask(frozen.frozen, traced.initial_state, [*leaves, *static], budget)
    return TorchRun(
        leaves,
        [outputs[i] for i in exported.output_positions],
        ask(traced.graph_module, traced.initial_state, leaves, budget),
        baked,
        baked_referee,
        {c.key: value for c, value in zip(frozen.coefficients, values, strict=True)},
        flops,
        counted,
    )


def _count(
    traced: TracedModel, module: GraphModule, leaves: Sequence[Any], inputs: Sequence[str] | None
) -> tuple[list[NodeFlops], FlopCount]:
    read = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    restore_state(module, {name: value for name, value in traced.initial_state.items() if name in read})
    own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    counted = executed_nodes(module, own)
    return counted, summed(counted, input_dependent(module.graph, inputs))


def feed_of(exported: ExportedGraphs, leaves: Sequence[Any]) -> dict[str, np.ndarray]:
    """The arrays of one input by their ONNX names."""
    return {
        name: leaves[position].detach().cpu().numpy()
        for name, position in zip(exported.input_names, exported.input_positions, strict=True)
    }


# --- what must agree ------------------------------------------------------------------------------------------------


def require_equal_counts(form: str, runs: Sequence[CountedRun], torch_runs: Sequence[TorchRun], what: str) -> None:
    """Raise unless onnxruntime's FLOPs are those of the traced graph for every input; `what` says which inputs.

    Raises:
        SelfCheckError: naming the input and the kind of op.
    """
    for i, (run, in_torch) in enumerate(zip(runs, torch_runs, strict=True)):
        expected = in_torch.flops[form]
        if run.flops == expected.per_input:
            continue
        kinds = sorted({*run.by_class, *expected.by_class})
        kind = next(k for k in kinds if run.by_class.get(k, 0) != expected.by_class.get(k, 0))
        raise SelfCheckError(
            f"torch and onnxruntime do not execute the same work in {form}.onnx",
            where=f"{what} {i}; first difference: {kind}",
            expected=f"{expected.by_class.get(kind, 0):,} FLOPs of {kind} (torch graph)",
            found=f"{run.by_class.get(kind, 0):,} (onnxruntime)",
            remedy="report this model: one of the two counts, or the export, is wrong",
            form=form,
            kind=kind,
        )


def require_same_bits(live: CountedRuns, bound: CountedRuns, names: Sequence[str]) -> None:
    """Raise unless bound, fed what live computed, returns what live returns, in onnxruntime under the same options.

    Raises:
        SelfCheckError: a bit differs.
    """
    for i, (a, b) in enumerate(zip(live.outputs, bound.outputs, strict=True)):
        for name in names:
            if not same_bits(a[name], b[name]):
                raise SelfCheckError(
                    f"bound.onnx does not reproduce live.onnx at output `{name}`",
                    where=f"input {i}",
                    expected="the same bits, with the coefficients that live computed",
                    found=f"a relative difference of {relative_errors(a[name], b[name])[1]:.3g}",
                    remedy="report this model",
                )


@dataclass(slots=True)
class Agreement:
    """How far onnxruntime is from torch, at worst over inputs and outputs.

    Relative to torch's own output: `relative_l2`, and `relative_max` of the largest element. Where a referee was heard,
    the largest errors against float64 of torch and of onnxruntime and the share of the limit that is used; `unheard`
    says why for the outputs where it was not.
    """

    relative_l2: float = 0.0
    relative_max: float = 0.0
    limit: float = 0.0
    heard: int = 0
    torch_error: float = 0.0
    onnx_error: float = 0.0
    share: float = 0.0
    unheard: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "relative_l2": self.relative_l2,
            "relative_max": self.relative_max,
            "limit": self.limit,
            "referee": {
                "heard": self.heard,
                "torch_error": self.torch_error if self.heard else None,
                "onnx_error": self.onnx_error if self.heard else None,
                "share_of_limit": self.share if self.heard else None,
                "unheard": self.unheard,
            },
        }

    def add(self, limit: Limit, expected: np.ndarray, found: np.ndarray, referee: Referee) -> str:
        """Compare one output; what is wrong with it, or the empty string."""
        l2, largest = relative_errors(expected, found)
        self.relative_l2, self.relative_max = max(self.relative_l2, l2), max(self.relative_max, largest)
        self.limit = max(self.limit, limit.relative)
        if limit.largest is None:
            self.unheard = self.unheard or referee.skipped or "float64 takes another course, or the output is not float"
            wrong = not max(l2, largest) <= limit.relative
            return f"{l2:.3g} in L2, {largest:.3g} of the largest element" if wrong else ""
        assert limit.torch_error is not None
        off = largest_difference(limit.reference, found)
        self.heard += 1
        self.torch_error, self.onnx_error = max(self.torch_error, limit.torch_error), max(self.onnx_error, off)
        self.share = max(self.share, off / limit.largest if limit.largest else 0.0)
        return "" if off <= limit.largest else f"{off:.3g} off from float64; torch is {limit.torch_error:.3g} off"


def agreement(
    outputs: Sequence[Mapping[str, np.ndarray]],
    expected: Sequence[tuple[Sequence[Tensor], Referee]],
    exported: ExportedGraphs,
    file: str,
    diverging: Mapping[str, Any] | None = None,
) -> Agreement:
    """How far `outputs` in onnxruntime are from torch's, input by input.

    Args:
        diverging: ``traced``, ``runtime`` and ``leaves`` by input, for naming the first node that differs.

    Raises:
        SelfCheckError: an output is off by more than its limit.
    """
    worst = Agreement()
    for i, (found, (tensors, referee)) in enumerate(zip(outputs, expected, strict=True)):
        for name, tensor, position in zip(exported.output_names, tensors, exported.output_positions, strict=True):
            limit = limit_for(tensor, referee, position)
            wrong = worst.add(limit, tensor.detach().cpu().numpy(), found[name], referee)
            if wrong:
                raise SelfCheckError(
                    f"{file} does not compute what the torch graph computes at output `{name}`",
                    where="\n".join(filter(None, (f"input {i}", _where(exported, i, diverging)))),
                    expected=_allowed(limit),
                    found=wrong,
                    remedy="ties in a top-k are broken differently in the two; otherwise the exporter translates an op"
                    " wrongly: write it with others, and report it to torch",
                )
    return worst


def _allowed(limit: Limit) -> str:
    if limit.largest is None:
        return f"relative errors of at most {limit.relative:g}"
    return f"at most {limit.largest:.3g} off from float64"


def _where(exported: ExportedGraphs, index: int, diverging: Mapping[str, Any] | None) -> str:
    if diverging is None:
        return ""
    runtime: Runtime = diverging["runtime"]
    leaves = diverging["leaves"][index]
    try:
        found = first_divergence(diverging["traced"], exported.live, leaves, feed_of(exported, leaves), runtime)
    except RunError as error:
        return f"the first node that differs could not be found: {error.what}"
    return str(found) if found is not None else "no node that both graphs name differs"


def agrees(outputs: Mapping[str, np.ndarray], run: TorchRun, exported: ExportedGraphs) -> bool:
    """Whether torch and onnxruntime compute the same on an input at all; rounding is not judged."""
    for name, tensor in zip(exported.output_names, run.outputs, strict=True):
        errors = relative_errors(tensor.detach().cpu().numpy(), outputs[name])
        if not max(errors) <= 100 * limit_for(tensor, _NO_REFEREE, 0).relative:
            return False
    return True

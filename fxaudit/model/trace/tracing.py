"""A `Subject` becomes a `TracedModel`: one flat graph of functional, undecomposed ATen that computes what eager
computes.

Full core-ATen decomposition would destroy what patterns look for; `run_decompositions({})` only makes in-place ops
functional and leaves `linear`, `conv2d`, `softplus` and `einsum` whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxaudit import ops
from fxaudit.errors import TraceError
from fxaudit.model.compare import compare, same_bits
from fxaudit.model.inputs import batch_of, resampled, tensors_of
from fxaudit.model.load import Subject
from fxaudit.model.settings import TraceOptions, exact_numerics, quiet_torch, traceable
from fxaudit.model.state import ModuleState, remember, set_back, set_back_buffer_objects, set_back_buffers
from fxaudit.model.trace.capture import Captured, captures
from fxaudit.model.trace.fidelity import RELATIVE_TOLERANCE, ask_referee, fidelity_of, is_tolerable, run_eager
from fxaudit.model.trace.flat import flat
from fxaudit.model.trace.refusals import untraceable
from fxaudit.model.trace.traced import Finding, TracedModel, written_inputs
from fxaudit.provenance import state_fingerprint

_NO_VALUES = Finding(
    "no-values", "the model is on the meta device: its graph is not compared with eager, and nothing is replayed"
)
_SUBGRAPHS = frozenset("cond while_loop scan map_impl associative_scan switch".split())


def trace(subject: Subject, *, seed: int = 0, options: TraceOptions | None = None) -> TracedModel:
    """The traced form of `subject`, compared with the eager model on two inputs and, where it can be, two batch sizes.

    Raises:
        TraceError: the model cannot be traced, or the trace computes something else.
        UsageError: an option that has no meaning for this model.
    """
    started = time.perf_counter()
    options = options or TraceOptions()
    module = subject.module
    before = state_fingerprint(module)
    left_behind: list[Finding] = []
    with exact_numerics(), traceable(module, options) as settings:
        cold = warm = remember(module)
        try:
            with quiet_torch():
                warmed = _warm_up(subject, cold) if _has_values(subject) else [_NO_VALUES]
                fixed = _has_values(subject) and _fixes_batch(subject, cold)
            warm = remember(module)
            options = dataclasses.replace(options, fixed_batch=options.fixed_batch or fixed)
            traced = _most_faithful(subject, options, settings, seed)
        finally:
            left_behind = _set_back(subject, cold, warm, before)
    return dataclasses.replace(
        traced,
        findings=(*traced.findings, *warmed, *left_behind),
        fingerprint=before,
        seconds=time.perf_counter() - started,
        options=options,
    )


def _has_values(subject: Subject) -> bool:
    tensors = [*subject.module.parameters(), *tensors_of(subject.arguments)]
    return not any(tensor.is_meta for tensor in tensors)


# --- the user's model is left as it was -----------------------------------------------------------------------------


def _warm_up(subject: Subject, state: ModuleState) -> list[Finding]:
    """Call the model twice from the same buffers: what a first call leaves behind must not reach the trace."""
    calls = []
    for _ in range(2):
        set_back_buffers(subject.module, state)
        calls.append([leaf for leaf in run_eager(subject, subject.arguments) if isinstance(leaf, Tensor)])
    found = compare("", *calls)
    if found.bitwise:
        return []
    text = (
        f"the first call of the model computes something else than the second (they differ by {found.max_abs_diff:.3g})"
        ": it keeps state; what is traced is a later call"
    )
    return [Finding("cold-call", text)]


def _fixes_batch(subject: Subject, cold: ModuleState) -> bool:
    """Whether a model that writes to its buffers refuses more inputs than the example has.

    Buffers that keep something of each input are made for one batch, and no guard of the graph says so.
    """
    count = batch_of(subject.arguments)
    now = remember(subject.module)
    kept = [name for name in cold.buffers if name in now.buffers]
    if count is None or all(same_bits(cold.buffers[name], now.buffers[name]) for name in kept):
        return False
    try:
        for batch in (count + 1, 2 * count):
            set_back_buffers(subject.module, cold)
            with contextlib.suppress(TraceError):
                run_eager(subject, resampled(subject.arguments, batch, batch))
                return False
        return True
    finally:
        set_back(subject.module, now)
        set_back_buffers(subject.module, now)


def _set_back(subject: Subject, cold: ModuleState, warm: ModuleState, fingerprint: str) -> list[Finding]:
    """Set the model back to its `cold` state; findings name what forward calls had changed."""
    changed = set_back_buffer_objects(subject.module, cold)
    if state_fingerprint(subject.module) != fingerprint:
        # A flag that says `already rescaled` belongs to the weights that were rescaled: both stay.
        set_back(subject.module, warm)
        set_back_buffers(subject.module, cold)
        text = "a forward call changes the model's own parameters; the model is left as its first call leaves it"
        return [Finding("mutates-parameters", text)]
    changed += set_back(subject.module, cold)
    if not changed:
        return []
    text = f"a forward call changes {', '.join(changed[:4])}{' and more' if len(changed) > 4 else ''}; set back"
    return [Finding("mutated-attribute", text)]


# --- the front end that computes what eager computes ----------------------------------------------------------------


def _most_faithful(subject: Subject, options: TraceOptions, settings: dict[str, str], seed: int) -> TracedModel:
    """The first trace that is bitwise, else the closest one that is tolerable. A tolerable one is not given up for
    another that covers fewer input sizes.

    Raises:
        TraceError: there is none.
    """
    tolerable_round: int | None = None
    inexact: list[tuple[TracedModel, float]] = []
    refused: TraceError | None = None
    attempts = captures(subject, options)
    while (captured := _next(attempts)) is not None and tolerable_round in (None, captured.round):
        try:
            with quiet_torch():
                traced = _flattened(subject, captured, options, settings)
            if not _has_values(subject):
                return traced
            fidelity, scale = fidelity_of(traced, seed)
        except Exception as error:
            refused = refused or untraceable(subject, captured.rescued_from or error)
            continue
        traced = dataclasses.replace(traced, fidelity=fidelity)
        if fidelity.bitwise:
            return traced
        inexact.append((traced, scale))
        if is_tolerable(fidelity, scale):
            tolerable_round = captured.round if tolerable_round is None else tolerable_round
    if not inexact:
        assert refused is not None, "captures yields or raises"
        raise refused
    return _closest(inexact)


def _next(attempts: Iterator[Captured]) -> Captured | None:
    with quiet_torch():
        return next(attempts, None)


def _closest(inexact: list[tuple[TracedModel, float]]) -> TracedModel:
    traced, scale = min(inexact, key=lambda pair: pair[0].fidelity.max_abs_diff)
    fidelity = traced.fidelity
    tolerable = is_tolerable(fidelity, scale)
    referee = ask_referee(traced)
    if not tolerable and not referee.accepts:
        worst = max(fidelity.comparisons, key=lambda comparison: comparison.max_abs_diff)
        raise TraceError(
            f"the trace of {traced.subject.source} does not compute what the model computes",
            expected=f"equal outputs, or a difference of at most {RELATIVE_TOLERANCE:g} of the largest ({scale:.3g})",
            found=f"a difference of {worst.max_abs_diff:.3g} on the {worst.inputs} input; {referee}",
            remedy="look for code that depends on values, on randomness, on state kept between calls,"
            " or on whether it is being exported",
            fidelity=fidelity,
            reason="unfaithful",
        )
    text = f"the trace differs from the eager model by up to {fidelity.max_abs_diff:.3g}; {referee}"
    return dataclasses.replace(traced, findings=(*traced.findings, Finding("inexact-trace", text)))


def _flattened(subject: Subject, captured: Captured, options: TraceOptions, settings: dict[str, str]) -> TracedModel:
    program = captured.program.run_decompositions(_decompositions(options))
    traced = flat(subject, program, captured.frontend, {**settings, **captured.settings})
    return dataclasses.replace(
        traced,
        findings=(*captured.findings, *_graph_findings(traced, captured)),
        unseen=captured.leaves,
    )


def _decompositions(options: TraceOptions) -> dict[Any, Any]:
    if "lstm" not in options.decompose:
        return {}
    from torch._decomp import get_decompositions

    recurrent = [torch.ops.aten.lstm.input, torch.ops.aten.gru.input]
    return dict(get_decompositions(recurrent))


# --- findings -------------------------------------------------------------------------------------------------------


def _graph_findings(traced: TracedModel, captured: Captured) -> list[Finding]:
    """What the graph shows, beside what was found when it was captured."""
    findings = []
    if isinstance(traced.sample, int) and not any(f.kind == "static-batch" for f in captured.findings):
        text = f"the graph takes only batches of {traced.sample}: the model's code fixes the input axis"
        findings.append(Finding("static-batch", text))
    if captured.settings.get("code") == "export":
        text = "the model has other code for export than for eager mode; the graph holds that"
        findings.append(Finding("export-code", text))
    if traced.decisions:
        text = (
            f"{len(traced.decisions)} Python values are read from tensors (branch-specialised): the graph holds the"
            " path that the example takes, and inputs that take another one are refused"
        )
        findings.append(Finding("branch-specialised", text, traced.decisions[0]))
    for name in traced.initial_state:
        findings.append(
            Finding("mutated-buffer", f"a forward call writes to `{name}`; every batch starts from its first value")
        )
    if written_inputs(traced.graph_module):
        findings.append(Finding("mutated-input", "a forward call writes to its own inputs; each run gets a copy"))
    for leaf in captured.leaves:
        share = leaf.parameter_count / max(traced.subject.parameter_count, 1)
        text = (
            f"`{leaf.path}` defeats tracing and runs as one opaque op; its {leaf.parameter_count:,} parameters"
            f" ({share:.0%} of the model) are unseen, and no absence of controllers is claimed there"
        )
        findings.append(Finding("opaque-leaf", text))
    return findings + _op_findings(traced)


def _op_findings(traced: TracedModel) -> list[Finding]:
    findings = []
    names: Counter[str] = Counter()
    lines: dict[str, str] = {}
    for node in traced.graph.nodes:
        if node.op != "call_function":
            continue
        name = ops.op_name(node)
        names[name] += 1
        lines.setdefault(name, ops.source_line(node))
        if _is_batch_statistics(node):
            text = "a norm uses the statistics of its batch: what one input gives depends on the others in its batch"
            findings.append(Finding("train-mode-norm", text, ops.source_line(node)))
        if name in ops.RANDOM:
            text = f"`{name}` draws random numbers in eval mode; every run starts from the same seed"
            findings.append(Finding("random-op", text, ops.source_line(node)))
    for name, count in names.items():
        namespace, _, short = name.rpartition("::")
        if namespace == "higher_order" or short in _SUBGRAPHS:
            text = f"`{short}` ({count} times) runs a subgraph; controllers inside it are not searched for"
            findings.append(Finding("subgraph", text, lines[name]))
        elif namespace not in ("", "python", "sym", "fxaudit"):
            text = f"`{name}` is a custom op: controllers inside it are unseen"
            findings.append(Finding("opaque-op", text, lines[name]))
        elif short in ("lstm", "gru"):
            text = f"`{short}` is one op ({count} times); --decompose lstm shows its gates"
            findings.append(Finding("fused-recurrence", text, lines[name]))
    return findings


def _is_batch_statistics(node: Node) -> bool:
    """Whether a node is a batch norm that ignores running statistics, as in training mode."""
    target = str(node.target)
    is_batch_norm = "batch_norm" in target and "no_training" not in target
    return is_batch_norm and ("no_stats" in target or bool(ops.attributes(node).get("training")))

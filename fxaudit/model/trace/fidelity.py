"""A trace compared with the eager model, and float64 as the referee where they differ."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxaudit.errors import DataError, TraceError
from fxaudit.model.compare import compare, largest_finite
from fxaudit.model.inputs import Arguments, cloned, map_tensors, resampled
from fxaudit.model.load import Subject
from fxaudit.model.outputs import output_leaves
from fxaudit.model.settings import quiet_torch
from fxaudit.model.state import remember, set_back_buffers
from fxaudit.model.trace.refusals import fails_in_eager
from fxaudit.model.trace.traced import Fidelity, TracedModel, other_batches, run_flat, same_draws

# An inexact trace is accepted, and said to be inexact, up to this error relative to the largest output ...
RELATIVE_TOLERANCE = 1e-5
# ... or when it is off from float64 by at most this many times what the eager model itself is off.
REFEREE_FACTOR = 4.0
# A model in float64 with its activations has to fit this many times into the memory that is free.
_HEADROOM = 2.0


@dataclass(frozen=True, slots=True)
class Referee:
    """How far the eager model and the trace are from the model in float64, on the example; or why that is unknown."""

    eager: float
    traced: float
    skipped: str = ""

    @property
    def accepts(self) -> bool:
        return not self.skipped and self.traced <= REFEREE_FACTOR * self.eager

    def __str__(self) -> str:
        if self.skipped:
            return f"float64 could not be asked: {self.skipped}"
        return f"against float64 the model is off by {self.eager:.3g}, its trace by {self.traced:.3g}"


def run_eager(subject: Subject, arguments: Arguments) -> list[Any]:
    """The output leaves of the eager model; random draws start from the seed that every run of a trace starts from.

    Raises:
        TraceError: the model fails on these inputs.
    """
    args, kwargs = cloned(arguments)
    try:
        with same_draws(arguments):
            return output_leaves(subject.module(*args, **kwargs))
    except Exception as error:
        raise fails_in_eager(subject, arguments, error) from error


def fidelity_of(traced: TracedModel, seed: int) -> tuple[Fidelity, float]:
    """The trace against the eager model (the example, another input, another batch size, each twice), and the largest
    output.

    Raises:
        TraceError: the trace does not cover another input of the same shape.
    """
    subject = traced.subject
    cases = [("example", subject.arguments), ("resampled", resampled(subject.arguments, seed + 1))]
    cases += other_batches(traced, seed + 2)[:1]
    state = remember(subject.module)
    comparisons = []
    scale = 0.0
    for name, arguments in cases:
        leaves = _leaves(traced, name, arguments)
        for attempt in ("", ", again"):
            # Buffers start every run from one state; a Python attribute that changes the output must be seen to do so.
            set_back_buffers(subject.module, state)
            with quiet_torch():
                expected = run_eager(subject, arguments)
                found = run_flat(traced.graph_module, leaves, traced.initial_state)
            comparisons.append(compare(name + attempt, expected, found))
            scale = max(scale, *map(largest_finite, expected), 0.0)
    return Fidelity(tuple(comparisons)), scale


def _leaves(traced: TracedModel, name: str, arguments: Arguments) -> list[Any]:
    try:
        return traced.flatten(arguments)
    except DataError as error:
        raise TraceError(
            f"the trace of {traced.subject.source} covers its example but not other inputs of the same shape",
            expected="a trace that covers inputs like the example",
            found=f"on the {name} input: {error.found}",
            remedy="write the branch with torch.where or torch.cond",
            reason="data-dependent-branch",
        ) from error


def is_tolerable(fidelity: Fidelity, scale: float) -> bool:
    """Whether the trace is equal, or differs by rounding only."""
    return fidelity.bitwise or fidelity.max_abs_diff <= RELATIVE_TOLERANCE * max(scale, 1e-30)


def ask_referee(traced: TracedModel) -> Referee:
    """Errors of the eager model and of the trace against a copy of the model in float64."""
    subject = traced.subject
    wide = sum(tensor.numel() for tensor in [*subject.module.parameters(), *subject.module.buffers()]) * 8
    free = _free_memory()
    if free is None or wide * _HEADROOM > free:
        return Referee(0.0, 0.0, f"it needs {wide * _HEADROOM / 2**30:.1f} GiB of free memory")
    arguments = map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, subject.arguments)
    try:
        module = copy.deepcopy(subject.module).double()
        with quiet_torch(), torch.no_grad():
            expected = run_eager(Subject(subject.source, module, arguments), arguments)
            eager = run_eager(subject, subject.arguments)
            found = run_flat(traced.graph_module, traced.flatten(subject.arguments), traced.initial_state)
    except Exception as error:
        return Referee(0.0, 0.0, f"the model does not run in float64 ({type(error).__name__})")
    return Referee(_distance(eager, expected), _distance(found, expected))


def _distance(found: Any, expected: list[Any]) -> float:
    widened = [
        value.to(e.dtype) if isinstance(value, Tensor) else value for value, e in zip(found, expected, strict=True)
    ]
    return compare("", expected, widened).max_abs_diff


def _free_memory() -> int | None:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None

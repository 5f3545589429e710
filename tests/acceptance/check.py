"""What is checked about a row of the acceptance table, each number beside the one expected."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxaudit import FrozenModel, load_patterns, stages
from fxaudit.controllers.pattern import DEFAULT, DETECT_ONLY, Pattern
from fxaudit.errors import AuditError
from fxaudit.model.inputs import as_arguments, resampled
from fxaudit.model.load import subject
from fxaudit.model.settings import exact_numerics, traceable
from fxaudit.stages import Matched
from tests.acceptance.discovery import Discovered, discovered
from tests.acceptance.row import Row, census
from tests.third_party import Inputs


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was found in the model of a row; `matched` with the row's opt-in and external families enabled.

    `counts` and `other` leave out families without a controller. `missing` are families of the row that the library
    does not have. `census` counts the eager model's modules. The rest is about the model with all controllers of the
    row frozen, on example inputs: whether its output with its own coefficients is the eager model's, bit for bit (or,
    where the trace itself is not, as close as the trace); by how much the output moves when one family gets another
    input's coefficients; controllers whose cone is empty; and parameters of cones that the frozen graph still holds.
    On the meta device nothing is replayed: only cones and parameters are looked at. `discovered` is what `discover`
    finds without any pattern; it is judged over all rows, not row by row.
    """

    row: Row
    seconds: float
    matched: Matched | None = None
    error: str = ""
    census: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    other: Mapping[str, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    identity: bool | None = None
    moved: Mapping[str, float] = field(default_factory=dict)
    empty_cones: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    discovered: Discovered | None = None

    @property
    def failures(self) -> list[str]:
        """Every way in which the row is not as expected."""
        return list(_failures(self))


def _failures(outcome: Outcome) -> Iterator[str]:
    row = outcome.row
    if outcome.error:
        yield outcome.error
        return
    for name in outcome.missing:
        yield f"no pattern {name}"
    for name in sorted({*row.counts, *outcome.counts}):
        if outcome.counts.get(name, 0) != row.counts.get(name, 0):
            yield f"{name}: expected {row.counts.get(name, 0)}, found {outcome.counts.get(name, 0)}"
    for name, expected in row.other.items():
        if outcome.other.get(name, 0) != expected:
            yield f"other {name}: expected {expected}, found {outcome.other.get(name, 0)}"
    for name, count in outcome.census.items():
        if count != row.expected.get(name, 0):
            yield f"the eager model has {count} modules of {name}, the row says {row.expected.get(name, 0)}"
    if outcome.identity is False:
        yield "identity replay differs"
    for name, change in outcome.moved.items():
        if not change > 0:
            yield f"{name}: another input's coefficients change nothing"
    if outcome.empty_cones:
        yield f"empty cones: {', '.join(outcome.empty_cones[:3])}"
    if outcome.held:
        yield f"the frozen graph holds {', '.join(outcome.held[:3])}"


def check(row: Row) -> Outcome:
    """Build the model of a row, trace it, match the whole library, freeze what it finds."""
    started = time.perf_counter()
    torch.manual_seed(0)
    module, inputs = row.build()
    try:
        counted = census(row, module, inputs)
        traced = stages.trace(subject(module, inputs, source=row.model), options=row.options)
        patterns = load_patterns()
        default = stages.match(traced, patterns)
        enabled = stages.match(traced, patterns, enable=_to_enable(row, patterns))
        frozen = _frozen_facts(enabled, module, inputs) if enabled.controllers else {}
    except AuditError as error:
        return Outcome(
            row, time.perf_counter() - started, error=f"{type(error).__name__}: {str(error).splitlines()[0]}"
        )
    known = {pattern.name for pattern in patterns}
    return Outcome(
        row,
        time.perf_counter() - started,
        enabled,
        census=counted,
        counts=_positive(default.counts),
        other=_positive(enabled.other),
        missing=tuple(name for name in row.expected if name not in known),
        discovered=discovered(traced, patterns),
        **frozen,
    )


def _positive(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


def _to_enable(row: Row, patterns: Sequence[Pattern]) -> list[str]:
    """The row's families outside the default set that can be audited, of those that the library has."""
    return [p.name for p in patterns if p.name in row.other and p.family_class not in (DEFAULT, DETECT_ONLY)]


def _frozen_facts(matched: Matched, module: nn.Module, inputs: Inputs) -> dict[str, Any]:
    frozen = FrozenModel(matched.traced, matched.controllers)
    held = set(frozen.frozen.state_dict())
    cones = {name for controller in matched.controllers for name in controller.parameter_names}
    facts: dict[str, Any] = {
        "empty_cones": tuple(controller.id for controller in matched.controllers if not controller.cone),
        "held": tuple(sorted(cones & held)),
    }
    return facts | _replay_facts(matched, frozen, module, inputs) if matched.traced.fidelity.is_measured else facts


def _replay_facts(matched: Matched, frozen: FrozenModel, module: nn.Module, inputs: Inputs) -> dict[str, Any]:
    example = as_arguments(inputs)
    own = frozen.live(*example[0], **example[1])
    other = resampled(example, seed=5)
    foreign = frozen.live(*other[0], **other[1]).coefficients
    with exact_numerics(), traceable(module):
        expected = _tensors(module(*example[0], **example[1]))
    replayed = _tensors(frozen(*example[0], coefficients=own.coefficients, **example[1]))
    tolerance = 0.0 if matched.traced.fidelity.bitwise else 4 * matched.traced.fidelity.max_abs_diff
    moved = {}
    for pattern in dict.fromkeys(controller.pattern for controller in matched.controllers):
        keys = {c.key for k in matched.controllers if k.pattern == pattern for c in k.coefficients}
        mixed = {key: (foreign if key in keys else own.coefficients)[key] for key in own.coefficients}
        moved[pattern] = _largest_change(replayed, _tensors(frozen(*example[0], coefficients=mixed, **example[1])))
    identity = all(_agree(a, b, tolerance) for a, b in zip(expected, replayed, strict=True))
    return {"identity": identity, "moved": moved}


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def _agree(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return torch.allclose(a, b, rtol=0, atol=tolerance, equal_nan=True)


def _largest_change(a: list[Tensor], b: list[Tensor]) -> float:
    changes = [(x.double() - y.double()).abs().max() for x, y in zip(a, b, strict=True) if x.numel()]
    return float(torch.stack(changes).nan_to_num(0.0).max())

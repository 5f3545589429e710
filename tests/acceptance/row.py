"""What a row of the acceptance table says, and how it is checked against the eager model."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from fxaudit.model.settings import TraceOptions
from tests.third_party import Build, Inputs

TABLE = "table"


@dataclass(frozen=True, slots=True)
class Row:
    """A model and the controllers that the library must count in it.

    `number` is the row of the table in section 6 of the taxonomy of controllers, or the section that describes the
    family where the table has none. `counts` are the default families, all others being zero; `other` are families
    that are counted apart: opt-in ones are enabled for the row, report-only and external ones always show. `source`
    says where the numbers are from: the table, or a formula. `modules` names, for each family, classes of the eager
    model whose forward calls are its controllers, a second way to the same number; ``2*Name`` where one call holds two.
    `options` are those of the trace, where the family is hidden without. `make test` checks the rows `in_sample`.
    """

    number: str
    model: str
    build: Build
    counts: Mapping[str, int] = field(default_factory=dict)
    other: Mapping[str, int] = field(default_factory=dict)
    source: str = TABLE
    modules: Mapping[str, str] = field(default_factory=dict)
    options: TraceOptions | None = None
    in_sample: bool = False

    @property
    def id(self) -> str:
        return f"{self.number}-{self.model.replace(' ', '-')}"

    @property
    def expected(self) -> dict[str, int]:
        return {**self.counts, **self.other}


def census(row: Row, module: nn.Module, inputs: Inputs) -> dict[str, int]:
    """Controllers by family as the eager model's own modules show them, counted by hooks during one forward call.

    A model on the meta device may ask for values when it is called: its modules are counted, each once.
    """
    calls: collections.Counter[str] = collections.Counter()
    if any(parameter.is_meta for parameter in module.parameters()):
        calls.update(type(m).__name__ for m in module.modules())
        return _by_family(row, calls)
    handles = [m.register_forward_hook(lambda m, _, __: calls.update([type(m).__name__])) for m in module.modules()]
    try:
        with torch.no_grad():
            module(**inputs) if isinstance(inputs, dict) else module(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return _by_family(row, calls)


def _by_family(row: Row, calls: Mapping[str, int]) -> dict[str, int]:
    return {family: sum(_count(term, calls) for term in terms.split()) for family, terms in row.modules.items()}


def _count(term: str, calls: Mapping[str, int]) -> int:
    times, _, name = term.rpartition("*")
    return int(times or 1) * calls[name]

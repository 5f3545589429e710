"""Floating-point operations of graph nodes, by torch's own formulas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node
from torch.utils.flop_counter import FlopCounterMode

from fxaudit import ops
from fxaudit.axes import Size, plain_size


@dataclass(frozen=True, slots=True)
class FlopCount:
    """Floating-point operations (a multiply-add is two) of matrix products, convolutions and attention.

    Elementwise ops have no formula and count zero by convention, as in every published FLOP figure; ops that could not
    be evaluated are in `unknown`, never counted as zero.
    """

    total: int
    unknown: tuple[str, ...]


def count_flops(nodes: Iterable[Node], sample: Size | None, batch: int = 1) -> FlopCount:
    """The FLOPs of `nodes` for `batch` inputs, from the shapes of the trace."""
    values = {sample: batch} if isinstance(sample, sympy.Expr) else {}
    total, unknown = 0, []
    for node in nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        with FlopCounterMode(display=False) as counter:
            try:
                node.target(*_meta(node.args, values), **_meta(node.kwargs, values))
            except Exception:
                # An op without a meta kernel, or with arguments that only a real run has.
                unknown.append(ops.op_name(node))
                continue
        total += counter.get_total_flops()
    return FlopCount(total, tuple(sorted(set(unknown))))


def _meta(value: Any, values: dict[Any, int]) -> Any:
    """Arguments with every node replaced by a meta tensor, or a number, of its concrete size."""
    if isinstance(value, Node):
        found = value.meta.get("val")
        return _meta_value(found, values)
    if isinstance(value, list | tuple):
        return type(value)(_meta(item, values) for item in value)
    if isinstance(value, dict):
        return {key: _meta(item, values) for key, item in value.items()}
    return torch.device("meta") if isinstance(value, torch.device) else value


def _meta_value(found: Any, values: dict[Any, int]) -> Any:
    if isinstance(found, Tensor):
        return torch.empty([_concrete(s, values) for s in found.shape], dtype=found.dtype, device="meta")
    if isinstance(found, list | tuple):
        return type(found)(_meta_value(item, values) for item in found)
    return _concrete(found, values) if isinstance(found, torch.SymInt) else found


def _concrete(size: Any, values: dict[Any, int]) -> int:
    plain = plain_size(size)
    return plain if isinstance(plain, int) else int(plain.subs(values))

"""Structural tests that every match must pass, so that pattern authors need not repeat them.

Let P(v) be the nodes reachable backward from v through ops that neither learn nor select, up to and including the first
learned op or selection. A coefficient c applied to a value v is a controller only if

    T1  c depends on the values of a runtime input, not only on positions, shapes or parameters;
    T2  the part of c that lies outside P(v) contains a learned op: otherwise c is a function of v along v's own path,
        as in SiLU, hard-swish, GELU, softcaps, layer norm and global response norm (T3);
    T6  c is a floating-point tensor, not a mask.
"""

from __future__ import annotations

from torch.fx import Node

from fxaudit import ops
from fxaudit.controllers.graphs import Dataflow

_CARRIERS = ("layout", "gather")
_CARRIER_STEPS = 12


def refusal(dataflow: Dataflow, coefficient: Node, apply: Node) -> str | None:
    """Why `coefficient`, applied at `apply`, is no controller; None when it is one."""
    dtype = ops.dtype(coefficient)
    if dtype is None or not dtype.is_floating_point:
        return f"`coefficient` is {dtype}, a mask or an index, not a coefficient (T6)"
    if not dataflow.is_dynamic(coefficient):
        return "`coefficient` does not depend on the values of any input (T1)"
    values = value_operands(dataflow, coefficient, apply)
    own_path = same_path(dataflow, values)
    if not any(dataflow.is_learned_op(node) for node in _outside(dataflow, coefficient, own_path)):
        return "`coefficient` has no learned op of its own: it is a function of the value that it multiplies (T2)"
    return None


def value_operands(dataflow: Dataflow, coefficient: Node, apply: Node) -> list[Node]:
    """The operands of `apply` that do not carry the coefficient: what it is applied to."""
    operands = dataflow.operands(apply)
    carriers = [node for node in operands if carries(dataflow, node, coefficient)]
    if not carriers:
        carriers = [node for node in operands if dataflow.depends(node, coefficient)]
    return [node for node in operands if node not in carriers]


def carries(dataflow: Dataflow, node: Node, coefficient: Node) -> bool:
    """Whether a node is the coefficient in another layout."""
    for _ in range(_CARRIER_STEPS):
        if node is coefficient:
            return True
        if not any(dataflow.is_a(node, name) for name in _CARRIERS):
            return False
        sources = [source for source in dataflow.operands(node) if dataflow.depends(source, coefficient)]
        if len(sources) != 1:
            return False
        node = sources[0]
    return node is coefficient


def same_path(dataflow: Dataflow, values: list[Node]) -> set[Node]:
    """P(v): see the module's docstring."""
    return set(dataflow.walk_back(values, lambda node: dataflow.is_learned_op(node) or ops.is_selection(node)))


def _outside(dataflow: Dataflow, coefficient: Node, own_path: set[Node]) -> list[Node]:
    found = dataflow.walk_back([coefficient], lambda node: node in own_path or not dataflow.is_dynamic(node))
    return [node for node in found if node not in own_path]

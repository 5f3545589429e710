"""The closed predicates of `where`: comparisons over axis sizes, and a few facts about captured nodes.

channel > 1              an axis size; also `k < expert_count`
size(feature) >= 4       the same, spelled out
rank(coefficient) == 3   number of axes of a captured node
uses(coefficient) == 1   number of nodes that read it
params(coefficient) > 0  number of parameters that only it needs
depends(value, input)    `value` is computed from `input`
distinct(value, input)   two captures are not the same node
static(bias)             no input's values reach it: a parameter, or computed from parameters and positions
module(input, "*.attn")  the module path of a node matches a glob
bound(filter)            an optional capture is there
and, or, not             of these
"""

from __future__ import annotations

import ast
import fnmatch
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import sympy
from torch.fx import Node

from fxaudit import ops
from fxaudit.axes import Size, format_size
from fxaudit.errors import nearest

# Predicate name -> kinds of its arguments.
PREDICATES: dict[str, tuple[str, ...]] = {
    "size": ("axis",),
    "rank": ("node",),
    "uses": ("node",),
    "params": ("node",),
    "depends": ("node", "node"),
    "distinct": ("node", "node"),
    "static": ("node",),
    "module": ("node", "text"),
    "bound": ("node",),
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: lambda a, b: _equal(a, b),
    ast.NotEq: lambda a, b: sympy.Not(_equal(a, b)) if isinstance(_equal(a, b), sympy.Basic) else not _equal(a, b),
}


def _equal(a: Any, b: Any) -> Any:
    """Equality that stays open for a dynamic size: `batch == 7` is true for some batches only."""
    return sympy.Eq(a, b) if isinstance(a, sympy.Basic) or isinstance(b, sympy.Basic) else a == b


class PredicateSyntaxError(ValueError):
    """A predicate that is not part of the closed set."""


class Undecided(ValueError):
    """A comparison with a dynamic size that no value of it settles."""


class Graph(Protocol):
    """What predicates ask about the graph."""

    def depends(self, node: Node, on: Node) -> bool: ...
    def is_dynamic(self, node: Node) -> bool: ...
    def exclusive_parameters(self, node: Node) -> int: ...


@dataclass(frozen=True, slots=True)
class Predicate:
    """One line of `where`, parsed."""

    text: str
    tree: ast.expr

    @property
    def names(self) -> list[str]:
        """The axes, captures and predicates that it mentions."""
        return _names(self.tree)


def parse_predicate(text: str, axes: set[str], captures: set[str]) -> Predicate:
    """The predicate that `text` denotes.

    Raises:
        PredicateSyntaxError: anything outside the closed set, an unknown axis or capture.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise PredicateSyntaxError(f"`{text}` is not a predicate: {error.msg}") from error
    _check(tree, axes, captures)
    if not _is_truth(tree):
        raise PredicateSyntaxError(f"`{text}` is a number, not a predicate; compare it with another")
    return Predicate(text, tree)


def _is_truth(node: ast.expr) -> bool:
    """Whether an expression is true or false, not a number."""
    match node:
        case ast.BoolOp(values=values):
            return all(map(_is_truth, values))
        case ast.UnaryOp(operand=operand):
            return _is_truth(operand)
        case ast.Call(func=ast.Name(id=name)):
            return name in ("depends", "distinct", "static", "module", "bound")
    return isinstance(node, ast.Compare)


def _check(node: ast.expr, axes: set[str], captures: set[str]) -> None:
    match node:
        case ast.BoolOp(values=values):
            for value in values:
                _check(value, axes, captures)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            _check(operand, axes, captures)
        case ast.Compare(left=left, ops=comparisons, comparators=others) if all(
            type(c) in _COMPARISONS for c in comparisons
        ):
            for value in (left, *others):
                _check(value, axes, captures)
        case ast.Constant(value=int() | float()):
            pass
        case ast.Name(id=name):
            if name not in axes:
                raise PredicateSyntaxError(f"`{name}` is no axis of [shape]{nearest(name, axes)}")
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            _check_call(name, arguments, axes, captures)
        case _:
            raise PredicateSyntaxError(
                f"`{ast.unparse(node)}` is not part of `where`; it knows {', '.join(PREDICATES)}"
            )


def _check_call(name: str, arguments: list[ast.expr], axes: set[str], captures: set[str]) -> None:
    if name not in PREDICATES:
        raise PredicateSyntaxError(f"`where` has no predicate `{name}`{nearest(name, list(PREDICATES))}")
    kinds = PREDICATES[name]
    if len(arguments) != len(kinds):
        raise PredicateSyntaxError(f"`{name}` takes {len(kinds)} arguments, found {len(arguments)}")
    for kind, argument in zip(kinds, arguments, strict=True):
        if kind == "text":
            if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                raise PredicateSyntaxError(f"`{name}` takes a quoted glob as its last argument")
            continue
        known = axes if kind == "axis" else captures
        if not isinstance(argument, ast.Name):
            raise PredicateSyntaxError(f"`{name}` takes names, found `{ast.unparse(argument)}`")
        if argument.id not in known:
            what = "axis of [shape]" if kind == "axis" else "name in `match`"
            raise PredicateSyntaxError(f"`{argument.id}` is no {what}{nearest(argument.id, known)}")


def refused_by(predicate: Predicate, sizes: Mapping[str, Size], nodes: Mapping[str, Node], graph: Graph) -> str | None:
    """Why a predicate does not hold, with the values found; None when it does."""
    try:
        if _value(predicate.tree, sizes, nodes, graph):
            return None
        reason = "is false"
    except Undecided:
        reason = "cannot be decided for every batch size"
    except KeyError as error:
        reason = f"speaks of `{error.args[0]}`, which this alternative does not bind"
    found = [f"{n}={format_size(sizes[n])}" for n in _names(predicate.tree) if n in sizes]
    return f"where `{predicate.text}` {reason}" + (f" ({', '.join(found)})" if found else "")


def _names(tree: ast.expr) -> list[str]:
    return list(dict.fromkeys(n.id for n in ast.walk(tree) if isinstance(n, ast.Name)))


def _value(node: ast.expr, sizes: Mapping[str, Size], nodes: Mapping[str, Node], graph: Graph) -> Any:
    match node:
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_value(v, sizes, nodes, graph) for v in values)
        case ast.BoolOp(values=values):
            return any(_value(v, sizes, nodes, graph) for v in values)
        case ast.UnaryOp(operand=operand):
            return not _value(operand, sizes, nodes, graph)
        case ast.Compare(left=left, ops=comparisons, comparators=others):
            values = [_value(v, sizes, nodes, graph) for v in (left, *others)]
            return all(
                _decide(_COMPARISONS[type(c)](a, b)) for c, a, b in zip(comparisons, values, values[1:], strict=False)
            )
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return sizes[name]
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return _call(name, arguments, sizes, nodes, graph)
    raise AssertionError(f"unchecked predicate {ast.unparse(node)}")


def _call(name: str, arguments: list[Any], sizes: Mapping[str, Size], nodes: Mapping[str, Node], graph: Graph) -> Any:
    if name == "size":
        return sizes[arguments[0].id]
    if name == "bound":
        return arguments[0].id in nodes
    first = nodes[arguments[0].id]
    match name:
        case "rank":
            return len(ops.sizes(first) or ())
        case "uses":
            return len(first.users)
        case "params":
            return graph.exclusive_parameters(first)
        case "depends":
            return graph.depends(first, nodes[arguments[1].id])
        case "distinct":
            return first is not nodes[arguments[1].id]
        case "static":
            return not graph.is_dynamic(first)
        case "module":
            path = ops.module_path(first)
            return fnmatch.fnmatchcase(path[-1].partition("@")[0] if path else "", arguments[1].value)
    raise AssertionError(f"unchecked predicate {name}")


def _decide(result: Any) -> bool:
    if isinstance(result, bool):
        return result
    if result in (sympy.true, sympy.false):
        return bool(result)
    raise Undecided

"""The match block: dataflow equations in a subset of Python's expression syntax, parsed with `ast`, never evaluated.

    pooled      = pool(input, over=[...])
    hidden      = chain(linear | activation | norm | layout)(pooled)
    coefficient = squash(hidden)
    apply       = input * chain(layout, least=0)(coefficient)

Each equation names a node. An expression describes how that node was computed, outermost op first. `docs/patterns.md`
lists every construct; the terms below are their parsed form.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fxaudit import ops
from fxaudit.errors import nearest

INFIX: dict[type[ast.operator], str] = {
    ast.Mult: "mul",
    ast.Add: "add",
    ast.Div: "div",
    ast.Sub: "sub",
    ast.MatMult: "matmul",
}
CLOSURES = ("chain", "maybe", "fold", "region")
_SUGGESTED = ops.CLASS_NAMES | ops.NAMED | frozenset().union(*ops.CLASSES.values())
CHAIN_LEAST, CHAIN_MOST = 1, 12
REGION_MOST = 64
FOLD_LEAST = 2


class MatchSyntaxError(ValueError):
    """A match block that cannot be read: the line inside the block, and why."""

    def __init__(self, line: int, message: str) -> None:
        self.line = line
        super().__init__(message)


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """An expression of the match block; `line` counts from 1 inside the block."""

    line: int


@dataclass(frozen=True, slots=True, eq=False)
class Anything(Term):
    """``_``: any node, never captured."""


@dataclass(frozen=True, slots=True, eq=False)
class Name(Term):
    """A capture: the node that an equation defines, or any node where none does. The same name is the same node."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Literal(Term):
    """A number that stands as an operand."""

    value: float


@dataclass(frozen=True, slots=True, eq=False)
class Op(Term):
    """One node: an op name or class, its data operands, and attributes that must have these values.

    `over` names the axes that a pooling or reduction must remove, by the axis names of its operand.
    """

    names: tuple[str, ...]
    operands: tuple[Term, ...]
    attributes: Mapping[str, Any]
    over: tuple[str, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class Item(Term):
    """``topk(x)[0]``: one output of a multi-output node."""

    source: Term
    index: int


@dataclass(frozen=True, slots=True, eq=False)
class Either(Term):
    """``p | q``: the first alternative that matches."""

    options: tuple[Term, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Chain(Term):
    """``chain(linear | norm)(x)``: from `least` to `most` nodes along one operand path, the longest first."""

    names: tuple[str, ...]
    source: Term
    least: int
    most: int


@dataclass(frozen=True, slots=True, eq=False)
class Region(Term):
    """``region(x, via=linear | norm)``: every path back from here to `x` or parameters stays in these classes."""

    names: tuple[str, ...]
    sources: tuple[Term, ...]
    most: int


@dataclass(frozen=True, slots=True, eq=False)
class Fold(Term):
    """``fold(add)(term)``: a tree of one op over at least `least` terms; captures inside become tuples."""

    names: tuple[str, ...]
    term: Term
    least: int


def parse_match(text: str) -> dict[str, Term]:
    """The equations of a match block by the name each defines, in order.

    Raises:
        MatchSyntaxError: with the line inside the block.
    """
    equations: dict[str, Term] = {}
    line = 1
    try:
        for statement in ast.parse(textwrap.dedent(text)).body:
            line = statement.lineno
            name, expression = _equation(statement)
            if name in equations:
                raise MatchSyntaxError(line, f"`{name}` is defined twice")
            equations[name] = parse_expression(expression)
    except SyntaxError as error:
        raise MatchSyntaxError(error.lineno or 1, f"this is not an expression: {error.msg}") from error
    except (RecursionError, MemoryError) as error:
        raise MatchSyntaxError(line, "this expression is nested too deeply") from error
    for name, term in equations.items():
        if name in _reachable(term, equations):
            raise MatchSyntaxError(term.line, f"`{name}` is defined in terms of itself")
    return equations


def parse_statement(text: str) -> tuple[str, Term]:
    """One equation, as `exclude` holds them.

    Raises:
        MatchSyntaxError: when it is not one.
    """
    try:
        body = ast.parse(text.strip()).body
    except SyntaxError as error:
        raise MatchSyntaxError(1, f"`{text}` is not an equation: {error.msg}") from error
    if len(body) != 1:
        raise MatchSyntaxError(1, f"`{text}` must be one equation")
    name, expression = _equation(body[0])
    return name, parse_expression(expression)


def _equation(statement: ast.stmt) -> tuple[str, ast.expr]:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id, statement.value
    raise MatchSyntaxError(statement.lineno, f"`{_source(statement)}` is not an equation; write `name = expression`")


def parse_expression(node: ast.expr) -> Term:
    """The term that a Python expression stands for."""
    line = node.lineno
    match node:
        case ast.Name(id="_"):
            return Anything(line)
        case ast.Name(id=name):
            return Name(line, name)
        case ast.Constant(value=bool()) | ast.Constant(value=str()):
            raise MatchSyntaxError(line, f"`{_source(node)}` cannot stand as an operand; operands are nodes or numbers")
        case ast.Constant(value=int() | float() as value):
            return Literal(line, value)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return Literal(line, -value)
        case ast.Subscript(value=source, slice=ast.Constant(value=int() as index)):
            return Item(line, parse_expression(source), index)
        case ast.BinOp(op=ast.BitOr()):
            return Either(line, tuple(parse_expression(option) for option in _alternatives(node)))
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in INFIX:
            return Op(line, (INFIX[type(operator)],), (parse_expression(left), parse_expression(right)), {}, None)
        case ast.Call():
            return _call(node)
    raise MatchSyntaxError(line, f"`{_source(node)}` is not part of the pattern language")


def _call(node: ast.Call) -> Term:
    line = node.lineno
    if isinstance(node.func, ast.Call):
        return _closure(node, node.func)
    if isinstance(node.func, ast.Name) and node.func.id == "region":
        options = _options(node, {"via", "most"})
        if "via" not in options:
            raise MatchSyntaxError(line, "`region` needs `via=`, the classes that it may pass through")
        via = _op_names(options["via"])
        return Region(line, via, _terms(node), _whole(options.get("most"), REGION_MOST))
    if isinstance(node.func, ast.Name) and node.func.id in CLOSURES:
        raise MatchSyntaxError(line, f"`{node.func.id}` takes classes, then an operand: `{node.func.id}(linear)(x)`")
    attributes: dict[str, Any] = {}
    over: tuple[str, ...] | None = None
    for keyword in node.keywords:
        if keyword.arg == "over":
            over = _axis_names(keyword.value)
        elif keyword.arg is None:
            raise MatchSyntaxError(line, "`**` is not part of the pattern language")
        else:
            try:
                attributes[keyword.arg] = ast.literal_eval(keyword.value)
            except ValueError as error:
                raise MatchSyntaxError(line, f"`{keyword.arg}` must be a plain value") from error
    if over is not None and len(node.args) != 1:
        raise MatchSyntaxError(line, "`over` needs exactly one operand, whose axes it names")
    return Op(line, _op_names(node.func), _terms(node), attributes, over)


def _closure(node: ast.Call, head: ast.Call) -> Term:
    line = node.lineno
    name = head.func.id if isinstance(head.func, ast.Name) else ""
    if name not in ("chain", "maybe", "fold"):
        raise MatchSyntaxError(line, f"`{_source(head)}` is not part of the pattern language{nearest(name, CLOSURES)}")
    if len(head.args) != 1 or len(node.args) != 1 or node.keywords:
        raise MatchSyntaxError(line, f"`{name}` takes classes, then one operand: `{name}(linear | norm)(x)`")
    names, source = _op_names(head.args[0]), parse_expression(node.args[0])
    if name == "maybe":
        _options(head, set())
        return Chain(line, names, source, 0, 1)
    if name == "fold":
        return Fold(line, names, source, _whole(_options(head, {"least"}).get("least"), FOLD_LEAST))
    options = _options(head, {"least", "most"})
    least, most = _whole(options.get("least"), CHAIN_LEAST), _whole(options.get("most"), CHAIN_MOST)
    if least > most:
        raise MatchSyntaxError(line, f"`least={least}` is more than `most={most}`")
    return Chain(line, names, source, least, most)


def _terms(node: ast.Call) -> tuple[Term, ...]:
    return tuple(parse_expression(argument) for argument in node.args)


def _options(node: ast.Call, known: set[str]) -> dict[str, ast.expr]:
    for keyword in node.keywords:
        if keyword.arg not in known:
            name = _source(node.func)
            raise MatchSyntaxError(
                node.lineno, f"`{name}` has no option `{keyword.arg}`{nearest(str(keyword.arg), known)}"
            )
    return {str(keyword.arg): keyword.value for keyword in node.keywords}


def _whole(node: ast.expr | None, default: int) -> int:
    if node is None:
        return default
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value >= 0:
        return node.value
    raise MatchSyntaxError(node.lineno, f"`{_source(node)}` must be a whole number")


def _axis_names(node: ast.expr) -> tuple[str, ...]:
    if isinstance(node, ast.List) and node.elts:
        names = []
        for element in node.elts:
            if isinstance(element, ast.Name):
                names.append(element.id)
            elif isinstance(element, ast.Constant) and element.value is Ellipsis:
                names.append("...")
            else:
                break
        else:
            return tuple(names)
    raise MatchSyntaxError(node.lineno, "`over` takes a list of axis names, such as `[height, width]` or `[...]`")


def _alternatives(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield from _alternatives(node.left)
        yield from _alternatives(node.right)
    else:
        yield node


def _op_names(node: ast.expr) -> tuple[str, ...]:
    names = []
    for option in _alternatives(node):
        if not isinstance(option, ast.Name):
            raise MatchSyntaxError(
                node.lineno, f"expected an op class such as `linear | norm`, found `{_source(option)}`"
            )
        if not known_op(option.id):
            raise MatchSyntaxError(
                option.lineno, f"unknown op or op class `{option.id}`{nearest(option.id, _SUGGESTED)}"
            )
        names.append(option.id)
    return tuple(names)


def known_op(name: str) -> bool:
    """Whether a name is an op class or an op that ATen has."""
    import torch

    if name in ops.CLASS_NAMES or name in ops.NAMED:
        return True
    return isinstance(getattr(torch.ops.aten, name, None), torch._ops.OpOverloadPacket)


def _source(node: ast.AST) -> str:
    return ast.unparse(node)


def walk(term: Term) -> Iterator[Term]:
    """A term and all terms inside it; names are not followed."""
    yield term
    for inner in children(term):
        yield from walk(inner)


def children(term: Term) -> tuple[Term, ...]:
    match term:
        case Op(operands=operands):
            return operands
        case Item(source=source) | Chain(source=source):
            return (source,)
        case Either(options=options):
            return options
        case Region(sources=sources):
            return sources
        case Fold(term=inner):
            return (inner,)
    return ()


def names_in(term: Term) -> set[str]:
    """The capture names that a term mentions directly."""
    return {inner.name for inner in walk(term) if isinstance(inner, Name)}


def _reachable(term: Term, equations: Mapping[str, Term]) -> set[str]:
    """The names that a term mentions, directly or through the equations of the names it mentions."""
    seen: set[str] = set()
    queue = list(names_in(term))
    while queue:
        name = queue.pop()
        if name not in seen:
            seen.add(name)
            if name in equations:
                queue.extend(names_in(equations[name]))
    return seen

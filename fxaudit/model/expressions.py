"""The closed grammars of the texts in a .pt2 archive that torch evaluates: sizes, guards, structures, operators, names.

torch hands them to `sympify`, `exec`, `getattr` and `importlib`. Here they are parsed, never evaluated; what the
grammar does not have is not understood, and the archive is refused.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from typing import Any

import torch

_LONGEST = 20_000
_SYMBOL = re.compile(r"[a-z]{1,4}\d{1,6}")
_NUMBER = re.compile(r"-?\d{1,40}(\.\d{0,40})?(e[+-]?\d{1,3})?")
_TEXT = re.compile(r"[^'\"\\\x00-\x1f\x7f]*")
_PATH = re.compile(r"[\w.@$-]*")
_LARGEST_EXPONENT = 64
_DIGITS = 10**20

# What torch writes for symbolic sizes: `srepr` of sympy's own classes and of torch's functions.
_SYMPY = set(
    "Symbol Integer Rational Float Add Mul Pow Max Min Abs floor ceiling And Or Not Equality Eq Unequality Ne"
    " LessThan Le StrictLessThan Lt GreaterThan Ge StrictGreaterThan Gt Piecewise ExprCondPair"
    " FloorDiv ModularIndexing Where PythonMod Mod CleanDiv CeilToInt FloorToInt CeilDiv LShift RShift PowByNatural"
    " FloatPow FloatTrueDiv IntTrueDiv IsNonOverlappingAndDenseIndicator TruncToFloat TruncToInt RoundToInt"
    " RoundDecimal ToFloat Identity".split()
)
_POWERS = {"Pow", "PowByNatural", "FloatPow", "LShift"}
_ASSUMPTIONS = set("positive nonnegative negative nonpositive integer real finite zero nonzero even odd".split())
_TRUTHS = {"true", "false", "True", "False"}
# What may be called in a guard, beside `size`, `stride` and `storage_offset` of an input.
_GUARD_CALLS = {"Max", "Min", "max", "min", "abs"}
_FUNCTION_CALLS = set("ceil floor trunc isnan sym_max sym_min sym_int sym_float sym_not sym_ite sym_sqrt".split())
_SIZE_CALLS = {"size", "stride", "storage_offset", "dim"}

_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)


class NotUnderstood(Exception):
    """A text outside its grammar; the message says which."""


def _parse(text: str) -> ast.expr:
    if len(text) > _LONGEST or not text.isprintable() or "#" in text:
        raise NotUnderstood("an expression that is too long or has other characters")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotUnderstood(f"the expression `{text[:60]}`") from error


def check_symbolic(text: str) -> None:
    """A symbolic size: arithmetic over symbols and numbers, in sympy's own writing.

    Raises:
        NotUnderstood: anything else.
    """
    _symbolic(_parse(text), text, in_power=False)


def _symbolic(node: ast.expr, text: str, *, in_power: bool) -> None:
    match node:
        case ast.Constant(value=bool()):
            return
        case ast.Constant(value=int() | float() as value) if abs(value) < _DIGITS:
            return
        case ast.Name(id=name) if _SYMBOL.fullmatch(name) or name in _TRUTHS | {"int_oo"}:
            return
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            return _symbolic(operand, text, in_power=in_power)
        case ast.BinOp(op=op, left=left, right=right) if isinstance(op, _ARITHMETIC):
            _symbolic(left, text, in_power=in_power)
            return _symbolic(right, text, in_power=in_power)
        case ast.BinOp(op=ast.Pow(), left=left, right=right) if not in_power and _is_small(right):
            return _symbolic(left, text, in_power=True)
        case ast.Compare(ops=ops, left=left, comparators=others) if all(isinstance(o, _COMPARISONS) for o in ops):
            for operand in (left, *others):
                _symbolic(operand, text, in_power=in_power)
            return None
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords) if name in _SYMPY:
            return _symbolic_call(name, arguments, keywords, text, in_power=in_power)
    raise NotUnderstood(f"the symbolic expression `{text[:60]}`")


def _symbolic_call(
    name: str, arguments: list[ast.expr], keywords: list[ast.keyword], text: str, *, in_power: bool
) -> None:
    values = {k.arg: k.value.value for k in keywords if k.arg and isinstance(k.value, ast.Constant)}
    known = len(values) == len(keywords)
    if name in ("Symbol", "Float"):
        pattern = _SYMBOL if name == "Symbol" else _NUMBER
        allowed: set[str] = _ASSUMPTIONS if name == "Symbol" else {"precision", "dps"}
        is_text = len(arguments) == 1 and isinstance(arguments[0], ast.Constant) and isinstance(arguments[0].value, str)
        small = all(isinstance(value, int) and 0 <= value <= 1000 for value in values.values())
        if known and is_text and set(values) <= allowed and small and pattern.fullmatch(arguments[0].value):  # type: ignore[attr-defined]
            return
        raise NotUnderstood(f"the symbolic expression `{text[:60]}`")
    if keywords and not (known and set(values) <= {"evaluate"} and all(isinstance(v, bool) for v in values.values())):
        raise NotUnderstood(f"the symbolic expression `{text[:60]}`")
    if name in _POWERS and (in_power or len(arguments) != 2 or not _is_small(arguments[1])):
        raise NotUnderstood(f"the symbolic expression `{text[:60]}`")
    for argument in arguments:
        _symbolic(argument, text, in_power=in_power or name in _POWERS)


def _is_small(node: ast.expr) -> bool:
    """A number small enough that a power of it can be computed."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return abs(value) <= _LARGEST_EXPONENT
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _is_small(operand)
        case ast.Call(func=ast.Name(id="Integer" | "Rational"), args=arguments, keywords=[]):
            return all(map(_is_small, arguments))
    return False


def check_guard(text: str) -> None:
    """A condition over the sizes and values of inputs, as torch compiles it into a guard function.

    Raises:
        NotUnderstood: anything else.
    """
    _guard(_parse(text), text)


def _guard(node: ast.expr, text: str) -> None:
    match node:
        case ast.BoolOp(values=values):
            for value in values:
                _guard(value, text)
            return None
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            return _guard(operand, text)
        case ast.Compare(ops=ops, left=left, comparators=others) if all(
            isinstance(o, (*_COMPARISONS, ast.Is, ast.IsNot)) for o in ops
        ):
            for operand in (left, *others):
                _guard(operand, text)
            return None
        case ast.BinOp(op=op, left=left, right=right) if isinstance(op, _ARITHMETIC):
            _guard(left, text)
            return _guard(right, text)
        case ast.BinOp(op=ast.Pow(), left=left, right=right) if _is_small(right):
            return _guard(left, text)
        case ast.Constant(value=None | bool()):
            return None
        case ast.Constant(value=int() | float() as value) if abs(value) < _DIGITS:
            return None
        case ast.Constant(value=str() as value) if _TEXT.fullmatch(value):
            return None
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _GUARD_CALLS:
            for argument in arguments:
                _guard(argument, text)
            return None
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="math" | "torch"), attr=name), args=arguments, keywords=[]
        ) if name in _FUNCTION_CALLS:
            for argument in arguments:
                _guard(argument, text)
            return None
        case ast.Attribute(value=ast.Name(id="math"), attr="inf" | "nan"):
            return None
    return _input(node, text)


def _input(node: ast.expr, text: str) -> None:
    """An input, part of one, or its size: ``L['x'][0].size()[1]``."""
    match node:
        case ast.Name(id="L"):
            return None
        case ast.Subscript(value=value, slice=ast.Constant(value=int() | str() as key)) if _TEXT.fullmatch(str(key)):
            return _input(value, text)
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=[], keywords=[]) if name in _SIZE_CALLS:
            return _input(value, text)
    raise NotUnderstood(f"the guard `{text[:60]}`")


# --- structures and names -------------------------------------------------------------------------------------------

_STRUCTURES = {
    *"builtins.tuple builtins.list builtins.dict collections.OrderedDict collections.namedtuple".split(),
    "torch.fx.immutable_collections.immutable_list",
    "torch.fx.immutable_collections.immutable_dict",
}
_OUTPUTS = re.compile(r"transformers\.modeling_outputs\.\w+")


def check_structure(text: str) -> None:
    """The structure of arguments or outputs: nested tuples, lists and dicts.

    Raises:
        NotUnderstood: anything else, such as a type that is looked up by import.
    """
    try:
        version, tree = json.loads(text)
        if version != 1:
            raise NotUnderstood(f"a structure of version {version!r}")
        _structure(tree)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise NotUnderstood(f"the structure `{text[:60]}`") from error


def _structure(tree: dict[str, Any]) -> None:
    kind, context, children = tree["type"], tree["context"], tree["children_spec"]
    if kind is None and context is None and children == []:
        return
    if not isinstance(kind, str) or not (kind in _STRUCTURES or _OUTPUTS.fullmatch(kind)):
        raise NotUnderstood(f"a structure of type `{str(kind)[:60]}`")
    # A named tuple is known by its registered name, everything else by the JSON text of its keys.
    keys = context if kind == "collections.namedtuple" else json.loads(context)
    for key in keys if isinstance(keys, list) else [keys]:
        if not (key is None or isinstance(key, int | str)) or not _TEXT.fullmatch(str(key)):
            raise NotUnderstood("a structure with keys that are neither numbers nor plain texts")
    for child in children:
        _structure(child)


def check_name(text: str) -> None:
    """A name that becomes a variable in generated code.

    Raises:
        NotUnderstood: not an identifier.
    """
    if not text.isidentifier():
        raise NotUnderstood(f"the name `{text[:60]}`")


def check_argument_name(text: str) -> None:
    """The name of a keyword argument; empty for a positional one.

    Raises:
        NotUnderstood: not an identifier.
    """
    if text:
        check_name(text)


def check_path(text: str) -> None:
    """The name of a parameter or module, which becomes part of generated code.

    Raises:
        NotUnderstood: other characters than those of names.
    """
    if not _PATH.fullmatch(text):
        raise NotUnderstood(f"the name `{text[:60]}`")


def check_text(text: str) -> None:
    """A text that becomes part of generated code in quotes.

    Raises:
        NotUnderstood: quotes, backslashes or control characters.
    """
    if not _TEXT.fullmatch(text):
        raise NotUnderstood(f"the text `{text[:60]}`")


def check_note(text: str) -> None:
    """A text that is only shown: lines of printable characters.

    Raises:
        NotUnderstood: control characters.
    """
    if not text.replace("\n", "").replace("\t", "").isprintable():
        raise NotUnderstood("a text with control characters")


_NAMED_OPERATOR = re.compile(r"torch\.ops\.(aten|prims)\.(\w+)\.(\w+)")
_HIGHER_ORDER = {
    f"torch.ops.higher_order.{name}"
    for name in "cond while_loop scan map_impl associative_scan wrap_with_set_grad_enabled wrap_with_autocast".split()
}
_SYMBOLIC_OPERATORS = {
    *(
        f"_operator.{name}"
        for name in "eq ne le ge lt gt neg pos mul add sub floordiv mod pow truediv and_ or_ getitem".split()
    ),
    *(f"torch.sym_{name}" for name in "not int float ite max min sqrt".split()),
    *"torch._sym_sqrt math.trunc math.ceil math.floor".split(),
}
assert all(hasattr(operator, name.partition(".")[2]) for name in _SYMBOLIC_OPERATORS if name.startswith("_operator"))


def check_operator(text: str) -> None:
    """An operator of the graph: one of ATen that touches nothing but tensors, arithmetic of sizes, or control flow.

    Raises:
        NotUnderstood: any other name, such as a function of Python, or an operator over files.
    """
    if text in _SYMBOLIC_OPERATORS | _HIGHER_ORDER:
        return
    if (match := _NAMED_OPERATOR.fullmatch(text)) is None:
        raise NotUnderstood(f"the operator `{text[:80]}`")
    namespace, name, overload = match.groups()
    found = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise NotUnderstood(f"the operator `{text[:80]}`")
    if any(argument.name == "filename" for argument in found._schema.arguments):
        raise NotUnderstood(f"the operator `{text[:80]}`, which opens files")

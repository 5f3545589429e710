"""The grammars of the texts in a .pt2 archive: what torch writes is understood, everything else is not."""

import pytest
import sympy
import torch
from torch.utils._sympy import functions

from fxaudit.model.expressions import (
    NotUnderstood,
    check_argument_name,
    check_guard,
    check_name,
    check_note,
    check_operator,
    check_path,
    check_structure,
    check_symbolic,
    check_text,
)

A, B = sympy.symbols("s0 s1", integer=True, positive=True)

# Expressions that torch builds, in the writing in which it stores them.
WRITTEN = [
    A,
    2 * A + B - 3,
    A**2 * B,
    A / B,
    -A,
    sympy.Max(A, B, 4),
    sympy.Min(A, B),
    functions.FloorDiv(A * B, sympy.Integer(2)),
    functions.Mod(A, sympy.Integer(3)),
    functions.PythonMod(A, B),
    functions.ModularIndexing(A, sympy.Integer(2), sympy.Integer(3)),
    functions.FloatTrueDiv(A, B),
    functions.ToFloat(A),
    functions.CeilToInt(functions.IntTrueDiv(A, B)),
    sympy.Eq(A, B),
    sympy.Ne(A, 3),
    sympy.And(A > 2, B <= 5),
    sympy.Or(A < 2, sympy.Not(sympy.Eq(B, 5))),
    sympy.Float(0.5) * A,
    sympy.Rational(2, 3) * A,
    sympy.Abs(A - B),
    sympy.true,
]


@pytest.mark.parametrize("expression", WRITTEN, ids=str)
def test_a_size_as_torch_writes_it_is_understood(expression):
    check_symbolic(sympy.srepr(expression))


@pytest.mark.parametrize("text", ["s0", "2*s0 + 1", "s0//2", "u3 % 4", "s0**2", "s0 == s1", "-1", "1.5"])
def test_a_size_as_older_torch_wrote_it_is_understood(text):
    check_symbolic(text)


CODE = [
    "__import__('os').system('ls')",
    "os.system",
    "s0.__class__",
    "(lambda: 1)()",
    "[x for x in s0]",
    "[s0]",
    "(s0, s1)",
    "{s0}",
    "s0 if s0 else s1",
    "s0[0]",
    "f'{s0}'",
    "'s0'",
    "b'x'",
    "(x := 1)",
    "*s0",
    "eval(s0)",
    "sympify(s0)",
    "Lambda(s0, s0)",
    "Function('f')(s0)",
    "Symbol('s0', commutative=s1)",
    "Symbol('__import__')",
    "Symbol(s0)",
    "Symbol('s0', 's1')",
    "Symbol('s0', **s1)",
    "Integer('1')",
    "Float('__import__')",
    "Add(*s0)",
    "Add(s0, evaluate=s1)",
    "N",
    "E",
    "S",
    "name",
    "s99999999999",
    "s0 is s1",
    "s0 in s1",
    "s0 @ s1",
    "s0 << 9",
    "9**9**9",
    "9**999999999",
    "s0**s1",
    "Pow(Pow(Integer(9), Integer(64)), Integer(64))",
    "LShift(Integer(1), Integer(9999999999))",
    "1" * 30,
    "s0\n+ s1",
    "s0 # comment",
    "s0; s1",
    "",
    "(" * 500,
    "s0 " + "+ s0" * 10_000,
]


@pytest.mark.parametrize("text", CODE, ids=lambda text: text[:30])
def test_anything_else_is_no_size(text):
    with pytest.raises(NotUnderstood):
        check_symbolic(text)


@pytest.mark.parametrize(
    "text",
    [
        "(L['x'].size()[1] % 2) == 0",
        "6*((L['x'].size()[1]*L['x'].size()[0]) // 2) != L['args'][0].size()[0]",
        "L['extra']['q'][0].stride()[0] >= 2 and not L['x'].storage_offset() > 3",
        "L['mode'] == 'a'",
        "L['k'] == -1.5",
        "L['n'] is None",
        "math.isnan(L['k'])",
        "L['k'] == -math.inf",
        "torch.sym_max(L['x'].size()[0], 3) <= 7",
        "Max(2, L['x'].size()[0]) < 9",
    ],
)
def test_a_guard_as_torch_writes_it_is_understood(text):
    check_guard(text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('ls')",
        "L['x'].__class__",
        "L['x'].size().__class__",
        "L['x'].tofile('a')",
        "L[L['x']]",
        "L['x\"']  == 1",
        "L['x'] == '\\''",
        "torch.load('a')",
        "torch.hub",
        "math.factorial(9)",
        "open('a')",
        "x == 1",
        "(L['x'] == 1, L['y'])",
        "[L]",
        "True) or (True",
        "L['x'] == 1 # more",
        "L['x'] ==\n1",
        "lambda: L",
    ],
)
def test_anything_else_is_no_guard(text):
    with pytest.raises(NotUnderstood):
        check_guard(text)


def test_a_structure_of_containers_is_understood():
    nested = torch.utils._pytree.tree_structure(({"a": [1, (2, None)], "b.c": {}}, [3]))
    check_structure(torch.utils._pytree.treespec_dumps(nested))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[1]",
        "[2, {}]",
        "[1, []]",
        "[1, null]",
        '[1, {"type": "os.system", "context": "null", "children_spec": []}]',
        '[1, {"type": "collections.defaultdict", "context": {"default_factory_module": "os"}, "children_spec": []}]',
        '[1, {"type": "builtins.dict", "context": "[\\"a\'b\\"]", "children_spec": []}]',
        '[1, {"type": "builtins.dict", "context": "[[1]]", "children_spec": []}]',
        '[1, {"type": "builtins.dict", "context": "{\\"__enum__\\": true}", "children_spec": []}]',
        '[1, {"type": "builtins.list", "context": "null", "children_spec": [{"type": "evil"}]}]',
        '[1, {"type": null, "context": "null", "children_spec": []}]',
        "[" * 100_000,
    ],
    ids=lambda text: text[:40],
)
def test_anything_else_is_no_structure(text):
    with pytest.raises(NotUnderstood):
        check_structure(text)


@pytest.mark.parametrize(
    "text",
    [
        "torch.ops.aten.linear.default",
        "torch.ops.aten.sym_size.int",
        "torch.ops.aten._assert_scalar.default",
        "torch.ops.prims.convert_element_type.default",
        "torch.ops.higher_order.cond",
        "_operator.floordiv",
        "torch.sym_max",
        "math.ceil",
    ],
)
def test_an_operator_of_tensors_and_sizes_is_understood(text):
    check_operator(text)


@pytest.mark.parametrize(
    "text",
    [
        "torch.os.system",
        "torch.load",
        "torch.ops.load_library",
        "torch.ops.aten.from_file.default",
        "torch.ops.aten.save.default",
        "torch.ops.aten.linear",
        "torch.ops.aten.linear.default.__init__",
        "torch.ops.aten.no_such_operator.default",
        "torch.ops.aten.__class__.default",
        "torch.ops.other.linear.default",
        "torch.ops.higher_order.call_torchbind",
        "_operator.attrgetter",
        "_operator.methodcaller",
        "math.factorial",
        "#extension:name",
        "os.system",
        "",
    ],
)
def test_anything_else_is_no_operator(text):
    with pytest.raises(NotUnderstood):
        check_operator(text)


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (check_name, ["x", "p_l_weight", "_1"], ["", "1", "a b", "a.b", "x=1", "x\n", "a(b)"]),
        (check_argument_name, ["", "x"], ["1", "a b", "x=1"]),
        (check_path, ["", "layers.0.weight", "a-b.c@1"], ["a'b", 'a"b', "a b", "a\\b", "a\n", "a(b)"]),
        (check_text, ["bij,bjk->bik", "tanh", ""], ["a'b", 'a"b', "a\\b", "a\nb", "\x1b[2J"]),
        (check_note, ['File "a.py", line 1\n\tx = y', ""], ["\x1b[2J", "a\x00"]),
        (check_symbolic, ["s0", "u12", "zuf3", "5*s77"], ["", "s", "s0.1", "s9999999", "S0", "s0.x", "s0()"]),
    ],
)
def test_a_text_stays_within_what_its_place_allows(check, good, bad):
    for text in good:
        check(text)
    for text in bad:
        with pytest.raises(NotUnderstood):
            check(text)

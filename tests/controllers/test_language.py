import pytest

from fxaudit.controllers.language import (
    Anything,
    Chain,
    Either,
    Fold,
    Item,
    Literal,
    MatchSyntaxError,
    Name,
    Op,
    Region,
    known_op,
    names_in,
    parse_match,
    parse_statement,
    walk,
)


def term(expression):
    return parse_match(f"a = {expression}")["a"]


def shape_of(value):
    """A term as nested plain values, lines left out, so that it can be compared."""
    match value:
        case Anything():
            return "_"
        case Name(name=name):
            return name
        case Literal(value=number):
            return number
        case Op(names=names, operands=operands, attributes=attributes, over=over):
            return ("op", names, tuple(map(shape_of, operands)), dict(attributes), over)
        case Item(source=source, index=index):
            return ("item", shape_of(source), index)
        case Either(options=options):
            return ("either", tuple(map(shape_of, options)))
        case Chain(names=names, source=source, least=least, most=most):
            return ("chain", names, shape_of(source), least, most)
        case Region(names=names, sources=sources, most=most):
            return ("region", names, tuple(map(shape_of, sources)), most)
        case Fold(names=names, term=inner, least=least):
            return ("fold", names, shape_of(inner), least)


def op(*names, operands=("x",), over=None, **attributes):
    return ("op", names, operands, attributes, over)


CONSTRUCTS = {
    "x": "x",
    "_": "_",
    "3": 3,
    "1.702": 1.702,
    "-2": -2,
    "-0.5": -0.5,
    "sigmoid(x)": op("sigmoid"),
    "linear(x)": op("linear"),
    "(sigmoid | tanh)(x)": op("sigmoid", "tanh"),
    "sigmoid(tanh(x))": op("sigmoid", operands=(op("tanh"),)),
    "lerp(x, y, z)": op("lerp", operands=("x", "y", "z")),
    "x * y": op("mul", operands=("x", "y")),
    "x + y": op("add", operands=("x", "y")),
    "x / y": op("div", operands=("x", "y")),
    "x - y": op("sub", operands=("x", "y")),
    "x @ y": op("matmul", operands=("x", "y")),
    "2 * x": op("mul", operands=(2, "x")),
    "softmax(x, dim=-1)": op("softmax", dim=-1),
    "adaptive_avg_pool2d(x, output_size=[1, 1])": op("adaptive_avg_pool2d", output_size=[1, 1]),
    "pool(x, over=[height, width])": op("pool", over=("height", "width")),
    "pool(x, over=[...])": op("pool", over=("...",)),
    "mean(x, over=[token], keepdim=True)": op("mean", over=("token",), keepdim=True),
    "topk(x)[1]": ("item", op("topk"), 1),
    "x[0]": ("item", "x", 0),
    "x | y": ("either", ("x", "y")),
    "x | y | 1": ("either", ("x", "y", 1)),
    "sigmoid(x) | x * y": ("either", (op("sigmoid"), op("mul", operands=("x", "y")))),
    "maybe(norm)(x)": ("chain", ("norm",), "x", 0, 1),
    "maybe(norm | linear)(x)": ("chain", ("norm", "linear"), "x", 0, 1),
    "chain(linear | norm | layout)(x)": ("chain", ("linear", "norm", "layout"), "x", 1, 12),
    "chain(linear, least=0)(x)": ("chain", ("linear",), "x", 0, 12),
    "chain(linear, least=2, most=3)(x)": ("chain", ("linear",), "x", 2, 3),
    "chain(linear)(sigmoid(x))": ("chain", ("linear",), op("sigmoid"), 1, 12),
    "region(x, via=linear | norm)": ("region", ("linear", "norm"), ("x",), 64),
    "region(x, y, via=linear, most=9)": ("region", ("linear",), ("x", "y"), 9),
    "fold(add)(x)": ("fold", ("add",), "x", 2),
    "fold(add | sub, least=3)(x * y)": ("fold", ("add", "sub"), op("mul", operands=("x", "y")), 3),
}


@pytest.mark.parametrize(("text", "expected"), CONSTRUCTS.items(), ids=CONSTRUCTS)
def test_each_construct_parses_to_its_term(text, expected):
    assert shape_of(term(text)) == expected


def test_equations_keep_their_order():
    assert list(parse_match("b = relu(x)\na = relu(b)")) == ["b", "a"]


def test_an_equation_may_use_a_name_that_a_later_one_defines():
    assert list(parse_match("a = relu(b)\nb = relu(x)")) == ["a", "b"]


def test_an_indented_block_is_read_like_one_that_is_not():
    assert list(parse_match("    a = relu(x)\n    b = relu(a)\n")) == ["a", "b"]


def test_comments_and_empty_lines_are_ignored():
    assert list(parse_match("# gate\n\na = relu(x)  # why\n")) == ["a"]


def test_an_expression_in_parentheses_may_span_lines():
    assert shape_of(parse_match("a = (sigmoid(x)\n     | tanh(x))")["a"]) == ("either", (op("sigmoid"), op("tanh")))


def test_a_term_knows_its_line_in_the_block():
    assert parse_match("\n# one\na = relu(x)\nb = relu(a)")["b"].line == 4


def test_a_term_inside_a_long_expression_knows_its_own_line():
    inner = parse_match("a = sigmoid(\n    relu(x))")["a"].operands[0]
    assert inner.line == 2


def test_the_names_of_a_term_are_those_it_mentions_itself():
    assert names_in(term("x * chain(linear)(y) + _ * 2")) == {"x", "y"}


def test_walking_a_term_visits_each_term_inside_it_once():
    # mul, fold, topk item, topk, x, region, y
    found = [type(t).__name__ for t in walk(term("fold(add)(topk(x)[0] * region(y, via=linear))"))]
    assert sorted(found) == ["Fold", "Item", "Name", "Name", "Op", "Op", "Region"]


def test_a_statement_is_one_equation():
    name, right = parse_statement("coefficient = softmax(_)")
    assert (name, shape_of(right)) == ("coefficient", op("softmax", operands=("_",)))


@pytest.mark.parametrize("text", ["softmax(_)", "a = relu(x); b = relu(x)", "a = ", "a = b = relu(x)", ""])
def test_a_statement_that_is_no_single_equation_is_an_error(text):
    with pytest.raises(MatchSyntaxError):
        parse_statement(text)


@pytest.mark.parametrize("name", ["sigmoid", "linear", "pointwise", "getitem", "batch_norm", "to", "topk", "einsum"])
def test_classes_and_aten_ops_are_known(name):
    assert known_op(name)


@pytest.mark.parametrize("name", ["sigmoidd", "name", "_dir", "__class__"])
def test_what_is_neither_class_nor_aten_op_is_unknown(name):
    assert not known_op(name)


# Each block is wrong on its third line.
SYNTAX_ERRORS = {
    "unreadable": ("c = relu(", "this is not an expression"),
    "no equation": ("relu(x)", "`relu(x)` is not an equation; write `name = expression`"),
    "two targets": ("c = d = relu(x)", "is not an equation"),
    "tuple target": ("c, d = relu(x)", "is not an equation"),
    "augmented": ("c += relu(x)", "is not an equation"),
    "annotated": ("c: int = relu(x)", "is not an equation"),
    "import": ("import os", "is not an equation"),
    "twice": ("a = tanh(x)", "`a` is defined twice"),
    "text operand": ("c = relu('x')", "cannot stand as an operand"),
    "boolean operand": ("c = mul(x, True)", "cannot stand as an operand"),
    "none operand": ("c = mul(x, None)", "is not part of the pattern language"),
    "attribute": ("c = torch.relu(x)", "expected an op class"),
    "method": ("c = x.relu()", "expected an op class"),
    "power": ("c = x ** 2", "`x ** 2` is not part of the pattern language"),
    "comparison": ("c = x > 2", "is not part of the pattern language"),
    "lambda": ("c = (lambda: x)(x)", "expected an op class"),
    "comprehension": ("c = [x for x in y]", "is not part of the pattern language"),
    "computed item": ("c = x[y]", "is not part of the pattern language"),
    "slice": ("c = x[0:1]", "is not part of the pattern language"),
    "unknown op": ("c = linaer(x)", "unknown op or op class `linaer`; did you mean `linear`?"),
    "unknown op in chain": ("c = chain(linear | nrom)(x)", "unknown op or op class `nrom`; did you mean `norm`?"),
    "unknown closure": ("c = chian(linear)(x)", "did you mean `chain`?"),
    "bare closure": ("c = chain(x)", "`chain` takes classes, then an operand"),
    "closure of two": ("c = chain(linear)(x, y)", "`chain` takes classes, then one operand"),
    "closure with keyword": ("c = chain(linear)(x, least=0)", "`chain` takes classes, then one operand"),
    "chain option": ("c = chain(linear, leats=0)(x)", "`chain` has no option `leats`; did you mean `least`?"),
    "maybe option": ("c = maybe(linear, least=0)(x)", "`maybe` has no option `least`"),
    "fold option": ("c = fold(add, most=3)(x)", "`fold` has no option `most`"),
    "region option": ("c = region(x, via=linear, least=0)", "`region` has no option `least`"),
    "region without via": ("c = region(x)", "`region` needs `via=`"),
    "negative count": ("c = chain(linear, least=-1)(x)", "`-1` must be a whole number"),
    "fractional count": ("c = chain(linear, most=1.5)(x)", "`1.5` must be a whole number"),
    "boolean count": ("c = chain(linear, most=True)(x)", "`True` must be a whole number"),
    "least over most": ("c = chain(linear, least=3, most=2)(x)", "`least=3` is more than `most=2`"),
    "over nothing": ("c = mean(x, over=[])", "`over` takes a list of axis names"),
    "over a number": ("c = mean(x, over=[1])", "`over` takes a list of axis names"),
    "over a name": ("c = mean(x, over=token)", "`over` takes a list of axis names"),
    "over two operands": ("c = mean(x, y, over=[token])", "`over` needs exactly one operand"),
    "computed value": ("c = softmax(x, dim=y)", "`dim` must be a plain value"),
    "double star": ("c = softmax(x, **y)", "`**` is not part of the pattern language"),
    "itself": ("c = relu(c)", "`c` is defined in terms of itself"),
}


@pytest.mark.parametrize(("wrong", "message"), SYNTAX_ERRORS.values(), ids=SYNTAX_ERRORS)
def test_each_mistake_is_named(wrong, message):
    with pytest.raises(MatchSyntaxError) as raised:
        parse_match(f"a = relu(x)\n\n{wrong}")
    assert message in str(raised.value)


@pytest.mark.parametrize("wrong", [wrong for wrong, _ in SYNTAX_ERRORS.values()], ids=SYNTAX_ERRORS)
def test_each_mistake_has_its_line(wrong):
    with pytest.raises(MatchSyntaxError) as raised:
        parse_match(f"a = relu(x)\n\n{wrong}")
    assert raised.value.line == 3


def test_a_cycle_through_several_equations_is_an_error():
    with pytest.raises(MatchSyntaxError, match="`a` is defined in terms of itself"):
        parse_match("a = relu(b)\nb = relu(c)\nc = relu(a)")


def test_an_op_that_is_nearly_spelt_right_is_suggested():
    with pytest.raises(MatchSyntaxError, match="did you mean `sigmoid`"):
        parse_match("a = sigmoidd(x)")


@pytest.mark.parametrize(
    "text", ["a = " + "(" * 500 + "x" + ")" * 500, "a = " + " | ".join(["x"] * 3000), "a = " + "-" * 3000 + "1"]
)
def test_a_block_too_deep_to_read_is_refused_not_crashed_on(text):
    with pytest.raises(MatchSyntaxError):
        parse_match(text)


def test_nothing_in_a_block_is_evaluated(tmp_path):
    target = tmp_path / "made"
    with pytest.raises(MatchSyntaxError):
        parse_match(f"a = relu(x, dim=open({str(target)!r}, 'w'))")
    assert not target.exists()

import pytest
import sympy

from fxaudit.controllers.predicates import PREDICATES, PredicateSyntaxError, parse_predicate, refused_by

from .build import Build

BATCH = sympy.Symbol("s0", positive=True, integer=True)
SIZES = {"channel": 16, "k": 2, "experts": 8, "batch": BATCH, "token": 5 * BATCH}


def graph():
    build = Build()
    x, y = build.input(2, 4), build.input(2, 4)
    gate = build.linear(x, 4)
    again = build.mul(gate, gate)
    gate.meta["nn_module_stack"] = {"L": ("", None), "a": ("blocks.3", None), "b": ("blocks.3.attn", None)}
    return build.dataflow(build.add(again, gate), y), {
        "x": x,
        "y": y,
        "gate": gate,
        "same": gate,
        "weight": gate.args[1],
    }


DATAFLOW, NODES = graph()


def refusal(text):
    predicate = parse_predicate(text, set(SIZES) | {"unbound"}, set(NODES) | {"missing"})
    return refused_by(predicate, SIZES, NODES, DATAFLOW)


HOLD = [
    "channel > 1",
    "channel >= 16",
    "k < experts",
    "k <= 2",
    "channel == 16",
    "channel != 15",
    "1 < k < experts",
    "size(channel) == 16",
    "rank(gate) == 2",
    "uses(gate) == 2",
    "uses(y) == 1",
    "params(gate) == 16",
    "params(x) == 0",
    "depends(gate, x)",
    "depends(gate, gate)",
    "not depends(gate, y)",
    "distinct(x, y)",
    "not distinct(gate, same)",
    "static(weight)",
    "not static(gate)",
    'module(gate, "*.attn")',
    'module(gate, "blocks.?.attn")',
    'not module(gate, "blocks.3")',
    'module(x, "")',
    "bound(gate)",
    "not bound(missing)",
    "channel > 1 and k > 1",
    "channel > 100 or k > 1",
    "not channel > 100",
    "not (channel > 100 and k > 1)",
    "batch > 0",
    "token > batch",
    "batch == batch",
]


@pytest.mark.parametrize("text", HOLD)
def test_a_true_predicate_refuses_nothing(text):
    assert refusal(text) is None


@pytest.mark.parametrize("text", [text for text in HOLD if not text.startswith("not ")])
def test_the_negation_of_a_true_predicate_refuses(text):
    assert refusal(f"not ({text})") is not None


def test_a_refusal_gives_the_sizes_found():
    assert refusal("k > experts") == "where `k > experts` is false (k=2, experts=8)"


def test_a_refusal_about_nodes_gives_no_sizes():
    assert refusal("depends(gate, y)") == "where `depends(gate, y)` is false"


@pytest.mark.parametrize(
    "text", ["batch > 7", "batch < 7", "batch == 7", "batch != 7", "not batch > 7", "not batch == 7"]
)
def test_a_comparison_that_the_batch_size_decides_is_undecided(text):
    assert refusal(text) == f"where `{text}` cannot be decided for every batch size (batch=s0)"


def test_a_predicate_about_a_name_that_was_not_bound_refuses():
    assert refusal("uses(missing) == 1") == (
        "where `uses(missing) == 1` speaks of `missing`, which this alternative does not bind"
    )


def test_a_predicate_about_an_axis_that_was_not_bound_refuses():
    assert refusal("unbound > 1") == "where `unbound > 1` speaks of `unbound`, which this alternative does not bind"


def test_the_second_half_of_an_or_is_not_asked_when_the_first_decides():
    assert refusal("k > 1 or unbound > 1") is None


MISTAKES = {
    "k >": "`k >` is not a predicate",
    "chanel > 1": "`chanel` is no axis of [shape]; did you mean `channel`?",
    "sise(channel) > 1": "`where` has no predicate `sise`; did you mean `size`?",
    "rank(gaet) == 2": "`gaet` is no name in `match`; did you mean `gate`?",
    "size(gate) == 2": "`gate` is no axis of [shape]",
    "rank(channel) == 2": "`channel` is no name in `match`",
    "rank() == 2": "`rank` takes 1 arguments, found 0",
    "depends(gate)": "`depends` takes 2 arguments, found 1",
    "rank(2) == 2": "`rank` takes names, found `2`",
    "module(gate, attn)": "`module` takes a quoted glob as its last argument",
    "rank(node=gate) == 2": "is not part of `where`",
    "k + 1 > 2": "`k + 1` is not part of `where`",
    "k in (1, 2)": "is not part of `where`",
    "k is 1": "is not part of `where`",
    "(lambda: 1)() > 0": "is not part of `where`",
    "__import__('os')": "`where` has no predicate `__import__`",
    "k.bit_length() > 1": "is not part of `where`",
    "'a' > 1": "is not part of `where`",
    "-k > 1": "is not part of `where`",
}


@pytest.mark.parametrize(("text", "message"), MISTAKES.items(), ids=MISTAKES)
def test_what_is_not_in_the_closed_set_is_refused_by_name(text, message):
    with pytest.raises(PredicateSyntaxError) as raised:
        parse_predicate(text, set(SIZES), set(NODES))
    assert message in str(raised.value)


@pytest.mark.parametrize("text", ["channel", "3", "rank(gate)", "size(channel)", "not channel", "k > 1 and channel"])
def test_a_number_alone_is_no_predicate(text):
    with pytest.raises(PredicateSyntaxError):
        parse_predicate(text, set(SIZES), set(NODES))


def test_the_predicates_are_the_closed_set_of_the_language():
    assert set(PREDICATES) == {"size", "rank", "depends", "uses", "params", "module", "distinct", "static", "bound"}

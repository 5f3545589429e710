import itertools
import math

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from fxaudit.axes import (
    Layout,
    Mismatch,
    ShapeSyntaxError,
    Unified,
    divide,
    parse_shape,
    plain_size,
    same_size,
    unify,
)

BATCH, LENGTH = sympy.symbols("s0 s1", positive=True, integer=True)


def fit(text, sizes, rest=None, **known):
    return unify(parse_shape(text), sizes, known, rest)


def sizes_of(text, sizes, **known):
    found = fit(text, sizes, **known)
    assert isinstance(found, Unified), found
    return dict(found.sizes)


def reasons(text, sizes, rest=None, **known):
    found = fit(text, sizes, rest, **known)
    assert isinstance(found, Mismatch)
    return found.reasons


# --- parse ----------------------------------------------------------------------------------------------------------


def test_axes_are_separated_by_any_number_of_spaces():
    assert parse_shape("  batch   channel ").layouts == (Layout((("batch",), ("channel",))),)


def test_a_bar_separates_alternatives_in_order():
    assert [str(layout) for layout in parse_shape("batch 1 | batch").layouts] == ["batch 1", "batch"]


def test_a_star_makes_one_axis_of_several_factors():
    assert parse_shape("batch*token*head k").layouts[0].axes == (("batch", "token", "head"), ("k",))


def test_names_are_what_is_neither_number_nor_wildcard():
    assert parse_shape("batch _ 1 ... a*b | c").names == {"batch", "a", "b", "c"}


@pytest.mark.parametrize(("text", "has"), [("batch ...", True), ("batch", False), ("batch | ... batch", True)])
def test_a_shape_knows_whether_it_has_a_rest(text, has):
    assert parse_shape(text).has_rest is has


@pytest.mark.parametrize("text", ["", "   ", "batch |", "| batch", "a || b"])
def test_an_empty_alternative_is_an_error(text):
    with pytest.raises(ShapeSyntaxError, match="an alternative is empty"):
        parse_shape(text)


UNREADABLE = ["-1", "a-b", "a*", "*a", "a**b", "2*a", "_*a", "...*a", "a+b", "1.5", "a__b", "..", "\u00e9"]


@pytest.mark.parametrize("token", UNREADABLE)
def test_an_unreadable_axis_is_an_error_that_quotes_it(token):
    with pytest.raises(ShapeSyntaxError) as raised:
        parse_shape(f"batch {token} channel")
    assert f"`{token}`" in str(raised.value)


def test_a_comma_gets_a_hint():
    with pytest.raises(ShapeSyntaxError, match="separated by spaces, not commas"):
        parse_shape("batch, channel")


def test_two_rests_in_one_alternative_are_an_error():
    with pytest.raises(ShapeSyntaxError, match="may stand once"):
        parse_shape("... batch ...")


def test_each_alternative_may_have_a_rest():
    assert len(parse_shape("batch ... | ... batch").layouts) == 2


@given(st.text(alphabet="ab_*.1| ,", max_size=12))
@settings(deadline=None)
def test_every_text_is_read_or_refused_by_the_documented_error(text):
    try:
        shape = parse_shape(text)
    except ShapeSyntaxError:
        return
    assert " | ".join(map(str, shape.layouts)).split() == text.replace("|", " | ").split()


# --- unify ----------------------------------------------------------------------------------------------------------


def test_names_take_the_sizes_they_stand_at():
    assert sizes_of("batch channel", (2, 16)) == {"batch": 2, "channel": 16}


def test_a_name_twice_in_one_shape_is_one_size():
    assert reasons("n n", (3, 4)) == ("n is 3, found 4",)


def test_a_known_name_must_keep_its_size():
    assert reasons("batch channel", (2, 16), channel=8) == ("channel is 8, found 16",)


def test_known_names_are_kept_beside_new_ones():
    assert sizes_of("batch", (2,), channel=8) == {"batch": 2, "channel": 8}


def test_what_is_known_is_not_changed_in_place():
    known = {"channel": 8}
    unify(parse_shape("batch"), (2,), known)
    assert known == {"channel": 8}


def test_a_number_is_that_size_and_no_other():
    assert reasons("batch 1", (2, 3)) == ("1 is 1, found 3",)


def test_an_underscore_is_any_size_and_binds_nothing():
    assert sizes_of("_ _", (2, 3)) == {}


@pytest.mark.parametrize(("sizes", "reason"), [((2,), "1 axes, 2 wanted"), ((2, 3, 4), "3 axes, 2 wanted")])
def test_another_number_of_axes_is_the_reason(sizes, reason):
    assert reasons("batch channel", sizes) == (reason,)


def test_too_few_axes_for_a_shape_with_a_rest_is_the_reason():
    assert reasons("batch channel ...", (2,)) == ("1 axes, at least 2 wanted",)


@pytest.mark.parametrize("rest", [(), (8,), (8, 9), (8, 9, 10)])
def test_a_rest_stands_for_any_number_of_axes(rest):
    assert fit("batch ... channel", (2, *rest, 16)).rest == rest


def test_each_axis_of_a_rest_is_named_so():
    assert fit("batch ... channel", (2, 8, 9, 16)).axes == (("batch",), ("...",), ("...",), ("channel",))


def test_a_rest_must_be_the_same_sizes_wherever_it_appears():
    assert reasons("batch ...", (2, 8, 8), rest=(8, 9)) == ("`...` is [8, 8], elsewhere [8, 9]",)


def test_a_rest_must_be_the_same_number_of_axes_wherever_it_appears():
    assert reasons("batch ...", (2, 8), rest=(8, 8)) == ("`...` is [8], elsewhere [8, 8]",)


def test_a_shape_without_a_rest_hands_on_the_one_found_before():
    assert fit("batch", (2,), rest=(8, 9)).rest == (8, 9)


def test_the_first_alternative_that_fits_wins():
    assert fit("a b | c d", (2, 3)).axes == (("a",), ("b",))


def test_a_later_alternative_is_taken_when_the_first_does_not_fit():
    assert sizes_of("batch channel 1 1 | batch channel", (2, 16)) == {"batch": 2, "channel": 16}


def test_an_alternative_that_failed_binds_nothing():
    assert sizes_of("a 5 | b _", (2, 3)) == {"b": 2}


def test_a_mismatch_gives_one_reason_for_each_alternative():
    assert reasons("n n | n", (2, 3)) == ("n is 2, found 3", "2 axes, 1 wanted")


def test_equal_reasons_of_two_alternatives_are_given_once():
    assert reasons("a | b", (2, 3)) == ("2 axes, 1 wanted",)


def test_a_mismatch_prints_the_shape_the_sizes_and_the_reasons():
    assert str(fit("n n | n", (2, BATCH))) == '"n n | n" does not fit [2, s0]: n is 2, found s0; 2 axes, 1 wanted'


# --- products -------------------------------------------------------------------------------------------------------


def test_a_product_is_divided_by_the_factor_that_is_known():
    assert sizes_of("batch*token k", (30, 4), batch=6)["token"] == 5


def test_a_product_is_divided_by_a_factor_that_stands_to_its_right():
    assert sizes_of("batch*token batch", (30, 6))["token"] == 5


def test_a_product_of_known_factors_is_compared():
    assert reasons("a*b", (7,), a=2, b=3) == ("a*b is 6, found 7",)


def test_a_product_of_two_unknown_factors_cannot_be_factored():
    assert reasons("batch*token", (30,)) == ("batch*token cannot be factored: batch and token are both unknown",)


def test_a_size_that_the_known_factor_does_not_divide_cannot_be_factored():
    assert reasons("batch*token", (31,), batch=6) == ("batch*token cannot be factored: 31 is no multiple of 6",)


def test_a_product_keeps_its_factor_names_as_one_axis():
    assert fit("batch*token k", (30, 4), batch=6).axes == (("batch", "token"), ("k",))


def test_a_product_is_factored_when_a_later_product_gives_its_factor():
    # c = 5, so b = 15 / 5 = 3, so a = 6 / 3 = 2: unique, whatever order the axes stand in.
    assert sizes_of("a*b b*c c", (6, 15, 5)) == {"a": 2, "b": 3, "c": 5}


def test_a_squared_name_must_be_a_square():
    assert reasons("n n*n", (3, 10)) == ("n*n is 9, found 10",)


# --- symbolic sizes -------------------------------------------------------------------------------------------------


def test_a_name_may_be_symbolic():
    assert sizes_of("batch channel", (BATCH, 16)) == {"batch": BATCH, "channel": 16}


def test_equal_expressions_in_another_form_are_one_size():
    assert sizes_of("n n", (2 * (BATCH + 1), 2 * BATCH + 2))


def test_two_symbols_are_two_sizes():
    assert reasons("n n", (BATCH, LENGTH)) == ("n is s0, found s1",)


def test_a_symbol_is_not_a_number():
    assert reasons("1", (BATCH,)) == ("1 is 1, found s0",)


def test_a_symbolic_product_is_factored_by_the_symbol():
    assert sizes_of("batch*token k", (5 * BATCH, 4), batch=BATCH)["token"] == 5


def test_a_factor_that_comes_out_whole_is_a_plain_int():
    assert type(sizes_of("batch*token", (5 * BATCH,), batch=BATCH)["token"]) is int


def test_a_product_of_two_symbols_is_factored_by_one():
    assert sizes_of("batch*token", (BATCH * LENGTH,), batch=BATCH)["token"] == LENGTH


def test_a_product_without_the_symbol_cannot_be_factored():
    assert reasons("batch*token", (10,), batch=BATCH) == ("batch*token cannot be factored: 10 is no multiple of s0",)


def test_half_a_symbol_is_no_size():
    assert divide(BATCH, 2) is None


def test_a_sum_is_divided_by_what_all_its_terms_hold():
    assert divide(BATCH**2 + 3 * BATCH, BATCH) == BATCH + 3


def test_nothing_is_divided_by_zero():
    assert divide(6, 0) is None


def test_a_symint_becomes_the_expression_behind_it():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    environment = ShapeEnv()
    from torch._dynamo.source import ConstantSource

    symbol = environment.create_symbol(4, ConstantSource("n"))
    size = environment.create_symintnode(symbol, hint=4)
    assert plain_size(size) == symbol
    assert not environment.guards


def test_an_expression_that_is_a_number_becomes_an_int():
    assert type(plain_size(sympy.Integer(4))) is int


# --- properties -----------------------------------------------------------------------------------------------------

NAMES = ["a", "b", "c", "d"]


@given(st.integers(0, 200), st.integers(0, 40))
@settings(deadline=None)
def test_whole_numbers_divide_exactly_or_not_at_all(size, factor):
    whole = [q for q in range(size + 1) if factor and q * factor == size]
    assert divide(size, factor) == (whole[0] if whole else None)


@given(st.integers(1, 9), st.integers(0, 3), st.integers(0, 3), st.integers(1, 9), st.integers(0, 3), st.integers(0, 3))
@settings(deadline=None)
def test_a_product_of_monomials_divides_back(c, i, j, d, k, m):
    a, b = c * BATCH**i * LENGTH**j, d * BATCH**k * LENGTH**m
    assert same_size(divide(a * b, b), a)


@given(
    st.fixed_dictionaries({name: st.integers(1, 12) for name in NAMES}),
    st.lists(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True), min_size=1, max_size=5),
    st.sampled_from(NAMES),
)
@settings(deadline=None)
def test_the_one_unknown_name_is_recovered_from_any_shape_that_mentions_it(values, axes, unknown):
    text = " ".join("*".join(axis) for axis in axes)
    sizes = tuple(math.prod(values[name] for name in axis) for axis in axes)
    found = sizes_of(text, sizes, **{name: size for name, size in values.items() if name != unknown})
    mentioned = {name for axis in axes for name in axis}
    assert found == {name: size for name, size in values.items() if name != unknown or name in mentioned}


def fits_by_enumeration(tokens, sizes):
    """Whether some assignment of sizes to names fits: every name tried at every size that occurs."""
    names = sorted({token for token in tokens if token.isalpha()})
    for width in range(len(sizes) + 1):
        expanded = [t for token in tokens for t in (["_"] * width if token == "..." else [token])]
        if len(expanded) != len(sizes):
            continue
        for values in itertools.product(set(sizes), repeat=len(names)):
            named = dict(zip(names, values, strict=True))
            wanted = [int(token) if token.isdigit() else named.get(token) for token in expanded]
            if all(w in (None, size) for w, size in zip(wanted, sizes, strict=True)):
                return True
    return False


@given(
    st.lists(st.sampled_from(["a", "b", "_", "1", "2"]), min_size=1, max_size=4),
    st.one_of(st.none(), st.integers(0, 4)),
    st.lists(st.integers(1, 3), min_size=0, max_size=4),
)
@settings(deadline=None)
def test_a_shape_fits_exactly_when_some_assignment_of_sizes_does(tokens, rest_at, sizes):
    if rest_at is not None:
        tokens = [*tokens[:rest_at], "...", *tokens[rest_at:]]
    found = fit(" ".join(tokens), tuple(sizes))
    assert isinstance(found, Unified) is fits_by_enumeration(tokens, sizes)

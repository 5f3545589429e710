import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_stores import coefficient, controller, recorded

from fxaudit.controllers.controller import Domain
from fxaudit.errors import UsageError
from fxaudit.replay.intervene import (
    LEVELS,
    Intervention,
    default_interventions,
    parse_interventions,
    permuted_positions,
    position_count,
    refusal,
)
from fxaudit.replay.permutations import draw_permutations
from fxaudit.replay.profiles import in_graph_order, static_profiles
from fxaudit.replay.store import to_samples

INPUTS, TOKENS, UNITS = 5, 4, 3
SIZES = {"batch": INPUTS, "token": TOKENS, "feature": UNITS, "row": 3, "column": 2, "channel": UNITS, "k": 2}
KEY = "gate#0/coefficient"


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


# --- permutations ---------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.integers(2, 60))
def test_no_input_is_its_own_donor(seed, inputs):
    donors = draw_permutations(seed, inputs, []).donors.tolist()
    assert all(donor != i for i, donor in enumerate(donors))


@given(st.integers(0, 2**32), st.integers(1, 60))
def test_every_input_is_a_donor_once(seed, inputs):
    assert sorted(draw_permutations(seed, inputs, []).donors.tolist()) == list(range(inputs))


def test_one_input_can_only_be_its_own_donor():
    assert draw_permutations(0, 1, []).donors.tolist() == [0]


def test_two_inputs_are_exchanged():
    assert draw_permutations(7, 2, []).donors.tolist() == [1, 0]


def test_every_derangement_of_four_inputs_is_drawn():
    found = {tuple(draw_permutations(seed, 4, []).donors.tolist()) for seed in range(200)}
    expected = {p for p in itertools.permutations(range(4)) if all(x != i for i, x in enumerate(p))}
    assert found == expected


def test_derangements_are_equally_likely():
    counts = dict.fromkeys([(1, 2, 0), (2, 0, 1)], 0)
    for seed in range(400):
        counts[tuple(draw_permutations(seed, 3, []).donors.tolist())] += 1
    # Four standard deviations of 400 fair draws.
    assert abs(counts[1, 2, 0] - 200) < 40


@given(st.integers(0, 2**32), st.integers(1, 12), st.lists(st.integers(1, 20), max_size=4))
def test_positions_of_every_number_are_permuted_within_each_input(seed, inputs, counts):
    found = draw_permutations(seed, inputs, counts).positions
    expected = {n: [list(range(n))] * inputs for n in set(counts)}
    assert {n: p.sort(1).values.tolist() for n, p in found.items()} == expected


def test_inputs_have_permutations_of_their_own():
    found = draw_permutations(0, 20, [12]).positions[12]
    assert len({tuple(row) for row in found.tolist()}) == 20


@pytest.mark.parametrize("part", ["donors", "positions"])
def test_the_same_seed_draws_the_same_permutations(part):
    first, second = (draw_permutations(3, 9, [7]) for _ in range(2))
    assert torch.equal(*((p.donors if part == "donors" else p.positions[7]) for p in (first, second)))


def test_another_seed_draws_other_donors():
    assert not torch.equal(draw_permutations(3, 30, []).donors, draw_permutations(4, 30, []).donors)


# --- permuted positions ---------------------------------------------------------------------------------------------


def shuffled(values: torch.Tensor, axes: str, positions: torch.Tensor) -> torch.Tensor:
    return permuted_positions(values, coefficient(axes, SIZES), positions)


def positions_of(count: int, seed: int = 0) -> torch.Tensor:
    return draw_permutations(seed, INPUTS, [count]).positions[count]


def test_positions_before_units_move_as_by_hand():
    values, order = rows(INPUTS, TOKENS, UNITS), positions_of(TOKENS)
    expected = torch.stack([values[i][order[i]] for i in range(INPUTS)])
    assert torch.equal(shuffled(values, "batch token feature", order), expected)


def test_positions_after_units_move_as_by_hand():
    values, order = rows(INPUTS, UNITS, TOKENS), positions_of(TOKENS)
    expected = torch.stack([values[i][:, order[i]] for i in range(INPUTS)])
    assert torch.equal(shuffled(values, "batch feature token", order), expected)


def test_two_position_axes_are_permuted_as_one():
    values, order = rows(INPUTS, UNITS, 3, 2), positions_of(6)
    expected = torch.empty_like(values)
    for i, unit, place in itertools.product(range(INPUTS), range(UNITS), range(6)):
        source = int(order[i, place])
        expected[i, unit, place // 2, place % 2] = values[i, unit, source // 2, source % 2]
    assert torch.equal(shuffled(values, "batch channel row column", order), expected)


def test_position_axes_on_both_sides_of_the_units_are_permuted_as_one():
    values, order = rows(INPUTS, 3, UNITS, 2), positions_of(6)
    expected = torch.empty_like(values)
    for i, unit, place in itertools.product(range(INPUTS), range(UNITS), range(6)):
        source = int(order[i, place])
        expected[i, place // 2, unit, place % 2] = values[i, source // 2, unit, source % 2]
    assert torch.equal(shuffled(values, "batch row channel column", order), expected)


def test_the_positions_of_a_product_move_as_by_hand():
    values, order = rows(INPUTS, TOKENS, 2), positions_of(TOKENS)
    expected = torch.stack([values[i][order[i]] for i in range(INPUTS)])
    assert torch.equal(shuffled(values, "batch*token k", order), expected)


def test_stored_inputs_come_first_also_where_the_graph_has_them_elsewhere():
    values, order = rows(INPUTS, TOKENS, UNITS), positions_of(TOKENS)
    expected = torch.stack([values[i][order[i]] for i in range(INPUTS)])
    assert torch.equal(shuffled(values, "token batch feature", order), expected)


def test_an_axis_of_one_between_positions_and_units_stays():
    values, order = rows(INPUTS, TOKENS, 1, UNITS), positions_of(TOKENS)
    expected = torch.stack([values[i][order[i]] for i in range(INPUTS)])
    assert torch.equal(shuffled(values, "batch token 1 feature", order), expected)


def test_positions_without_units_move_as_by_hand():
    values, order = rows(INPUTS, TOKENS), positions_of(TOKENS)
    expected = torch.stack([values[i][order[i]] for i in range(INPUTS)])
    assert torch.equal(shuffled(values, "batch token", order), expected)


def test_whole_numbers_move_like_fractions():
    values, order = torch.arange(INPUTS * TOKENS * 2).reshape(INPUTS, TOKENS, 2), positions_of(TOKENS)
    expected = torch.stack([values[i][order[i]] for i in range(INPUTS)])
    assert torch.equal(shuffled(values, "batch token k", order), expected)


SHAPES = {
    "batch token feature": (INPUTS, TOKENS, UNITS),
    "batch feature token": (INPUTS, UNITS, TOKENS),
    "batch channel row column": (INPUTS, UNITS, 3, 2),
    "batch*token k": (INPUTS, TOKENS, 2),
}


@pytest.mark.parametrize("axes", SHAPES)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_permutation_and_its_inverse_give_what_was_recorded(axes, seed):
    count = 6 if "row" in axes else TOKENS
    values, order = rows(*SHAPES[axes]), positions_of(count, seed)
    assert torch.equal(shuffled(shuffled(values, axes, order), axes, order.argsort(1)), values)


@pytest.mark.parametrize("axes", SHAPES)
def test_positions_that_stay_change_nothing(axes):
    count = 6 if "row" in axes else TOKENS
    values = rows(*SHAPES[axes])
    assert torch.equal(shuffled(values, axes, torch.arange(count).expand(INPUTS, count)), values)


POSITIONS = {
    "batch token feature": TOKENS,
    "batch channel row column": 6,
    "batch*token k": TOKENS,
    "batch feature": None,
}


@pytest.mark.parametrize("axes", POSITIONS)
def test_positions_are_counted_over_all_their_axes(axes):
    assert position_count(coefficient(axes, SIZES)) == POSITIONS[axes]


def test_positions_of_a_size_that_is_not_fixed_have_no_count():
    import sympy

    assert position_count(coefficient("batch token", {"batch": 2, "token": sympy.Symbol("s0")})) is None


# --- static profiles ------------------------------------------------------------------------------------------------

COUNT, BATCH = 7, 3


def profile(directory, values, axes, level, **other):
    described = coefficient(axes, SIZES, **other)
    return static_profiles(recorded(directory, {KEY: values}, BATCH), [described], level)[KEY]


def mean(values: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(values.numpy().astype(np.float64).mean(axes, keepdims=True).astype(np.float32))


AVERAGED = {"controller": (0, 1, 2), "unit": (0, 1), "unit-position": (0,)}


@pytest.mark.parametrize("level", LEVELS)
def test_a_profile_is_the_mean_over_the_real_inputs_of_all_batches(tmp_path, level):
    values = rows(COUNT, TOKENS, UNITS)
    found = profile(tmp_path / "store", values, "batch token feature", level)
    torch.testing.assert_close(found, mean(values, AVERAGED[level]), rtol=1e-7, atol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_a_profile_of_units_before_positions_averages_the_same_roles(tmp_path, level):
    values = rows(COUNT, UNITS, TOKENS)
    axes = {"controller": (0, 1, 2), "unit": (0, 2), "unit-position": (0,)}[level]
    found = profile(tmp_path / "store", values, "batch feature token", level)
    torch.testing.assert_close(found, mean(values, axes), rtol=1e-7, atol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_a_profile_over_two_position_axes_averages_both_or_none(tmp_path, level):
    values = rows(COUNT, UNITS, 3, 2)
    axes = {"controller": (0, 1, 2, 3), "unit": (0, 2, 3), "unit-position": (0,)}[level]
    found = profile(tmp_path / "store", values, "batch channel row column", level)
    torch.testing.assert_close(found, mean(values, axes), rtol=1e-7, atol=0)


def test_slots_keep_profiles_of_their_own(tmp_path):
    values = rows(COUNT, TOKENS, 2)
    found = profile(tmp_path / "store", values, "batch*token k", "unit")
    torch.testing.assert_close(found, mean(values, (0, 1)), rtol=1e-7, atol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_the_profile_of_a_profile_is_the_profile(tmp_path, level):
    first = profile(tmp_path / "a", rows(COUNT, TOKENS, UNITS), "batch token feature", level)
    repeated = first.expand(COUNT, TOKENS, UNITS).contiguous()
    again = profile(tmp_path / "b", repeated, "batch token feature", level)
    assert torch.equal(again.expand_as(repeated), repeated)


def test_a_profile_is_rounded_once(tmp_path):
    # In float32, adding one to 2**24 changes nothing.
    values = torch.tensor([[2.0**24], [1.0], [1.0], [1.0], [1.0]])
    expected = np.float32((2.0**24 + 4) / 5)
    assert profile(tmp_path / "store", values, "batch feature", "unit").item() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_profile_has_the_dtype_of_its_coefficient(tmp_path, dtype):
    values = rows(COUNT, TOKENS, UNITS).to(dtype)
    assert profile(tmp_path / "store", values, "batch token feature", "unit", dtype=dtype).dtype == dtype


def test_a_half_precision_profile_is_the_float64_mean_rounded_once(tmp_path):
    values = rows(COUNT, TOKENS, UNITS).half()
    expected = values.double().mean((0, 1), keepdim=True).half()
    found = profile(tmp_path / "store", values, "batch token feature", "unit", dtype=torch.float16)
    assert torch.equal(found, expected)


def test_coefficients_that_are_not_asked_for_have_no_profile(tmp_path):
    store = recorded(tmp_path / "store", {KEY: rows(COUNT, 2), "other#0/coefficient": rows(COUNT, 2)}, BATCH)
    assert list(static_profiles(store, [coefficient("batch feature", SIZES)], "unit")) == [KEY]


IN_ORDER = {
    "batch token feature": ((1, 1, UNITS), (1, 1, UNITS)),
    "token batch feature": ((1, 1, UNITS), (1, 1, UNITS)),
    "batch feature token": ((1, UNITS, 1), (1, UNITS, 1)),
    "feature batch": ((1, UNITS), (UNITS, 1)),
    "batch*token feature": ((1, 1, UNITS), (1, UNITS)),
    "feature batch*token": ((1, UNITS, 1), (UNITS, 1)),
    "batch channel 1 1": ((1, UNITS, 1, 1), (1, UNITS, 1, 1)),
}


@pytest.mark.parametrize("axes", IN_ORDER)
def test_a_profile_takes_the_dimension_order_of_the_graph(axes):
    stored, expected = IN_ORDER[axes]
    assert tuple(in_graph_order(rows(*stored), coefficient(axes, SIZES)).shape) == expected


@pytest.mark.parametrize("axes", ["batch token feature", "token batch feature", "batch*token feature", "feature batch"])
def test_a_profile_in_graph_order_broadcasts_to_the_mean_of_the_graphs_own_tensor(tmp_path, axes):
    described = coefficient(axes, SIZES)
    shape = [math.prod(SIZES[name] for name in dimension) for dimension in described.axes]
    tensor = rows(*shape)
    stored = to_samples(tensor, described, INPUTS)
    found = in_graph_order(profile(tmp_path / "store", stored, axes, "unit"), described)
    averaged = tuple(i for i, dimension in enumerate(described.axes) if dimension != ("feature",))
    torch.testing.assert_close(found.expand(shape), mean(tensor, averaged).expand(shape), rtol=1e-7, atol=0)


# --- names ----------------------------------------------------------------------------------------------------------


def test_interventions_are_named_separated_by_commas():
    found = parse_interventions("identity, static:unit,neutral")
    assert found == (Intervention("identity"), Intervention("static", "unit"), Intervention("neutral"))


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("reassign:each", Intervention("reassign", each=True)),
        ("shuffle-tokens:weights", Intervention("shuffle-tokens", part="weights")),
        ("reassign:each:indices", Intervention("reassign", each=True, part="indices")),
    ],
)
def test_options_follow_the_name(text, meant):
    assert parse_interventions(text) == (meant,)


def test_static_stands_for_its_three_levels():
    assert parse_interventions("static") == tuple(Intervention("static", level) for level in LEVELS)


def test_naming_an_intervention_twice_asks_for_it_once():
    found = parse_interventions("reassign,static,static:unit,reassign")
    assert len(found) == len(set(found)) == 4


def test_the_default_interventions_are_all_but_identity():
    every = "reassign,shuffle-tokens,static,neutral,resample,permute-units,swap-controllers"
    assert default_interventions() == parse_interventions(every)


def test_parts_of_a_choice_are_exchanged_where_there_is_one():
    added = set(default_interventions([ROUTER])) - set(default_interventions([GATE]))
    parts = "reassign:weights,reassign:indices,shuffle-tokens:weights,shuffle-tokens:indices"
    assert added == set(parse_interventions(parts))


@pytest.mark.parametrize(
    "text", ["", "none", "static:layer", "neutral:unit", "reassign,", "Static", "identity:controller"]
)
def test_what_is_no_intervention_is_refused(text):
    with pytest.raises(UsageError, match="unknown intervention"):
        parse_interventions(text)


@pytest.mark.parametrize(
    ("text", "meant"),
    [("reasign", "reassign"), ("shuffle", "shuffle-tokens"), ("static:units", "static:unit"), ("neural", "neutral")],
)
def test_a_misspelled_intervention_gets_a_suggestion(text, meant):
    with pytest.raises(UsageError, match=f"did you mean `{meant}`"):
        parse_interventions(text)


def test_an_unknown_intervention_lists_the_known_ones():
    with pytest.raises(UsageError) as caught:
        parse_interventions("none")
    known = caught.value.expected.split(", ")
    assert {"identity", "reassign", "static:unit", "reassign:each", "swap-controllers:weights"} <= set(known)
    assert all(parse_interventions(name) for name in known)


@pytest.mark.parametrize("intervention", [Intervention("static", "unit"), Intervention("neutral")])
def test_an_intervention_reads_as_it_is_named(intervention):
    assert parse_interventions(str(intervention)) == (intervention,)


# --- refusals -------------------------------------------------------------------------------------------------------

GATE = controller(coefficient("batch token feature", SIZES))
POOLED = controller(coefficient("batch channel 1 1", SIZES))
ONE_POSITION = controller(coefficient("batch token feature", {**SIZES, "token": 1}))
NO_NEUTRAL = controller(coefficient("batch token feature", SIZES), neutral=None)
ROUTER = controller(
    coefficient("batch*token k", SIZES),
    coefficient("batch*token k", SIZES, "gate#0/indices", Domain("index"), dtype=torch.int64),
)

INDICES = coefficient("batch*token k", SIZES, "gate#0/indices", Domain("index"), dtype=torch.int64)
CHOICE = controller(INDICES)
CAPACITY = controller(
    *ROUTER.coefficients,
    coefficient("batch token expert", {**SIZES, "expert": 4}, "gate#0/mask", Domain("index"), dtype=torch.bool),
)
ONE_UNIT = controller(coefficient("batch token feature", {**SIZES, "feature": 1}))
UNEQUAL = controller(
    coefficient("batch token feature", SIZES), coefficient("batch token channel", {**SIZES, "channel": 7}, "gate#0/b")
)


@pytest.mark.parametrize(
    "name", ["identity", "reassign", "shuffle-tokens", "neutral", *(f"static:{x}" for x in LEVELS)]
)
def test_a_gate_of_tokens_takes_every_intervention(name):
    (intervention,) = parse_interventions(name)
    assert refusal(intervention, GATE, 2) is None


@pytest.mark.parametrize("name", ["identity", "reassign", "shuffle-tokens"])
def test_a_router_takes_exchanges(name):
    assert refusal(Intervention(name), ROUTER, 2) is None


REFUSED = {
    "reassignment of one input": (Intervention("reassign"), GATE, 1, "reassignment needs two inputs"),
    "shuffling no positions": (Intervention("shuffle-tokens"), POOLED, 9, "the coefficient has no position axis"),
    "shuffling one position": (Intervention("shuffle-tokens"), ONE_POSITION, 9, "the coefficient has one position"),
    "a profile of positions that are not there": (
        Intervention("static", "unit-position"),
        POOLED,
        9,
        "the coefficient has no position axis",
    ),
    "weights of a choice without them": (
        Intervention("reassign", part="weights"),
        CHOICE,
        9,
        "the choice has no weights",
    ),
    "parts of what is no choice": (
        Intervention("reassign", part="indices"),
        GATE,
        9,
        "the controller chooses nothing: it has no slots to exchange one by one",
    ),
    "parts of a capacity mask": (
        Intervention("reassign", part="weights"),
        CAPACITY,
        9,
        "a capacity mask belongs to the choice that it was made for",
    ),
    "resampled experts": (
        Intervention("resample"),
        ROUTER,
        9,
        "a choice is made of all scores at once: its slots have no marginals of their own",
    ),
    "resampling one value": (
        Intervention("resample"),
        POOLED,
        1,
        "one value of each unit leaves nothing to draw from",
    ),
    "permuted experts of an unknown number": (
        Intervention("permute-units"),
        ROUTER,
        9,
        "the dense scores, which would tell the number of experts, are not recorded",
    ),
    "permuting one unit": (Intervention("permute-units"), ONE_UNIT, 9, "the coefficient has one unit"),
    "units of unequal number": (
        Intervention("permute-units"),
        UNEQUAL,
        9,
        "its coefficients differ in their number of positions or units",
    ),
    "swapping with nobody": (Intervention("swap-controllers"), GATE, 9, "no other controller has the same shape"),
    "neutral without a value": (Intervention("neutral"), NO_NEUTRAL, 9, "the family has no neutral value"),
    "neutral for a router": (Intervention("neutral"), ROUTER, 9, "the family has no neutral value"),
    **{
        f"averaged indices by {level}": (
            Intervention("static", level),
            ROUTER,
            9,
            "indices are not averaged, and the dense scores of the choice are not recorded",
        )
        for level in LEVELS
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_meaning_is_refused_with_its_reason(case):
    intervention, subject, inputs, reason = REFUSED[case]
    assert refusal(intervention, subject, inputs) == reason


@pytest.mark.parametrize("level", ["controller", "unit"])
def test_a_gate_without_positions_has_static_profiles_of_the_other_levels(level):
    assert refusal(Intervention("static", level), POOLED, 9) is None

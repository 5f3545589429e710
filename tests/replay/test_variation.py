import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_stores import UNIT_INTERVAL, coefficient, controller, recorded

from fxaudit.controllers.controller import Domain
from fxaudit.replay.variation import LEVELS, Moments, as_grid, measure_variation

COUNT, BATCH = 7, 3
SIZES = {"batch": BATCH, "token": 4, "feature": 3, "wide": 8, "channel": 3, "row": 2, "column": 5, "k": 2}


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def variation_of(directory, *gates, domain: Domain = UNIT_INTERVAL, pattern="gate", batch_size: int = BATCH):
    """The variation of controllers given as (axes, stored values)."""
    keys = [f"gate{i}#0/coefficient" for i in range(len(gates))]
    patterns = [pattern] * len(gates) if isinstance(pattern, str) else pattern
    domains = [domain] * len(gates) if isinstance(domain, Domain) else domain
    controllers = [
        controller(coefficient(axes, SIZES, key, domains[i]), pattern=patterns[i])
        for i, (key, (axes, _)) in enumerate(zip(keys, gates, strict=True))
    ]
    store = recorded(directory, {key: v for key, (_, v) in zip(keys, gates, strict=True)}, batch_size)
    return measure_variation(store, controllers)


def grid(values: torch.Tensor) -> np.ndarray:
    return values.numpy().astype(np.float64)


# --- moments --------------------------------------------------------------------------------------------------------

numbers = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30)


def moments(values) -> Moments:
    return Moments.of(torch.tensor(values, dtype=torch.float64))


@given(numbers)
def test_moments_are_count_mean_and_sum_of_squared_deviations(values):
    found = moments(values)
    expected = (len(values), np.mean(values), np.var(values) * len(values))
    assert (found.count, found.mean, found.squares) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(numbers, numbers)
def test_merged_moments_are_those_of_all_values(first, second):
    found, both = moments(first).merge(moments(second)), first + second
    expected = (len(both), np.mean(both), np.var(both) * len(both))
    assert (found.count, found.mean, found.squares) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(numbers)
def test_merging_with_nothing_changes_nothing(values):
    found = moments(values)
    assert Moments().merge(found) == found.merge(Moments()) == found


def test_a_large_mean_does_not_drown_a_small_variance():
    parts = [np.array([1e8, 1e8 + 1]), np.array([1e8 + 2, 1e8 + 3])]
    found = moments(parts[0]).merge(moments(parts[1]))
    assert found.squares == pytest.approx(5.0, rel=1e-12)  # 1.5² + 0.5² + 0.5² + 1.5²


# --- the grid -------------------------------------------------------------------------------------------------------

GRIDS = {
    "batch token feature": ((2, 4, 3), "ntu->ntu", (2, 4, 3)),
    "batch feature token": ((2, 3, 4), "nut->ntu", (2, 4, 3)),
    "batch channel row column": ((2, 3, 2, 5), "nuhw->nhwu", (2, 10, 3)),
    "batch*token k": ((2, 4, 2), "ntu->ntu", (2, 4, 2)),
    "batch feature": ((2, 3), "nu->nu", (2, 1, 3)),
    "batch token": ((2, 4), "nt->nt", (2, 4, 1)),
    "batch channel 1 1": ((2, 3, 1, 1), "nuab->nuab", (2, 1, 3)),
}


@pytest.mark.parametrize("axes", GRIDS)
def test_stored_rows_become_a_grid_of_inputs_positions_and_units(axes):
    stored, equation, shape = GRIDS[axes]
    values = uniform(*stored)
    expected = np.einsum(equation, values.numpy()).reshape(shape)
    assert np.array_equal(as_grid(values, coefficient(axes, SIZES)).numpy(), expected)


# --- within one controller ------------------------------------------------------------------------------------------


def shares_by_definition(values: np.ndarray) -> dict[str, float]:
    """The split of a grid [inputs, positions, units], term by term, the residual from its own formula."""
    mean = values.mean()
    unit = values.mean((0, 1), keepdims=True) - mean
    position = values.mean((0, 2), keepdims=True) - mean
    sample = values.mean((1, 2), keepdims=True) - mean
    residual = values - mean - unit - position - sample
    parts = {"unit": unit, "position": position, "input": sample, "residual": residual}
    total = ((values - mean) ** 2).sum()
    return {name: float((np.broadcast_to(part, values.shape) ** 2).sum() / total) for name, part in parts.items()}


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), batch_size=st.integers(1, 9))
def test_shares_within_a_controller_equal_their_definition(tmp_path_factory, seed, batch_size):
    values = uniform(COUNT, 4, 3, seed=seed)
    place = tmp_path_factory.mktemp("stores") / "store"
    (found,) = variation_of(place, ("batch token feature", values), batch_size=batch_size).controllers
    assert found.shares == pytest.approx(shares_by_definition(grid(values)), abs=1e-10)


def test_shares_sum_to_one(tmp_path):
    (found,) = variation_of(tmp_path / "s", ("batch token feature", uniform(COUNT, 4, 3))).controllers
    assert sum(found.shares.values()) == pytest.approx(1.0, abs=1e-12)


def test_shares_of_a_map_treat_every_pixel_as_a_position(tmp_path):
    values = uniform(COUNT, 3, 2, 5)
    (found,) = variation_of(tmp_path / "s", ("batch channel row column", values)).controllers
    expected = shares_by_definition(grid(values).transpose(0, 2, 3, 1).reshape(COUNT, 10, 3))
    assert found.shares == pytest.approx(expected, abs=1e-10)


def test_shares_of_a_router_treat_every_slot_as_a_unit(tmp_path):
    values = uniform(COUNT, 4, 2)
    (found,) = variation_of(tmp_path / "s", ("batch*token k", values)).controllers
    assert found.shares == pytest.approx(shares_by_definition(grid(values)), abs=1e-10)


VARIES_ALONG = {"unit": (1, 1, 3), "position": (1, 4, 1), "input": (COUNT, 1, 1)}


@pytest.mark.parametrize("along", VARIES_ALONG)
def test_what_varies_along_one_axis_has_its_whole_share_there(tmp_path, along):
    values = uniform(*VARIES_ALONG[along]).expand(COUNT, 4, 3)
    (found,) = variation_of(tmp_path / "s", ("batch token feature", values)).controllers
    assert found.shares[along] == pytest.approx(1.0, abs=1e-9)


def test_an_interaction_of_input_and_unit_is_residual(tmp_path):
    signs = torch.tensor([1.0, -1.0])
    values = torch.einsum("n,u->nu", signs.repeat(2), signs)[:, None].expand(4, 4, 2) * 0.25 + 0.5
    (found,) = variation_of(tmp_path / "s", ("batch token feature", values)).controllers
    assert found.shares["residual"] == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_a_coefficient_of_one_value_has_no_shares(tmp_path, value):
    (found,) = variation_of(tmp_path / "s", ("batch token feature", torch.full((COUNT, 4, 3), value))).controllers
    assert found.shares is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 1 / 3])
def test_a_coefficient_of_one_value_has_no_shares_whatever_its_bits(tmp_path, value, dtype):
    values = torch.full((COUNT, 4, 3), value, dtype=dtype)
    (found,) = variation_of(tmp_path / "s", ("batch token feature", values)).controllers
    assert found.shares is None


def test_means_of_units_are_those_of_numpy(tmp_path):
    values = uniform(COUNT, 4, 3)
    (found,) = variation_of(tmp_path / "s", ("batch token feature", values)).controllers
    assert found.unit_means == pytest.approx(grid(values).mean((0, 1)), abs=1e-12)


def test_means_of_positions_are_those_of_numpy(tmp_path):
    values = uniform(COUNT, 4, 3)
    (found,) = variation_of(tmp_path / "s", ("batch token feature", values)).controllers
    assert found.position_means == pytest.approx(grid(values).mean((0, 2)), abs=1e-12)


def test_mean_and_spread_and_extremes_are_those_of_numpy(tmp_path):
    values = uniform(COUNT, 4, 3)
    (found,) = variation_of(tmp_path / "s", ("batch token feature", values)).controllers
    wide = grid(values)
    expected = (wide.mean(), wide.std(), wide.min(), wide.max())
    assert (found.mean, found.std, found.minimum, found.maximum) == pytest.approx(expected, abs=1e-12)


# --- saturation -----------------------------------------------------------------------------------------------------


def saturated(directory, values, domain):
    (found,) = variation_of(directory, ("batch feature", torch.tensor(values)), domain=domain).controllers
    return found.saturated


def test_saturation_is_the_share_within_a_hundredth_of_a_bound(tmp_path):
    values = [[0.0, 0.009, 0.011], [0.5, 0.989, 0.991], [1.0, 0.2, 0.3]]
    assert saturated(tmp_path / "s", values, UNIT_INTERVAL) == pytest.approx(4 / 9)


def test_saturation_goes_by_the_range_of_the_domain(tmp_path):
    values = [[-1.0, -0.979, 0.0], [0.0, 0.979, 0.981]]  # a hundredth of [-1, 1] is 0.02
    assert saturated(tmp_path / "s", values, Domain("interval", -1.0, 1.0)) == pytest.approx(2 / 6)


@pytest.mark.parametrize("domain", [Domain("real")])
def test_an_unbounded_coefficient_does_not_saturate(tmp_path, domain):
    assert saturated(tmp_path / "s", [[0.0, 1.0]], domain) is None


# --- between controllers --------------------------------------------------------------------------------------------

AVERAGES = {
    "element": lambda v: v.reshape(-1),
    "mean_input_position": lambda v: v.mean((0, 1)),
    "mean_unit": lambda v: v.mean(2).reshape(-1),
    "mean_unit_position": lambda v: v.mean((1, 2)),
}


def layer_share(grids: list[np.ndarray], level: str) -> float:
    values = [AVERAGES[level](v) for v in grids]
    everything = np.concatenate(values)
    between = sum(len(v) * (v.mean() - everything.mean()) ** 2 for v in values)
    return between / ((everything - everything.mean()) ** 2).sum()


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three controllers of different unit counts, means and spreads."""
    values = [uniform(COUNT, 4, 3, seed=1), 0.5 * uniform(COUNT, 4, 8, seed=2), uniform(COUNT, 4, 2, seed=3) ** 2]
    axes = ["batch token feature", "batch token wide", "batch*token k"]
    found = variation_of(tmp_path_factory.mktemp("three") / "s", *zip(axes, values, strict=True))
    return found, [grid(v) for v in values]


@pytest.mark.parametrize("level", LEVELS)
def test_layer_identity_equals_its_definition(three, level):
    found, grids = three
    assert found.patterns[0].layer_share[level] == pytest.approx(layer_share(grids, level), abs=1e-10)


@pytest.mark.parametrize("level", LEVELS)
def test_controllers_that_differ_in_nothing_else_are_all_of_the_variance(tmp_path, level):
    gates = [("batch token feature", torch.full((COUNT, 4, 3), v)) for v in (0.25, 0.5)]
    (found,) = variation_of(tmp_path / "s", *gates).patterns
    assert found.layer_share[level] == pytest.approx(1.0)


@pytest.mark.parametrize("level", LEVELS)
def test_controllers_that_are_alike_explain_nothing(tmp_path, level):
    gates = [("batch token feature", uniform(COUNT, 4, 3))] * 2
    (found,) = variation_of(tmp_path / "s", *gates).patterns
    assert found.layer_share[level] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("level", LEVELS)
def test_a_single_controller_has_no_layer_identity(tmp_path, level):
    (found,) = variation_of(tmp_path / "s", ("batch token feature", uniform(COUNT, 4, 3))).patterns
    assert found.layer_share[level] is None


@pytest.mark.parametrize("value", [0.5, 0.3])
@pytest.mark.parametrize("level", LEVELS)
def test_controllers_of_one_value_have_no_layer_identity(tmp_path, level, value):
    gates = [("batch token feature", torch.full((COUNT, 4, 3), value))] * 2
    (found,) = variation_of(tmp_path / "s", *gates).patterns
    assert found.layer_share[level] is None


def test_weights_that_sum_to_one_have_no_layer_identity_once_they_are_averaged_over_slots(tmp_path):
    # What is left of the means over slots, all one half, is rounding.
    gates = [("batch*token k", uniform(COUNT, 4, 2, seed=seed).softmax(-1)) for seed in (1, 2)]
    (found,) = variation_of(tmp_path / "s", *gates, domain=Domain("simplex", 0.0, 1.0, "k", 1.0)).patterns
    assert found.layer_share["mean_unit"] is None


def test_patterns_with_one_domain_are_also_compared_together(tmp_path):
    gates = [("batch token feature", uniform(COUNT, 4, 3, seed=i)) for i in range(3)]
    found = variation_of(tmp_path / "s", *gates, pattern=["a", "a", "b"])
    expected = layer_share([grid(v) for _, v in gates], "element")
    assert found.overall.layer_share["element"] == pytest.approx(expected, abs=1e-10)


def test_patterns_with_different_domains_are_not_compared(tmp_path):
    gates = [("batch token feature", uniform(COUNT, 4, 3, seed=i)) for i in range(2)]
    found = variation_of(tmp_path / "s", *gates, pattern=["a", "b"], domain=[UNIT_INTERVAL, Domain("real")])
    assert found.overall is None


def test_one_pattern_needs_no_comparison_with_itself(tmp_path):
    gates = [("batch token feature", uniform(COUNT, 4, 3, seed=i)) for i in range(2)]
    assert variation_of(tmp_path / "s", *gates).overall is None


# --- indices, and the verdict ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def router(tmp_path_factory):
    weights = coefficient("batch*token k", SIZES, "router#0/coefficient")
    indices = coefficient("batch*token k", SIZES, "router#0/indices", Domain("index"))
    store = recorded(
        tmp_path_factory.mktemp("router") / "s",
        {weights.key: uniform(COUNT, 4, 2), indices.key: uniform(COUNT, 4, 2)},
        3,
    )
    return measure_variation(store, [controller(weights, indices)])


def test_indices_have_no_variation(router):
    assert [c.controller for c in router.controllers] == ["router#0"]


def test_indices_are_named_as_left_out(router):
    assert router.skipped == ("router#0/indices: indices have no mean",)


def test_the_number_of_inputs_is_that_of_the_data(router):
    assert router.inputs == COUNT


def test_a_coefficient_that_follows_its_input_is_varying(tmp_path):
    values = uniform(COUNT, 1, 1).expand(COUNT, 4, 3)
    assert variation_of(tmp_path / "s", ("batch token feature", values)).verdict == "VARYING"


def test_one_controller_that_varies_is_enough(tmp_path):
    gates = [torch.full((COUNT, 4, 3), 0.5), uniform(COUNT, 4, 3)]
    assert variation_of(tmp_path / "s", *(("batch token feature", v) for v in gates)).verdict == "VARYING"


@pytest.mark.parametrize("step", [1e-4, 2.0**-24])
def test_a_coefficient_that_varies_once_in_many_is_varying(tmp_path, step):
    values = torch.cat([torch.zeros(1, 1, 1), torch.ones(1, 1, 1)], 2).expand(COUNT, 4, 2).clone()
    values[0, 0, 1] -= step
    assert variation_of(tmp_path / "s", ("batch*token k", values)).verdict == "VARYING"


@settings(max_examples=40, deadline=None)
@given(
    value=st.floats(0, 1, width=32),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    batch_size=st.integers(1, 4),
)
def test_one_value_everywhere_is_constant(tmp_path_factory, value, shape, batch_size):
    place = tmp_path_factory.mktemp("stores") / "s"
    gate = ("batch token feature", torch.full(shape, value))
    assert variation_of(place, gate, batch_size=batch_size).verdict == "CONSTANT"


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), batch_size=st.integers(1, 4), low=st.sampled_from([0.0, 0.9, 0.999999]))
def test_one_value_for_each_unit_is_constant(tmp_path_factory, seed, batch_size, low):
    values = (low + (1 - low) * uniform(1, 1, 8, seed=seed)).expand(COUNT, 4, 8)
    place = tmp_path_factory.mktemp("stores") / "s"
    assert variation_of(place, ("batch token wide", values), batch_size=batch_size).verdict == "CONSTANT"


def test_a_mean_over_many_batches_is_that_of_numpy(tmp_path):
    values = uniform(60, 4, 3)
    (found,) = variation_of(tmp_path / "s", ("batch token feature", values), batch_size=7).controllers
    assert found.std == pytest.approx(math.sqrt(grid(values).var()), rel=1e-12)


def test_one_value_in_float64_is_constant(tmp_path):
    values = torch.full((COUNT, 4, 3), 0.3, dtype=torch.float64)
    assert variation_of(tmp_path / "s", ("batch token feature", values)).verdict == "CONSTANT"

import itertools
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fxaudit.replay import statistics
from fxaudit.replay.statistics import holm, paired_effect

probabilities = st.lists(st.floats(0, 1), min_size=1, max_size=12)


def flipped(differences) -> float:
    """The two-sided sign-flip p-value, by going through every assignment of signs."""
    observed = abs(np.mean(differences))
    signs = itertools.product([1, -1], repeat=len(differences))
    return float(np.mean([abs(np.mean(np.multiply(s, differences))) >= observed - 1e-12 for s in signs]))


# --- effects --------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=6))
def test_the_effect_is_the_mean_difference(differences):
    assert paired_effect(differences).mean == pytest.approx(np.mean(differences), abs=1e-12)


@pytest.mark.parametrize("count", range(2, 14))
def test_differences_of_one_sign_have_the_smallest_p_value_there_is(count):
    assert paired_effect([1.0 + i / 10 for i in range(count)]).p == pytest.approx(2.0 ** -(count - 1), rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 9))
def test_the_p_value_of_few_inputs_is_exact(seed, count):
    differences = np.random.default_rng(seed).normal(0.3, 1.0, count)
    assert paired_effect(differences).p == pytest.approx(flipped(differences), rel=1e-9)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 9))
def test_the_p_value_does_not_depend_on_the_sign(seed, count):
    differences = np.random.default_rng(seed).normal(0.3, 1.0, count)
    assert paired_effect(-differences).p == pytest.approx(paired_effect(differences).p, rel=1e-9)


def test_no_p_value_is_zero():
    # Of 9,999 random flips none reaches the mean, which itself is counted: 2 * 1 / 10,000.
    assert paired_effect(np.linspace(1, 2, 40)).p == pytest.approx(2e-4, rel=1e-9)


def test_the_p_value_of_many_inputs_is_near_that_of_a_t_test():
    differences = np.random.default_rng(5).normal(0.1, 1.0, 200)
    assert paired_effect(differences).p == pytest.approx(stats.ttest_1samp(differences, 0).pvalue, abs=0.02)


def test_differences_that_cancel_are_not_significant():
    assert paired_effect([1.0, -1.0, 2.0, -2.0]).p == 1.0


def test_no_difference_at_all_is_not_significant():
    assert paired_effect([0.0] * 8).p == 1.0


def test_equal_differences_have_an_interval_of_one_point():
    assert paired_effect([0.25] * 8).interval == (0.25, 0.25)


def test_equal_differences_have_the_p_value_of_their_number():
    assert paired_effect([0.25] * 8).p == pytest.approx(2.0**-7)


@pytest.mark.parametrize("differences", [[0.1] * 3, [0.3] * 7, [-0.7] * 10])
def test_equal_differences_have_their_own_value_as_interval(differences):
    assert paired_effect(differences).interval == pytest.approx((differences[0], differences[0]), abs=1e-15)


def test_one_input_has_no_interval():
    assert paired_effect([0.5]).interval is None


def test_one_input_has_no_p_value():
    assert paired_effect([0.5]).p is None


def test_one_input_has_an_effect():
    assert paired_effect([0.5]).mean == 0.5


@pytest.mark.parametrize("differences", [[0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [1e-300, 0.0, 0.0], [5.0, 5.0, 5.0 + 1e-15]])
def test_an_interval_is_always_finite(differences):
    assert np.isfinite(paired_effect(differences).interval).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("differences", [[math.nan, 1.0, 2.0], [math.inf, 1.0, 2.0], [math.inf, -math.inf, 0.0]])
def test_differences_that_are_not_finite_are_never_significant(differences):
    assert paired_effect(differences).p is None


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.integers(5, 40))
def test_the_interval_lies_within_the_differences_and_around_the_mean(seed, count):
    differences = np.random.default_rng(seed).normal(0.3, 1.0, count)
    found = paired_effect(differences)
    assert differences.min() <= found.interval[0] <= found.mean <= found.interval[1] <= differences.max()


def test_the_same_seed_gives_the_same_effect():
    differences = np.random.default_rng(0).normal(size=30)
    assert paired_effect(differences, seed=4) == paired_effect(differences, seed=4)


def test_another_seed_moves_the_interval():
    differences = np.random.default_rng(0).normal(size=30)
    assert paired_effect(differences, seed=4).interval != paired_effect(differences, seed=5).interval


def test_the_interval_is_near_the_one_of_students_t_for_normal_differences():
    differences = np.random.default_rng(3).normal(1.0, 1.0, 400)
    expected = stats.t.interval(0.95, 399, np.mean(differences), stats.sem(differences))
    assert paired_effect(differences).interval == pytest.approx(expected, abs=0.02)


def test_the_memory_of_an_effect_is_not_that_of_every_resample_at_once():
    differences = np.random.default_rng(0).normal(size=3000)
    tracemalloc.start()
    try:
        paired_effect(differences)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # 9,999 resamples of 3,000 numbers are 240 MB.
    assert peak < 100e6


@pytest.fixture
def few_resamples(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 999)


@pytest.mark.usefixtures("few_resamples")
def test_intervals_cover_a_known_effect_at_about_the_nominal_rate():
    generator = np.random.default_rng(11)
    samples = generator.exponential(1.0, (300, 40)) - 0.5  # skewed, with mean 0.5
    covered = [(e := paired_effect(sample).interval)[0] <= 0.5 <= e[1] for sample in samples]
    # Three standard errors of 300 trials around 0.93, what BCa reaches for a skewed sample of 40.
    assert 0.885 <= np.mean(covered) <= 0.98


@pytest.mark.usefixtures("few_resamples")
def test_without_an_effect_about_one_p_value_in_twenty_is_significant():
    samples = np.random.default_rng(12).normal(0.0, 1.0, (300, 20))
    found = np.mean([paired_effect(sample).p < 0.05 for sample in samples])
    assert 0.012 <= found <= 0.088  # three standard errors


# --- Holm's correction ----------------------------------------------------------------------------------------------


def test_holm_equals_a_computation_by_hand():
    # Sorted: 0.005 * 4, 0.01 * 3, 0.03 * 2, 0.04 * 1 -> raised to 0.06.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_holm_leaves_a_single_p_value_as_it_is():
    assert holm([0.03]) == [0.03]


def test_holm_of_nothing_is_nothing():
    assert holm([]) == []


def test_holm_gives_equal_p_values_one_value():
    assert holm([0.01, 0.01, 0.01]) == pytest.approx([0.03] * 3)


def test_holm_never_exceeds_one():
    assert holm([0.4, 0.9]) == pytest.approx([0.8, 0.9])


@given(probabilities)
def test_holm_keeps_the_order_of_the_p_values(found):
    adjusted = holm(found)
    order = np.argsort(found, kind="stable")
    assert np.all(np.diff(np.asarray(adjusted)[order]) >= 0)


@given(probabilities)
def test_holm_lowers_no_p_value(found):
    assert all(a >= p for a, p in zip(holm(found), found, strict=True))


@given(probabilities)
def test_holm_is_no_harsher_than_bonferroni(found):
    assert all(a <= min(1.0, len(found) * p) + 1e-12 for a, p in zip(holm(found), found, strict=True))


@given(probabilities, st.floats(0.001, 0.5))
def test_holm_rejects_what_the_step_down_procedure_rejects(found, level):
    rejected, order = set(), np.argsort(found, kind="stable")
    for rank, index in enumerate(order):
        if found[index] * (len(found) - rank) > level:
            break
        rejected.add(int(index))
    assert {i for i, a in enumerate(holm(found)) if a <= level} == rejected

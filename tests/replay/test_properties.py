"""What must hold of interventions and statistics whatever the values."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.torch import save_file
from synthetic_stores import coefficient, recorded

from fxaudit.cli import main
from fxaudit.replay import statistics
from fxaudit.replay.intervene import LEVELS
from fxaudit.replay.profiles import static_profiles
from fxaudit.replay.statistics import needed_inputs, paired_effect
from tests.oracles import models

KEY = "gate#0/coefficient"
SHAPE = (5, 4, 3)
GATE = coefficient("batch token feature", {"batch": 5, "token": 4, "feature": 3})
ROWS = arrays.arrays(np.float32, SHAPE, elements=st.floats(-8, 8, width=32))


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=25, deadline=None)
@given(rows=ROWS)
def test_the_profile_of_a_profile_is_that_profile(tmp_path_factory, level, rows):
    place = tmp_path_factory.mktemp("profiles")
    once = static_profiles(recorded(place / "a", {KEY: torch.from_numpy(rows.copy())}, 2), [GATE], level)[KEY]
    spread = once.expand(SHAPE).contiguous()
    assert torch.equal(static_profiles(recorded(place / "b", {KEY: spread}, 2), [GATE], level)[KEY], once)


@settings(max_examples=10, deadline=None)
@given(arrays.arrays(np.float64, (12,), elements=st.floats(-4, 4)), st.floats(-3, 3))
def test_an_effect_moves_with_its_differences(differences, shift):
    found, moved = paired_effect(differences.tolist()), paired_effect((differences + shift).tolist())
    assert moved.mean == pytest.approx(found.mean + shift, abs=1e-9)


@pytest.fixture
def fewer_resamples(monkeypatch):
    """A tenth of them: enough for rates of 5 %, in a tenth of the time."""
    monkeypatch.setattr(statistics, "RESAMPLES", 999)


def test_intervals_cover_a_known_effect_at_the_stated_rate(fewer_resamples):
    generator = np.random.default_rng(0)
    runs, effect = 150, 0.3
    covered = 0
    for seed in range(runs):
        low, high = paired_effect(generator.normal(effect, 1.0, 40).tolist(), seed).interval
        covered += low <= effect <= high
    # 95 %, within four standard deviations of a binomial count.
    assert abs(covered / runs - 0.95) < 4 * math.sqrt(0.95 * 0.05 / runs)


def test_a_test_without_an_effect_rejects_at_the_stated_rate(fewer_resamples):
    generator = np.random.default_rng(1)
    runs = 150
    rejected = sum(paired_effect(generator.normal(0.0, 1.0, 12).tolist(), seed).p < 0.05 for seed in range(runs))
    assert rejected / runs < 0.05 + 4 * math.sqrt(0.95 * 0.05 / runs)


def sample(mean: float, spread: float, count: int = 20) -> list[float]:
    drawn = np.random.default_rng(2).normal(size=count)
    return ((drawn - drawn.mean()) / drawn.std(ddof=1) * spread + mean).tolist()


def test_the_inputs_that_an_effect_needs_are_those_of_a_z_test_with_a_power_of_80_percent():
    # (1.959964 + 0.841621)^2 = 7.848880
    assert needed_inputs(sample(0.5, 1.0)) == math.ceil(7.848880 / 0.25)
    assert needed_inputs(sample(-0.1, 2.0)) == math.ceil(7.848880 * 4 / 0.01)


def test_one_of_many_tests_needs_more_inputs():
    # (z(1 - 0.05 / 20) + z(0.8))^2 = (2.807034 + 0.841621)^2
    assert needed_inputs(sample(0.5, 1.0), tests=10) == math.ceil((2.807034 + 0.841621) ** 2 / 0.25)


@pytest.mark.parametrize(("tests", "fewest"), [(1, 6), (2, 7), (8, 9)])
def test_a_large_effect_still_needs_enough_signs_to_flip(tests, fewest):
    # The least p-value of n inputs is 2^(1 - n); it must be below 0.05 / tests.
    assert 2.0 ** (1 - fewest) < 0.05 / tests <= 2.0 ** (2 - fewest)
    assert needed_inputs(sample(50.0, 1.0), tests=tests) == fewest


def test_a_divergence_is_told_from_the_margin_only():
    assert needed_inputs(sample(0.5, 1.0), is_divergence=True) is None
    assert needed_inputs(sample(0.5, 1.0), 0.3, is_divergence=True) == math.ceil(7.848880 / 0.04)


def test_with_a_margin_equivalence_may_need_fewer_inputs():
    assert needed_inputs(sample(0.01, 1.0), 0.21) == math.ceil(7.848880 / 0.04)


@pytest.mark.parametrize("differences", [[], [1.0], [0.5, 0.5, 0.5], [1.0, math.nan], sample(0.0, 1.0)])
def test_where_no_number_of_inputs_would_tell_none_is_named(differences):
    assert needed_inputs(differences) is None or needed_inputs(differences) > 1e12


METRIC = """
import torch
def share_of_ones(outputs, targets, live):
    return (outputs.argmax(-1) == 1).float().mean(-1)
def wrong(outputs, targets, live):
    return outputs.mean()
def failing(outputs, targets, live):
    return outputs.nothing
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "metric.py").write_text(METRIC)
    save_file({"ids": models.tokens(5, 1)}, tmp_path / "data.safetensors")
    return tmp_path


def replay(place, metric: str):
    options = ["--data", f"{place}/data.safetensors", "--interventions", "reassign", "--scope", "joint", "--json"]
    return CliRunner().invoke(main, ["replay", f"{models.__file__}:gated", *options, "--metric", f"{place}/{metric}"])


def test_a_metric_of_the_users_own_scores_every_input(place):
    found = json.loads(replay(place, "metric.py:share_of_ones").stdout)
    with torch.no_grad():
        outputs = models.gated()[0].eval()(models.tokens(5, 1))
    expected = (outputs.argmax(-1) == 1).double().mean(-1)
    assert found["baseline"]["per_input"] == pytest.approx(expected.tolist())
    assert found["baseline"]["metric"].endswith("metric.py:share_of_ones")


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("metric.py:wrong", "did not return one number for each input"),
        ("metric.py:failing", "AttributeError"),
        ("metric.py:absent", "has no `absent`"),
        ("none.py:x", "does not exist"),
    ],
)
def test_a_metric_that_does_not_work_is_told(place, metric, said):
    result = replay(place, metric)
    assert result.exit_code == 6
    assert said in result.stderr
    assert "Traceback" not in result.stderr

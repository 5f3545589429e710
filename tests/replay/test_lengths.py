"""Padding: what is no valid position neither moves nor counts, in variation, profiles, replay and metrics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import WIDTH
from synthetic_stores import coefficient, controller, recorded
from torch import nn
from torch.nn import functional as F

from fxaudit import stages
from fxaudit.controllers.controller import Domain
from fxaudit.model.data import load_data
from fxaudit.replay.dependence import Calibration, measure_dependence
from fxaudit.replay.intervene import feasible, parse_interventions
from fxaudit.replay.permutations import draw_permutations
from fxaudit.replay.profiles import measure_profiles
from fxaudit.replay.variation import measure_variation

INPUTS, TOKENS, UNITS = 7, 6, 3
KEY = "gate#0/coefficient"
SIZES = {"batch": INPUTS, "token": TOKENS, "feature": UNITS}
GATE = controller(coefficient("batch token feature", SIZES))


def values(seed: int = 0) -> torch.Tensor:
    return torch.rand(INPUTS, TOKENS, UNITS, generator=torch.Generator().manual_seed(seed))


def mask(lengths: list[int]) -> torch.Tensor:
    return torch.arange(TOKENS) < torch.tensor(lengths)[:, None]


LENGTHS = [6, 4, 4, 6, 2, 6, 4]


def by_definition(rows: torch.Tensor, valid: torch.Tensor) -> dict[str, float]:
    """The split of the sum of squares within buckets of equal length, and between them."""
    wide = rows.double()
    everything = torch.cat([wide[i][valid[i]].reshape(-1) for i in range(len(wide))])
    mean, total = everything.mean(), ((everything - everything.mean()) ** 2).sum()
    sums = dict.fromkeys(("unit", "position", "input", "bucket"), 0.0)
    for length in set(valid.sum(1).tolist()):
        grid = torch.stack([wide[i][valid[i]] for i in range(len(wide)) if int(valid[i].sum()) == length])
        own = grid.mean()
        sums["bucket"] += float(grid.numel() * (own - mean) ** 2)
        for name, axes in {"unit": (0, 1), "position": (0, 2), "input": (1, 2)}.items():
            sums[name] += float(((grid.mean(axes, keepdim=True) - own).expand_as(grid) ** 2).sum())
    found = {name: value / float(total) for name, value in sums.items()}
    return {**found, "residual": 1.0 - sum(found.values())}


def test_shares_of_unequal_lengths_equal_their_definition(tmp_path):
    store = recorded(tmp_path / "s", {KEY: values()}, 3)
    (found,) = measure_variation(store, [GATE], mask(LENGTHS)).controllers
    assert found.shares == pytest.approx(by_definition(values(), mask(LENGTHS)), abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, TOKENS), min_size=INPUTS, max_size=INPUTS), st.integers(0, 1000))
def test_shares_sum_to_one_whatever_the_lengths(tmp_path_factory, lengths, seed):
    store = recorded(tmp_path_factory.mktemp("s") / "store", {KEY: values(seed)}, 3)
    (found,) = measure_variation(store, [GATE], mask(lengths)).controllers
    assert sum(found.shares.values()) == pytest.approx(1.0, abs=1e-12)
    assert all(share >= -1e-12 for share in found.shares.values())


def test_values_at_invalid_positions_change_nothing(tmp_path):
    valid = mask(LENGTHS)
    spoilt = torch.where(valid[..., None], values(), 9e9)
    found = [
        measure_variation(recorded(tmp_path / str(i), {KEY: rows}, 3), [GATE], valid).controllers[0]
        for i, rows in enumerate((values(), spoilt))
    ]
    assert found[0] == found[1]


def test_first_special_and_other_positions_are_told_apart(tmp_path):
    valid, special = mask(LENGTHS), torch.zeros(INPUTS, TOKENS, dtype=torch.bool)
    special[1, 2] = special[3, 3] = special[4, 5] = True  # the last one is padding
    store = recorded(tmp_path / "s", {KEY: values()}, 3)
    (found,) = measure_variation(store, [GATE], valid, special).controllers
    rows = values().double()
    first = rows[:, 0]
    rest = valid.clone()
    rest[:, 0] = rest[1, 2] = rest[3, 3] = False
    expected = {"first": first, "special": torch.stack([rows[1, 2], rows[3, 3]]), "rest": rows[rest]}
    for part, chosen in expected.items():
        told = found.apart[part]
        assert (told.count, told.mean) == (chosen.numel(), pytest.approx(float(chosen.mean()), abs=1e-12))
        assert told.std == pytest.approx(float(chosen.std(correction=0)), abs=1e-12)


def test_the_entropy_of_a_simplex_is_that_of_scipy(tmp_path):
    from scipy import stats

    simplex = Domain("simplex", 0.0, 1.0, "feature", 1.0)
    described = controller(coefficient("batch token feature", SIZES, domain=simplex))
    rows = (3 * values()).softmax(-1)
    store = recorded(tmp_path / "s", {KEY: rows}, 3)
    (found,) = measure_variation(store, [described], mask(LENGTHS)).controllers
    expected = stats.entropy(rows.double().numpy(), axis=-1)[mask(LENGTHS).numpy()].mean()
    assert found.entropy == pytest.approx(expected, abs=1e-7)
    assert found.entropy_limit == pytest.approx(math.log(UNITS))


def test_a_profile_averages_valid_positions_and_counts_those_that_are_absent(tmp_path):
    valid = mask([4, 3, 4, 2, 4, 1, 3])
    store = recorded(tmp_path / "s", {KEY: values()}, 3)
    described = GATE.coefficients[0]
    unit = measure_profiles(store, [described], "unit", valid)[KEY]
    expected = values().double()[valid].mean(0).float()
    torch.testing.assert_close(unit.value.reshape(-1), expected, rtol=0, atol=1e-7)
    position = measure_profiles(store, [described], "unit-position", valid)[KEY]
    assert position.absent == 2
    torch.testing.assert_close(position.value[0, 4:], expected.expand(2, -1), rtol=0, atol=1e-7)
    third = values().double()[[0, 1, 2, 4, 6], 2].mean(0).float()
    torch.testing.assert_close(position.value[0, 2], third, rtol=0, atol=1e-7)


@given(st.integers(0, 2**32), st.lists(st.integers(1, TOKENS), min_size=2, max_size=12))
def test_donors_have_the_length_of_those_that_they_give_to(seed, lengths):
    valid = mask(lengths)
    drawn = draw_permutations(seed, len(lengths), [TOKENS], valid)
    assert torch.equal(valid[drawn.donors], valid)
    lonely = [lengths.count(length) == 1 for length in lengths]
    assert drawn.alone.tolist() == lonely
    assert [int(d) == i for i, d in enumerate(drawn.donors)] == lonely


@given(st.integers(0, 2**32), st.lists(st.integers(1, TOKENS), min_size=2, max_size=12))
def test_only_valid_positions_move(seed, lengths):
    valid = mask(lengths)
    places = draw_permutations(seed, len(lengths), [TOKENS], valid).positions[TOKENS]
    assert torch.equal(places.sort(1).values, torch.arange(TOKENS).expand_as(places))
    assert torch.equal(places[~valid], torch.arange(TOKENS).expand_as(places)[~valid])


@given(st.integers(0, 2**32))
def test_a_permutation_and_its_inverse_give_identity(seed):
    drawn = draw_permutations(seed, INPUTS, [TOKENS])
    rows, order = values(), drawn.positions[TOKENS]
    assert torch.equal(rows[drawn.donors][torch.argsort(drawn.donors)], rows)
    moved = rows.gather(1, order[..., None].expand_as(rows))
    assert torch.equal(moved.gather(1, torch.argsort(order, 1)[..., None].expand_as(rows)), rows)


def test_a_doubly_stochastic_matrix_stays_one():
    matrix = coefficient("batch row_unit feature", {**SIZES, "row_unit": 3}, domain=Domain("doubly-stochastic"))
    found = feasible(torch.rand(5, 3, 3, generator=torch.Generator().manual_seed(0)) + 0.1, matrix)
    torch.testing.assert_close(found.sum(1), torch.ones(5, 3), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.sum(2), torch.ones(5, 3), rtol=0, atol=1e-5)


# --- replay ---------------------------------------------------------------------------------------------------------


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x, attention_mask):
        return self.head(torch.sigmoid(self.gate(x)) * self.value(x)) * attention_mask.unsqueeze(-1)


def test_replay_moves_and_counts_valid_positions_only(tmp_path):
    torch.manual_seed(3)
    model = Gated().eval()
    valid = mask(LENGTHS)
    x, calibrating = (torch.randn(INPUTS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    labels = torch.randint(0, 4, (INPUTS, TOKENS), generator=torch.Generator().manual_seed(4))
    weights = valid.float()
    frozen = stages.freeze(model, {"x": x[:2], "attention_mask": weights[:2]})
    data = load_data({"x": x, "attention_mask": weights, "targets": labels}, frozen.traced)
    own = load_data({"x": calibrating, "attention_mask": weights}, frozen.traced)
    stores = [stages.record(frozen, d, tmp_path / n, batch_size=3).store for d, n in ((data, "e"), (own, "c"))]
    asked = parse_interventions("reassign,shuffle-tokens,static:unit")
    profile = Calibration(stores[1], own.valid_positions())
    found = measure_dependence(frozen, data, stores[0], profile, asked, scopes=("joint",))
    drawn = found.permutations
    with torch.no_grad():
        gate, calibrated = torch.sigmoid(model.gate(x)), torch.sigmoid(model.gate(calibrating))
        changed = {
            "reassign": gate[drawn.donors],
            "shuffle-tokens": torch.stack([g[p] for g, p in zip(gate, drawn.positions[TOKENS], strict=True)]),
            "static:unit": calibrated.double()[valid].mean(0).float().expand_as(gate),
        }
        for result in found.results:
            logits = model.head(changed[result.label] * model.value(x)) * weights.unsqueeze(-1)
            losses = F.cross_entropy(logits.double().transpose(1, 2), labels, reduction="none")
            expected = (losses * valid).sum(1) / valid.sum(1)
            for i, value in enumerate(result.per_input):
                if result.label == "reassign" and LENGTHS.count(LENGTHS[i]) == 1:
                    assert value is None
                else:
                    assert value == pytest.approx(float(expected[i]), abs=1e-6)
    left_out = {r.label: r.left_out for r in found.results}
    assert left_out == {"reassign": 1, "shuffle-tokens": 0, "static:unit": 0}
    kept = [b for b, n in zip(found.baseline.per_input, LENGTHS, strict=True) if LENGTHS.count(n) > 1]
    (reassigned,) = [r for r in found.results if r.label == "reassign"]
    assert reassigned.baseline == pytest.approx(np.mean(kept))
    values_kept = [v for v in reassigned.per_input if v is not None]
    assert reassigned.delta == pytest.approx(np.mean(values_kept) - np.mean(kept))

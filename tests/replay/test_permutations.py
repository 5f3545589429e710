"""Permutations drawn, written, given, and refused where they do not fit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from synthetic_stores import coefficient, controller

from fxaudit.errors import DataError, UsageError
from fxaudit.replay.intervene import Intervention, parse_interventions
from fxaudit.replay.permutations import (
    POOL,
    draw,
    read_permutations,
    with_given,
    write_permutations,
)
from fxaudit.replay.plan import SCOPES, parse_scopes, plan_rows

INPUTS, TOKENS, UNITS = 6, 4, 3
SIZES = {"batch": INPUTS, "token": TOKENS, "feature": UNITS}
ALL = parse_interventions(
    "reassign:each,shuffle-tokens:each,permute-units,permute-units:each,resample,swap-controllers"
)


def gate(name: str, units: int = UNITS):
    sizes = {**SIZES, "feature": units}
    return dataclasses.replace(controller(coefficient("batch token feature", sizes, f"{name}/coefficient")), id=name)


GATES = [gate("a#0"), gate("b#0"), gate("c#0"), gate("wide#0", 5)]


def drawn(seed: int = 0, inputs: int = INPUTS):
    return draw(seed, inputs, GATES, ALL)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_what_is_written_is_read_again_by_seed(tmp_path, suffix):
    file = tmp_path / f"p{suffix}"
    by_seed = {3: drawn(3), 4: drawn(4)}
    write_permutations(file, by_seed)
    found = read_permutations(file)
    assert set(found) == {None, 4}
    for seed, arrays in ((None, by_seed[3].arrays()), (4, by_seed[4].arrays())):
        assert {n: v.tolist() for n, v in found[seed].items()} == {n: v.tolist() for n, v in arrays.items()}


def test_given_arrays_take_the_place_of_drawn_ones():
    given = drawn(9).arrays()
    found = with_given(drawn(0), given, GATES)
    assert {n: v.tolist() for n, v in found.arrays().items()} == {n: v.tolist() for n, v in given.items()}


def test_a_draw_does_not_depend_on_what_else_is_asked_for():
    alone = draw(5, INPUTS, GATES, [Intervention("resample")])
    assert torch.equal(alone.resample_donors["b#0"], drawn(5).resample_donors["b#0"])
    assert torch.equal(alone.donors, drawn(5).donors)


def test_controllers_have_draws_of_their_own():
    found = drawn(1, 40)
    assert not torch.equal(found.own_donors["a#0"], found.own_donors["b#0"])
    assert not torch.equal(found.own_positions["a#0"], found.own_positions["b#0"])


@given(st.integers(0, 2**32))
def test_controllers_are_swapped_with_others_of_their_shape(seed):
    sources = draw(seed, 2, GATES, [Intervention("swap-controllers")]).controllers.tolist()
    assert sorted(sources[:3]) == [0, 1, 2]
    assert all(source != i for i, source in enumerate(sources[:3]))
    assert sources[3] == 3


def test_units_are_permuted_by_their_number():
    found = drawn()
    assert {n: sorted(units.tolist()) for n, units in found.units.items()} == {3: [0, 1, 2], 5: [0, 1, 2, 3, 4]}
    assert {"units/3", "units/5", "positions", "donors"} <= set(found.arrays())


def test_resampling_draws_from_a_pool_that_fits_in_memory():
    found = draw(0, 3 * POOL, GATES[:1], [Intervention("resample")])
    assert len(found.pool) <= POOL
    assert found.resample_donors["a#0"].shape == (3 * POOL, UNITS)


REFUSED = {
    "too few donors": ({"donors": torch.arange(3)}, "`donors` does not fit"),
    "a donor that is not there": ({"donors": torch.full((INPUTS,), INPUTS)}, "`donors` does not fit"),
    "positions of other inputs": ({"positions": torch.zeros(2, TOKENS, dtype=torch.int64)}, "does not fit"),
    "another controller": ({"donors/z#0": torch.arange(INPUTS)}, "`donors/z#0` is no permutation"),
    "a misspelt name": ({"donor": torch.arange(INPUTS)}, "did you mean `donors`"),
    "a swap of unequal shapes": ({"controllers": torch.tensor([3, 0, 1, 2])}, "cannot take the coefficients of wide#0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arrays_that_do_not_fit_are_refused(case):
    arrays, said = REFUSED[case]
    with pytest.raises(DataError, match=said):
        with_given(drawn(), arrays, GATES)


def test_donors_of_another_length_are_refused():
    valid = torch.arange(TOKENS) < torch.tensor([4, 4, 2, 2, 3, 3])[:, None]
    donors = torch.tensor([1, 0, 3, 2, 0, 4])
    with pytest.raises(DataError, match="other valid positions") as caught:
        with_given(draw(0, INPUTS, GATES, (), valid), {"donors": donors}, GATES, valid)
    assert caught.value.found == "input 4 and donor 0"


def test_positions_that_move_padding_are_refused():
    valid = torch.arange(TOKENS) < torch.tensor([4, 4, 2, 2, 3, 3])[:, None]
    backwards = torch.arange(TOKENS).flip(0).expand(INPUTS, -1)
    with pytest.raises(DataError, match="moves positions that are padding"):
        with_given(draw(0, INPUTS, GATES, (), valid), {"positions": backwards}, GATES, valid)


def test_files_that_hold_no_permutations_are_refused(tmp_path):
    (tmp_path / "bad.npz").write_bytes(b"no zip")
    save_file({"donors": torch.rand(3)}, tmp_path / "float.safetensors")
    for name, said in (("none.npz", "no such file"), ("bad.npz", "cannot be read"), ("float.safetensors", "float32")):
        with pytest.raises(DataError) as caught:
            read_permutations(tmp_path / name)
        assert said in str(caught.value)


def test_pickled_arrays_are_not_opened(tmp_path):
    np.savez(tmp_path / "p.npz", donors=np.asarray([object()], dtype=object))
    with pytest.raises(DataError, match="cannot be read"):
        read_permutations(tmp_path / "p.npz")


# --- scopes ---------------------------------------------------------------------------------------------------------


def test_scopes_are_named_separated_by_commas():
    assert parse_scopes("cumulative, joint,joint") == ("cumulative", "joint")


def test_an_unknown_scope_gets_a_suggestion():
    with pytest.raises(UsageError, match="did you mean `cumulative`"):
        parse_scopes("cumulativ")


def planned(scope: str, refused: tuple[str, ...] = (), live: bool = False):
    def refusal(intervention, controller):
        return "no" if controller.id in refused else None

    rows = plan_rows(GATES, [Intervention("reassign")], [scope], refusal, metric="nll", seed=0, live=live)
    return [(r.result.controllers, r.result.feedback, r.result.refused) for r in rows]


def test_a_cumulative_scope_goes_by_depth():
    ids = tuple(k.id for k in GATES)
    assert planned("cumulative") == [(ids[: i + 1], "frozen", None) for i in range(4)]


def test_controllers_that_refuse_are_left_out_of_joint_rows():
    assert planned("joint", ("b#0",)) == [(("a#0", "c#0", "wide#0"), "frozen", None)]


@pytest.mark.parametrize("scope", SCOPES)
def test_where_every_controller_refuses_the_rows_say_why(scope):
    assert {reason for _, _, reason in planned(scope, tuple(k.id for k in GATES))} == {"no"}


def test_what_is_recomputed_stands_in_rows_of_its_own():
    feedback = [(f, r) for _, f, r in planned("controller", live=True)]
    assert feedback == [("frozen", None), ("live", None)] * 4

"""Choices of experts: what is counted of them, and what could not be one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from synthetic_stores import coefficient, controller, recorded

from fxaudit.controllers.controller import Domain
from fxaudit.errors import SelfCheckError
from fxaudit.replay.choices import require_choice
from fxaudit.replay.variation import measure_variation

INPUTS, TOKENS, SLOTS, EXPERTS = 4, 5, 2, 6
SIZES = {"batch": INPUTS, "token": TOKENS, "k": SLOTS, "expert": EXPERTS}
WEIGHTS = coefficient("batch token k", SIZES, "router#0/coefficient")
INDICES = coefficient("batch token k", SIZES, "router#0/indices", Domain("index"), dtype=torch.int64)
SCORES = dataclasses.replace(coefficient("batch token expert", SIZES, "router#0/scores"), name="scores")
ROUTER = dataclasses.replace(controller(WEIGHTS, INDICES), taps=(SCORES,))


def routed(tmp_path, scores: torch.Tensor, bias: torch.Tensor | None = None):
    ranked = scores if bias is None else scores + bias
    indices = ranked.topk(SLOTS, -1).indices
    rows = {WEIGHTS.key: scores.gather(-1, indices), INDICES.key: indices.float(), SCORES.key: scores}
    store = recorded(tmp_path / "store", {k: v.float() for k, v in rows.items()}, 3)
    (found,) = measure_variation(store, [ROUTER]).routers
    return found, indices


def scores() -> torch.Tensor:
    # The last expert is never among the best.
    drawn = torch.rand(INPUTS, TOKENS, EXPERTS, generator=torch.Generator().manual_seed(1))
    drawn[..., -1] = -1.0
    return drawn


def test_the_load_of_each_expert_is_counted(tmp_path):
    found, indices = routed(tmp_path, scores())
    assert found.load == tuple(int((indices == e).sum()) for e in range(EXPERTS))
    assert (found.choices, found.never_used, found.ties) == (INPUTS * TOKENS, (EXPERTS - 1,), 0)


def test_ties_at_the_boundary_of_the_choice_are_counted(tmp_path):
    tied = scores()
    tied[0, 0] = torch.tensor([0.9, 0.5, 0.5, 0.1, 0.2, 0.0])
    tied[1, 2] = torch.tensor([0.9, 0.9, 0.5, 0.1, 0.2, 0.0])  # both are chosen: no tie at the boundary
    assert routed(tmp_path, tied)[0].ties == 1


def test_ties_are_not_told_where_something_else_ranks(tmp_path):
    assert routed(tmp_path, scores(), torch.tensor([0.0, 0, 0, 0, 0, 5]))[0].ties is None


@pytest.mark.parametrize(
    ("choice", "found"), [([1, 1], "chosen twice"), ([0, EXPERTS], f"0 to {EXPERTS}"), ([-1, 2], "-1 to 2")]
)
def test_what_no_router_could_choose_is_refused(choice, found):
    with pytest.raises(SelfCheckError) as caught:
        require_choice(torch.tensor([[choice]]), INDICES, EXPERTS, "reassign")
    assert found in caught.value.found


def test_a_choice_in_any_order_is_one():
    require_choice(torch.tensor([[[5, 0], [2, 3]]]), INDICES, EXPERTS, "reassign")

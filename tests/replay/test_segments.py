"""Replays that share a prefix: the same bits as whole passes, and no operation more than the suffixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from small_models import WIDTH, CountingGate, sequence
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fxaudit import stages
from fxaudit.model.settings import exact_numerics
from fxaudit.model.trace import run_flat
from fxaudit.replay.segments import Chain, Explorer, frozen_chain, live_chain
from tests.oracles import models

BATCH, LAYERS = 3, 3


@dataclass(frozen=True)
class Named:
    """A replay that is told by what it binds: a number for each coefficient, None for its own value."""

    signature: tuple[int | None, ...]


@pytest.fixture(scope="module")
def frozen():
    return stages.freeze(models.gated()[0].eval(), (models.tokens(2, 0),))


@pytest.fixture(scope="module")
def run(frozen):
    """Input leaves, recorded coefficients, and other values for them by number."""
    leaves = [models.tokens(BATCH, 5)]
    with exact_numerics():
        _, values = frozen.run_tapped(leaves)
    own = list(values[: len(frozen.coefficients)])
    return leaves, own, lambda i, mark: own[i] if mark is None else (own[i] + 0.01 * (mark + 1)).clone()


def found(chain: Chain, leaves: list[Any], replays: list[Named], bind) -> dict[Named, tuple[Tensor, ...]]:
    outputs: dict[Named, tuple[Tensor, ...]] = {}

    def finish(done, output) -> None:
        outputs.update(dict.fromkeys(done, output))

    with exact_numerics():
        Explorer(chain, bind, finish).run(leaves, replays)
    return outputs


def sweep() -> list[Named]:
    """The baseline, then each controller by itself."""
    alone = [tuple(0 if i == k else None for i in range(LAYERS)) for k in range(LAYERS)]
    return [Named((None,) * LAYERS), *map(Named, alone)]


EVERY = [Named((a, b, c)) for a in (None, 0, 1) for b in (None, 0, 1) for c in (None, 0)]


def test_replays_that_share_have_the_bits_of_whole_frozen_passes(frozen, run):
    leaves, _, value = run
    chain = frozen_chain(frozen)
    outputs = found(chain, leaves, EVERY, lambda i, mark, _: value(i, mark))
    for replay, output in outputs.items():
        bound = dict(zip(chain.order, replay.signature, strict=True))
        with exact_numerics():
            expected = frozen.run_frozen(leaves, [value(i, bound[i]) for i in range(LAYERS)])
        assert torch.equal(output[0], expected[0])
    assert len({output[0].sum().item() for output in outputs.values()}) == len(EVERY)


def test_with_nothing_bound_the_live_segments_are_the_live_model(frozen, run):
    leaves = run[0]
    nothing = Named((None,) * LAYERS)
    outputs = found(live_chain(frozen), leaves, [nothing], lambda i, mark, computed: computed)
    with exact_numerics():
        expected = run_flat(frozen.traced.graph_module, leaves, frozen.traced.initial_state)
    assert torch.equal(outputs[nothing][0], expected[0])


def test_the_first_replay_finishes_first(frozen, run):
    order = []
    with exact_numerics():
        explorer = Explorer(frozen_chain(frozen), lambda i, mark, _: run[2](i, mark), lambda d, _: order.extend(d))
        explorer.run(run[0], sweep())
    assert order[0] == sweep()[0]
    assert set(order) == set(sweep())


def test_equal_replays_run_once(frozen, run):
    count = 0

    def finish(done, output) -> None:
        nonlocal count
        count += 1

    with exact_numerics():
        Explorer(frozen_chain(frozen), lambda i, mark, _: run[2](i, mark), finish).run(run[0], sweep() * 3)
    assert count == 1 + LAYERS


def flops(work) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


LAYER = 2 * BATCH * (models.WIDTH * models.TOKENS**2 + 2 * models.TOKENS * models.WIDTH * 24)
HEAD = 2 * BATCH * models.TOKENS * models.WIDTH * models.VOCABULARY


def test_a_sweep_costs_the_base_pass_and_the_suffixes(frozen, run):
    leaves, _, value = run
    # The gate of layer k is applied at the end of that layer, so what lies behind it are the later layers and the head.
    suffixes = sum((LAYERS - 1 - k) * LAYER + HEAD for k in range(LAYERS))
    cost = flops(lambda: found(frozen_chain(frozen), leaves, sweep(), lambda i, mark, _: value(i, mark)))
    assert cost == LAYERS * LAYER + HEAD + suffixes


def test_a_cumulative_sweep_costs_no_more_than_a_sweep(frozen, run):
    leaves, _, value = run
    depths = [Named(tuple(0 if i <= k else None for i in range(LAYERS))) for k in range(LAYERS)]
    suffixes = sum((LAYERS - 1 - k) * LAYER + HEAD for k in range(LAYERS))
    cost = flops(lambda: found(frozen_chain(frozen), leaves, [sweep()[0], *depths], lambda i, mark, _: value(i, mark)))
    assert cost == LAYERS * LAYER + HEAD + suffixes


def test_a_model_that_counts_its_calls_starts_every_replay_from_one_state(run):
    torch.manual_seed(0)
    counting = stages.freeze(CountingGate().eval(), (sequence(2),))
    leaves = [sequence(BATCH)]
    with exact_numerics():
        (expected, *_), (gate, *_) = counting.run_tapped(leaves)
    replays = [Named((mark,)) for mark in (None, 0, 1)]
    outputs = found(
        frozen_chain(counting),
        leaves,
        replays,
        lambda i, mark, _: gate if mark is None else torch.full_like(gate, mark),
    )
    assert frozen_chain(counting).stateful
    assert torch.equal(outputs[replays[0]][0], expected)
    assert expected.shape[-1] == WIDTH
    assert float(outputs[replays[1]][0].abs().max()) == 0.0


@pytest.mark.slow
def test_compiled_segments_agree_with_the_eager_ones(frozen, run):
    leaves, _, value = run
    results = [
        found(frozen_chain(frozen, compiled=compiled), leaves, sweep(), lambda i, mark, _: value(i, mark))
        for compiled in (False, True)
    ]
    for replay in sweep():
        torch.testing.assert_close(results[1][replay][0], results[0][replay][0], rtol=1e-4, atol=1e-4)

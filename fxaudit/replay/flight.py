"""Values in flight: coefficients of the perturbed run itself, given to other inputs of the same run.

A reassigned input gets what its donor computes in the perturbed run, and the donor may be in another batch. So the run
is recorded one coefficient at a time, in the order of the graph: everything before it is bound to what was recorded
before.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.model.data import DataSet
from fxaudit.replay.segments import Chain, Explorer, Replay
from fxaudit.replay.store import to_samples
from fxaudit.replay.values import Player, Sources, Treatment


def fly(
    frozen: FrozenModel,
    chain: Chain,
    data: DataSet,
    sources: Sources,
    treatment: Treatment,
    replay: Replay,
    directory: Path,
) -> None:
    """Record the coefficients of a run in flight into `sources.flights`, mapped from files in `directory`."""
    assert treatment.flight is not None
    assert isinstance(sources.flights, dict)
    place = (treatment.flight, treatment.seed)
    if place in sources.flights:
        return
    recorded: dict[str, Tensor] = {}
    sources.flights[place] = recorded
    for cut, mark in enumerate(replay.signature):
        if mark is None:
            continue
        coefficient = frozen.coefficients[chain.order[cut]]
        held: Tensor | None = None
        for batch in sources.recording.batches:
            leaves, _ = data.leaves(frozen.traced, batch.start, batch.size)
            player = Player(frozen, sources, batch, leaves)
            explorer: Explorer[Replay] = Explorer(chain, player.live_value, lambda done, found: None)
            rows = to_samples(explorer.until(leaves, replay, cut), coefficient, batch.size)[: batch.real]
            if held is None:
                file = directory / f"{len(sources.flights)}-{cut}"
                held = _mapped(file, (data.count, *rows.shape[1:]), rows.dtype)
            held[batch.start : batch.start + batch.real] = rows
        assert held is not None
        recorded[coefficient.key] = held


def _mapped(file: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in a file of its own, so that memory does not grow with the number of inputs."""
    count = torch.Size(shape).numel()
    return torch.from_file(str(file), shared=True, size=count, dtype=dtype).view(shape)

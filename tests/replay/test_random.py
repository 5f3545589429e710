"""Models that draw random numbers: every replay computes with the draws of the live run, whatever it leaves out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from fxaudit import stages
from fxaudit.cli import main

INPUTS, WIDTH, CLASSES, LAYERS = 6, 8, 4, 3


class Block(nn.Module):
    """Noise within the controller, which the frozen model does not draw, then dropped and added on the main path."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.score, self.squash = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        gate = self.squash(self.score(x) + torch.rand_like(x))
        return F.dropout(self.linear(x) * gate, 0.3, training=True) + torch.randn_like(x)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Noisy().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7)
    return model, torch.randn(2, WIDTH)


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(INPUTS, WIDTH, generator=generator)
    return inputs, torch.randint(0, CLASSES, (INPUTS,), generator=generator)


def replay(directory: Path, data: tuple[Tensor, Tensor], *options: str) -> dict:
    save_file({"x": data[0], "targets": data[1]}, directory / "data.safetensors")
    np.savez(directory / "permutations.npz", donors=DONORS, units=np.arange(WIDTH))
    arguments = ["replay", f"{Path(__file__).resolve()}:build", "--data", str(directory / "data.safetensors")]
    given = ["--permutations", str(directory / "permutations.npz"), "--batch-size", "3", "--json", *options]
    outcome = CliRunner().invoke(main, arguments + given, catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return json.loads(outcome.stdout)


# Donors across batches: a draw belongs to the place in the batch, so every input keeps its own.
DONORS = np.array([3, 4, 5, 1, 2, 0])


def eager(inputs: Tensor, targets: Tensor, replaced: dict[int, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Cross entropy and gates of the eager model, each batch of three from seed 0, with gates replaced by hooks."""
    model, _ = build()
    losses, gates = [], []
    for start in range(0, INPUTS, 3):
        seen: dict[int, Tensor] = {}

        def hook(k: int, start: int = start, seen: dict[int, Tensor] = seen):
            def called(module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
                seen[k] = output
                return replaced[k][start : start + 3] if k in replaced else None

            return called

        handles = [block.squash.register_forward_hook(hook(k)) for k, block in enumerate(model.blocks)]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            logits = model(inputs[start : start + 3])
        for handle in handles:
            handle.remove()
        losses.append(F.cross_entropy(logits.double(), targets[start : start + 3], reduction="none"))
        gates.append([seen[k] for k in range(LAYERS)])
    return torch.cat(losses), [torch.cat(parts) for parts in zip(*gates, strict=True)]


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_replay_draws_what_the_eager_model_draws(tmp_path, data, layer):
    found = replay(tmp_path, data, "--interventions", "reassign", "--scope", "controller", "--live")
    plain, own = eager(*data, {})
    assert found["baseline"]["per_input"] == pytest.approx(plain.tolist(), abs=1e-6)
    exchanged = own[layer][torch.from_numpy(DONORS)]
    others = {k: own[k] for k in range(LAYERS) if k != layer}
    expected = {"frozen": eager(*data, others | {layer: exchanged})[0], "live": eager(*data, {layer: exchanged})[0]}
    for feedback, losses in expected.items():
        assert (losses - plain).abs().max() > 1e-2
        (row,) = (
            r
            for r in found["interventions"]
            if r["feedback"] == feedback and r["controllers"][0].startswith(f"blocks.{layer}.")
        )
        assert row["per_input"] == pytest.approx(losses.tolist(), abs=1e-6)


def test_putting_every_unit_where_it_was_changes_nothing(tmp_path, data):
    found = replay(tmp_path, data, "--interventions", "permute-units", "--live")
    rows = [row for row in found["interventions"] if row["refused"] is None]
    assert len(rows) > LAYERS
    assert all(row["changed"] is False and row["delta"] == 0 for row in rows)


def test_the_frozen_model_computes_with_the_draws_of_the_live_one(data):
    model, example = build()
    frozen = stages.freeze(model, (example,))
    live = frozen.live(data[0])
    assert torch.equal(frozen(data[0], coefficients=live.coefficients), live.output)

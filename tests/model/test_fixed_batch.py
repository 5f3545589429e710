"""Models that keep something of each input in buffers made for one batch: no guard of the graph says so."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from fxaudit import stages
from fxaudit.model.load import load


class Cached(nn.Module):
    def __init__(self, batch: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(batch, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        # Fake tensors let any batch pass here, so that export makes no guard of it.
        self.cache[:, torch.zeros(1, dtype=torch.long)] = y.detach()[:, None]
        return y


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


def test_a_cache_fixes_the_batch() -> None:
    traced = stages.trace(Cached(3).eval(), (torch.randn(3, 4),))
    assert traced.sample == 3
    assert [f.text for f in traced.findings if f.kind == "static-batch"] == [
        "the graph takes only the traced batch size; the model writes to buffers that are made for it"
    ]


def test_a_buffer_that_any_number_of_inputs_writes_to_fixes_nothing() -> None:
    traced = stages.trace(Counting().eval(), (torch.randn(3, 4),))
    assert traced.is_batch_dynamic
    assert "mutated-buffer" in [f.kind for f in traced.findings]


def test_the_model_and_its_cache_are_left_as_they_were() -> None:
    model = Cached(3).eval()
    stages.trace(model, (torch.randn(3, 4),))
    assert not bool(model.cache.any())


def test_prepare_may_bring_the_inputs_that_fit_its_caches(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import torch\n"
        "from torch import nn\n"
        "def build():\n    return nn.Linear(4, 4), torch.zeros(2, 4)\n"
        "def prepare(module):\n    return module.double(), torch.ones(5, 4).double()\n"
        "def alone(module):\n    module.bias.data.zero_()\n"
    )
    made = load(f"{file}:build", prepare=f"{file}:prepare")
    assert made.module.weight.dtype == torch.float64
    assert torch.equal(made.arguments[0][0], torch.ones(5, 4).double())
    alone = load(f"{file}:build", prepare=f"{file}:alone")
    assert list(alone.arguments[0][0].shape) == [2, 4]
    assert not bool(alone.module.bias.any())

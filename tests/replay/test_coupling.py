"""Models that couple the inputs of a batch: found, named, and never padded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxaudit import stages
from fxaudit.errors import DataError

WIDTH, COUNT = 6, 6


class Gated(nn.Module):
    """A gate, and what its subclasses do with the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.linear(x) * torch.sigmoid(self.gate(x)))

    def mix(self, x: Tensor) -> Tensor:
        return x


class Capacity(Gated):
    """The first two inputs that score high pass, as in a router with a capacity."""

    def mix(self, x: Tensor) -> Tensor:
        high = (x[:, :1] > 0).long()
        return torch.where((high.cumsum(0) <= 2) & (high > 0), x, torch.zeros_like(x))


class Centred(Gated):
    """A norm over the batch."""

    def mix(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


def recorded(kind: type[Gated], directory, batch_size: int, count: int = COUNT):
    torch.manual_seed(0)
    frozen = stages.freeze(kind().eval(), (torch.randn(3, WIDTH),))
    inputs = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))
    return stages.record(frozen, {"x": inputs}, directory / "store", batch_size=batch_size)


def kinds(recording) -> list[str]:
    return [finding.kind for finding in recording.findings]


@pytest.mark.parametrize("kind", [Capacity, Centred])
def test_a_coupled_model_is_named_and_its_last_batch_not_padded(kind, tmp_path):
    assert kinds(recorded(kind, tmp_path, 3)) == ["coupled-inputs"]
    with pytest.raises(DataError, match="leave a batch of 4 incomplete") as caught:
        recorded(kind, tmp_path / "padded", 4)
    assert caught.value.remedy == "--batch-size 3, or --limit 4"
    assert not list((tmp_path / "padded").rglob("*.safetensors"))


def test_what_the_remedy_names_works(tmp_path):
    assert recorded(Capacity, tmp_path, 1).store.is_complete
    assert kinds(recorded(Capacity, tmp_path / "limited", 4, count=4)) == ["coupled-inputs"]


def test_a_model_that_takes_inputs_apart_is_padded(tmp_path):
    recording = recorded(Gated, tmp_path, 4)
    assert kinds(recording) == []
    assert recording.store.is_complete

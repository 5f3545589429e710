"""What an axis holds follows from where it comes from, not from its size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxaudit import ops, stages
from fxaudit.controllers.graphs import Dataflow
from fxaudit.controllers.roles import AxisRoles

TOKENS, WIDTH = 6, 36  # as many heads of six features as there are tokens


class _Model(nn.Module):
    def __init__(self, shape: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.conv, self.table = nn.Linear(WIDTH, WIDTH), nn.Conv2d(3, 4, 3), nn.Embedding(8, WIDTH)
        self.bank = nn.Parameter(torch.randn(4, WIDTH))
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return torch.sinh(self.shape(self, x))  # an op that nothing else uses marks the result


def _held(x: Tensor, shape: Callable[[nn.Module, Tensor], Tensor]) -> list[str]:
    torch.manual_seed(0)
    dataflow = Dataflow(stages.trace(_Model(shape), x).graph_module)
    (node,) = (n for n in dataflow.nodes if ops.op_name(n) == "sinh")
    roles = AxisRoles(dataflow)
    return ["+".join(sorted(roles.holds(node, dim))) for dim in range(len(ops.sizes(node) or ()))]


@pytest.mark.parametrize(
    ("shape", "held"),
    [
        (lambda m, x: m.fc(x).view(-1, TOKENS, 6, 6), ["sample", "position", "unit", "unit"]),
        (lambda m, x: m.fc(x).view(-1, TOKENS, 6, 6).transpose(1, 2), ["sample", "unit", "position", "unit"]),
        (lambda m, x: m.fc(x).reshape(-1, WIDTH), ["position+sample", "unit"]),
        (lambda m, x: m.fc(x).reshape(-1, 2, 3, WIDTH).softmax(2), ["sample", "position", "position", "unit"]),
        (lambda m, x: m.fc(x).mean(1), ["sample", "unit"]),
        (lambda m, x: m.fc(x)[:, -1], ["sample", "unit"]),
        (lambda m, x: m.fc(x).chunk(2, -1)[1], ["sample", "position", "unit"]),
        (lambda m, x: torch.stack([m.fc(x), x * 2], 1), ["sample", "unit", "position", "unit"]),
        (lambda m, x: torch.cat([m.fc(x)[:, :, None], x[:, :, None]], 2), ["sample", "position", "unit", "unit"]),
        (lambda m, x: F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1), ["sample", "position", "unit", "window"]),
        (lambda m, x: m.fc(x) @ x.transpose(1, 2), ["sample", "position", "position"]),
        (lambda m, x: m.fc(x)[:, None] + m.bank[:, None], ["sample", "unit", "position", "unit"]),
        (lambda m, x: m.bank[(m.fc(x)[..., 0] > 0).long()], ["sample", "position", "unit"]),
        (lambda m, x: torch.einsum("btd,ed->bet", x, m.bank), ["sample", "unit", "position"]),
        (lambda m, x: m.fc(x).mean(-1, keepdim=True) * m.fc(x).mean(1, keepdim=True), ["sample", "position", "unit"]),
    ],
)  # fmt: skip
def test_axes_of_a_sequence(shape: Callable[[nn.Module, Tensor], Tensor], held: list[str]) -> None:
    assert _held(torch.randn(3, TOKENS, WIDTH), shape) == held


@pytest.mark.parametrize(
    ("shape", "held"),
    [
        (lambda m, x: m.conv(x), ["sample", "unit", "position", "position"]),
        (lambda m, x: m.conv(x).flatten(2).transpose(1, 2), ["sample", "position", "unit"]),
        # Channels times nine pixels around each pixel, taken apart again.
        (lambda m, x: F.unfold(x, 3, padding=1), ["sample", "unit+window", "position"]),
        (lambda m, x: F.unfold(x, 3, padding=1).view(-1, 3, 9, 64), ["sample", "unit", "window", "position"]),
    ],
)
def test_axes_of_an_image(shape: Callable[[nn.Module, Tensor], Tensor], held: list[str]) -> None:
    assert _held(torch.randn(3, 3, 8, 8), shape) == held


def test_a_table_gives_units_to_each_id() -> None:
    assert _held(torch.randint(0, 8, (3, 5)), lambda m, ids: m.table(ids)) == ["sample", "position", "unit"]

"""Models small enough to trace in a second; each function is named on the command line as small_models.py:NAME."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

FILE = Path(__file__).resolve()
WIDTH, TOKENS = 8, 5


class TransposedGate(nn.Module):
    """Mixes tokens to gate features, so its coefficient [batch, token, feature] lies in memory as [batch, feature,
    token]."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.squash = nn.Linear(TOKENS, TOKENS), nn.Sigmoid()
        self.value, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x):
        gate = self.squash(self.mix(x.transpose(1, 2)).transpose(1, 2))
        return self.head(gate * self.value(x))


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc1, self.fc2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.squash = nn.Sigmoid()

    def forward(self, x):
        x = self.conv(x)
        return x * self.squash(self.fc2(F.relu(self.fc1(x.mean((2, 3), keepdim=True)))))


class Router(nn.Module):
    """Two of four experts for each token, tokens and inputs in one axis."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.softmax = nn.Linear(WIDTH, 4), nn.Softmax(-1)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        values, indices = self.router(flat).topk(2, -1)
        outputs = (flat[:, None, None] @ self.experts[indices]).squeeze(2)
        return (outputs * self.softmax(values).unsqueeze(-1)).sum(1).view_as(x)


class CountingGate(nn.Module):
    """A gate whose coefficient depends on how many calls came before."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        x = x + self.calls
        return torch.sigmoid(self.gate(x)) * self.value(x)


class ScaledGate(nn.Module):
    """Scaled by a tensor that is neither a parameter nor a buffer."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.gate, self.value, self.scale = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), torch.tensor([scale])

    def forward(self, x):
        return torch.sigmoid(self.gate(x)) * self.value(x) * self.scale


class PairedInputs(nn.Module):
    """Takes only an even number of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = torch.sigmoid(self.gate(x)) * self.value(x)
        return y.view(x.shape[0] // 2, 2, TOKENS, WIDTH).sum(1)


class Plain(nn.Module):
    """No controller."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x)


class Branching(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x


class ChangedUnderExport(nn.Module):
    def forward(self, x):
        return 2 * x if type(x) in (torch.Tensor, nn.Parameter) else 3 * x


def sequence(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, TOKENS, WIDTH)


def gated():
    return TransposedGate(), sequence()


def squeeze_excite():
    return SqueezeExcite(), torch.randn(2, 3, 6, 6)


def routed():
    return Router(), sequence()


def plain():
    return Plain(), sequence()


def branching():
    return Branching(), sequence()


def changed_under_export():
    return ChangedUnderExport(), sequence()

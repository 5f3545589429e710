"""Three small models with controllers of three kinds; each function is named on the command line as models.py:NAME.

`controllers` says which modules hand over coefficients, in the order of the forward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, TOKENS, WIDTH, CLASSES, EXPERTS = 24, 7, 12, 5, 6


def widened(layer: nn.Module, factor: float) -> nn.Module:
    """A layer with larger weights, so that coefficients vary enough to matter."""
    with torch.no_grad():
        layer.weight.mul_(factor)
    return layer


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.squash = nn.LayerNorm(WIDTH), widened(nn.Linear(WIDTH, WIDTH), 3), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.squash(self.linear(self.norm(x)))


class GatedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.norm = Gate(), nn.LayerNorm(WIDTH)
        self.mix, self.up, self.down = nn.Linear(TOKENS, TOKENS), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        value = self.mix(x.transpose(1, 2)).transpose(1, 2) + self.down(F.gelu(self.up(self.norm(x))))
        return x + self.gate(x) * value


class GatedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(GatedLayer() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def controllers(self) -> list[nn.Module]:
        return [layer.gate for layer in self.layers]


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.excite = widened(nn.Conv2d(8, 4, 1), 4), widened(nn.Conv2d(4, 8, 1), 8)
        self.squash = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.squash(self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))


class SqueezeExciteLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv2d(8, 8, 3, padding=1), SqueezeExcite()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        return x * self.gate(x)


class SqueezeExciteNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3), widened(nn.Linear(8, CLASSES), 10)
        self.layers = nn.ModuleList(SqueezeExciteLayer() for _ in range(2))

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))

    def controllers(self) -> list[nn.Module]:
        return [layer.gate for layer in self.layers]


class Router(nn.Module):
    """Weights and indices of the best two experts, [inputs * tokens, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.softmax = widened(nn.Linear(WIDTH, EXPERTS), 2), nn.Softmax(-1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, indices = self.softmax(self.linear(x)).topk(2, -1)
        return weights / weights.sum(-1, keepdim=True), indices


class RoutedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.norm = Router(), nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(TOKENS, TOKENS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        flat = self.norm(x).reshape(-1, WIDTH)
        weights, indices = self.router(flat)
        outputs = (flat[:, None, None] @ self.experts[indices]).squeeze(2)
        return x + (outputs * weights.unsqueeze(-1)).sum(1).view_as(x)


class RoutedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(RoutedLayer() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def controllers(self) -> list[nn.Module]:
        return [layer.router for layer in self.layers]


def tokens(count: int, seed: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (count, TOKENS), generator=torch.Generator().manual_seed(seed))


def images(count: int, seed: int) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def gated() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    return GatedLanguageModel(), tokens(2, 0)


def squeeze_excite() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    return SqueezeExciteNetwork(), images(2, 0)


def routed() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    return RoutedLanguageModel(), tokens(2, 0)

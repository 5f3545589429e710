"""The FeatureGate Transformer: a causal language model whose blocks gate every feature of both residual branches.

    x = x + sigmoid(W_a LN_a(x) + b_a) * Attention(LN_a(x))
    x = x + sigmoid(W_f LN_f(x) + b_f) * FFN(LN_f(x))

`trained` returns the small model that README.md describes, with text to run it on.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HERE = Path(__file__).parent
WEIGHTS = HERE / "weights.safetensors"
EXAMPLE_TEXT = HERE / "evaluation.txt"
EXAMPLE_ROWS, EXAMPLE_LENGTH = 4, 128

INITIAL_STD = 0.02
# sigmoid(2) = 0.88: training starts close to a transformer without gates.
INITIAL_GATE_BIAS = 2.0
ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class Config:
    layers: int
    width: int
    heads: int
    vocabulary: int

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def ffn_width(self) -> int:
        return 4 * self.width

    @property
    def parameter_count(self) -> int:
        block = 14 * self.width**2 + 15 * self.width
        return self.layers * block + self.vocabulary * self.width + 2 * self.width


PRESETS = {
    "tiny": Config(layers=2, width=32, heads=2, vocabulary=256),
    "280k": Config(layers=2, width=96, heads=4, vocabulary=256),
    "1m": Config(layers=4, width=128, heads=4, vocabulary=256),
    "76m": Config(layers=16, width=512, heads=8, vocabulary=32_768),
    "504m": Config(layers=32, width=1024, heads=16, vocabulary=32_768),
}


class FeatureGateTransformer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self._initialise()

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [batch, token, vocabulary] for token ids [batch, token]."""
        rotation = rotary_tables(input_ids.shape[1], self.config.head_width, input_ids.device)
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, rotation)
        return F.linear(self.norm(x), self.embedding.weight)

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INITIAL_STD)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        # 2L branches add up in the residual stream.
        residual_std = INITIAL_STD / math.sqrt(2 * self.config.layers)
        for block in self.blocks:
            assert isinstance(block, Block)
            nn.init.normal_(block.attention.output.weight, std=residual_std)
            nn.init.normal_(block.ffn.down.weight, std=residual_std)
            nn.init.constant_(block.attention_gate.bias, INITIAL_GATE_BIAS)
            nn.init.constant_(block.ffn_gate.bias, INITIAL_GATE_BIAS)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention_gate = nn.Linear(config.width, config.width)
        self.attention = CausalAttention(config)
        self.ffn_norm = nn.LayerNorm(config.width)
        self.ffn_gate = nn.Linear(config.width, config.width)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        normed = self.attention_norm(x)
        x = x + torch.sigmoid(self.attention_gate(normed)) * self.attention(normed, rotation)
        normed = self.ffn_norm(x)
        return x + torch.sigmoid(self.ffn_gate(normed)) * self.ffn(normed)


class CausalAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.head_width = config.head_width
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (3 * self.heads, self.head_width)).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(rotate(query, rotation), rotate(key, rotation), value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.ffn_width)
        self.down = nn.Linear(config.ffn_width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def rotary_tables(length: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_width / 2] of the rotary angles."""
    # Computed, not stored: a buffer would limit the length and would be lost when a model is built on the meta device.
    frequencies = ROTARY_BASE ** (torch.arange(0, head_width, 2, device=device) / -head_width)
    angles = torch.arange(length, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = rotation
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def build(preset: str) -> FeatureGateTransformer:
    """A model with random weights, drawn from torch's global generator."""
    return FeatureGateTransformer(PRESETS[preset])


def load(preset: str, weights: Path) -> FeatureGateTransformer:
    from safetensors.torch import load_file

    with torch.device("meta"):
        model = build(preset)
    model.load_state_dict(load_file(weights), assign=True)
    return model


def trained() -> tuple[FeatureGateTransformer, Tensor]:
    """The trained 1m model in eval mode, and byte ids [4, 128] of text that it was not trained on."""
    return load("1m", WEIGHTS).eval(), example()


def untrained_280k() -> tuple[FeatureGateTransformer, Tensor]:
    """A model to give weights to, in eval mode, and text to run it on."""
    return build("280k").eval(), example()


def example() -> Tensor:
    """Byte ids [4, 128] from evenly spaced places of the evaluation text."""
    text = EXAMPLE_TEXT.read_bytes()
    starts = range(0, len(text), len(text) // EXAMPLE_ROWS)[:EXAMPLE_ROWS]
    return torch.tensor([list(text[start : start + EXAMPLE_LENGTH]) for start in starts])

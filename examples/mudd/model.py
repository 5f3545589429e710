"""MUDDPythia in plain PyTorch: a Pythia-style transformer whose residual stream is replaced by multiway dynamic dense
connections (Xiao et al. 2025, arXiv:2502.12170).

After each block a small network looks at the newest hidden state and returns, for each token, how much of every earlier
hidden state goes into the query, key, value and residual streams of the next block: one controller for each layer. Its
coefficient is the tensor after the static bias, [way, batch, token, source].

Parameter names are those of the public checkpoints, so `load_state_dict` takes them once their caches are
dropped, which are buffers of a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HERE = Path(__file__).parent
WEIGHTS = HERE / "weights.safetensors"
EXAMPLE_TEXT = HERE.parent / "featuregate" / "evaluation.txt"
EXAMPLE_ROWS, EXAMPLE_LENGTH = 4, 128

WAYS = ("query", "key", "value", "residual")
INITIAL_STD = 0.02


@dataclass(frozen=True)
class Config:
    """Sizes of a MUDDPythia model; defaults are those that all published sizes share."""

    layers: int
    width: int
    heads: int
    hidden: int  # of the feed-forward network half-way up the stack
    vocabulary: int = 50432
    context: int = 2048
    eps: float = 1e-5
    rotary_fraction: float = 0.25
    rotary_base: float = 10000.0

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def rotary_width(self) -> int:
        return int(self.head_width * self.rotary_fraction)

    def feed_forward_width(self, layer: int) -> int:
        """Deeper feed-forward networks are wider: from half to one and a half times `hidden`, in steps of 128."""
        return 128 * round(self.hidden * (layer / (self.layers - 1) + 0.5) / 128)

    def ways(self, layer: int) -> int:
        """The streams that are mixed after a block; after the last one only the residual stream is left."""
        return 1 if layer == self.layers - 1 else len(WAYS)

    def sources(self, layer: int) -> int:
        """The hidden states that exist after a block: the embedding, and one for each block so far."""
        return layer + 2

    def controller_width(self, layer: int) -> int:
        """The hidden width of a controller: its outputs, four times those in the last layer, up to a step of 64.

        An exact multiple of 64 moves up one step, as in the published code.
        """
        outputs = self.ways(layer) * self.sources(layer)
        return ((outputs * (4 if layer == self.layers - 1 else 1)) // 64 + 1) * 64

    @property
    def coefficients(self) -> int:
        """Mixing coefficients for each token: 2 (L - 1) (L + 2) + L + 1."""
        return sum(self.ways(layer) * self.sources(layer) for layer in range(self.layers))


MUDDPYTHIA_1_4B = Config(layers=24, width=2048, heads=16, hidden=8192)
MUDDPYTHIA_2_8B = Config(layers=32, width=2560, heads=32, hidden=10240)
TINY = Config(layers=5, width=64, heads=4, hidden=256, vocabulary=256, context=256)
PRESETS = {"tiny": TINY, "1.4b": MUDDPYTHIA_1_4B, "2.8b": MUDDPYTHIA_2_8B}


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, with a learned scale unless `width` is None."""

    def __init__(self, width: int | None, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = None if width is None else nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed if self.weight is None else normed * self.weight


def rotary_tables(config: Config, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [position, rotary width]; the GPT-NeoX pairing of dimension i with i + half."""
    exponents = torch.arange(0, config.rotary_width, 2, device=device) / config.rotary_width
    angles = torch.arange(length, device=device)[:, None] * config.rotary_base**-exponents
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dimensions of each head by position; `x` is [batch, head, token, head width]."""
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-second, first), -1) * sin, kept), -1)


class Attention(nn.Module):
    """Causal attention whose queries, keys and values come from three different streams."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(config.width, config.width) for _ in range(4))
        self.q_norm = RMSNorm(config.head_width, config.eps)
        self.k_norm = RMSNorm(config.head_width, config.eps)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = query.shape
        q, k, v = (
            linear(x).view(batch, length, self.config.heads, self.config.head_width)
            for linear, x in ((self.wq, query), (self.wk, key), (self.wv, value))
        )
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        attended = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v.transpose(1, 2), is_causal=True
        )
        return self.wo(attended.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    """Attention and feed-forward network in parallel, both added to the residual stream.

    The first block has one pre-norm, since its streams are all the embedding; later ones norm each stream by itself.
    """

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.attention = Attention(config)
        if layer == 0:
            self.attention_norm = nn.LayerNorm(config.width, eps=config.eps)
        else:
            self.attention_norms = nn.ModuleList(nn.LayerNorm(config.width, eps=config.eps) for _ in range(3))
        self.ffn_norm = nn.LayerNorm(config.width, eps=config.eps)
        self.feed_forward = FeedForward(config.width, config.feed_forward_width(layer))
        self.layer = layer

    def forward(self, streams: tuple[Tensor, Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor) -> Tensor:
        *inputs, residual = streams
        if self.layer == 0:
            query = key = value = self.attention_norm(residual)
        else:
            query, key, value = (norm(x) for norm, x in zip(self.attention_norms, inputs, strict=True))
        attended = self.attention(query, key, value, cos, sin)
        return residual + attended + self.feed_forward(self.ffn_norm(residual))


class DynamicDense(nn.Module):
    """The controller: from the newest hidden state to the token's mixing weights, before their static bias."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.ways, self.sources = config.ways(layer), config.sources(layer)
        self.norm = RMSNorm(None, config.eps)
        hidden = config.controller_width(layer)
        self.w1 = nn.Linear(config.width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, self.ways * self.sources, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, token, width] to [way, batch, token, source]."""
        mixing = self.w2(F.gelu(self.w1(self.norm(x))))
        return mixing.unflatten(-1, (self.ways, self.sources)).permute(2, 0, 1, 3)


class MUDDPythia(nn.Module):
    """Token ids [batch, token] to logits [batch, token, vocabulary].

    `contraction` mixes by one einsum instead of a sum of products, as a fused implementation would.
    """

    def __init__(self, config: Config, contraction: bool = False) -> None:
        super().__init__()
        self.config, self.contraction = config, contraction
        self.tok_embeddings = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.dynamic_dense = nn.ModuleList(DynamicDense(config, layer) for layer in range(config.layers))
        self.dense_bs = nn.ParameterList(
            nn.Parameter(torch.zeros(config.ways(layer), config.sources(layer))) for layer in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width, eps=config.eps)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)
        with torch.no_grad():
            for bias in self.dense_bs:
                bias[:, -1] = 1.0  # without a dynamic part, each stream is the newest hidden state

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = rotary_tables(self.config, tokens.shape[1], tokens.device)
        states = [self.tok_embeddings(tokens)]
        streams: list[Tensor] = states * len(WAYS)
        for block, dense, bias in zip(self.layers, self.dynamic_dense, self.dense_bs, strict=True):
            states.append(block(tuple(streams), cos, sin))
            streams = self.mix(dense(states[-1]) + bias[:, None, None], states)
        return self.output(self.norm(streams[0]))

    def mix(self, coefficients: Tensor, states: list[Tensor]) -> list[Tensor]:
        """One stream for each way: sum over sources of coefficient times hidden state. No softmax, signed."""
        if self.contraction:
            return list(torch.einsum("lbtd,cbtl->cbtd", torch.stack(states), coefficients).unbind(0))
        return [
            sum(weight[..., source, None] * state for source, state in enumerate(states)) for weight in coefficients
        ]


def build(preset: str) -> MUDDPythia:
    """A model to train, with random weights from torch's global generator.

    Controllers end in zeros, so that training starts from a transformer whose streams are the newest hidden state.
    """
    model = MUDDPythia(PRESETS[preset], contraction=True)
    # Two branches for each layer add up in the residual stream.
    residual_std = INITIAL_STD / math.sqrt(2 * model.config.layers)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(
                module.weight, std=residual_std if name.endswith((".wo", "feed_forward.w2")) else INITIAL_STD
            )
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, DynamicDense):
            nn.init.normal_(module.w1.weight, std=model.config.width**-0.5)
    for dense in model.dynamic_dense:
        assert isinstance(dense, DynamicDense)
        nn.init.zeros_(dense.w2.weight)
    return model


def trained() -> tuple[MUDDPythia, Tensor]:
    """The trained tiny model in eval mode, and byte ids [4, 128] of text that it was not trained on."""
    from safetensors.torch import load_file

    with torch.device("meta"):
        model = MUDDPythia(TINY)
    model.load_state_dict(load_file(WEIGHTS), assign=True)
    text = EXAMPLE_TEXT.read_bytes()
    starts = range(0, len(text), len(text) // EXAMPLE_ROWS)[:EXAMPLE_ROWS]
    return model.eval(), torch.tensor([list(text[start : start + EXAMPLE_LENGTH]) for start in starts])


def muddpythia_1_4b() -> tuple[nn.Module, Tensor]:
    """The 1.4B model and two inputs of eight tokens."""
    return MUDDPythia(MUDDPYTHIA_1_4B), _tokens(MUDDPYTHIA_1_4B)


def muddpythia_2_8b() -> tuple[nn.Module, Tensor]:
    """The 2.8B model and two inputs of eight tokens."""
    return MUDDPythia(MUDDPYTHIA_2_8B), _tokens(MUDDPYTHIA_2_8B)


def tiny(contraction: bool = False) -> tuple[nn.Module, Tensor]:
    """A five-layer model with random weights whose controllers matter, and two inputs of eight tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MUDDPythia(TINY, contraction)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        return model, _tokens(TINY)


def _tokens(config: Config) -> Tensor:
    return torch.randint(0, config.vocabulary, (2, 8), generator=torch.Generator().manual_seed(0))

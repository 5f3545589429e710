"""MUDDPythia as a module of a Hugging Face directory, of the form that the public checkpoints have.

Written from the description in arXiv:2502.12170. Like the published module it must be given caches before its first
call: `setup_caches` makes key-value buffers of one batch size, into which every call writes in place. It takes `idx`
and returns a named tuple. Prefill only: a single token at a time is not implemented.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import PreTrainedModel

from .configuration_muddpythia import MUDDPythiaConfig


class KVCache(nn.Module):
    def __init__(self, batch: int, length: int, heads: int, head_width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(batch, heads, length, head_width, dtype=dtype))
        self.register_buffer("v_cache", torch.zeros(batch, heads, length, head_width, dtype=dtype))

    def update(self, input_pos: Tensor, k: Tensor, v: Tensor) -> None:
        self.k_cache[:, :, input_pos] = k
        self.v_cache[:, :, input_pos] = v


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return unit_rms(x, self.eps) * self.weight


def unit_rms(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).type_as(x)


class Attention(nn.Module):
    def __init__(self, config: MUDDPythiaConfig) -> None:
        super().__init__()
        self.heads, self.head_width = config.n_head, config.dim // config.n_head
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(config.dim, config.dim) for _ in range(4))
        self.q_norm, self.k_norm = RMSNorm(self.head_width, config.norm_eps), RMSNorm(self.head_width, config.norm_eps)
        self.kv_cache: KVCache | None = None

    def forward(self, streams: list[Tensor], rotation: Tensor, mask: Tensor, input_pos: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (self.heads, self.head_width))
            for linear, x in zip((self.wq, self.wk, self.wv), streams, strict=True)
        )
        q, k = rotated(self.q_norm(q), rotation), rotated(self.k_norm(k), rotation)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.kv_cache is not None:
            self.kv_cache.update(input_pos, k, v)
        scores = q @ k.transpose(-2, -1) * self.head_width**-0.5
        probabilities = scores.masked_fill(~mask[..., : k.shape[-2]], torch.finfo(scores.dtype).min).softmax(-1)
        return self.wo((probabilities @ v).transpose(1, 2).flatten(2))


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """`x` [batch, token, head, head width] with its first dimensions turned by `rotation` [2, token, pairs]."""
    cosine, sine = rotation[:, None, :, None].unbind(0)
    pairs = cosine.shape[-1]
    first, second, kept = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine, kept), -1)


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    def __init__(self, config: MUDDPythiaConfig, layer: int) -> None:
        super().__init__()
        norms = [nn.LayerNorm(config.dim, eps=config.norm_eps) for _ in range(3 if layer else 1)]
        if layer:
            self.attention_norms = nn.ModuleList(norms)
        else:
            self.attention_norm = norms[0]
        self.attention = Attention(config)
        self.ffn_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        hidden = config.intermediate_size * (layer / (config.n_layer - 1) + 0.5)
        self.feed_forward = FeedForward(config.dim, 128 * round(hidden / 128))
        self.layer = layer

    def forward(self, x: Any, rotation: Tensor, mask: Tensor, input_pos: Tensor) -> Tensor:
        if self.layer:
            *streams, residual = x
            streams = [norm(stream) for norm, stream in zip(self.attention_norms, streams, strict=True)]
        else:
            residual, streams = x, [self.attention_norm(x)] * 3
        attended = self.attention(streams, rotation, mask, input_pos)
        return residual + attended + self.feed_forward(self.ffn_norm(residual))


class MultiwayDynamicDense(nn.Module):
    def __init__(self, config: MUDDPythiaConfig, layer: int) -> None:
        super().__init__()
        last = layer == config.n_layer - 1
        self.ways, self.eps = (1 if last else 4), config.norm_eps
        outputs = self.ways * (layer + 2)
        hidden = (outputs * (4 if last else 1) // 64 + 1) * 64
        self.w1, self.w2 = nn.Linear(config.dim, hidden, bias=False), nn.Linear(hidden, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixing = self.w2(F.gelu(self.w1(unit_rms(x, self.eps))))
        return mixing.unflatten(-1, (self.ways, -1)).permute(2, 0, 1, 3)


class MUDDPythia(PreTrainedModel):
    config_class = MUDDPythiaConfig

    def __init__(self, config: MUDDPythiaConfig) -> None:
        super().__init__(config)
        layers = range(config.n_layer)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, layer) for layer in layers)
        self.dynamic_dense = nn.ModuleList(MultiwayDynamicDense(config, layer) for layer in layers)
        self.dense_bs = nn.ParameterList(
            nn.Parameter(torch.randn(dense.ways, layer + 2)) for layer, dense in enumerate(self.dynamic_dense)
        )
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.rotation: Tensor | None = None

    def setup_caches(self, max_batch_size: int, max_seq_length: int, dtype: torch.dtype = torch.float32) -> None:
        """Make the buffers that every call writes to, for batches of exactly `max_batch_size`, and the tables."""
        config, device = self.config, self.tok_embeddings.weight.device
        head_width = config.dim // config.n_head
        for block in self.layers:
            block.attention.kv_cache = KVCache(max_batch_size, max_seq_length, config.n_head, head_width, dtype)
        turned = int(head_width * config.rotary_pct)
        exponents = torch.arange(0, turned, 2, device=device) / turned
        angles = torch.arange(config.block_size, device=device)[:, None] * config.rope_base**-exponents
        self.rotation = torch.stack((angles.cos(), angles.sin()))
        self.causal_mask = torch.ones(max_seq_length, max_seq_length, dtype=torch.bool, device=device).tril()

    def forward(self, idx: Tensor, input_pos: Tensor | None = None, return_tensor: bool = False) -> Any:
        assert self.rotation is not None, "Caches must be initialized first"
        if input_pos is None:
            input_pos = torch.arange(idx.shape[-1], device=idx.device, dtype=torch.int)
        mask, rotation = self.causal_mask[None, None, input_pos], self.rotation[:, input_pos]
        x: Any = self.tok_embeddings(idx)
        states = [x]
        for block, dense, bias in zip(self.layers, self.dynamic_dense, self.dense_bs, strict=True):
            states.append(block(x, rotation, mask, input_pos))
            coefficients = dense(states[-1]) + bias[:, None, None, :]
            x = [sum(weight[..., j, None] * state for j, state in enumerate(states)) for weight in coefficients]
        logits = self.output(self.norm(x[0]))
        if return_tensor:
            return logits
        # A class of its own for every call, as in the published module.
        CausalLMOutput = namedtuple("CausalLMOutput", ["logits"])
        return CausalLMOutput(logits=logits)

"""FeatureGate Transformer: every sublayer's output is rescaled feature by feature by a sigmoid of its own input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.attention_gate, self.feed_forward_gate = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, cos, sin):
        h = self.norm1(x)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(h).chunk(3, -1))
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + torch.sigmoid(self.attention_gate(h)) * self.out(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + torch.sigmoid(self.feed_forward_gate(h)) * self.down(F.gelu(self.up(h)))


class FeatureGateTransformer(nn.Module):
    def __init__(self, layers=16, dim=64, heads=4, vocabulary=128):
        super().__init__()
        self.head_dim = dim // heads
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList([Block(dim, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)

    def forward(self, input_ids):
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        frequency = 10000.0 ** (-torch.arange(0, self.head_dim, 2, device=input_ids.device) / self.head_dim)
        angle = torch.outer(position, frequency).repeat(1, 2)
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, angle.cos(), angle.sin())
        return F.linear(self.norm(x), self.embed.weight)

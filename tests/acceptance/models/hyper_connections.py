"""Hyper-connections (Zhu et al. 2024, arXiv:2409.19606), in the style of the public PyTorch package of that name.

The package starts its dynamic parts at zero; here they are drawn, so that the mixing depends on the input.
"""

from __future__ import annotations

from random import Random

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.scale = dim**0.5
        self.gamma = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return F.normalize(x, dim=-1) * self.scale * (self.gamma + 1)


class HyperConnections(nn.Module):
    """Streams lie in the batch axis, as ``(b s) t d``."""

    def __init__(self, streams, dim, branch, layer_index=None):
        super().__init__()
        self.branch, self.num_residual_streams = branch, streams
        self.norm = RMSNorm(dim)
        index = Random(0).randrange(streams) if layer_index is None else layer_index % streams
        self.static_beta = nn.Parameter(torch.ones(streams))
        alpha = torch.zeros(streams, 1)
        alpha[index, :] = 1.0
        self.static_alpha = nn.Parameter(torch.cat([alpha, torch.eye(streams)], dim=1))
        self.dynamic_alpha_fn = nn.Parameter(torch.randn(dim, streams + 1) * dim**-0.5)
        self.dynamic_alpha_scale = nn.Parameter(torch.ones(()))
        self.dynamic_beta_fn = nn.Parameter(torch.randn(dim) * dim**-0.5)
        self.dynamic_beta_scale = nn.Parameter(torch.ones(()))

    def width_connection(self, residuals):
        s = self.num_residual_streams
        residuals = residuals.unflatten(0, (-1, s)).movedim(1, 2)  # b t s d
        normed = self.norm(residuals)
        alpha = torch.tanh(normed @ self.dynamic_alpha_fn) * self.dynamic_alpha_scale + self.static_alpha
        beta = torch.tanh(normed @ self.dynamic_beta_fn) * self.dynamic_beta_scale + self.static_beta
        mixed = torch.einsum("...st,...sd->...td", alpha, residuals)
        branch_input, residuals = mixed[..., 0, :], mixed[..., 1:, :]
        return branch_input, residuals, beta

    def depth_connection(self, output, residuals, beta):
        residuals = torch.einsum("btd,bts->btsd", output, beta) + residuals
        return residuals.movedim(2, 1).flatten(0, 1)

    def forward(self, residuals):
        branch_input, residuals, beta = self.width_connection(residuals)
        return self.depth_connection(self.branch(branch_input), residuals, beta)


class FeedForward(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    """`branches` attention and feed-forward branches in turn, each behind hyper-connections."""

    def __init__(self, branches=6, dim=32, streams=4, vocabulary=128):
        super().__init__()
        self.streams = streams
        self.embed = nn.Embedding(vocabulary, dim)
        kinds = [Attention if i % 2 == 0 else FeedForward for i in range(branches)]
        self.layers = nn.ModuleList([HyperConnections(streams, dim, kind(dim), i) for i, kind in enumerate(kinds)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary)

    def forward(self, input_ids):
        x = self.embed(input_ids).repeat_interleave(self.streams, dim=0)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.unflatten(0, (-1, self.streams)).sum(1)))

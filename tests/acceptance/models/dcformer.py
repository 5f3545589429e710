"""DCFormer: dynamically composable multi-head attention (Xiao et al. 2024, arXiv:2405.08553), prefill path.

Attention logits and probabilities are mixed over heads by low-rank and diagonal maps that each query and each key
computes for itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class DynamicWeightProjection(nn.Module):
    """Four branches (before and after the softmax, by query and by key) of two low-rank factors and a diagonal."""

    def __init__(self, dim, heads, rank=2):
        super().__init__()
        self.heads, self.rank, self.hidden = heads, rank, 4 * heads
        self.dw1 = nn.Parameter(torch.randn(dim, 4, self.hidden) * dim**-0.5)
        self.qkw = nn.Parameter(torch.randn(4, self.hidden, 2 * rank, heads) * self.hidden**-0.5)
        self.dd = nn.Parameter(torch.randn(dim, 4 * heads) * dim**-0.5)

    def forward(self, x):
        hidden = F.gelu(torch.einsum("btd,dck->btck", x, self.dw1))
        w1, w2 = torch.einsum("btck,ckin->btcin", hidden, self.qkw).chunk(2, dim=-2)
        w1 = w1 * torch.rsqrt(w1.pow(2).mean(-1, keepdim=True) + 1e-6)
        dd = torch.tanh(torch.einsum("btd,de->bte", x, self.dd)).unflatten(-1, (4, self.heads))
        pre_q, pre_k, post_q, post_k = ((w1[:, :, i], w2[:, :, i], dd[:, :, i]) for i in range(4))
        return (pre_q, pre_k), (post_q, post_k)


def cross_head(inputs, query, key):
    """Head mixing of `inputs` [batch, head, query token, key token] by the maps of both sides."""
    out = inputs
    (qw1, qw2, qdd), (kw1, kw2, kdd) = query, key
    for i in range(qw1.shape[-2]):
        mixed = torch.einsum("bnts,btn->bts", inputs, qw1[..., i, :])
        out = out + torch.einsum("bts,btn->bnts", mixed, qw2[..., i, :])
        mixed = torch.einsum("bnts,bsn->bts", inputs, kw1[..., i, :])
        out = out + torch.einsum("bts,bsn->bnts", mixed, kw2[..., i, :])
    out = out + torch.einsum("bnts,btn->bnts", inputs, qdd)
    return out + torch.einsum("bnts,bsn->bnts", inputs, kdd)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.dyn_w_proj = DynamicWeightProjection(dim, heads)

    def forward(self, x, mask):
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, self.heads, self.head_dim).transpose(1, 2) for y in self.wqkv(x).chunk(3, -1))
        pre, post = self.dyn_w_proj(x)
        logits = q @ k.transpose(-2, -1) * self.head_dim**-0.5
        logits = cross_head(logits, *pre)
        probs = torch.softmax(torch.where(mask, logits, torch.finfo(logits.dtype).min), -1)
        probs = cross_head(probs, *post)
        return self.wo((probs @ v).transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.w1, self.w2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x, mask):
        return x + self.attention(self.attention_norm(x), mask) + self.w2(F.gelu(self.w1(self.ffn_norm(x))))


class DCPythia(nn.Module):
    def __init__(self, layers=32, dim=64, heads=4, vocabulary=128):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList([Block(dim, heads) for _ in range(layers)])
        self.norm, self.output = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, input_ids):
        t = input_ids.shape[1]
        mask = torch.tril(torch.ones(t, t, dtype=torch.bool, device=input_ids.device))
        x = self.tok_embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.output(self.norm(x))

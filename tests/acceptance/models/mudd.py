"""MUDDPythia: multiway dynamic dense connections (Xiao et al. 2025, arXiv:2502.12170), after the published description.

The static part of the connections is a free parameter and the dynamic part is added to it; here both are drawn large
enough that the mixing weights depend on the input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5, scale=True):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim)) if scale else None

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return y.type_as(x) if self.weight is None else y.type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self, dim, heads, rotary):
        super().__init__()
        self.heads, self.head_dim, self.rotary = heads, dim // heads, rotary
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim) for _ in range(4))
        self.q_norm, self.k_norm = RMSNorm(self.head_dim), RMSNorm(self.head_dim)

    def rotate(self, x, cos, sin):
        first, rest = x[..., : self.rotary], x[..., self.rotary :]
        a, b = first.chunk(2, -1)
        return torch.cat([first * cos + torch.cat([-b, a], -1) * sin, rest], -1)

    def forward(self, q, k, v, cos, sin, mask):
        b, t, _ = q.shape
        q, k, v = (w(x).view(b, t, self.heads, self.head_dim) for w, x in ((self.wq, q), (self.wk, k), (self.wv, v)))
        q, k, v = (x.transpose(1, 2) for x in (self.q_norm(q), self.k_norm(k), v))
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        logits = q @ k.transpose(-2, -1) / self.head_dim**0.5
        probs = F.softmax(torch.where(mask, logits, -65504.0), dim=-1)
        return self.wo((probs @ v).transpose(1, 2).reshape(b, t, -1))


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    def __init__(self, dim, heads, hidden, rotary, first):
        super().__init__()
        self.first = first
        if first:
            self.attention_norm = nn.LayerNorm(dim)
        else:
            self.attention_norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(3)])
        self.attention = Attention(dim, heads, rotary)
        self.ffn_norm = nn.LayerNorm(dim)
        self.feed_forward = FeedForward(dim, hidden)

    def forward(self, x, cos, sin, mask):
        if self.first:
            q = k = v = self.attention_norm(x)
            r = x
        else:
            (q, k, v), r = (norm(s) for norm, s in zip(self.attention_norms, x[:3], strict=True)), x[3]
        return r + self.attention(q, k, v, cos, sin, mask) + self.feed_forward(self.ffn_norm(r))


class MultiwayDynamicDenseBlock(nn.Module):
    def __init__(self, dim, layer, ways, last):
        super().__init__()
        self.ways, self.sources = ways, layer + 2
        hidden = ways * self.sources * (4 if last else 1)
        hidden = (hidden // 64 + 1) * 64
        self.norm = RMSNorm(dim, scale=False)
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.act = nn.GELU()
        self.w2 = nn.Linear(hidden, ways * self.sources, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        dw = self.w2(self.act(self.w1(self.norm(x))))
        return dw.reshape(b, t, self.ways, self.sources).permute(2, 0, 1, 3)  # ways, batch, token, source

    def layer_mix(self, hids, dw):
        return tuple(sum(dw[c, :, :, j, None] * hids[j] for j in range(self.sources)) for c in range(self.ways))


class MUDDPythia(nn.Module):
    def __init__(self, layers=24, dim=64, heads=4, intermediate=256, vocabulary=128, rotary=4, ways=4):
        super().__init__()
        self.rotary = rotary
        self.tok_embeddings = nn.Embedding(vocabulary, dim)
        self.layers, self.dynamic_dense, self.dense_bs = nn.ModuleList(), nn.ModuleList(), nn.ParameterList()
        for i in range(layers):
            last = i == layers - 1
            hidden = 128 * round((intermediate * (i / (layers - 1) + 0.5)) / 128)
            self.layers.append(Block(dim, heads, hidden, rotary, i == 0))
            self.dynamic_dense.append(MultiwayDynamicDenseBlock(dim, i, 1 if last else ways, last))
            self.dense_bs.append(nn.Parameter(torch.randn(1 if last else ways, i + 2) / (i + 2) ** 0.5))
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, input_ids):
        t = input_ids.shape[1]
        position = torch.arange(t, device=input_ids.device)
        frequency = 10000.0 ** (-torch.arange(0, self.rotary, 2, device=input_ids.device) / self.rotary)
        angle = torch.outer(position, frequency).repeat(1, 2)
        cos, sin = angle.cos(), angle.sin()
        mask = torch.tril(torch.ones(t, t, dtype=torch.bool, device=input_ids.device))
        x = self.tok_embeddings(input_ids)
        hiddens = [x]
        for block, dense, static in zip(self.layers, self.dynamic_dense, self.dense_bs, strict=True):
            out = block(x, cos, sin, mask)
            hiddens.append(out)
            dw = dense(out) + static[:, None, None, :]
            x = dense.layer_mix(hiddens, dw)
        return self.output(self.norm(x[0]))

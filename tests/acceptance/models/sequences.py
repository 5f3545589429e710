"""Small networks with other ways to gate a sequence, each after its paper.

Dynamic convolution (arXiv:1901.10430), highway networks (arXiv:1505.00387), gated linear attention (arXiv:2312.06635),
the three-way output gate of native sparse attention (arXiv:2502.11089), and feature-wise modulation (arXiv:1709.07871).
Recurrent layers are torch's own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class DynamicConv(nn.Module):
    """A depthwise convolution over tokens whose taps, shared within a head, are a softmax that each token computes."""

    def __init__(self, dim, kernel_size=3, heads=4):
        super().__init__()
        self.kernel_size, self.heads = kernel_size, heads
        self.linear1, self.linear2 = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.weight_linear = nn.Linear(dim, heads * kernel_size)

    def forward(self, x):
        x = F.glu(self.linear1(x))
        b, t, c = x.shape
        weight = F.softmax(self.weight_linear(x).view(b, t, self.heads, self.kernel_size), dim=-1)
        padded = F.pad(x, (0, 0, self.kernel_size - 1, 0))
        windows = padded.unfold(1, self.kernel_size, 1).reshape(b, t, self.heads, c // self.heads, self.kernel_size)
        return self.linear2((windows * weight.unsqueeze(3)).sum(-1).reshape(b, t, c))


class DynamicConvNet(nn.Module):
    def __init__(self, layers=3, dim=32, vocabulary=128):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.convs = nn.ModuleList([DynamicConv(dim) for _ in range(layers)])
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(layers)])
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + conv(norm(x))
        return self.head(x)


class Recurrent(nn.Module):
    """A recurrent layer of torch, an LSTM or a GRU, between an embedding and a head."""

    def __init__(self, kind, dim=16, vocabulary=128):
        super().__init__()
        self.embed, self.cells = nn.Embedding(vocabulary, dim), kind(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, input_ids):
        return self.head(self.cells(self.embed(input_ids))[0])


class Highway(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.plain, self.transform = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x):
        t = torch.sigmoid(self.transform(x))
        return t * F.relu(self.plain(x)) + (1 - t) * x


class HighwayNet(nn.Module):
    def __init__(self, layers=5, size=32):
        super().__init__()
        self.first = nn.Linear(16, size)
        self.layers = nn.Sequential(*(Highway(size) for _ in range(layers)))
        self.last = nn.Linear(size, 10)

    def forward(self, x):
        return self.last(self.layers(F.relu(self.first(x))))


class GatedLinearAttention(nn.Module):
    """A linear recurrence whose state decays by a gate of each key channel; the plain recurrent form."""

    def __init__(self, dim, heads=2, low_rank=8, normalizer=16):
        super().__init__()
        self.heads, self.normalizer = heads, normalizer
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.gk_proj = nn.Sequential(nn.Linear(dim, low_rank, bias=False), nn.Linear(low_rank, dim))
        self.norm, self.o_proj = nn.LayerNorm(dim // heads), nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        gate = F.logsigmoid(self.gk_proj(x)) / self.normalizer
        q, k, v, gate = (
            y.view(b, t, self.heads, -1).transpose(1, 2) for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x), gate)
        )
        q = q * q.shape[-1] ** -0.5
        state = x.new_zeros(b, self.heads, k.shape[-1], v.shape[-1])
        outputs = []
        for i in range(t):
            state = state * gate[:, :, i].exp().unsqueeze(-1) + k[:, :, i].unsqueeze(-1) * v[:, :, i].unsqueeze(-2)
            outputs.append((q[:, :, i].unsqueeze(-1) * state).sum(-2))
        out = self.norm(torch.stack(outputs, 2))
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))


class NativeSparseAttention(nn.Module):
    """Compressed, chosen and local attention, added under three sigmoid gates for each head; here the chosen blocks
    are all of them."""

    def __init__(self, dim, heads=2, block=4, window=3):
        super().__init__()
        self.heads, self.block, self.window = heads, block, window
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.g_proj, self.o_proj = nn.Linear(dim, heads * 3, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (
            y.view(b, t, self.heads, -1).transpose(1, 2) for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        g_cmp, g_slc, g_swa = self.g_proj(x).view(b, t, self.heads, 3).sigmoid().unbind(-1)
        blocks = [y.unflatten(2, (-1, self.block)).mean(3) for y in (k, v)]
        compressed = F.scaled_dot_product_attention(q, *blocks)
        chosen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        place = torch.arange(t, device=x.device)
        distance = place[:, None] - place[None]
        local = F.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= 0) & (distance < self.window))
        o = (
            compressed.transpose(1, 2) * g_cmp.unsqueeze(-1)
            + chosen.transpose(1, 2) * g_slc.unsqueeze(-1)
            + local.transpose(1, 2) * g_swa.unsqueeze(-1)
        )
        return self.o_proj(o.reshape(b, t, -1))


class Residual(nn.Module):
    """Token embeddings, layers of `kind` behind layer norms, and a head."""

    def __init__(self, kind, layers=2, dim=32, vocabulary=128):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(dim), kind(dim)) for _ in range(layers)])
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class FiLMedBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2, self.bn = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels, affine=False)

    def forward(self, x, gammas, betas):
        x = F.relu(self.conv1(x))
        out = self.bn(self.conv2(x))
        out = gammas.unsqueeze(2).unsqueeze(3).expand_as(out) * out + betas.unsqueeze(2).unsqueeze(3).expand_as(out)
        return x + F.relu(out)


class FiLMedNet(nn.Module):
    """A question's GRU state shifts and scales the feature maps of an image network."""

    def __init__(self, blocks=3, channels=8, hidden=16, vocabulary=128):
        super().__init__()
        self.channels = channels
        self.embed, self.encoder = nn.Embedding(vocabulary, hidden), nn.GRU(hidden, hidden, batch_first=True)
        self.decoders = nn.ModuleList([nn.Linear(hidden, 2 * channels) for _ in range(blocks)])
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList([FiLMedBlock(channels) for _ in range(blocks)])
        self.fc = nn.Linear(channels, 10)

    def forward(self, image, question):
        state = self.encoder(self.embed(question))[0][:, -1]
        x = F.relu(self.stem(image))
        for block, decoder in zip(self.blocks, self.decoders, strict=True):
            gammas, betas = decoder(state).split(self.channels, dim=1)
            x = block(x, gammas, betas)
        return self.fc(x.mean((2, 3)))

"""Networks that skip blocks: SkipNet (arXiv:1711.09485), ConvNet-AIG (arXiv:1711.11503), Mixture-of-Depths
(arXiv:2404.02258); and one that stops refining what it is sure of, LightGlue (arXiv:2306.13643).

The published evaluation code of ConvNet-AIG adds Gumbel noise to its decision; here it takes the more likely choice.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x):
        return self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))


class RNNGate(nn.Module):
    """A gate shared by all blocks: global pooling, projection, one LSTM step, a hard decision."""

    def __init__(self, channels, hidden=8):
        super().__init__()
        self.project = nn.Conv2d(channels, hidden, 1)
        self.rnn = nn.LSTMCell(hidden, hidden)
        self.proj = nn.Linear(hidden, 1)

    def forward(self, x, state):
        x = self.project(F.adaptive_avg_pool2d(x, 1)).flatten(1)
        hidden, cell = self.rnn(x, state)
        prob = torch.sigmoid(self.proj(hidden))
        disc = (prob > 0.5).float().detach() - prob.detach() + prob  # straight through
        return disc.view(x.size(0), 1, 1, 1), (hidden, cell)


class SkipNet(nn.Module):
    """The gate after block i decides about block i + 1; what the gate after the last block decides is not used."""

    def __init__(self, blocks=4, channels=8):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList([ResidualBlock(channels) for _ in range(blocks)])
        self.gate = RNNGate(channels)
        self.fc = nn.Linear(channels, 10)

    def forward(self, x):
        x = F.relu(self.stem(x))
        zeros = x.new_zeros(x.size(0), 8)
        state, mask = (zeros, zeros), None
        for block in self.blocks:
            previous = x
            x = F.relu(block(x) + x)
            if mask is not None:
                x = mask * x + (1 - mask) * previous
            mask, state = self.gate(x, state)
        return self.fc(x.mean((2, 3)))


class AIGBlock(nn.Module):
    def __init__(self, channels, hidden=8):
        super().__init__()
        self.block = ResidualBlock(channels)
        self.fc1, self.fc1bn, self.fc2 = nn.Conv2d(channels, hidden, 1), nn.BatchNorm2d(hidden), nn.Conv2d(hidden, 2, 1)

    def forward(self, x):
        w = F.avg_pool2d(x, (x.size(2), x.size(3)))
        w = self.fc2(F.relu(self.fc1bn(self.fc1(w))))
        probability = F.softmax(w.view(w.size(0), 2), dim=1)
        index = probability.max(-1, keepdim=True)[1]
        hard = torch.zeros_like(probability).scatter_(-1, index, 1.0)
        w = hard[:, 1].view(-1, 1, 1, 1)
        return F.relu(x + self.block(x) * w)


class ConvNetAIG(nn.Module):
    def __init__(self, blocks=4, channels=8):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(AIGBlock(channels) for _ in range(blocks)))
        self.fc = nn.Linear(channels, 10)

    def forward(self, x):
        return self.fc(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ffn = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.ffn(x)


class DepthRouter(nn.Module):
    """The k tokens with the largest weights pass through the block, in order; all others pass by."""

    def __init__(self, dim, capacity):
        super().__init__()
        self.capacity = capacity
        self.router, self.block = nn.Linear(dim, 1, bias=False), Attention(dim)

    def forward(self, x):
        weights = torch.sigmoid(self.router(x).squeeze(-1))
        top, selected = torch.topk(weights, self.capacity, dim=1, sorted=False)
        selected, order = torch.sort(selected, dim=1)
        top = torch.gather(top, 1, order)
        expanded = selected.unsqueeze(-1).expand(-1, -1, x.size(-1))
        processed = self.block(torch.gather(x, 1, expanded)) * top.unsqueeze(-1)
        return x.scatter_add(1, expanded, processed)


class MixtureOfDepths(nn.Module):
    """Every other block is behind a router."""

    def __init__(self, blocks=4, dim=32, capacity=4, vocabulary=128):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList([DepthRouter(dim, capacity) if i % 2 else Attention(dim) for i in range(blocks)])
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TokenMixer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(F.gelu(F.scaled_dot_product_attention(query, key, value)))


class TokenConfidence(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.token = nn.Linear(dim, 1)

    def forward(self, x):
        return torch.sigmoid(self.token(x)).squeeze(-1)


class EarlyExit(nn.Module):
    """LightGlue's exit for a batch of pairs: a pair keeps its state once enough of its tokens are confident.

    The published code drops such pairs from the batch by Python control flow.
    """

    def __init__(self, layers=9, dim=16, vocabulary=128):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList([TokenMixer(dim) for _ in range(layers)])
        self.confidence = nn.ModuleList([TokenConfidence(dim) for _ in range(layers - 1)])
        self.match = nn.Linear(dim, dim)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        stopped = torch.zeros(len(x), dtype=torch.bool)
        for i, layer in enumerate(self.layers):
            x = torch.where(stopped[:, None, None], x, layer(x))
            if i < len(self.confidence):
                threshold = 0.4 + 0.1 * math.exp(-4.0 * i / len(self.layers))
                confident = 1.0 - (self.confidence[i](x) < threshold).float().sum(1) / x.shape[1]
                stopped = stopped | (confident > 0.95)
        return self.match(x)

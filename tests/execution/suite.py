"""Small models, one for each way in which compute may or may not depend on the input.

Every one has a gate or a router that can be frozen, and says which verdict, how many FLOPs for each input, and which
roots are right. The FLOPs are worked out from the sizes of the layers and from what plain Python does with the values
of the eager model: how often a branch or a step is taken, how many rows pass a threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F

WIDTH, TOKENS, INPUTS = 16, 6, 8
# One linear layer of full width on every token.
LINEAR = 2 * TOKENS * WIDTH**2
EXPERTS, CHOSEN = 4, 2

PROVEN, CONSTANT, REDISTRIBUTED = "PROVEN_STATIC", "OBSERVED_CONSTANT", "REDISTRIBUTED"
SHAPES, KERNELS = "DATA_DEPENDENT_SHAPES", "DATA_DEPENDENT_KERNELS"


@dataclass(frozen=True, slots=True)
class Case:
    """A model and what is right about it.

    `inputs` are [input, token, feature], or what the model takes, one after the other along the first axis. `flops`
    gives those of one input of the eager model. `roots` are op, module path and a piece of the source line of each node
    at which work begins to depend on data. `bound` is the verdict once all coefficients are held. `ops` must be among
    those that onnxruntime executes. `dense` has for each router that names experts the FLOPs of the model with every
    expert on every token, None where experts do not run by choice.
    """

    name: str
    build: Callable[[], nn.Module]
    verdict: str
    flops: Callable[[Any, Tensor], int]
    bound: str = ""
    roots: tuple[tuple[str, str, str], ...] = ()
    inputs: Callable[[], Tensor] = field(default=lambda: shifted())
    keyword: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    opset: int = 20
    ops: tuple[str, ...] = ()
    dense: tuple[int | None, ...] = ()

    @property
    def bound_verdict(self) -> str:
        return self.bound or self.verdict


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def shifted(size: float = 1.0) -> Tensor:
    """Inputs with growing means of both signs."""
    steps = torch.linspace(-size, size, INPUTS)
    return (
        normal(INPUTS, TOKENS, WIDTH)
        + steps[torch.randperm(INPUTS, generator=torch.Generator().manual_seed(1))][:, None, None]
    )


class Gated(nn.Module):
    """A feature gate, then `body` on what it lets through."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.gate, self.value, self.body = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), body

    def gated(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x)) * self.value(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.gated(x))


# --- branches and loops ---------------------------------------------------------------------------------------------


class Branch(nn.Module):
    def __init__(self, threshold: float = 0.0) -> None:
        super().__init__()
        self.extra, self.threshold = nn.Linear(WIDTH, WIDTH), threshold

    def taken(self, h: Tensor) -> Tensor:
        return h.mean() > self.threshold

    def forward(self, h: Tensor) -> Tensor:
        return torch.cond(self.taken(h), lambda h: h + self.extra(h), lambda h: h.clone(), (h,))


class Exits(nn.Module):
    """Three layers, each left out once the hidden state is small enough."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def leaves(self, h: Tensor) -> Tensor:
        return h.abs().mean() < 0.35

    def step(self, layer: nn.Module, h: Tensor) -> Tensor:
        return 0.5 * h + 0.1 * layer(h)

    def forward(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = torch.cond(self.leaves(h), lambda h: h.clone(), lambda h, f=layer: self.step(f, h), (h,))
        return h

    def steps(self, h: Tensor) -> int:
        taken = 0
        for layer in self.layers:
            if not self.leaves(h):
                h, taken = self.step(layer, h), taken + 1
        return taken


class While(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def goes_on(self, i: Tensor, h: Tensor) -> Tensor:
        return (h.abs().mean() > 0.2) & (i < 20)

    def step(self, i: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, 0.8 * h + 0.01 * torch.tanh(self.layer(h))

    def forward(self, h: Tensor) -> Tensor:
        return torch.while_loop(self.goes_on, self.step, (torch.zeros((), dtype=torch.int64), h))[1]

    def steps(self, h: Tensor) -> int:
        i = torch.zeros((), dtype=torch.int64)
        while self.goes_on(i, h):
            i, h = self.step(i, h)
        return int(i)


class Recurrence(nn.Module):
    """One matrix on each of the tokens, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * normal(WIDTH, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            state = torch.tanh(state @ self.weight + row)
            return state, state.clone()

        return scan(step, h[:, 0].clone(memory_format=torch.contiguous_format), h.transpose(0, 1))[1]


# --- routing --------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Two linear layers for each expert, of half the width."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH // 2) for _ in range(EXPERTS))
        self.down = nn.ModuleList(nn.Linear(WIDTH // 2, WIDTH) for _ in range(EXPERTS))

    def expert(self, e: int, rows: Tensor) -> Tensor:
        return self.down[e](F.relu(self.up[e](rows)))


ROUTER = 2 * TOKENS * WIDTH * EXPERTS
ROW = 2 * 2 * WIDTH * WIDTH // 2


class LoopedExperts(Experts):
    """The two best experts of each token, each expert on the rows that chose it."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.reshape(-1, WIDTH)
        weights, chosen = torch.topk(F.softmax(self.router(h), -1), CHOSEN, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(h)
        for e in range(EXPERTS):
            rows, slot = torch.where(chosen == e)
            out = out.index_add(0, rows, self.expert(e, h[rows]) * weights[rows, slot, None])
        return out.reshape(x.shape)


class ThresholdedExperts(Experts):
    """Every token goes to all experts whose probability is above the mean: none, one, or several."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.reshape(-1, WIDTH)
        p = F.softmax(3 * self.router(h), -1)
        out = torch.zeros_like(h)
        for e in range(EXPERTS):
            rows = torch.where(p[:, e] > 1 / EXPERTS)[0]
            out = out.index_add(0, rows, self.expert(e, h[rows]) * p[rows, e, None])
        return out.reshape(x.shape)


class MaskedExperts(Experts):
    """All experts on all tokens; what was not chosen is multiplied by zero."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.reshape(-1, WIDTH)
        weights, chosen = torch.topk(F.softmax(self.router(h), -1), CHOSEN, -1)
        dense = torch.zeros_like(h[:, :EXPERTS]).scatter(1, chosen, weights)
        out = torch.stack([self.expert(e, h) for e in range(EXPERTS)], 1)
        return (out * dense.unsqueeze(-1)).sum(1).reshape(x.shape)


class Depths(nn.Module):
    """Mixture of depths: a fixed number of tokens goes through the layer, whichever they are."""

    capacity = 2

    def __init__(self) -> None:
        super().__init__()
        self.router, self.layer = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(self.router(x).squeeze(-1), self.capacity, -1)
        index = chosen.unsqueeze(-1).expand(-1, -1, WIDTH)
        rows = torch.gather(x, 1, index)
        return x.scatter_add(1, index, self.layer(rows) * torch.sigmoid(weights).unsqueeze(-1))


class Compaction(nn.Module):
    """Only the rows that pass a test are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def kept(self, rows: Tensor) -> Tensor:
        return rows[:, 0] > 0

    def forward(self, h: Tensor) -> Tensor:
        rows = h.reshape(-1, WIDTH)
        return self.layer(rows[self.kept(rows)]).sum(0)


# --- layers whose count others get wrong ----------------------------------------------------------------------------


class SqueezeExcite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.fc2(F.relu(self.fc1(x.mean((2, 3), keepdim=True)))))


class SqueezeNet(nn.Module):
    """Two convolutions with a gate each, and a classifier, on [input, 3, 8, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1), nn.Linear(16, 5)
        self.norm1, self.norm2 = nn.BatchNorm2d(8), nn.BatchNorm2d(16)
        self.se1, self.se2 = SqueezeExcite(8), SqueezeExcite(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.se1(F.relu(self.norm1(self.conv1(x))))
        x = self.se2(F.relu(self.norm2(self.conv2(x))))
        return self.head(x.mean((2, 3)))


SQUEEZE_NET = 2 * 64 * 8 * 27 + 2 * 16 * 16 * 72 + 2 * 2 * (8 * 2 + 16 * 4) + 2 * 16 * 5


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h)[0]


class Contraction(nn.Module):
    """Three heads by one einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(3, WIDTH, 5))

    def forward(self, h: Tensor) -> Tensor:
        return torch.einsum("btd,hde->bhte", h, self.weight)


class Upsampling(nn.Module):
    """A transposed convolution in two groups: 16 channels to 8, kernel 3, stride 2."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ConvTranspose1d(WIDTH, 8, 3, stride=2, groups=2)

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h.transpose(1, 2))


class Attention(nn.Module):
    """Two heads of width 8, causal."""

    def forward(self, h: Tensor) -> Tensor:
        q = h.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)


ATTENTION = 2 * 2 * 2 * TOKENS * TOKENS * (WIDTH // 2)


def mixtral() -> nn.Module:
    import transformers

    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=EXPERTS,
            num_experts_per_tok=CHOSEN,
        )
    )


def token_ids() -> Tensor:
    return torch.randint(0, 64, (INPUTS, 8), generator=torch.Generator().manual_seed(0))


# Queries, keys, values and output; attention over 8 tokens; two experts of three matrices; the router; the head.
MIXTRAL = 2 * 8 * (32 * (32 + 16 + 16 + 32) + CHOSEN * 3 * 32 * 48 + 32 * EXPERTS + 32 * 64) + 4 * 8 * 8 * 32
DENSE_MIXTRAL = MIXTRAL + 2 * 8 * (EXPERTS - CHOSEN) * 3 * 32 * 48


def _gated(body: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Gated(body())


def _rows_above(model: Any, x: Tensor) -> int:
    h = model.gated(x).reshape(-1, WIDTH)
    return int((F.softmax(3 * model.body.router(h), -1) > 1 / EXPERTS).sum())


def _kept(model: Any, x: Tensor) -> int:
    return int(model.body.kept(model.gated(x).reshape(-1, WIDTH)).sum())


_IF = ("If", "body", "torch.cond(")

CASES: Sequence[Case] = (
    Case(
        "a branch that never flips",
        _gated(lambda: Branch(-1e6)),
        CONSTANT,
        lambda m, x: 3 * LINEAR,
        roots=(_IF,),
    ),
    Case(
        "a branch",
        _gated(Branch),
        KERNELS,
        lambda m, x: (2 + int(m.body.taken(m.gated(x)))) * LINEAR,
        roots=(_IF,),
    ),
    Case(
        "several exits",
        _gated(Exits),
        KERNELS,
        lambda m, x: (2 + m.body.steps(m.gated(x))) * LINEAR,
        roots=(_IF,) * 3,
        inputs=lambda: shifted(3.0),
    ),
    Case(
        "a loop until the state is small",
        _gated(While),
        KERNELS,
        lambda m, x: (2 + m.body.steps(m.gated(x))) * LINEAR,
        roots=(("Loop", "body", "torch.while_loop("),),
        inputs=lambda: shifted(3.0),
    ),
    Case("a scan over tokens", _gated(Recurrence), PROVEN, lambda m, x: 3 * LINEAR),
    Case(
        "top-2 experts in a loop",
        _gated(LoopedExperts),
        REDISTRIBUTED,
        lambda m, x: 2 * LINEAR + ROUTER + TOKENS * CHOSEN * ROW,
        bound=PROVEN,
        roots=(("NonZero", "body", "torch.where(chosen == e)"),) * EXPERTS,
        dense=(2 * LINEAR + ROUTER + TOKENS * EXPERTS * ROW,),
    ),
    Case(
        "experts above a threshold",
        _gated(ThresholdedExperts),
        SHAPES,
        lambda m, x: 2 * LINEAR + ROUTER + _rows_above(m, x) * ROW,
        roots=(("NonZero", "body", "torch.where(p[:, e] > 1 / EXPERTS)"),) * EXPERTS,
    ),
    Case(
        "all experts under a mask",
        _gated(MaskedExperts),
        PROVEN,
        lambda m, x: 2 * LINEAR + ROUTER + TOKENS * EXPERTS * ROW,
        dense=(None,),
    ),
    Case(
        "Mixtral, batched experts",
        mixtral,
        PROVEN,
        lambda m, x: MIXTRAL,
        inputs=token_ids,
        keyword="input_ids",
        options={"experts": "batched_mm"},
        dense=(DENSE_MIXTRAL,),
    ),
    Case(
        "Mixtral, grouped experts",
        mixtral,
        REDISTRIBUTED,
        lambda m, x: MIXTRAL,
        inputs=token_ids,
        bound=PROVEN,
        # Gate and up in one product, then down: each over the rows of each expert.
        roots=(("Slice", "model.layers.0.mlp.experts", "experts_forward("),) * 2 * EXPERTS,
        keyword="input_ids",
        options={"experts": "grouped_mm"},
        dense=(DENSE_MIXTRAL,),
    ),
    Case(
        "a mixture of depths",
        _gated(Depths),
        PROVEN,
        lambda m, x: 2 * LINEAR + 2 * TOKENS * WIDTH + 2 * Depths.capacity * WIDTH**2,
    ),
    Case(
        "rows kept by a mask",
        _gated(Compaction),
        SHAPES,
        lambda m, x: 2 * LINEAR + 2 * _kept(m, x) * WIDTH**2,
        roots=(("NonZero", "body", "rows[self.kept(rows)]"), ("Expand", "body", "rows[self.kept(rows)]")),
    ),
    Case("squeeze and excite", SqueezeNet, PROVEN, lambda m, x: SQUEEZE_NET, inputs=lambda: normal(INPUTS, 3, 8, 8)),
    Case(
        "LSTM in both directions",
        _gated(lambda: Recurrent(nn.LSTM(WIDTH, 8, bidirectional=True, batch_first=True))),
        PROVEN,
        lambda m, x: 2 * LINEAR + 2 * TOKENS * 2 * 4 * 8 * (WIDTH + 8),
    ),
    Case(
        "GRU of two layers",
        _gated(lambda: Recurrent(nn.GRU(WIDTH, 8, num_layers=2, batch_first=True))),
        PROVEN,
        lambda m, x: 2 * LINEAR + 2 * TOKENS * 3 * 8 * (WIDTH + 8) + 2 * TOKENS * 3 * 8 * (8 + 8),
    ),
    Case("an einsum", _gated(Contraction), PROVEN, lambda m, x: 2 * LINEAR + 2 * TOKENS * 3 * WIDTH * 5),
    Case(
        "a transposed convolution",
        _gated(Upsampling),
        PROVEN,
        lambda m, x: 2 * LINEAR + 2 * WIDTH * TOKENS * 4 * 3,
    ),
    Case("attention, decomposed", _gated(Attention), PROVEN, lambda m, x: 2 * LINEAR + ATTENTION, ops=("Softmax",)),
    Case(
        "attention as one op",
        _gated(Attention),
        PROVEN,
        lambda m, x: 2 * LINEAR + ATTENTION,
        opset=23,
        ops=("Attention",),
    ),
)

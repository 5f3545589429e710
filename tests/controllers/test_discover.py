"""Discover finds controllers that no pattern describes, and takes nothing that only looks like one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn import functional as F

from fxaudit import stages
from fxaudit.cli import main
from fxaudit.controllers.discover import discover, stands_for
from fxaudit.controllers.graphs import Dataflow
from fxaudit.report import as_json

WIDTH, TOKENS = 16, 6


class _Block(nn.Module):
    """Linear maps to build blocks from; `out` comes last, so that no meeting is an output head."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.one, self.two, self.four = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 4)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.bank = nn.Parameter(torch.randn(4, WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.mix(x))
        return y

    def mix(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class SigmoidGate(_Block):
    def mix(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.a(x)) * self.b(x)


class GateAfterPacking(_Block):
    def mix(self, x: Tensor) -> Tensor:
        value, gate = self.two(x).chunk(2, dim=-1)
        return value * gate.sigmoid()


class TapsBesideStaticOnes(_Block):
    """As in multiway dense connections: one tensor of weights, each picked for one source and one stream."""

    def mix(self, x: Tensor) -> Tensor:
        weights = self.four(x).unflatten(-1, (2, 2)).permute(2, 0, 1, 3) + self.scale[:2].view(2, 1, 1, 1)
        sources = (self.a(x), self.b(x))
        streams = [sum(one[..., i, None] * source for i, source in enumerate(sources)) for one in weights]
        return streams[0] * 2 + streams[1]


class ScalarPerToken(_Block):
    def mix(self, x: Tensor) -> Tensor:
        return self.a(x) * self.one(x)


class Highway(_Block):
    def mix(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.a(x))
        return gate * self.b(x) + (1 - gate) * x


class Squeeze(_Block):
    def mix(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.b(F.relu(self.a(x.mean(1, keepdim=True)))))


class HandWrittenHardSigmoid(_Block):
    def mix(self, x: Tensor) -> Tensor:
        return self.b(x) * torch.clamp(self.a(x) * 0.2 + 0.5, 0, 1)


class KernelMixture(_Block):
    """A convolution bank weighted for each input, as in CondConv."""

    def mix(self, x: Tensor) -> Tensor:
        routing = torch.softmax(self.four(x.mean(1)), -1)
        weight = (routing @ self.bank.flatten(1)).view(-1, WIDTH, 1)
        rows = x.transpose(1, 2).reshape(1, -1, TOKENS)
        return F.conv1d(rows, weight, groups=x.shape[0]).view(x.shape[0], WIDTH, TOKENS).transpose(1, 2)


class StreamMixing(_Block):
    """Four streams, mixed by a 4x4 matrix for each token, as in AltUp and hyper-connections."""

    def mix(self, x: Tensor) -> Tensor:
        matrices = self.a(x).view(*x.shape[:2], 4, 4)
        streams = torch.stack([x, self.b(x), self.c(x), x * 2], dim=2)
        return (matrices @ streams).sum(2)


class Decay(_Block):
    """A running state with a step size that depends on the token."""

    def mix(self, x: Tensor) -> Tensor:
        step = F.softplus(self.one(x))
        state, states = x[:, 0], []
        for t in range(TOKENS):
            state = state * torch.exp(-step[:, t]) + x[:, t] * step[:, t]
            states.append(state)
        return torch.stack(states, 1)


class TopOne(_Block):
    def mix(self, x: Tensor) -> Tensor:
        weights, chosen = torch.softmax(self.four(x), -1).topk(2, dim=-1)
        rows = self.bank[:, 0][chosen]
        return x + (rows * weights[..., None]).sum(-2)


class Taps(_Block):
    """A convolution over the last four tokens: its taps are static ones plus some that each token computes."""

    def mix(self, x: Tensor) -> Tensor:
        taps = self.four(x)[:, :, None] + self.bank[:, :, 0].T
        windows = F.pad(self.b(x), (0, 0, 3, 0)).unfold(1, 4, 1)
        return (windows * taps).sum(-1)


class DrivenDecay(_Block):
    """A decay whose square root scales what is written: both come from the logarithm of the decay."""

    def mix(self, x: Tensor) -> Tensor:
        log_decay = -8 * torch.sigmoid(self.a(x)) * F.softplus(self.scale)
        written = self.b(x) * torch.sqrt(1 - torch.exp(2 * log_decay))
        decay, state, states = torch.exp(log_decay), written[:, 0], []
        for t in range(1, TOKENS):
            state = state * decay[:, t] + written[:, t]
            states.append(state)
        return torch.stack(states, 1)


class PackOfWeights(_Block):
    """Four weights for each token, each cut from one tensor to scale one of four states, beside static ones."""

    def mix(self, x: Tensor) -> Tensor:
        weights = self.four(x) + self.scale[:4]
        states = [x, self.b(x), self.c(x), x.sin()]
        return sum(weights[..., i, None] * state for i, state in enumerate(states))


class ScaleAndShift(_Block):
    """Both halves of one map act, one of them as 1 + scale."""

    def mix(self, x: Tensor) -> Tensor:
        scale, shift = self.two(F.silu(x.mean(1))).chunk(2, -1)
        return self.b(x) * (1 + scale[:, None]) + shift[:, None]


class NormedScores(_Block):
    """A gate of many states, its scores divided by their size instead of the states themselves."""

    def mix(self, x: Tensor) -> Tensor:
        state = x * 2
        for one in (self.a, self.b, self.c, self.a, self.b):
            state = state + F.gelu(one(state))
        scores = self.one(state) * torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + 1e-6)
        return state * torch.sigmoid(scores)


class DecayFromNothing(_Block):
    """The first step decays a state of zeros; only there is the state no function of earlier decays."""

    def mix(self, x: Tensor) -> Tensor:
        log_decay, value, states = F.logsigmoid(self.one(x)) / 16, self.b(x), []
        state = torch.zeros_like(value[:, 0])
        for t in range(TOKENS):
            state = state * log_decay[:, t].exp() + value[:, t]
            states.append(state)
        return torch.stack(states, 1)


@pytest.mark.parametrize(
    ("block", "root", "sites"),
    [
        (SigmoidGate, "a", 1),
        (GateAfterPacking, "two", 1),
        (ScalarPerToken, "one", 1),
        (Highway, "a", 2),
        (Squeeze, "b", 1),
        (HandWrittenHardSigmoid, "a", 1),
        (KernelMixture, "four", 1),
        (StreamMixing, "a", 1),
        # From the second token on the state holds earlier steps: there it is its own path (T2).
        (Decay, "one", TOKENS + 1),
        (TopOne, "four", 2),
        (Taps, "four", 1),
        (TapsBesideStaticOnes, "four", 4),
        (DrivenDecay, "a", 1),
        (PackOfWeights, "four", 4),
        (ScaleAndShift, "two", 2),
        (NormedScores, "one", 1),
        (DecayFromNothing, "one", 1),
    ],
)
def test_a_controller_is_found_with_all_its_sites(block: type[_Block], root: str, sites: int) -> None:
    (found,) = _candidates(block())
    assert len(found.applies) == sites
    assert any(node.target == f"{root}.weight" for node in _inputs_of(found.coefficients))


class Silu(_Block):
    def mix(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return y * torch.sigmoid(1.702 * y)


class TanhGelu(_Block):
    def mix(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return 0.5 * y * (1 + torch.tanh(0.8 * (y + 0.04 * y**3)))


class Glu(_Block):
    def mix(self, x: Tensor) -> Tensor:
        return F.silu(self.a(x)) * self.b(x)


class Bilinear(_Block):
    def mix(self, x: Tensor) -> Tensor:
        return self.a(x) * self.b(x)


class RmsNorm(_Block):
    def mix(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.scale * y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)


class ResponseNorm(_Block):
    def mix(self, x: Tensor) -> Tensor:
        y = F.gelu(self.a(x))
        size = y.norm(dim=1, keepdim=True)
        return y + self.scale * y * (size / (size.mean(-1, keepdim=True) + 1e-6))


class Attention(_Block):
    def mix(self, x: Tensor) -> Tensor:
        q, k, v = self.a(x), self.b(x), self.c(x)
        return torch.softmax(q @ k.transpose(1, 2) / WIDTH**0.5, -1) @ v


class AttentionPooling(_Block):
    def mix(self, x: Tensor) -> Tensor:
        return x + (self.one(x).softmax(1) * self.a(x)).sum(1, keepdim=True)


class LinearAttention(_Block):
    def mix(self, x: Tensor) -> Tensor:
        q, k, v = F.elu(self.a(x)) + 1, F.elu(self.b(x)) + 1, self.c(x)
        return q @ (k.transpose(1, 2) @ v)


class Rotary(_Block):
    def mix(self, x: Tensor) -> Tensor:
        angles = torch.arange(TOKENS)[:, None] * torch.ones(WIDTH)
        y = self.a(x)
        return y * angles.cos() + y.roll(1, -1) * angles.sin()


class LayerScale(_Block):
    def mix(self, x: Tensor) -> Tensor:
        return x + torch.sigmoid(self.scale) * self.a(x)


class Mask(_Block):
    def mix(self, x: Tensor) -> Tensor:
        return self.a(x) * (x[..., :1] > 0).float()


class SoftCap(_Block):
    def mix(self, x: Tensor) -> Tensor:
        return 30 * torch.tanh(self.a(x) / 30)


class OutputHead(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.one(x)) * self.a(x)


class LocalAttention(_Block):
    """Every token says how those around it mix with each other, without comparing them (outlook attention)."""

    def mix(self, x: Tensor) -> Tensor:
        weights = self.a(x)[..., :9].unflatten(-1, (3, 3)).softmax(-1)
        windows = F.pad(self.b(x), (0, 0, 2, 0)).unfold(1, 3, 1).transpose(2, 3)
        return (weights @ windows).mean(2)


class WindowPooling(_Block):
    """Windows of two tokens, each pooled into one by a softmax over its tokens."""

    def mix(self, x: Tensor) -> Tensor:
        values, scores = self.a(x).unflatten(1, (3, 2)), self.b(x).unflatten(1, (3, 2))
        return (values * scores.softmax(2)).sum(2)


@pytest.mark.parametrize(
    "block",
    [
        Silu, TanhGelu, Glu, Bilinear, RmsNorm, ResponseNorm, Attention, AttentionPooling, LinearAttention, Rotary,
        LayerScale, Mask, SoftCap, OutputHead, LocalAttention, WindowPooling,
    ],
)  # fmt: skip
def test_what_only_looks_like_a_controller_is_not_found(block: type[_Block]) -> None:
    assert _candidates(block()) == ()


def test_a_decay_is_bound_where_all_that_is_made_from_it_begins() -> None:
    (found,) = _candidates(DrivenDecay())
    assert found.parameters == WIDTH * WIDTH + 2 * WIDTH  # the linear map and the rate: nothing of them survives
    (bound,) = found.coefficients
    assert len(bound.users) == 2


class _Hashed(_Block):
    """Experts by a table of token ids, weighed by learned scores of the hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("experts_of", torch.randint(0, 4, (8, 2)))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        chosen = self.experts_of[ids]
        weights = torch.sigmoid(self.four(x)).gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        y: Tensor = self.out(((x[:, :, None, None] @ self.bank[chosen]).squeeze(3) * weights[..., None]).sum(2))
        return y


def test_indices_say_which_values_are_taken_and_are_no_path_of_their_own() -> None:
    (found,) = _candidates(_Hashed(), torch.randn(3, TOKENS, WIDTH), torch.randint(0, 8, (3, TOKENS)))
    assert any(node.target == "four.weight" for node in _inputs_of(found.coefficients))


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, tokens: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        y = torch.zeros_like(tokens)
        for number in chosen.unique().tolist():
            (rows,) = torch.where(chosen == number)
            y.index_add_(0, rows, self.experts[number](tokens[rows]) * weight[rows])
        return y


class _LoopOverExperts(_Block):
    def __init__(self) -> None:
        super().__init__()
        self.experts = _Experts()

    def mix(self, x: Tensor) -> Tensor:
        scores = self.four(x).softmax(-1)
        weight, chosen = scores.max(-1)
        return self.experts(x.flatten(0, 1), chosen.flatten(), weight.view(-1, 1)).view_as(x)


def test_what_a_part_that_cannot_be_traced_reads_beside_its_data_is_found() -> None:
    (found,) = _candidates(_LoopOverExperts())
    assert "unseen" in found.applies[0].name
    assert any(node.target == "four.weight" for node in _inputs_of(found.coefficients))


class _Category(_Block):
    """A shift that a table holds for a category, itself or through a learned map."""

    def __init__(self, mapped: bool) -> None:
        super().__init__()
        self.table, self.mapped = nn.Embedding(8, WIDTH), mapped

    def forward(self, x: Tensor, category: Tensor) -> Tensor:
        shift = self.table(category)
        y: Tensor = self.out(self.b(x) + (self.a(F.relu(shift)) if self.mapped else shift)[:, None])
        return y


@pytest.mark.parametrize(("mapped", "count"), [(True, 1), (False, 0)])
def test_the_table_through_which_an_input_enters_shifts_nothing(mapped: bool, count: int) -> None:
    found = _candidates(_Category(mapped), torch.randn(3, TOKENS, WIDTH), torch.randint(0, 8, (3,)))
    assert len(found) == count


class _RowsFromRows(nn.Module):
    """A map over rows, computed from the image, mixes its rows (bilinear attention)."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.value, self.out = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.sigmoid(self.rows(x.mean(3, keepdim=True)))[..., 0]
        y: Tensor = self.out(weights[:, None] @ self.value(x))
        return y


class _BlocksOfRows(_RowsFromRows):
    """The same for pairs of rows: each weight times an identity matrix."""

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.sigmoid(self.rows(F.avg_pool2d(x, 2).mean(3, keepdim=True)))[:, :4, :, 0]
        blocks = (weights[..., None, None] * torch.eye(2)).transpose(2, 3).reshape(-1, 8, 8)
        y: Tensor = self.out(blocks[:, None] @ self.value(x))
        return y


@pytest.mark.parametrize("kind", [_RowsFromRows, _BlocksOfRows])
def test_a_matrix_from_positions_to_positions_is_attention(kind: type[nn.Module]) -> None:
    assert _candidates(kind(), torch.randn(3, 3, 8, 8)) == ()


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SigmoidGate(), SigmoidGate(), Squeeze()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_candidates_say_where_they_are_how_often_they_occur_and_what_dies_with_them() -> None:
    found = {one.module: one for one in _candidates(_Stack())}
    assert {name: one.repeats for name, one in found.items()} == {"layers.0.a": 2, "layers.1.a": 2, "layers.2": 1}
    assert found["layers.0.a"].parameters == WIDTH * WIDTH + WIDTH
    assert found["layers.2"].parameters == 2 * (WIDTH * WIDTH + WIDTH)
    assert found["layers.0.a"].axes == (("sample", "position", "unit"),)
    assert found["layers.2"].axes == (("sample", "1", "unit"),)
    assert "self.out(self.mix(x))" in found["layers.0.a"].source


def test_what_a_pattern_describes_is_marked_as_claimed() -> None:
    discovery = stages.discover(_Stack(), torch.randn(3, TOKENS, WIDTH))
    claims = {one.module: one.claimed_by for one in discovery.candidates}
    assert claims["layers.0.a"] == claims["layers.1.a"] == "feature-gate"
    assert all(one.claimed_by is None for one in discovery.unclaimed)
    assert len(discovery.unclaimed) == sum(owner is None for owner in claims.values())


def test_drafted_patterns_match_the_discovered_sites_and_no_others(tmp_path: Path) -> None:
    traced = stages.trace(_Stack(), torch.randn(3, TOKENS, WIDTH))
    discovery = stages.discover(traced, patterns=[])
    drafts = stages.draft_discovered(discovery)
    for draft in drafts:
        (tmp_path / f"{draft.name}.toml").write_text(draft.text, encoding="utf-8")
    assert [draft.beyond for draft in drafts] == [(), ()]
    matched = stages.match(traced, [tmp_path])
    wanted = {node for one in discovery.candidates for node in one.coefficients}
    assert {c.node for controller in matched.controllers for c in controller.coefficients} == wanted
    assert sorted(matched.counts.values()) == [1, 2]


class _Routed(_Block):
    """Two of four experts for each token, renormalised: scores reach the product through a top-k."""

    def mix(self, x: Tensor) -> Tensor:
        weights, chosen = self.four(x).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return ((x[:, :, None, None] @ self.bank[chosen]).squeeze(3) * weights[..., None]).sum(2)


def test_a_draft_follows_a_coefficient_through_whatever_it_passes(tmp_path: Path) -> None:
    traced = stages.trace(_Routed(), torch.randn(3, TOKENS, WIDTH))
    discovery = stages.discover(traced, patterns=[])
    (draft,) = stages.draft_discovered(discovery)
    assert discovery.undrafted([draft]) == ()
    (tmp_path / f"{draft.name}.toml").write_text(draft.text, encoding="utf-8")
    (controller,) = stages.match(traced, [tmp_path]).controllers
    assert {c.node for c in controller.coefficients} == {n for one in discovery.candidates for n in one.coefficients}


def test_a_candidate_without_a_draft_is_named(tmp_path: Path) -> None:
    traced = stages.trace(_Stack(), torch.randn(3, TOKENS, WIDTH))
    discovery = stages.discover(traced, patterns=[])
    first, second = stages.draft_discovered(discovery)
    assert discovery.undrafted([first, second]) == ()
    assert set(discovery.undrafted([first])) == {
        c for c in discovery.candidates if set(c.coefficients) <= {*second.covers}
    }
    assert as_json.discover(discovery, [first])["undrafted"] == [f"{c.module}#0" for c in discovery.undrafted([first])]
    assert as_json.discover(discovery)["undrafted"] == []


def test_the_command_writes_drafts_and_overwrites_none(tmp_path: Path) -> None:
    arguments = [
        "discover",
        "timm:seresnet18",
        "--random-init",
        "--no-library",
        "--write",
        str(tmp_path),
    ]
    first = CliRunner().invoke(main, [*arguments, "--json"])
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)
    assert sum(len(one["coefficients"]) for one in found["candidates"]) == 8  # the squeeze-excite blocks
    assert {path.stem for path in tmp_path.iterdir()} == {draft["name"] for draft in found["drafts"]} != set()
    again = CliRunner().invoke(main, arguments)
    assert again.exit_code == 2
    assert "exists" in again.stderr


def _candidates(model: nn.Module, *inputs: Tensor):
    torch.manual_seed(0)
    traced = stages.trace(model, inputs or torch.randn(3, TOKENS, WIDTH))
    return discover(Dataflow(traced.graph_module))


def _inputs_of(nodes):
    """Every node above `nodes` up to the next learned op, those of that op included."""
    seen, queue = set(), list(nodes)
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        queue += [] if node.op == "get_attr" else node.all_input_nodes[:] if "linear" not in node.name else [
            n for n in node.all_input_nodes if n.op == "get_attr"
        ]  # fmt: skip
    return seen


class _Modulated(nn.Module):
    """A scale and a shift cut from one linear map of a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.condition, self.value, self.out = nn.Linear(8, 2 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.condition(condition).chunk(2, dim=-1)
        y: Tensor = self.out(self.norm(self.value(x)) * (1 + scale[:, None]) + shift[:, None])
        return y


def test_a_piece_of_a_coefficient_stands_for_its_controller() -> None:
    traced = stages.trace(_Modulated(), (torch.randn(3, TOKENS, WIDTH), torch.randn(3, 8)))
    (controller,) = stages.match(traced).others
    (bound,) = controller.coefficients
    (found,) = stages.discover(traced, patterns=[]).candidates
    assert stands_for(found, controller)
    # As if only the scale had been found, where it is applied.
    scale = next(node for node in traced.graph.nodes if node.op == "call_function" and node.args[1:] == (1,))
    piece = replace(found, coefficients=(scale,), cone=frozenset([scale]))
    assert bound.node is not scale
    assert stands_for(piece, controller)
    assert not stands_for(replace(piece, coefficients=(traced.placeholders()[0],), cone=frozenset()), controller)

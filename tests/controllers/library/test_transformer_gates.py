"""Routers and gates of transformers: found as often as the eager model runs them, bound to what its modules compute."""

import collections
import functools
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch

import pytest
import torch
from torch import nn

from fxaudit import stages
from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.model.load import subject
from tests.third_party import transformers, wave

WIDTH, STREAMS = 16, 3


class AltUp(nn.Module):
    """One layer over stacked residual streams, predicted before it and corrected after it (Gemma 3n)."""

    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, STREAMS, bias=False)
        self.predict = nn.Linear(STREAMS, STREAMS * STREAMS, bias=False)
        self.correct = nn.Linear(STREAMS, STREAMS, bias=False)
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, streams):
        mix = self.predict(self.modes(streams[0])).reshape(*streams.shape[1:3], STREAMS, STREAMS).permute(0, 1, 3, 2)
        predicted = torch.matmul(streams.permute(1, 2, 3, 0), mix).permute(3, 0, 1, 2) + streams
        activated = self.layer(predicted[0])
        gain = (self.correct(self.modes(activated)) + 1.0).permute(2, 0, 1).unsqueeze(-1)
        return (activated - predicted[0]).repeat(STREAMS, 1, 1, 1) * gain + predicted

    def modes(self, x):
        return torch.tanh(self.router(self.norm(x)))


class AltUpStack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(AltUp() for _ in range(2))

    def forward(self, x):
        streams = torch.stack([x, 2 * x, -x])
        for layer in self.layers:
            streams = layer(streams)
        return streams.mean(0)


class Highway(nn.Module):
    """Two highway layers, the first in the sum form, the second by lerp."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate1 = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())
        self.gate2 = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH), nn.Sigmoid())

    def forward(self, x):
        gate = self.gate1(x)
        x = gate * torch.relu(self.first(x)) + (1 - gate) * x
        return torch.lerp(x, self.second(x), self.gate2(x))


class HeadGate(nn.Module):
    """Attention written out, each head gated; then a branch gated by one number for each token."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head_gate = nn.Sequential(nn.Linear(WIDTH, 2), nn.Softplus())
        self.branch, self.token_gate = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, 1), nn.Sigmoid())

    def forward(self, x):
        q, k, v = (part.view(*x.shape[:2], 2, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2)
        x = x + self.out((y * self.head_gate(x).unsqueeze(-1)).flatten(2))
        return x + self.branch(x) * self.token_gate(x)


class CapacityRouter(nn.Module):
    """The best expert for each token, of which an expert takes the first two of a sequence (Switch)."""

    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(WIDTH, 4)

    def forward(self, x):
        scores = self.classifier(x).softmax(-1)
        chosen = nn.functional.one_hot(scores.argmax(-1), 4)
        return chosen * (chosen.cumsum(-2) <= 2), scores.max(-1).values


class Capacity(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = CapacityRouter(), nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, x):
        dispatch, weight = self.router(x)
        return x + torch.einsum("btd,edf,bte->btf", x, self.experts, dispatch.float()) * weight.unsqueeze(-1)


def hand_written(kind):
    """A builder of a module with weights of a size at which its gates move."""

    def build():
        torch.manual_seed(0)
        module = kind()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(2)
        return module.eval(), (torch.randn(2, 5, WIDTH),)

    return build


def output(module, values):
    return (values,)


def squashed(module, values):
    return (torch.sigmoid(values),)


def routed(module, values):
    """A router returns logits, weights, indices."""
    return values[-2:]


def first(module, values):
    return values[:1]


def swapped(module, values):
    """A router that returns the choice, then its weight."""
    return values[::-1]


def relative_bias(module, values):
    """WavLM's formula of its two gates (section 2.1 of the paper); `module` is the linear layer below them."""
    reset, update = torch.sigmoid(values.view(*values.shape[:-1], 2, 4).sum(-1)).chunk(2, -1)
    return (reset * (update * module.const - 1.0) + 2.0,)


@dataclass(frozen=True)
class Case:
    """A model, one family in it, and the modules (a glob over paths) whose calls compute its coefficients.

    `bound` says what a call binds: from the module and its output to the tensors, in the order of the controller.
    """

    family: str
    build: Callable
    modules: str
    bound: Callable = output
    prepare: Callable = lambda model: None


def share_constants(model):
    """Each gate's linear layer is given the constant of its attention module, for `relative_bias`."""
    for module in model.modules():
        if hasattr(module, "gru_rel_pos_linear"):
            object.__setattr__(module.gru_rel_pos_linear, "const", module.gru_rel_pos_const.detach())


SMALL_WAVE = dict(cls="AutoModel", conv_dim=[32, 32, 32], conv_stride=[5, 4, 2], conv_kernel=[10, 8, 4])  # noqa: C408
CASES = {
    "router after the choice": Case("moe-topk", transformers("granitemoe", num_hidden_layers=1), "*.router", routed),
    "sparse mixer": Case("moe-topk", transformers("phimoe", num_hidden_layers=1), "*.router", routed),
    "dense masked router": Case(
        "moe-topk",
        transformers("llama4_text", cls="Llama4ForCausalLM", num_hidden_layers=2, interleave_moe_layer_step=1),
        "*.router",
        first,
    ),
    "shared expert": Case(
        "scalar-gate", transformers("qwen2_moe", num_hidden_layers=1), "*.shared_expert_gate", squashed
    ),
    "router with a capacity": Case("moe-top1-capacity", hand_written(Capacity), "router", swapped),
    "gate for each token": Case("scalar-gate", hand_written(HeadGate), "token_gate"),
    "gate for each head": Case("attn-output-gate", hand_written(HeadGate), "head_gate"),
    "gate for each channel": Case(
        "attn-output-gate", transformers("afmoe", num_hidden_layers=1), "*.self_attn.gate_proj", squashed
    ),
    "streams": Case("altup", hand_written(AltUpStack), "layers.?"),
    "highways": Case("highway-lerp", hand_written(Highway), "gate?"),
    "relative bias": Case(
        "rel-bias-gate",
        transformers("wavlm", wave(), num_feat_extract_layers=3, num_conv_pos_embeddings=16, **SMALL_WAVE),
        "*.gru_rel_pos_linear",
        relative_bias,
        share_constants,
    ),
}


@dataclass(frozen=True)
class Run:
    """What the family's controllers are, and what the eager model's modules computed on the same inputs."""

    controllers: tuple
    frozen: FrozenModel
    recorded: dict[str, torch.Tensor]
    captured: tuple[tuple[torch.Tensor, ...], ...]
    leaves: list


@functools.cache
def run(name) -> Run:
    case = CASES[name]
    model, inputs = case.build()
    case.prepare(model)
    captured = captures(case, model, inputs)
    matched = stages.match(stages.trace(subject(model, inputs, source=name)))
    controllers = tuple(c for c in matched.controllers if c.pattern == case.family)
    frozen = FrozenModel(matched.traced, controllers)
    leaves = matched.traced.flatten(matched.traced.subject.arguments)
    values = frozen.run_tapped(leaves)[1]
    recorded = {c.key: value for c, value in zip(frozen.coefficients, values, strict=False)}
    return Run(controllers, frozen, recorded, captured, leaves)


def captures(case, model, inputs):
    """What each call of the case's modules binds, by forward hooks on the untraced model."""
    found = []
    hooked = [module for path, module in model.named_modules() if fnmatch(path, case.modules)]
    if case.family == "altup":
        handles = list(altup_hooks(hooked, found))
    else:
        handles = [m.register_forward_hook(lambda m, _, out: found.append(case.bound(m, out))) for m in hooked]
    with torch.no_grad():
        model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    for handle in handles:
        handle.remove()
    return tuple(found)


def altup_hooks(layers, found):
    """An AltUp layer binds the correction's gains, then the prediction's weights: two modules of one layer."""
    mixes = collections.deque()
    for layer in layers:
        yield layer.predict.register_forward_hook(lambda m, _, out: mixes.append(out))
        yield layer.correct.register_forward_hook(
            lambda m, _, out: found.append((out + 1.0, mixes.popleft().view(*out.shape[:2], STREAMS, STREAMS)))
        )


def reassigned(value, batch=2):
    """A recorded coefficient with its inputs exchanged; the sample axis is first in memory order of all of these."""
    return value.reshape(batch, -1).flip(0).reshape(value.shape)


each_case = pytest.mark.parametrize("name", CASES)


@each_case
def test_as_many_controllers_as_calls_in_the_eager_model(name):
    assert len(run(name).controllers) == len(run(name).captured) > 0


@each_case
def test_the_coefficient_is_what_the_eager_module_computed_bit_for_bit(name):
    found = run(name)
    for controller, expected in zip(found.controllers, found.captured, strict=True):
        bound = [found.recorded[c.key] for c in controller.coefficients]
        assert [torch.equal(a, b) for a, b in zip(bound, expected, strict=True)] == [True] * len(expected)


@each_case
def test_identity_replay_is_bitwise(name):
    assert stages.identity(run(name).frozen).bitwise


@each_case
def test_coefficients_of_another_input_change_the_output(name):
    found = run(name)
    bound = list(found.recorded.values())[: len(found.frozen.coefficients)]
    live = found.frozen.run_frozen(found.leaves, bound)
    swapped = found.frozen.run_frozen(found.leaves, [reassigned(value) for value in bound])
    assert not all(torch.equal(a, b) for a, b in zip(live, swapped, strict=True))


@each_case
def test_freezing_removes_the_controllers_own_parameters(name):
    found = run(name)
    for controller in found.controllers:
        assert controller.parameter_names
        assert not controller.parameter_names & set(found.frozen.frozen.state_dict())


@each_case
def test_nothing_leaks(name):
    assert [leak for controller in run(name).controllers for leak in controller.leaks] == []

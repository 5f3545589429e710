"""Opt-in families and routers by depth, against what forward hooks see in the eager model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxaudit import stages

from .eager import telling
from .freezing import captured, example_model, family

Expected = Callable[[nn.Module, tuple[Tensor, ...]], list[Tensor]]


@dataclass(frozen=True)
class Requested:
    """A family, a model of it, two inputs for the model, and its coefficients in the eager model, found by hooks.

    `removed` is an expression for the parameters that only the controllers need.
    """

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    others: tuple[Tensor, ...]
    expected: Expected
    axes: tuple[str, ...]
    removed: str


def drawn(*sizes: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Two inputs, each batch element with a mean of its own."""
    one, two = (torch.randn(sizes, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    shift = torch.arange(sizes[0]).view(-1, *(1 for _ in sizes[1:]))
    return (one + shift,), (two * 2 - shift,)


def outputs(module: nn.Module, inputs: tuple[Tensor, ...], *names: str) -> dict[str, list[Tensor]]:
    """What the submodules of these paths return, call by call."""
    with captured(module, lambda path, _: path in names) as calls, torch.no_grad():
        module(*inputs)
    return {name: [out for path, _, _, out in calls if path == name] for name in names}


# --- gated linear units ---------------------------------------------------------------------------------------------


class SwiGLU(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, 32), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def gated_unit() -> Requested:
    def expected(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        return [F.silu(outputs(module, inputs, "gate")["gate"][0])]

    return Requested(
        "glu-gate", telling(SwiGLU()), *drawn(2, 5, 16), expected, ("batch", "token", "feature"), r"gate\..*"
    )


class ShortConvolution(nn.Module):
    """One packed layer cut into two gates and a value, positions last (LFM2)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.conv = nn.Conv1d(width, width, 3, padding=2, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        before, behind, value = self.into(x).transpose(-1, -2).chunk(3, dim=-2)
        mixed = self.conv(before * value)[:, :, : x.shape[1]]
        return self.out((behind * mixed).transpose(-1, -2))


def short_convolution(tokens: int = 5) -> Requested:
    def expected(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        packed = outputs(module, inputs, "into")["into"][0]
        return [packed[..., :16].mT, packed[..., 16:32].mT]

    axes = ("batch", "feature", "token")
    # The packed layer makes the value, too: it stays.
    return Requested("glu-gate", telling(ShortConvolution()), *drawn(2, tokens, 16), expected, axes, "")


def equally_long() -> Requested:
    """As many tokens as features: sizes do not tell which axis is which."""
    return short_convolution(tokens=16)


# --- vision ---------------------------------------------------------------------------------------------------------


def response_norm() -> Requested:
    from timm.layers.grn import GlobalResponseNorm

    def expected(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        x = F.gelu(outputs(module, inputs, "0")["0"][0])
        size = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
        return [size / (size.mean(-1, keepdim=True) + 1e-6)]

    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), GlobalResponseNorm(16), nn.Linear(16, 8))
    axes = ("batch", "1", "1", "channel")
    return Requested("grn", telling(module), *drawn(2, 6, 6, 8), expected, axes, "")  # a norm has no parameters


def focal() -> Requested:
    from timm.models.focalnet import FocalModulation

    def expected(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        seen = outputs(module, inputs, "0.f", "0.h")
        return [seen["0.f"][0][:, 16:], seen["0.h"][0]]

    module = nn.Sequential(FocalModulation(8, focal_window=3, focal_level=2), nn.Conv2d(8, 8, 1))
    axes = ("batch", "level", "height", "width")
    return Requested(
        "focal-modulation", telling(module), *drawn(2, 8, 6, 6), expected, axes, r"0\.(h|focal_layers\..*)\..*"
    )


# --- recurrent cells ------------------------------------------------------------------------------------------------


def long_short_term() -> Requested:
    def expected(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        seen = outputs(module, inputs, "ih", "hh")
        found = []
        for a, b in zip(seen["ih"], seen["hh"], strict=True):
            i, f, g, o = (a + b).chunk(4, 1)
            found += [i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()]
        return found

    module, _ = example_model(family("rnn-gates").examples[0])
    return Requested("rnn-gates", module, *drawn(2, 3, 4), expected, ("batch", "feature"), r"(ih|hh)\..*")


def gated_recurrent() -> Requested:
    def expected(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        seen = outputs(module, inputs, "ih", "hh")
        found = []
        for a, b in zip(seen["ih"], seen["hh"], strict=True):
            (ir, iz, i), (hr, hz, n) = a.chunk(3, 1), b.chunk(3, 1)
            reset = (ir + hr).sigmoid()
            found += [reset, (iz + hz).sigmoid(), (i + reset * n).tanh()]
        return found

    module, _ = example_model(family("rnn-gates").examples[1])
    return Requested("rnn-gates", module, *drawn(2, 3, 4), expected, ("batch", "feature"), r"(ih|hh)\..*")


# --- routers by depth -----------------------------------------------------------------------------------------------


def depths() -> Requested:
    def expected(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        scores = outputs(module, inputs, "router")["router"][0].squeeze(-1).sigmoid()
        weights, indices = torch.topk(scores, 3, dim=1, sorted=False)
        return [weights, indices]

    module, _ = example_model(family("mod-router").examples[0])
    return Requested("mod-router", telling(module), *drawn(2, 8, 16), expected, ("batch", "k"), r"router\..*")


CASES = [
    gated_unit,
    short_convolution,
    equally_long,
    response_norm,
    focal,
    long_short_term,
    gated_recurrent,
    depths,
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.__name__)
def case(request):
    return request.param()


@pytest.fixture(scope="module")
def frozen(case):
    enable = [] if case.name == "mod-router" else [case.name]
    return stages.freeze(stages.trace(case.module, case.inputs), patterns=[family(case.name)], enable=enable)


def test_coefficients_are_those_that_hooks_see_bit_for_bit(case, frozen):
    found = list(frozen.live(*case.others).coefficients.values())
    wanted = case.expected(case.module, case.others)
    assert len(found) == len(wanted)
    for value in wanted:
        equal = [i for i, one in enumerate(found) if one.shape == value.shape and torch.equal(one, value)]
        assert equal
        del found[equal[0]]


def test_axes_are_named_as_they_lie(case, frozen):
    first = frozen.coefficients[0]
    assert tuple("*".join(axis) for axis in first.axes) == case.axes


def test_identity_replay_is_bitwise(case, frozen):
    with torch.no_grad():
        eager = case.module(*case.others)
    live = frozen.live(*case.others)
    assert torch.equal(live.output, eager)
    assert torch.equal(frozen(*case.others, coefficients=live.coefficients), eager)


def test_coefficients_of_another_input_change_the_output(case, frozen):
    # Jointly: alone, a gate that only makes another gate changes nothing, since that one is bound, too.
    live, others = frozen.live(*case.inputs), frozen.live(*case.others)
    moved = frozen(*case.inputs, coefficients=others.coefficients)
    assert not torch.allclose(moved, live.output)


def test_the_frozen_graph_lacks_what_only_the_controllers_need(case, frozen):
    assert all(controller.cone for controller in frozen.controllers)
    held = set(frozen.frozen.state_dict())
    assert set(case.module.state_dict()) - held == {
        n for n in case.module.state_dict() if re.fullmatch(case.removed, n)
    }
    assert not held & {name for controller in frozen.controllers for name in controller.parameter_names}

"""Families of vision models, against the modules of timm and torchvision and against code after the authors' own."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxaudit import stages

from .eager import CHECKS, Eager, images, telling


class Stack(nn.Module):
    """Blocks between convolutions, so that no gate is the model's last word."""

    def __init__(self, *blocks, width=16, first=3):
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(first, width, 3, padding=1), nn.ModuleList(blocks)
        self.between = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in blocks)

    def forward(self, x):
        x = self.stem(x)
        for block, between in zip(self.blocks, self.between, strict=True):
            x = between(block(x)).relu()
        return x


def stacked(family, block, gates, cone, count=2, finish=lambda output: output, each=1, **options):
    first, second = images(2, 3, 8, 8)
    names = [f"blocks.{i}.{gate}".rstrip(".") for i in range(count) for gate in gates]
    module = telling(Stack(*(block() for _ in range(count)), **options))
    families = {family: each * count}
    return Eager(module, first, second, families, names, rf"blocks\.\d+\.({cone})", finish)


def squeeze_excite():
    from torchvision.ops import SqueezeExcitation

    return stacked("se-gate", lambda: SqueezeExcitation(16, 8), ["scale_activation"], r"fc[12]\..*")


def efficient_channel():
    from timm.layers import EcaModule

    return stacked("eca-gate", lambda: EcaModule(16), ["gate"], r"conv\..*")


def circular_channel():
    from timm.layers import CecaModule

    return stacked("eca-gate", lambda: CecaModule(16), ["gate"], r"conv\..*")


def selective_kernel():
    from timm.layers import SelectiveKernel

    return stacked("branch-softmax", lambda: SelectiveKernel(16, 16), ["attn"], r"attn\..*")


def split_attention():
    from timm.layers import SplitAttn

    block = lambda: SplitAttn(16, norm_layer=nn.BatchNorm2d)  # noqa: E731
    return stacked("branch-softmax", block, ["rsoftmax"], r"(fc1|bn1|fc2)\..*")


def context_scales():
    from timm.layers import GlobalContext

    return stacked("global-context", lambda: GlobalContext(16), ["gate"], r".*")


def context_shifts():
    from timm.layers import GlobalContext

    block = lambda: GlobalContext(16, fuse_add=True, fuse_scale=False)  # noqa: E731
    return stacked("global-context", block, ["mlp_add.fc2"], r".*")


def convolutional_block_attention():
    from timm.layers.cbam import CbamModule

    return stacked("spatial-gate", lambda: CbamModule(16), ["channel.gate", "spatial.gate"], r".*", each=2)


def coordinate_attention():
    from timm.layers.coord_attn import CoordAttn

    return stacked("spatial-gate", lambda: CoordAttn(16), ["gate"], r".*", each=2)


def ghost():
    from timm.models.ghostnet import GhostModuleV2

    return stacked("spatial-gate", lambda: GhostModuleV2(16, 16), ["gate_fn"], r"short_conv\..*")


def conditional_convolution():
    from timm.models._efficientnet_blocks import CondConvResidual

    block = lambda: CondConvResidual(16, 16, num_experts=4)  # noqa: E731
    return stacked("cond-conv", block, ["routing_fn"], r"routing_fn\..*", finish=torch.sigmoid)


class OmniConv(nn.Module):
    """Four attentions over one convolution, after github.com/OSVAI/ODConv."""

    def __init__(self, inputs, outputs, size, kernels, groups=1):
        super().__init__()
        self.outputs, self.size, self.groups = outputs, size, groups
        self.stem = nn.Sequential(nn.Conv2d(inputs, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.channel = nn.Sequential(nn.Conv2d(8, inputs, 1), nn.Unflatten(1, (inputs,)), nn.Sigmoid())
        is_depthwise = inputs == groups == outputs
        self.filter = None if is_depthwise else nn.Sequential(nn.Conv2d(8, outputs, 1), nn.Sigmoid())
        taps = (1, 1, 1, size, size)
        self.spatial = (
            nn.Sequential(nn.Conv2d(8, size * size, 1), nn.Flatten(), nn.Unflatten(1, taps), nn.Sigmoid())
            if size > 1
            else None
        )
        shape = (kernels, 1, 1, 1, 1)
        self.kernel = (
            nn.Sequential(nn.Conv2d(8, kernels, 1), nn.Flatten(), nn.Unflatten(1, shape), nn.Softmax(1))
            if kernels > 1
            else None
        )
        self.weight = nn.Parameter(torch.randn(kernels, outputs, inputs // groups, size, size))

    def forward(self, x):
        b, c, h, w = x.shape
        z = self.stem(F.adaptive_avg_pool2d(x, 1))
        gate = self.channel(z)
        filters = 1.0 if self.filter is None else self.filter(z)
        taps = 1.0 if self.spatial is None else self.spatial(z)
        kernels = 1.0 if self.kernel is None else self.kernel(z)
        x = x * gate
        if self.spatial is None and self.kernel is None:
            return F.conv2d(x, self.weight.squeeze(0)) * filters
        weight = (taps * kernels * self.weight.unsqueeze(0)).sum(1)
        weight = weight.view(-1, c // self.groups, self.size, self.size)
        x = F.conv2d(x.reshape(1, -1, h, w), weight, padding=self.size // 2, groups=self.groups * b)
        return x.view(b, self.outputs, h, w) * filters


def omni_dimensional():
    blocks = [OmniConv(16, 16, 3, 4), OmniConv(16, 16, 1, 1), OmniConv(16, 16, 3, 1, groups=16)]
    first, second = images(2, 3, 8, 8)
    gates = [
        f"blocks.{i}.{name}"
        for i, block in enumerate(blocks)
        for name in ("channel", "filter", "spatial", "kernel")
        if getattr(block, name) is not None
    ]
    return Eager(
        telling(Stack(*blocks)),
        first,
        second,
        {"od-conv": 3},
        gates,
        r"blocks\.\d+\.(stem|channel|filter|spatial|kernel)\..*",
    )


CASES = [
    squeeze_excite,
    efficient_channel,
    circular_channel,
    selective_kernel,
    split_attention,
    context_scales,
    context_shifts,
    convolutional_block_attention,
    coordinate_attention,
    ghost,
    conditional_convolution,
    omni_dimensional,
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.__name__)
def eager(request):
    return request.param()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_a_family_is_counted_recorded_replayed_and_removed(eager, check):
    check(eager)


@pytest.mark.parametrize("case", [context_scales, context_shifts, squeeze_excite])
def test_with_its_neutral_value_a_block_leaves_its_map_as_it_is(case):
    eager = case()
    frozen = stages.freeze(eager.module, eager.inputs)
    own = frozen.live(*eager.inputs).coefficients
    neutral = {
        c.key: torch.full_like(own[c.key], k.intervene.neutral_of(c.name))
        for k in frozen.controllers
        for c in k.coefficients
    }
    without = copy.deepcopy(eager.module)
    without.blocks = nn.ModuleList(nn.Identity() for _ in without.blocks)
    with torch.no_grad():
        assert torch.equal(frozen(*eager.inputs, coefficients=neutral), without(*eager.inputs))

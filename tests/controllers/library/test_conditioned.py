"""Modulation by a condition, routers that skip blocks, dynamic taps, and attention over layers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxaudit import stages
from fxaudit.errors import TraceError

from .eager import CHECKS, Eager, telling


class Modulated(nn.Module):
    """A block of a diffusion transformer (adaLN-Zero), modulated by its own mean: a controller like any other."""

    def __init__(self, width=16):
        super().__init__()
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.mix, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.condition(x.mean(1)).unsqueeze(1).chunk(6, dim=2)
        x = x + gate1 * self.mix(F.layer_norm(x, x.shape[-1:]) * (1 + scale1) + shift1)
        return x + gate2 * self.down(F.gelu(self.up(F.layer_norm(x, x.shape[-1:]) * (1 + scale2) + shift2)))


class Decision(nn.Module):
    """A hard decision, straight through, for each input."""

    def forward(self, logits):
        p = torch.sigmoid(logits)
        return (p > 0.5).float().detach() - p.detach() + p


class Skipping(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.block, self.gate, self.decision = nn.Linear(width, width), nn.Linear(width, 1), Decision()

    def forward(self, x):
        mask = self.decision(self.gate(x.mean(1))).unsqueeze(1)
        return mask * torch.tanh(self.block(x)) + (1 - mask) * x


class DynamicTaps(nn.Module):
    """Static taps and those that each token computes, added, over windows of three tokens."""

    def __init__(self, width=16):
        super().__init__()
        self.static, self.taps, self.sum = nn.Parameter(torch.randn(3, width)), nn.Linear(width, 12), Sum()

    def forward(self, x):
        b, t, c = x.shape
        taps = self.sum(self.static.T.view(4, c // 4, 3), self.taps(x).view(b, t, 4, 1, 3))
        windows = F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).reshape(b, t, 4, c // 4, 3)
        return (windows * taps).sum(-1).reshape(b, t, c)


class Sum(nn.Module):
    def forward(self, a, b):
        return a + b


class DepthAttention(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.layer, self.query, self.softmax = nn.Linear(width, width), nn.Linear(width, 1, bias=False), nn.Softmax(2)

    def forward(self, x):
        states = torch.stack([x, torch.tanh(self.layer(x))], dim=2)
        weights = self.softmax(self.query(F.layer_norm(states, states.shape[-1:])).squeeze(-1))
        return (weights.unsqueeze(-1) * states).sum(2)


def case(family, block, gate, cone):
    torch.manual_seed(0)
    module = telling(nn.Sequential(nn.Linear(8, 16), block(), nn.Linear(16, 16), block(), nn.Linear(16, 4)))
    drawn = [torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(seed)) * 2 for seed in (1, 2)]
    shifted = [x + x.new_tensor([1.0, -2.0, 0.5, 3.0]).roll(i).view(4, 1, 1) for i, x in enumerate(drawn)]
    gates = [f"{i}.{gate}" for i in (1, 3)]
    return Eager(module, (shifted[0],), (shifted[1],), {family: 2}, gates, rf"[13]\.({cone})")


CASES = {
    "adaln-film": (Modulated, "condition", r"condition\..*"),
    "mod-router": (Skipping, "decision", r"gate\..*"),
    "dynamic-taps": (DynamicTaps, "sum", r"static|taps\..*"),
    "depth-attention": (DepthAttention, "softmax", r"query\..*"),
}


@pytest.fixture(scope="module", params=CASES)
def eager(request):
    return case(request.param, *CASES[request.param])


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_a_family_is_counted_recorded_replayed_and_removed(eager, check):
    check(eager)


class _Matcher(nn.Module):
    """The matcher of LightGlue alone: finding its keypoints branches on data, too."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, keypoints, descriptors, mask):
        return self.model._match_image_pair(keypoints, descriptors, 32, 32, mask=mask)[:2]


def test_an_exit_by_python_control_flow_is_refused_with_its_line():
    import inspect

    import transformers

    detector = transformers.SuperPointConfig(
        encoder_hidden_sizes=[8, 8, 16, 16], decoder_hidden_size=16, descriptor_decoder_dim=16, max_keypoints=12
    )
    config = transformers.LightGlueConfig(
        keypoint_detector_config=detector, descriptor_dim=16, num_hidden_layers=9, num_attention_heads=2
    )
    model = _Matcher(transformers.LightGlueForKeypointMatching(config)).eval()
    inputs = {
        "keypoints": torch.rand(3, 2, 10, 2) * 32,
        "descriptors": torch.randn(3, 2, 10, 16),
        "mask": torch.ones(3, 2, 10, dtype=torch.int),
    }
    with pytest.raises(TraceError) as caught:
        stages.trace(model, inputs)
    source, first = inspect.getsourcelines(type(model.model)._match_image_pair)
    exits = [i for i, line in enumerate(source, first) if "if torch.any(early_stopped_pairs)" in line]
    assert caught.value.reason == "data-dependent-branch"
    assert f"modeling_lightglue.py:{exits[0]}" in caught.value.where

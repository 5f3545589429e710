"""Rows of architectures that no installed package holds, written out after their papers in `models`."""

from __future__ import annotations

import torch
from torch import nn

from fxaudit.model.settings import TraceOptions
from tests.acceptance.models import (
    dcformer,
    dit,
    feature_gate,
    hyper_connections,
    mudd,
    od_conv,
    sequences,
    skipping,
)
from tests.acceptance.row import Row
from tests.third_party import Build, Inputs, calibrated, images, tokens


def text(kind, *args, length: int = 8, **options) -> Build:
    """A builder of a module that takes token ids."""
    return lambda: (kind(*args, **options).eval(), tokens(length=length))


def image(kind, *args, size: int = 32, **options) -> Build:
    """A builder of a module that takes images, its batch statistics calibrated."""
    return lambda: (calibrated(kind(*args, **options), size), images(size))


@torch.no_grad()
def skipnet() -> tuple[nn.Module, Inputs]:
    """SkipNet whose gate, all but constant when it is initialised, decides one way for some images, else for others."""
    module, inputs = image(skipping.SkipNet, size=16)()
    gate = module.gate
    gate.project.weight.mul_(10)
    for parameter in gate.rnn.parameters():
        parameter.mul_(4)
    logits: list[torch.Tensor] = []
    handle = gate.proj.register_forward_hook(lambda _, __, output: logits.append(output))
    module(*images(16, batch=16))
    handle.remove()
    gate.proj.bias.sub_(torch.cat(logits).median())
    return module, inputs


@torch.no_grad()
def adaptive_inference() -> tuple[nn.Module, Inputs]:
    """ConvNet-AIG, each gate of which opens for about half of the images that reach it."""
    module, inputs = image(skipping.ConvNetAIG, size=16)()
    for block in module.blocks:
        logits: list[torch.Tensor] = []
        handle = block.fc2.register_forward_hook(lambda _, __, output, seen=logits: seen.append(output))
        module(*images(16, batch=16))
        handle.remove()
        block.fc2.bias[1] -= (logits[0][:, 1] - logits[0][:, 0]).median()
    return module, inputs


def diffusion(depth: int) -> Build:
    def build() -> tuple[nn.Module, Inputs]:
        g = torch.Generator().manual_seed(1)
        latent = torch.randn(4, 4, 8, 8, generator=g)
        steps, classes = torch.tensor([17, 400, 3, 250]), torch.tensor([3, 8, 1, 5])  # two values are taken for a mask
        return dit.DiT(depth).eval(), {"x": latent, "t": steps, "y": classes}

    return build


def features(kind) -> Build:
    return lambda: (kind().eval(), (torch.randn(4, 16, generator=torch.Generator().manual_seed(1)),))


def filmed() -> tuple[nn.Module, Inputs]:
    inputs = {"image": images(16)[0], "question": tokens(length=6)["input_ids"]}
    return sequences.FiLMedNet().eval(), inputs


PAPERS = [
    Row(
        "69",
        "MUDDPythia 5 layers",
        text(mudd.MUDDPythia, 5),
        {"mudd-dense": 5},
        modules={"mudd-dense": "MultiwayDynamicDenseBlock"},
        source="one for each layer",
    ),
    Row(
        "69",
        "MUDDPythia 24 layers",
        text(mudd.MUDDPythia, 24),
        {"mudd-dense": 24},
        modules={"mudd-dense": "MultiwayDynamicDenseBlock"},
    ),
    Row(
        "70",
        "MUDDPythia 32 layers",
        text(mudd.MUDDPythia, 32),
        {"mudd-dense": 32},
        modules={"mudd-dense": "MultiwayDynamicDenseBlock"},
    ),
    Row(
        "71",
        "DCPythia 3 layers",
        text(dcformer.DCPythia, 3),
        {"dcmha": 3},
        modules={"dcmha": "DynamicWeightProjection"},
        source="one for each layer",
        in_sample=True,
    ),
    Row(
        "71",
        "DCPythia 32 layers",
        text(dcformer.DCPythia, 32),
        {"dcmha": 32},
        modules={"dcmha": "DynamicWeightProjection"},
    ),
    Row("72", "DiT 12 blocks", diffusion(12), other={"adaln-film": 13}, modules={"adaln-film": "DiTBlock FinalLayer"}),
    Row("72", "DiT 28 blocks", diffusion(28), other={"adaln-film": 29}, modules={"adaln-film": "DiTBlock FinalLayer"}),
    Row(
        "73",
        "od_resnet18",
        image(od_conv.ODResNet, od_conv.BasicBlock, (2, 2, 2, 2)),
        {"od-conv": 16},
        modules={"od-conv": "ODConv2d"},
        in_sample=True,
    ),
    Row(
        "73",
        "od_resnet50",
        image(od_conv.ODResNet, od_conv.Bottleneck, (3, 4, 6, 3), kernel_num=1),
        {"od-conv": 48},
        modules={"od-conv": "ODConv2d"},
    ),
    Row(
        "73",
        "od_mobilenetv2",
        image(od_conv.ODMobileNetV2, size=64),
        {"od-conv": 51},
        modules={"od-conv": "ODConv2d"},
    ),
    Row(
        "74",
        "hyper_connections",
        text(hyper_connections.Stack),
        {"hyper-connection": 6},
        modules={"hyper-connection": "HyperConnections"},
        in_sample=True,
    ),
    Row(
        "B3",
        "FeatureGate",
        text(feature_gate.FeatureGateTransformer, 4),
        {"feature-gate": 8},
        modules={"feature-gate": "2*Block"},
        source="2 for each layer",
        in_sample=True,
    ),
    Row(
        "B2",
        "native sparse attention",
        text(sequences.Residual, sequences.NativeSparseAttention),
        {"attn-output-gate": 2},
        modules={"attn-output-gate": "NativeSparseAttention"},
        source="one for each layer",
    ),
    Row(
        "C1",
        "highway",
        features(sequences.HighwayNet),
        {"highway-lerp": 5},
        modules={"highway-lerp": "Highway"},
        source="one for each layer",
        in_sample=True,
    ),
    Row(
        "D2",
        "dynamic convolution",
        text(sequences.DynamicConvNet),
        {"dynamic-taps": 3},
        modules={"dynamic-taps": "DynamicConv"},
        source="one for each layer",
        in_sample=True,
    ),
    Row(
        "D4",
        "gated linear attention",
        text(sequences.Residual, sequences.GatedLinearAttention),
        {"linear-rnn-gate": 2},
        modules={"linear-rnn-gate": "GatedLinearAttention"},
        source="one for each layer",
        in_sample=True,
    ),
    Row(
        "X3",
        "LSTM of 3 tokens",
        text(sequences.Recurrent, nn.LSTM, length=3),
        other={"rnn-gates": 12},
        modules={"rnn-gates": "12*LSTM"},
        source="3 gates and a candidate for each token",
        options=TraceOptions(decompose=("lstm",)),
        in_sample=True,
    ),
    Row(
        "X3",
        "GRU of 3 tokens",
        text(sequences.Recurrent, nn.GRU, length=3),
        other={"rnn-gates": 9},
        modules={"rnn-gates": "9*GRU"},
        source="2 gates and a candidate for each token",
        options=TraceOptions(decompose=("lstm",)),
    ),
    Row(
        "E2",
        "FiLM",
        filmed,
        other={"adaln-film": 3},
        modules={"adaln-film": "FiLMedBlock"},
        source="one for each block",
        in_sample=True,
    ),
    Row(
        "G9",
        "mixture of depths",
        text(skipping.MixtureOfDepths, length=10),
        {"mod-router": 2},
        modules={"mod-router": "DepthRouter"},
        source="every other block",
        in_sample=True,
    ),
    Row("G10", "SkipNet", skipnet, {"mod-router": 3}, source="one for each block but the first"),
    Row(
        "G10",
        "ConvNet-AIG",
        adaptive_inference,
        {"mod-router": 4},
        modules={"mod-router": "AIGBlock"},
        source="one for each block",
    ),
    Row(
        "68",
        "early exit",
        text(skipping.EarlyExit),
        other={"early-exit": 8},
        modules={"early-exit": "TokenConfidence"},
        source="the table's: one for each layer of LightGlue but the last, its exits written with tensor ops",
        in_sample=True,
    ),
]

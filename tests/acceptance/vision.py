"""Rows of convolutional networks and vision transformers."""

from __future__ import annotations

from torch import nn

from tests.acceptance.row import Row
from tests.third_party import Build, Inputs, calibrated, pixels, timm, torchvision, transformers

TORCHVISION_SE = {"se-gate": "SqueezeExcitation"}
TIMM_SE = {"se-gate": "SEModule"}


def photographs(model_type: str, size: int, **options) -> Build:
    """A builder of a transformers vision model, its batch statistics calibrated: else maps fade on the way to gates."""
    build = transformers(model_type, pixels(size), **options)

    def calibrate() -> tuple[nn.Module, Inputs]:
        module, inputs = build()
        return calibrated(module, size), inputs

    return calibrate


CHANNEL_GATES = [
    Row(
        "1",
        "torchvision mobilenet_v3_small",
        torchvision("mobilenet_v3_small"),
        {"se-gate": 9},
        modules=TORCHVISION_SE,
        in_sample=True,
    ),
    Row(
        "2", "torchvision mobilenet_v3_large", torchvision("mobilenet_v3_large"), {"se-gate": 8}, modules=TORCHVISION_SE
    ),
    Row("3", "torchvision efficientnet_b0", torchvision("efficientnet_b0"), {"se-gate": 16}, modules=TORCHVISION_SE),
    Row("5", "torchvision efficientnet_b7", torchvision("efficientnet_b7"), {"se-gate": 55}, modules=TORCHVISION_SE),
    Row(
        "6", "torchvision efficientnet_v2_s", torchvision("efficientnet_v2_s"), {"se-gate": 30}, modules=TORCHVISION_SE
    ),
    Row(
        "6", "torchvision efficientnet_v2_m", torchvision("efficientnet_v2_m"), {"se-gate": 44}, modules=TORCHVISION_SE
    ),
    Row(
        "6", "torchvision efficientnet_v2_l", torchvision("efficientnet_v2_l"), {"se-gate": 61}, modules=TORCHVISION_SE
    ),
    Row("7", "torchvision regnet_y_400mf", torchvision("regnet_y_400mf"), {"se-gate": 16}, modules=TORCHVISION_SE),
    Row("9", "torchvision maxvit_t", torchvision("maxvit_t", 224), {"se-gate": 11}, modules=TORCHVISION_SE),
    Row("10", "timm seresnet50", timm("seresnet50"), {"se-gate": 16}, modules=TIMM_SE),
    Row("11", "timm seresnet18", timm("seresnet18"), {"se-gate": 8}, modules=TIMM_SE, in_sample=True),
    Row("11", "timm seresnet152", timm("seresnet152"), {"se-gate": 50}, modules=TIMM_SE),
    Row("12", "timm legacy_seresnet50", timm("legacy_seresnet50"), {"se-gate": 16}, modules=TIMM_SE),
    Row("12", "timm legacy_senet154", timm("legacy_senet154"), {"se-gate": 50}, modules=TIMM_SE),
    Row("14", "timm ecaresnet50t", timm("ecaresnet50t"), {"eca-gate": 16}, modules={"eca-gate": "EcaModule"}),
    Row("14", "timm ecaresnet101d", timm("ecaresnet101d"), {"eca-gate": 33}, modules={"eca-gate": "EcaModule"}),
    Row("15", "timm eca_nfnet_l0", timm("eca_nfnet_l0"), {"eca-gate": 12}, modules={"eca-gate": "EcaModule"}),
    Row("15", "timm eca_vovnet39b", timm("eca_vovnet39b"), {"eca-gate": 4}, modules={"eca-gate": "EcaModule"}),
    Row("17", "timm resnest14d", timm("resnest14d"), {"branch-softmax": 4}, modules={"branch-softmax": "SplitAttn"}),
    Row("17", "timm resnest50d", timm("resnest50d"), {"branch-softmax": 16}, modules={"branch-softmax": "SplitAttn"}),
    Row("17", "timm resnest101e", timm("resnest101e"), {"branch-softmax": 33}, modules={"branch-softmax": "SplitAttn"}),
    Row(
        "A5",
        "timm skresnet18",
        timm("skresnet18"),
        {"branch-softmax": 8},
        modules={"branch-softmax": "SelectiveKernelAttn"},
        source="one for each block",
    ),
    Row(
        "19",
        "timm gcresnet33ts",
        timm("gcresnet33ts"),
        {"global-context": 10},
        modules={"global-context": "GlobalContext"},
    ),
    Row(
        "A5",
        "timm skresnet18 of 4 blocks",
        timm("skresnet18", layers=[1, 1, 1, 1]),
        {"branch-softmax": 4},
        modules={"branch-softmax": "SelectiveKernelAttn"},
        source="one for each block",
        in_sample=True,
    ),
    Row(
        "A7",
        "timm resnet10t gc",
        timm("resnet10t", block_args={"attn_layer": "gc"}),
        {"global-context": 4},
        modules={"global-context": "GlobalContext"},
        source="one for each block, multiplied",
        in_sample=True,
    ),
    Row(
        "A4",
        "timm resnet10t ceca",
        timm("resnet10t", block_args={"attn_layer": "ceca"}),
        {"eca-gate": 4},
        modules={"eca-gate": "CecaModule"},
        source="one for each block",
        in_sample=True,
    ),
    Row(
        "A8",
        "timm resnet10t cbam",
        timm("resnet10t", block_args={"attn_layer": "cbam"}),
        {"spatial-gate": 8},
        modules={"spatial-gate": "2*CbamModule"},
        source="2 for each block",
        in_sample=True,
    ),
    Row(
        "20",
        "timm tf_efficientnet_cc_b0_4e",
        timm("tf_efficientnet_cc_b0_4e"),
        {"se-gate": 16, "cond-conv": 8},
        modules={"se-gate": "SqueezeExcite", "cond-conv": "CondConvResidual"},
        in_sample=True,
    ),
    Row(
        "23",
        "timm ghostnetv2_100",
        timm("ghostnetv2_100"),
        {"se-gate": 7, "spatial-gate": 14},
        modules={"se-gate": "SqueezeExcite", "spatial-gate": "GhostModuleV2"},
    ),
    Row("24", "timm nfnet_l0", timm("nfnet_l0"), {"se-gate": 12}, modules=TIMM_SE),
    Row("24", "timm dm_nfnet_f0", timm("dm_nfnet_f0", 96), {"se-gate": 12}, modules=TIMM_SE),
    Row("27", "timm bat_resnext26ts", timm("bat_resnext26ts", 256)),
    Row(
        "28", "timm convnextv2_atto", timm("convnextv2_atto"), other={"grn": 12}, modules={"grn": "GlobalResponseNorm"}
    ),
    Row(
        "28", "timm convnextv2_tiny", timm("convnextv2_tiny"), other={"grn": 18}, modules={"grn": "GlobalResponseNorm"}
    ),
    Row(
        "29",
        "timm mambaout_femto",
        timm("mambaout_femto"),
        other={"glu-gate": 18},
        modules={"glu-gate": "GatedConvBlock"},
    ),
    Row(
        "30",
        "timm gmlp_s16_224",
        timm("gmlp_s16_224", 224),
        other={"glu-gate": 30},
        modules={"glu-gate": "SpatialGatingUnit"},
    ),
    Row(
        "32",
        "timm focalnet_tiny_srf",
        timm("focalnet_tiny_srf", 224),
        other={"focal-modulation": 12},
        modules={"focal-modulation": "FocalModulation"},
        in_sample=True,
    ),
    Row(
        "34",
        "transformers regnet",
        photographs("regnet", 64, cls="AutoModel", embedding_size=16, hidden_sizes=[16, 32, 32, 32], groups_width=16),
        {"se-gate": 22},
        modules={"se-gate": "RegNetSELayer"},
    ),
    Row(
        "34",
        "transformers efficientnet",
        photographs("efficientnet", 64, cls="AutoModel"),
        {"se-gate": 55},
        modules={"se-gate": "EfficientNetSqueezeExciteLayer"},
    ),
    Row(
        "34",
        "transformers pp_lcnet",
        photographs("pp_lcnet", 64, cls="PPLCNetForImageClassification"),
        {"se-gate": 2},
        modules={"se-gate": "PPLCNetSqueezeExcitationModule"},
    ),
]

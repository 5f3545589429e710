"""The zoo is complete, its documents are up to date, and a sample of it traces bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fxaudit import stages
from tests.zoo import one, render
from tests.zoo.models import SAMPLE, ZOO

# Every model whose tracing was measured before fxaudit was built, its failures included.
MEASURED = """
mixtral qwen2_moe qwen3_moe olmoe gpt_oss deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 granitemoe granitemoeshared
phimoe minimax_m2 ernie4_5_moe glm4_moe glm4_moe_lite hunyuan_v1_moe dots1 flex_olmo zaya afmoe mimo_v2_flash
cohere2_moe exaone_moe hy_v3 laguna axk1 kolibri1 lfm2_moe gemma4_text llama4_text jetmoe doge doge_moe dbrx
longcat_flash openai_privacy_filter mamba falcon_mamba jamba zamba rwkv recurrent_gemma xlstm minimax mamba2 bamba
zamba2 falcon_h1 nemotron_h granitemoehybrid lfm2 kimi_linear bailing_hybrid qwen3_next olmo_hybrid qwen3_5_moe_text
lara_mini gpt2 gpt_neox llama smollm3 diffllama qwen3 gemma2 gemma3_text gemma3n_text bloom opt nanochat hrm_text
apertus flint bert modernbert convbert deberta-v2 fnet albert squeezebert big_bird esm canine reformer t5 bart whisper
moonshine wav2vec2 wavlm wav2vec2-conformer sew-d vit dinov2_swiglu dinov3_vit_gated swin swinv2 convnextv2 focalnet
regnet segformer beit mobilevitv2 pvt_v2 swiftformer patchtsmixer patchtst nystromformer longt5 switch_transformers
nllb-moe longformer
""".split()
MEASURED_VISION = """
torchvision:mobilenet_v3_small torchvision:efficientnet_b0 torchvision:efficientnet_v2_s torchvision:regnet_y_400mf
torchvision:swin_v2_t torchvision:convnext_tiny torchvision:vit_b_16 torchvision:googlenet
timm:tf_efficientnet_cc_b0_4e timm:bat_resnext26ts timm:efficientvit_b0 timm:efficientvit_m0
""".split()


@pytest.mark.parametrize("name", [*(f"transformers:{name}" for name in MEASURED), *MEASURED_VISION])
def test_every_model_measured_before_is_in_the_zoo(name: str) -> None:
    assert name in ZOO


def test_the_zoo_has_at_least_150_models_of_three_libraries() -> None:
    assert len(ZOO) >= 150
    assert {name.partition(":")[0] for name in ZOO} == {"transformers", "torchvision", "timm"}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sampled_model_is_traced_bit_for_bit_on_two_inputs(name: str) -> None:
    row = one.examine(name)
    assert (row["outcome"], row.get("reason")) == ("bitwise", None)
    assert row["identity"] in (True, None)


def test_the_zoos_own_comparison_sees_a_graph_of_other_weights() -> None:
    traced = stages.trace(nn.Linear(4, 4), torch.randn(2, 4))
    found = one.second_input(traced, nn.Linear(4, 4), (torch.randn(2, 4),))
    assert not found["bitwise"]
    assert found["max_abs_diff"] > 0


def test_a_trace_that_says_bitwise_and_is_not_is_wrong() -> None:
    second = {"refused": False, "bitwise": False, "max_abs_diff": 1e-7, "scale": 1.0}
    assert one._outcome({"bitwise": True, "max_abs_diff": 0.0}, second) == "wrong"
    assert one._outcome({"bitwise": False, "max_abs_diff": 1e-7}, second) == "inexact"


def test_other_inputs_keep_masks_and_change_everything_else() -> None:
    inputs = {"input_ids": torch.arange(12).view(2, 6), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    other = one.other_inputs(inputs)
    assert torch.equal(other["attention_mask"], inputs["attention_mask"])
    assert not torch.equal(other["input_ids"], inputs["input_ids"])
    assert other["input_ids"].max() < 12


# --- documents ------------------------------------------------------------------------------------------------------

ROWS: list[dict[str, Any]] = [
    {"name": "a:one", "outcome": "bitwise", "seconds": 1.0, "controllers": {"se-gate": 2}, "identity": True},
    {
        "name": "a:two",
        "outcome": "inexact",
        "seconds": 2.0,
        "fidelity": {"bitwise": False, "max_abs_diff": 2e-7},
        "second": {"bitwise": False, "max_abs_diff": 3e-7, "refused": False},
        "identity": None,
    },
    {"name": "b:three", "outcome": "refused", "reason": "a loop | over data", "seconds": 3.0},
]


def test_the_section_counts_models_by_library_and_names_those_that_are_not_exact() -> None:
    text = render.section(ROWS)
    assert "| a | 2 | 1 | 1 | 0 |" in text
    assert "| b | 1 | 0 | 0 | 1 |" in text
    assert "Equal bit for bit: 1 of 3 (33.3 %)" in text
    assert "- `a:two`: traced; differs from the model by at most 2e-07" in text
    assert "- `b:three`: refused: a loop | over data" in text
    assert "`a:one`" not in text


def test_models_without_a_result_are_counted_beside_those_that_have_one() -> None:
    assert "3 further models of the zoo have not been run" in render.section(ROWS, ["c", "d", "e"])
    assert "further models" not in render.section(ROWS)


def test_a_bar_in_a_reason_does_not_break_the_table() -> None:
    lines = render.table(ROWS).splitlines()
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


def test_what_stands_around_the_section_stays() -> None:
    readme = f"before\n{render.BEGIN}\nold\n{render.END}\nafter\n"
    assert render.with_section(readme, "new\n") == f"before\n{render.BEGIN}\nnew\n{render.END}\nafter\n"

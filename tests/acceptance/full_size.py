"""Rows of transformers in their default configurations, on the meta device: counts, cones and parameters, no values.

Their narrow counterparts in `language` are replayed. Models whose scan unrolls to more nodes than a table should take
(KDA and gated delta rule, mLSTM, Mamba) are only there: with all their layers where that is cheap, else with a few.
"""

from __future__ import annotations

from tests.acceptance.row import Row
from tests.third_party import full_size

FULL_SIZE = [
    Row(
        "37",
        "transformers mixtral full size",
        full_size("mixtral"),
        {"moe-topk": 32},
        modules={"moe-topk": "MixtralTopKRouter"},
    ),
    Row(
        "38",
        "transformers qwen2_moe full size",
        full_size("qwen2_moe"),
        {"moe-topk": 24, "scalar-gate": 24},
        modules={"moe-topk": "Qwen2MoeTopKRouter", "scalar-gate": "Qwen2MoeSparseMoeBlock"},
    ),
    Row(
        "42",
        "transformers deepseek_v3 full size",
        full_size("deepseek_v3"),
        {"moe-topk": 58},
        modules={"moe-topk": "DeepseekV3TopkRouter"},
    ),
    Row(
        "43",
        "transformers gpt_oss full size",
        full_size("gpt_oss"),
        {"moe-topk": 36},
        modules={"moe-topk": "GptOssTopKRouter"},
    ),
    Row(
        "44",
        "transformers llama4_text full size",
        full_size("llama4_text", cls="Llama4ForCausalLM"),
        {"moe-topk": 48},
        modules={"moe-topk": "Llama4Router"},
    ),
    Row(
        "51",
        "transformers gemma3n_text full size",
        full_size("gemma3n_text"),
        {"altup": 35},
        modules={"altup": "Gemma3nTextDecoderLayer"},
    ),
]

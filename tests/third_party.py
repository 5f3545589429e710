"""Third-party architectures in small random configurations, built without a download.

Weights are scaled so that what a model computes depends on its input: an initialisation that leaves branches at zero or
gates at one half would make every controller look inert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Inputs = dict[str, torch.Tensor] | tuple[torch.Tensor, ...]
Build = Callable[[], tuple[nn.Module, Inputs]]

# The config's own default, where a small value of the same name would contradict another field.
OWN = object()

SMALL = dict(  # noqa: C408 (three times the lines as a literal)
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, n_positions=128, n_embd=64, n_layer=2, n_head=4,
    d_model=64, d_ff=96, d_kv=16, num_heads=4, num_experts=4, num_local_experts=4, n_routed_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32, expert_ffn_hidden_size=32,
    ffn_hidden_size=96, moe_topk=2, shared_intermediate_size=32, moe_shared_expert_intermediate_size=32, n_group=1,
    topk_group=1, kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    first_k_dense_replace=1, pad_token_id=0, bos_token_id=1, eos_token_id=2, linear_key_head_dim=16,
    linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, sliding_window=8, mamba_d_state=8,
    mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=8, mamba_n_heads=4, mamba_d_head=32, mamba_chunk_size=8,
    chunk_size=8, state_size=8, time_step_rank=8, expand=2,
)  # fmt: skip


def small_config(model_type: str, **fields: Any) -> Any:
    """The transformers config of `model_type`: small where `SMALL` has a value, and `fields` as given."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    known = kind().to_dict()
    chosen = {name: value for name, value in SMALL.items() if name in known} | fields
    return kind(**{name: value for name, value in chosen.items() if value is not OWN})


def transformers(
    model_type: str,
    inputs: Inputs | None = None,
    *,
    cls: str = "AutoModelForCausalLM",
    attention: str | None = None,
    **fields: Any,
) -> Build:
    """A builder of a transformers model of a small config, with inputs (by default token ids)."""

    def build() -> tuple[nn.Module, Inputs]:
        import transformers as package

        config = small_config(model_type, **fields)
        chosen = {"attn_implementation": attention} if attention else {}
        kind = getattr(package, cls)
        make = kind.from_config if cls.startswith("Auto") else kind._from_config
        module = make(config, **chosen).float().eval()
        if getattr(config, "use_cache", False):
            module.config.use_cache = False
        return enlarged(module), tokens() if inputs is None else inputs

    return build


def full_size(model_type: str, *, cls: str = "AutoModelForCausalLM") -> Build:
    """A builder of a transformers model in its own default configuration, on the meta device: shapes, no values."""

    def build() -> tuple[nn.Module, Inputs]:
        import transformers as package

        config = package.CONFIG_MAPPING[model_type]()
        config.use_cache = False
        kind = getattr(package, cls)
        make = kind.from_config if cls.startswith("Auto") else kind._from_config
        with torch.device("meta"):
            return make(config).eval(), {"input_ids": torch.empty((2, 12), dtype=torch.long)}

    return build


def torchvision(name: str, size: int = 64, **options: Any) -> Build:
    """A builder of a torchvision model without weights."""

    def build() -> tuple[nn.Module, Inputs]:
        from torchvision.models import get_model

        return calibrated(get_model(name, weights=None, **options), size), images(size)

    return build


def timm(name: str, size: int = 64, **options: Any) -> Build:
    """A builder of a timm model without weights."""

    def build() -> tuple[nn.Module, Inputs]:
        from timm import create_model

        return calibrated(create_model(name, pretrained=False, num_classes=10, **options), size), images(size)

    return build


# --- inputs ---------------------------------------------------------------------------------------------------------


def tokens(batch: int = 2, length: int = 12, vocabulary: int = 128, name: str = "input_ids") -> dict[str, torch.Tensor]:
    """Token ids above those of special tokens."""
    return {name: torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))}


def translation(batch: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    """Token ids for an encoder and a decoder, with the masks that some models build only when none is given."""
    ones = torch.ones(batch, length, dtype=torch.long)
    return {
        **tokens(batch, length),
        **tokens(batch, length, name="decoder_input_ids"),
        "attention_mask": ones,
        "decoder_attention_mask": ones.clone(),
    }


def images(size: int, batch: int = 2) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1)),)


def pixels(size: int, batch: int = 2) -> dict[str, torch.Tensor]:
    """Images by the name that transformers gives them."""
    return {"pixel_values": images(size, batch)[0]}


def wave(samples: int = 1600, batch: int = 2) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(batch, samples, generator=torch.Generator().manual_seed(1))}


# --- weights --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def enlarged(module: nn.Module, factor: float = 5.0) -> nn.Module:
    """`module` with its small weight matrices made larger, and those that are zero or undefined drawn anew."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point() or parameter.is_meta or not parameter.numel():
            continue
        if not torch.isfinite(parameter).all():
            parameter.normal_(0, 0.1, generator=generator)
        elif parameter.ndim >= 2 and parameter.numel() > 1 and parameter.std() < 0.05:
            if parameter.abs().max() < 1e-3:
                parameter.normal_(0, 0.1, generator=generator)
            else:
                parameter.mul_(factor)
        elif parameter.ndim <= 1 and parameter.abs().max() < 1e-2 and not name.endswith("bias"):
            parameter.fill_(0.5)
    return module


def calibrated(module: nn.Module, size: int) -> nn.Module:
    """An untrained vision model that tells its inputs apart: no zero weights, batch statistics from random images."""
    module = _without_zeros(module).eval()
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    if norms:
        with torch.no_grad():
            module(torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(3)))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return module.eval()


@torch.no_grad()
def _without_zeros(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    for name, parameter in module.named_parameters():
        largest = parameter.abs().max()
        is_scale = name.endswith("weight") or any(
            word in name.split(".")[-1] for word in ("gamma", "scale", "gain", "ls")
        )
        if parameter.ndim >= 2 and parameter.numel() > 1 and largest < 1e-3:
            parameter.normal_(0, 0.1, generator=generator)
        elif (parameter.ndim <= 1 and largest < 1e-3 and is_scale) or ("gamma" in name and largest < 1e-2):
            parameter.fill_(0.5)
    return module

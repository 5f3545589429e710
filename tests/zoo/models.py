"""The zoo: third-party architectures in small random configurations, one line each where possible.

Names are ``library:model``. Weights are scaled so that routing depends on the input.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.third_party import (
    OWN,
    Build,
    Inputs,
    pixels,
    timm,
    tokens,
    torchvision,
    transformers,
    translation,
    wave,
)

ZOO: dict[str, Build] = {}


def hf(name: str, inputs: Inputs | None = None, kind: str | None = None, **fields: Any) -> None:
    """Add a transformers model, by default the causal language model of the config that `name` names."""
    ZOO[f"transformers:{name}"] = transformers(kind or name, inputs, **fields)


def encoder(name: str, inputs: Inputs | None = None, kind: str | None = None, **fields: Any) -> None:
    hf(name, inputs, kind, cls="AutoModel", **fields)


def tv(name: str, size: int = 64, **options: Any) -> None:
    ZOO[f"torchvision:{name}"] = torchvision(name, size, **options)


def tm(name: str, size: int = 64, **options: Any) -> None:
    ZOO[f"timm:{name}"] = timm(name, size, **options)


LINEAR_FULL = ["linear_attention", "full_attention"]
SLIDING_FULL = ["sliding_attention", "full_attention"]
LATENT: dict[str, Any] = {"head_dim": OWN, "num_key_value_heads": 4}
SPARSE: dict[str, Any] = {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 2}
SIDES = ("layers", "attention_heads", "ffn_dim")
BOTH: dict[str, Any] = {
    f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in zip(SIDES, (2, 4, 96), strict=True)
}

# --- language models ------------------------------------------------------------------------------------------------
for plain in """
    gpt2 gpt_neox llama smollm3 diffllama gemma2 gemma3_text qwen3 bloom mixtral qwen2_moe qwen3_moe olmoe gpt_oss
    granitemoe granitemoeshared phimoe minimax_m2 doge glm4_moe flex_olmo afmoe mimo_v2_flash cohere2_moe exaone_moe
    hy_v3 laguna kolibri1 flint nanochat hrm_text apertus mistral stablelm olmo2 phi3 starcoder2  cohere2
    seed_oss ernie4_5 beam dory
""".split():
    hf(plain)
for plain in "gptj codegen".split():
    hf(plain, rotary_dim=8)
hf("opt", ffn_dim=96, word_embed_proj_dim=64)
hf("qwen3_next", layer_types=LINEAR_FULL)
hf("qwen3_5_text", layer_types=LINEAR_FULL)
hf("qwen3_5_moe_text", layer_types=LINEAR_FULL)
hf("olmo_hybrid", layer_types=LINEAR_FULL, linear_num_value_heads=2)
hf("lara_mini", layer_types=["linear_attention", "sliding_attention"])
hf("kimi_linear", num_experts_per_token=2)
hf(
    "bailing_hybrid",
    **LATENT,
    num_experts_per_token=2,
    num_expert_group=1,
    layer_group_size=2,
    linear_head_dim=16,
    linear_num_heads=4,
)
hf("deepseek_v2", **LATENT)
hf("deepseek_v3", **LATENT)
hf("deepseek_v32", **LATENT, **SPARSE)
hf("deepseek_v4", num_key_value_heads=1, **SPARSE, o_groups=2, o_lora_rank=8, hc_sinkhorn_iters=3)
hf("axk1", **LATENT)
hf("axk2", **LATENT)
hf("glm4_moe_lite", **LATENT)
hf("granitemoehybrid", layer_types=LINEAR_FULL)
hf("jamba", attn_layer_period=2, attn_layer_offset=1)
hf("mamba", hidden_size=32, intermediate_size=64)
hf("falcon_mamba", hidden_size=32, intermediate_size=64)
hf("mamba2", head_dim=32, n_groups=1)
hf("bamba", attn_layer_indices=[1])
hf(
    "zamba",
    n_mamba_heads=2,
    attention_head_dim=32,
    attention_hidden_size=128,
    num_hidden_layers=4,
    layers_block_type=["linear_attention", "hybrid"] * 2,
)
hf("zamba2", layers_block_type=["linear_attention", "hybrid"], n_mamba_heads=4, mamba_ngroups=1, num_key_value_heads=4)
hf("falcon_h1", mamba_d_ssm=128, mamba_n_groups=1)
hf(
    "nemotron_h",
    layers_block_type=OWN,
    hybrid_override_pattern="M-E*",
    mamba_num_heads=4,
    mamba_head_dim=16,
    n_groups=1,
    ssm_state_size=8,
)
hf("rwkv", attention_hidden_size=64, context_length=64)
hf("recurrent_gemma", lru_width=64, attention_window_size=8, num_hidden_layers=3)
hf("xlstm", num_heads=2, num_blocks=2, embedding_dim=64, chunk_size=8)
hf("minimax", layer_types=LINEAR_FULL, block_size=8)
hf("doge_moe", kind="doge", is_moe=True)
hf(
    "gemma3n_text",
    laurel_rank=8,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=128,
    num_kv_shared_layers=0,
    layer_types=SLIDING_FULL,
    activation_sparsity_pattern=[0.5, 0.0],
    altup_num_inputs=2,
)
hf(
    "gemma4_text",
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=128,
    enable_moe_block=True,
    top_k_experts=2,
    layer_types=SLIDING_FULL,
)
hf(
    "dbrx",
    ffn_config={"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
    n_heads=4,
    n_layers=2,
    max_seq_len=64,
)
hf("llama4_text", cls="Llama4ForCausalLM", intermediate_size_mlp=96, interleave_moe_layer_step=1)
hf("lfm2", layer_types=["conv", "full_attention"])
hf("lfm2_moe", layer_types=["conv", "full_attention"], num_dense_layers=1)
hf("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_num_shared_experts=1, moe_layer_start_index=0)
hf("hunyuan_v1_moe", moe_topk=2)
hf("dots1", n_shared_experts=1)
hf("jetmoe", kv_channels=16)
hf("longcat_flash", head_dim=8, num_key_value_heads=4, num_layers=1, zero_expert_num=2)
hf("zaya", router_hidden_size=16, num_experts_per_tok=1)
hf("openai_privacy_filter", cls="AutoModelForTokenClassification")

# --- encoders -------------------------------------------------------------------------------------------------------
for plain in "bert modernbert fnet roformer eurobert mpnet albert".split():
    encoder(plain, **({"embedding_size": 64} if plain == "albert" else {}))
encoder("convbert", embedding_size=64, conv_kernel_size=5)
encoder("deberta-v2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8)
encoder("nystromformer", num_landmarks=4, segment_means_seq_len=12)
encoder("squeezebert", embedding_size=64)
encoder("big_bird", block_size=4, num_random_blocks=1)
encoder("longformer", attention_window=[4, 4])
encoder(
    "reformer",
    attn_layers=["lsh", "local"],
    axial_pos_embds=False,
    num_buckets=4,
    lsh_attn_chunk_length=4,
    local_attn_chunk_length=4,
    feed_forward_size=96,
    attention_head_size=16,
    is_decoder=False,
)
encoder("canine")
encoder("esm", position_embedding_type="rotary")

# --- encoders with decoders -----------------------------------------------------------------------------------------
SEQ2SEQ: dict[str, Any] = {"cls": "AutoModelForSeq2SeqLM"}
IDS: Inputs = {**tokens(), **tokens(name="decoder_input_ids")}
hf("t5", IDS, **SEQ2SEQ, decoder_start_token_id=0, num_decoder_layers=2)
hf("bart", IDS, **SEQ2SEQ, **BOTH)
hf(
    "switch_transformers",
    translation(),
    **SEQ2SEQ,
    decoder_start_token_id=0,
    num_decoder_layers=2,
    num_sparse_encoder_layers=1,
    num_sparse_decoder_layers=1,
    expert_capacity=8,
)
hf("nllb-moe", translation(), **SEQ2SEQ, **BOTH, encoder_sparse_step=1, decoder_sparse_step=1, expert_capacity=16)
hf(
    "longt5",
    IDS,
    **SEQ2SEQ,
    decoder_start_token_id=0,
    num_decoder_layers=2,
    local_radius=3,
    encoder_attention_type="transient-global",
    global_block_size=4,
)

# --- audio ----------------------------------------------------------------------------------------------------------
SPEECH = "AutoModelForSpeechSeq2Seq"
MEL = {
    "input_features": torch.randn(2, 16, 24, generator=torch.Generator().manual_seed(1)),
    **tokens(name="decoder_input_ids"),
}
hf(
    "whisper",
    MEL,
    cls=SPEECH,
    **BOTH,
    num_mel_bins=16,
    max_source_positions=12,
    max_target_positions=64,
    decoder_start_token_id=1,
    suppress_tokens=None,
    begin_suppress_tokens=None,
)
hf(
    "moonshine",
    {**wave(4000), **tokens(name="decoder_input_ids")},
    cls=SPEECH,
    encoder_num_hidden_layers=2,
    decoder_num_hidden_layers=2,
    encoder_num_attention_heads=4,
    decoder_num_attention_heads=4,
    decoder_start_token_id=1,
)
CONVS: dict[str, Any] = {
    "conv_dim": [32, 32, 32],
    "conv_stride": [5, 4, 2],
    "conv_kernel": [10, 8, 4],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
for plain in "wav2vec2 wavlm wav2vec2-conformer hubert".split():
    encoder(plain, wave(), **CONVS)
encoder("sew-d", wave(), **CONVS, squeeze_factor=2, position_buckets=8)
encoder("data2vec-audio", wave(), **CONVS, conv_pos_kernel_size=9)

# --- vision ---------------------------------------------------------------------------------------------------------
NARROW: dict[str, Any] = {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}
HEADS: dict[str, Any] = {**NARROW, "num_attention_heads": [1, 1, 2, 2]}
WINDOWS: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "hidden_size": OWN,
}
encoder("vit", pixels(32), image_size=32, patch_size=8)
encoder("beit", pixels(32), image_size=32, patch_size=8)
encoder("dinov2_swiglu", pixels(32), "dinov2", image_size=32, patch_size=8, use_swiglu_ffn=True)
encoder("dinov3_vit_gated", pixels(32), "dinov3_vit", image_size=32, patch_size=8, use_gated_mlp=True)
encoder("swin", pixels(32), **WINDOWS)
encoder("swinv2", pixels(32), **WINDOWS)
encoder("convnextv2", pixels(32), hidden_sizes=[16, 32], depths=[1, 1], num_stages=2)
encoder(
    "focalnet",
    pixels(32),
    image_size=32,
    patch_size=4,
    embed_dim=16,
    depths=[1, 1],
    focal_levels=[2, 2],
    focal_windows=[3, 3],
    hidden_sizes=[16, 32],
    use_layerscale=True,
)
encoder("regnet", pixels(32), embedding_size=16, hidden_sizes=[16, 32, 32, 32], depths=[1, 1, 1, 1], groups_width=16)
encoder("efficientnet", pixels(64))
encoder("mobilevitv2", pixels(64))
encoder("segformer", pixels(64), **HEADS)
encoder("hiera", pixels(224), embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2])
encoder("pvt_v2", pixels(64), **HEADS, image_size=64)
encoder("poolformer", pixels(64), **NARROW)
encoder("swiftformer", pixels(64), depths=[1, 1, 1, 1], embed_dims=[16, 16, 32, 32])
encoder("dinov3_convnext", pixels(64), **NARROW)
hf("hgnet_v2", pixels(64), cls="AutoBackbone")

# --- series ---------------------------------------------------------------------------------------------------------
SERIES: Inputs = {"past_values": torch.randn(2, 32, 3, generator=torch.Generator().manual_seed(1))}
PATCHES: dict[str, Any] = {"context_length": 32, "patch_length": 8, "num_input_channels": 3, "patch_stride": 8}
hf("patchtsmixer", SERIES, cls="PatchTSMixerModel", **PATCHES, gated_attn=True, mode="mix_channel")
hf("patchtst", SERIES, cls="PatchTSTModel", **PATCHES)

# --- torchvision ----------------------------------------------------------------------------------------------------
for plain in """
    mobilenet_v3_small efficientnet_b0 efficientnet_v2_s regnet_y_400mf swin_v2_t convnext_tiny mobilenet_v2
    shufflenet_v2_x0_5
""".split():
    tv(plain)
tv("vit_b_16", image_size=64)
tv("googlenet", init_weights=True)
tv("maxvit_t", 224)

# --- timm -----------------------------------------------------------------------------------------------------------
for plain in """
    seresnet18 seresnet50 skresnet18 skresnext50_32x4d resnest14d resnest26d ecaresnet26t ecaresnet50t gcresnet33ts
    gcresnext26ts convnextv2_atto convnextv2_femto tf_efficientnet_cc_b0_4e tf_efficientnet_cc_b0_8e
    mobilenetv3_small_050 mobilenetv3_large_100 mobilenetv4_conv_small mambaout_femto hgnet_tiny hgnetv2_b0 rdnet_tiny
    legacy_seresnet18 fbnetv3_b ghostnetv2_100 resnet18 dla34 res2net50_14w_8s starnet_s1 repvit_m0_9 repghostnet_050
    inception_next_atto nf_regnet_b0 eca_nfnet_l0 efficientvit_b0 hardcorenas_a mixnet_s cs3se_edgenet_x resnetaa34d
    ese_vovnet19b_dw convmixer_768_32
""".split():
    tm(plain)
for plain in """
    levit_128s efficientvit_m0 efficientformerv2_s0 davit_tiny focalnet_tiny_srf swiftformer_xs
    coatnet_nano_rw_224
""".split():
    tm(plain, 224)
for plain in """
    volo_d1_224 sequencer2d_s swin_tiny_patch4_window7_224 visformer_tiny nextvit_small hiera_tiny_224 twins_svt_small
    pit_ti_224 mvitv2_tiny nest_tiny
""".split():
    tm(plain, 224)
for plain in """
    halonet26t bat_resnext26ts lambda_resnet26t botnet26t_256 sebotnet33ts_256 maxvit_pico_rw_256 fastvit_t8
    swinv2_tiny_window8_256
""".split():
    tm(plain, 256)
tm("edgenext_xx_small", 128)
tm("csatv2", 512)
tm("dm_nfnet_f0", 96)
tm("crossvit_tiny_240", 240)
tm("tnt_s_patch16_224", 224, depth=3)
for plain in """
    cait_xxs24_224 xcit_nano_12_p16_224 deit3_small_patch16_224 vit_relpos_small_patch16_224
    vit_small_patch16_dinov3
""".split():
    tm(plain, img_size=64, depth=3)
for plain in "gmlp_ti16_224 mixer_s16_224 resmlp_12_224".split():
    tm(plain, img_size=64)
tm("eva02_tiny_patch14_224", 56, img_size=56, depth=3)
tm("vit_small_patch14_dinov2", 56, img_size=56, depth=3)
tm("vit_giant_patch14_dinov2", 56, img_size=56, depth=2, embed_dim=64, num_heads=4, mlp_ratio=2.0)
tm("beitv2_base_patch16_224", img_size=64, depth=2, embed_dim=64, num_heads=4)

# What `make test` traces: one for each kind of architecture, all quick.
SAMPLE = """
    transformers:gpt2 transformers:llama transformers:mixtral transformers:mamba2 transformers:deepseek_v3
    transformers:bert transformers:t5 transformers:wav2vec2 transformers:vit transformers:patchtst
    torchvision:mobilenet_v2 timm:resnet18 timm:deit3_small_patch16_224 timm:convnextv2_atto timm:starnet_s1
""".split()

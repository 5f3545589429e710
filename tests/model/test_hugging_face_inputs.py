"""Example inputs of transformers models of every kind: the model itself takes them."""

import pytest
import torch
import transformers as hf
from torch import nn

from fxaudit.errors import LoadError
from fxaudit.model.hugging_face_inputs import example_inputs

TEXT = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 20,
}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
SEQUENCE = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    **IDS,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}


def vision_to_text() -> nn.Module:
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        hf.ViTConfig(**VISION), hf.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
    )
    return hf.VisionEncoderDecoderModel(config)


def clip() -> nn.Module:
    return hf.CLIPModel(hf.CLIPConfig(text_config={**TEXT, **IDS}, vision_config=VISION, projection_dim=8))


# By architecture: the model, and the shapes of the inputs that it takes, from its configuration.
MODELS = {
    "text": (lambda: hf.BertForMaskedLM(hf.BertConfig(**TEXT)), {"input_ids": (2, 20)}),
    "causal text": (
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2)),
        {"input_ids": (2, 64)},
    ),
    "text to text": (
        lambda: hf.BartForConditionalGeneration(hf.BartConfig(**SEQUENCE, max_position_embeddings=20)),
        {"input_ids": (2, 20), "decoder_input_ids": (2, 20)},
    ),
    "encoder of a text to text model": (
        lambda: hf.T5EncoderModel(hf.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)),
        {"input_ids": (2, 64)},
    ),
    "images": (lambda: hf.ViTForImageClassification(hf.ViTConfig(**VISION)), {"pixel_values": (2, 3, 32, 32)}),
    "grey images": (
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**VISION, num_channels=1)),
        {"pixel_values": (2, 1, 32, 32)},
    ),
    "images without a size": (
        lambda: hf.ResNetForImageClassification(
            hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic")
        ),
        {"pixel_values": (2, 3, 224, 224)},
    ),
    "clips": (
        lambda: hf.VideoMAEForVideoClassification(hf.VideoMAEConfig(**VISION, num_frames=4)),
        {"pixel_values": (2, 4, 3, 32, 32)},
    ),
    "images and text": (clip, {"input_ids": (2, 20), "pixel_values": (2, 3, 32, 32)}),
    "images to text": (vision_to_text, {"pixel_values": (2, 3, 32, 32), "decoder_input_ids": (2, 20)}),
    "waveforms": (
        lambda: hf.Wav2Vec2ForCTC(
            hf.Wav2Vec2Config(
                **{**TEXT, "num_attention_heads": 2},
                conv_dim=(8, 8),
                conv_stride=(5, 2),
                conv_kernel=(10, 3),
                num_feat_extract_layers=2,
                num_conv_pos_embeddings=4,
                num_conv_pos_embedding_groups=2,
            )
        ),
        {"input_values": (2, 8000)},
    ),
    "spectrograms": (
        lambda: hf.ASTForAudioClassification(
            hf.ASTConfig(
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=1,
                num_attention_heads=2,
                max_length=64,
                num_mel_bins=32,
            )
        ),
        {"input_values": (2, 64, 32)},
    ),
    "speech to text": (
        lambda: hf.WhisperForConditionalGeneration(
            hf.WhisperConfig(**SEQUENCE, num_mel_bins=20, max_source_positions=30, max_target_positions=24)
        ),
        {"input_features": (2, 20, 60), "decoder_input_ids": (2, 24)},
    ),
    "speech to text of an older kind": (
        lambda: hf.Speech2TextForConditionalGeneration(
            hf.Speech2TextConfig(**SEQUENCE, input_feat_per_channel=20, conv_channels=16, max_target_positions=24)
        ),
        {"input_features": (2, 128, 20), "decoder_input_ids": (2, 24)},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_takes_the_inputs_that_are_inferred_for_it(name):
    build, shapes = MODELS[name]
    torch.manual_seed(0)
    module = build().eval()
    inputs = example_inputs(module, name)
    assert {key: tuple(value.shape) for key, value in inputs.items()} == shapes
    with torch.no_grad():
        module(**inputs)


class Custom(nn.Module):
    """As custom code has it: its token ids under a name of its own, its length under another."""

    main_input_name = "input_ids"

    class config:
        vocab_size, block_size = 7, 12

    def forward(self, idx, targets=None):
        return idx


def test_token_ids_go_by_the_name_that_custom_code_has_for_them():
    inputs = example_inputs(Custom(), "custom")
    assert list(inputs) == ["idx"]
    assert list(inputs["idx"].shape) == [2, 12]
    assert int(inputs["idx"].max()) < 7


def test_a_size_that_no_image_has_is_not_tried():
    module = hf.ViTForImageClassification(hf.ViTConfig(**VISION))
    module.config.image_size = 1 << 30
    with pytest.raises(LoadError) as caught:
        example_inputs(module, "model")
    assert "--inputs" in caught.value.remedy

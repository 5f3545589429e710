"""Random example inputs of transformers models: what they take is read off their configuration and signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxaudit.errors import LoadError

EXAMPLE_TOKENS = 64
_INPUTS = 2
_SAMPLES = 8000  # half a second of audio at 16 kHz
_FRAMES = 128
# What custom code calls its token ids; in transformers itself it is `input_ids`.
_TOKENS = ("input_ids", "idx", "tokens", "token_ids", "ids", "x", "inputs", "input")


def example_inputs(module: Any, source: str) -> dict[str, Tensor]:
    """Two random inputs of the kind that a transformers model takes.

    Token ids; images, clips; waveforms, spectrograms; of an encoder-decoder also the ids that the decoder starts from,
    and of a model of two modalities both.

    Raises:
        LoadError: another kind of input, or a size that the configuration does not tell.
    """
    taken = inspect.signature(module.forward).parameters
    main = _main_input(module, taken)
    makers: dict[str, Callable[[Any, str], Tensor | None]] = {
        "input_ids": lambda config, _: _token_ids(config),
        "pixel_values": _pixels,
        "pixel_values_videos": _pixels,
        "input_features": _features,
        "input_values": _features,
    }
    name = "input_ids" if main in _TOKENS else main
    made = makers[name](module.config, name) if name in makers else None
    if made is None:
        raise LoadError(
            f"fxaudit does not know what inputs {type(module).__name__} takes",
            where=source,
            expected="a model over token ids, images, clips or audio, with their sizes in its configuration",
            found=f"the main input `{main}`",
            remedy="give them in a file: --inputs FILE.safetensors, an array for each argument of the model",
        )
    inputs = {main: made}
    if getattr(module.config, "is_encoder_decoder", False) and "decoder_input_ids" in taken:
        ids = _token_ids(_decoder_of(module.config))
        inputs["decoder_input_ids"] = made.flip(0) if ids is None and name == "input_ids" else ids  # type: ignore[assignment]
    for other in ("pixel_values", "input_features"):
        # Two towers, as in CLIP: both are needed, where the signature names both and the configuration has both.
        if name == "input_ids" and other in taken and _has_two_towers(module.config):
            tower = makers[other](module.config, other)
            inputs |= {} if tower is None else {other: tower}
    return {key: value for key, value in inputs.items() if value is not None}


def _main_input(module: Any, taken: Any) -> str:
    name = str(getattr(module, "main_input_name", "input_ids"))
    if name in taken:
        return name
    # Custom code keeps the default of the base class, whatever it calls its own argument.
    return next((other for other in _TOKENS if other in taken), next(iter(taken), name))


def _has_two_towers(config: Any) -> bool:
    return hasattr(config, "text_config") and (hasattr(config, "vision_config") or hasattr(config, "audio_config"))


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _decoder_of(config: Any) -> Any:
    decoder = getattr(config, "decoder", None)
    return decoder if hasattr(decoder, "vocab_size") else config


def _token_ids(config: Any) -> Tensor | None:
    text = _text_config(config)
    vocabulary = getattr(text, "vocab_size", None)
    if not isinstance(vocabulary, int) or vocabulary < 1:
        return None
    names = ("max_position_embeddings", "max_target_positions", "n_positions", "block_size", "max_seq_len")
    longest = [size for name in names if isinstance(size := getattr(text, name, None), int) and size > 0]
    return torch.randint(vocabulary, (_INPUTS, min([EXAMPLE_TOKENS, *longest])))


def _pixels(config: Any, name: str) -> Tensor | None:
    vision = _inner(config, "vision_config", "encoder", "backbone_config")
    size = getattr(vision, "image_size", None) or getattr(config, "image_size", None) or 224
    if isinstance(size, dict):
        size = (size.get("height"), size.get("width"))
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    if not all(isinstance(number, int) and 0 < number < 1 << 16 for number in (height, width, channels)):
        return None
    frames = getattr(vision, "num_frames", None) or getattr(vision, "frames_per_clip", None)
    if name == "pixel_values_videos" and frames is None:
        return None
    return torch.randn(_INPUTS, *([frames] if frames else []), channels, height, width)


def _features(config: Any, name: str) -> Tensor | None:
    audio = _inner(config, "audio_config", "encoder")
    bins = next((n for key in ("num_mel_bins", "input_feat_per_channel") if (n := getattr(audio, key, None))), None)
    if bins is None:
        return torch.randn(_INPUTS, _SAMPLES) if name == "input_values" and hasattr(audio, "conv_stride") else None
    if longest := getattr(audio, "max_source_positions", None):
        # Whisper takes spectrograms [bins, frames], of twice as many frames as its encoder has positions.
        is_whisper = not hasattr(audio, "input_feat_per_channel")
        return torch.randn(_INPUTS, bins, 2 * longest) if is_whisper else torch.randn(_INPUTS, _FRAMES, bins)
    return torch.randn(_INPUTS, getattr(audio, "max_length", None) or _FRAMES, bins)


def _inner(config: Any, *names: str) -> Any:
    """The part of a configuration that is about one modality, or the whole where there is none."""
    parts = [part for name in names if hasattr(part := getattr(config, name, None), "to_dict")]
    return parts[0] if parts else config

"""A Hugging Face model directory becomes a module with example inputs. Code in the directory is never run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxaudit.errors import LoadError

CONFIG = "config.json"
EXAMPLE_TOKENS = 64


def load_directory(path: Path, *, pretrained: bool) -> tuple[nn.Module, Callable[[], Any]]:
    """The model of a directory with `config.json` and safetensors weights, and a function that makes example inputs.

    The class is the one that the configuration names (`architectures`), so that heads are kept.

    Raises:
        LoadError: no configuration, an unknown or custom class, or weights that do not load.
    """
    architecture = _architecture(path)
    model_class = _model_class(architecture, path)
    import transformers

    info: dict[str, Any] = {}
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        if pretrained:
            loaded: Any = model_class.from_pretrained(
                path, local_files_only=True, use_safetensors=True, config=config, output_loading_info=True
            )
            module, info = loaded
        else:
            module = model_class(config)
    except Exception as error:
        raise LoadError(
            f"{path} could not be loaded",
            where=str(path),
            expected="config.json with the safetensors weights beside it",
            found=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            remedy="convert the weights to safetensors, or use --random-init for the architecture alone",
        ) from error
    # transformers draws what it does not find at random, and goes on.
    if missing := sorted(info.get("missing_keys", ())):
        raise LoadError(
            f"the weights in {path} do not fit {architecture}",
            where=str(path),
            expected="every weight of the class that config.json names",
            found=f"missing {', '.join(missing[:4])}{f' and {len(missing) - 4} more' if len(missing) > 4 else ''}",
            remedy="name the class that the weights were saved from under `architectures` in config.json",
        )
    return module, lambda: example_inputs(module, path)


def _model_class(architecture: str, path: Path) -> Any:
    import transformers

    try:
        found = getattr(transformers, architecture)
    except Exception:  # no such name, or one whose own imports fail
        found = None
    # The name comes from the directory: of all that transformers holds, only a model may be called.
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return found
    raise LoadError(
        f"transformers has no model class `{architecture}`",
        where=str(path / CONFIG),
        expected=f"a model class of transformers {transformers.__version__}",
        found=architecture,
        remedy="install the transformers version that the model was saved with, or name a function that builds it",
    )


def _architecture(path: Path) -> str:
    try:
        config = json.loads((path / CONFIG).read_bytes())
        architecture = config["architectures"][0]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise LoadError(
            f"{path} is no model directory",
            where=str(path / CONFIG),
            expected="a config.json that names its class under `architectures`",
            found=f"{type(error).__name__}: {error}",
            remedy="name the directory that save_pretrained wrote",
        ) from error
    if "auto_map" in config:
        raise LoadError(
            f"{path} brings its own code, which is not run",
            where=str(path / CONFIG),
            expected="a class of transformers itself",
            found=f"auto_map: {config['auto_map']}",
            remedy="name a function that builds the model, in a Python file of your own",
        )
    return str(architecture)


def example_inputs(module: Any, path: Path) -> dict[str, torch.Tensor]:
    """Two random inputs of the kind that a transformers model takes: token ids, or pixels.

    Raises:
        LoadError: another kind of input.
    """
    config = module.config.get_text_config() if hasattr(module.config, "get_text_config") else module.config
    name = module.main_input_name
    if name == "input_ids":
        tokens = min(EXAMPLE_TOKENS, getattr(config, "max_position_embeddings", None) or EXAMPLE_TOKENS)
        ids = torch.randint(config.vocab_size, (2, tokens))
        both = getattr(module.config, "is_encoder_decoder", False)
        return {"input_ids": ids, "decoder_input_ids": ids.flip(0)} if both else {"input_ids": ids}
    if name == "pixel_values" and getattr(module.config, "image_size", None):
        size = module.config.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return {"pixel_values": torch.randn(2, getattr(module.config, "num_channels", 3), height, width)}
    raise LoadError(
        f"fxaudit does not know what inputs {type(module).__name__} takes",
        where=str(path),
        expected="a model over token ids or pixels",
        found=f"the main input `{name}`",
        remedy="name a function that returns (module, inputs)",
    )


def tokenizer_directory(path: Path) -> Path | None:
    """The directory itself when it holds a tokenizer that transformers can load without running code."""
    names = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model")
    return path if path.is_dir() and any((path / name).exists() for name in names) else None

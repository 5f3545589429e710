"""Data in a folder: images, or a data set that Hugging Face `datasets` has saved to disk."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxaudit import ops
from fxaudit.errors import DataError
from fxaudit.model.columns import Column, Images, Loaded, Table
from fxaudit.model.trace import TracedModel

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm")
TARGETS = "targets"
LABELS = (TARGETS, "label", "labels")


def is_dataset(folder: Path) -> bool:
    """Whether a folder was written by `datasets.Dataset.save_to_disk`."""
    return (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists()


def image_columns(folder: Path, traced: TracedModel, name: str) -> dict[str, Column]:
    """The images below `folder` in order of their paths, as the model's own preprocessing makes them.

    Where every image lies in a subfolder named by its class, a whole number or a name that the model's configuration
    lists, the classes are the targets.

    Raises:
        DataError: no image, a model without a preprocessing configuration, or an image that cannot be read.
    """
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGES)
    if not paths:
        raise DataError(
            f"{folder} holds no images",
            where=str(folder),
            expected=f"files ending in {', '.join(IMAGES)}, or a data set saved by Hugging Face `datasets`",
            found=", ".join(sorted(path.name for path in folder.iterdir())[:4]) or "an empty folder",
            remedy="name the folder that holds the images",
        )
    found: dict[str, Column] = {name: Images(paths, _opened(preparation(traced, name)))}
    classes = [_class_of(path.relative_to(folder).parts[0], traced) for path in paths]
    nested = all(len(path.relative_to(folder).parts) > 1 for path in paths)
    if nested and all(one is not None for one in classes):
        found[TARGETS] = Loaded(torch.tensor([int(one or 0) for one in classes]))
    return found


def dataset_columns(folder: Path, traced: TracedModel, names: Sequence[str]) -> tuple[dict[str, Column], str | None]:
    """The columns of a saved data set: one for each input by name, or ``image``; else its ``text``, joined by lines.

    Raises:
        DataError: `datasets` is not installed, a data set in splits, or no column for an input.
    """
    dataset = _load_dataset(folder)
    present = list(dataset.column_names)
    found: dict[str, Column] = {}
    if all(name in present for name in names):
        found = {name: Table(dataset, name, torch.as_tensor) for name in names}
    elif len(names) == 1 and "image" in present:
        prepare = preparation(traced, names[0])
        found = {names[0]: Table(dataset, "image", lambda image: prepare(image.convert("RGB")))}
    elif "text" in present:
        return {}, "\n".join(str(text) for text in dataset["text"])
    else:
        raise DataError(
            f"{folder} does not hold the inputs of {traced.subject.source}",
            expected=f"columns {', '.join(names)}, or `image`, or `text`",
            found=", ".join(present) or "no column",
            remedy="rename its columns to the names of the model's inputs",
        )
    label = next((name for name in LABELS if name in present), None)
    if label is not None:
        found[TARGETS] = Table(dataset, label, torch.as_tensor)
    if "valid" in present:
        found["valid"] = Table(dataset, "valid", torch.as_tensor)
    return found, None


def _load_dataset(folder: Path) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{folder} is a Hugging Face data set, and `datasets` is not installed",
            expected="the package `datasets`",
            found=str(error),
            remedy="pip install 'fxaudit[data]'",
        ) from error
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:  # arrow, JSON and file errors alike
        raise DataError(
            f"{folder} could not be read as a data set",
            where=str(folder),
            expected="a folder written by datasets.Dataset.save_to_disk",
            found=f"{type(error).__name__}: {error}",
            remedy="save it again",
        ) from error
    if isinstance(found, Mapping):
        raise DataError(
            f"{folder} holds a data set in splits",
            expected="one split",
            found=", ".join(found),
            remedy=f"name the folder of one of them, such as {folder / next(iter(found))}",
        )
    return found


def _class_of(folder: str, traced: TracedModel) -> int | None:
    """The class that a folder's name stands for."""
    if re.fullmatch(r"\d+", folder):
        return int(folder)
    names = getattr(getattr(traced.subject.module, "config", None), "label2id", None) or {}
    return int(names[folder]) if folder in names else None


def _opened(prepare: Callable[[Any], Tensor]) -> Callable[[Path], Tensor]:
    def read(path: Path) -> Tensor:
        from PIL import Image

        try:
            with Image.open(path) as image:
                return prepare(image.convert("RGB"))
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(
                f"{path} is no image that can be read",
                where=str(path),
                expected="an image file",
                found=str(error),
                remedy="remove the file or convert it",
            ) from error

    return read


def preparation(traced: TracedModel, name: str) -> Callable[[Any], Tensor]:
    """What the model's own configuration makes of a picture: a tensor [channels, height, width] of the traced size.

    The image processor of a Hugging Face directory, the data configuration of a timm model, or the transforms of a
    torchvision model's default weights.

    Raises:
        DataError: the model has none of these, or it makes another size than the traced one.
    """
    try:
        prepare = _preparation(traced)
    except Exception as error:  # a broken configuration, in whatever way
        raise _no_preparation(traced, f"{type(error).__name__}: {error}") from error
    if prepare is None:
        raise _no_preparation(traced, "none of these")
    node = traced.placeholders()[traced.input_names.index(name)]
    expected = (ops.sizes(node) or ())[1:]

    def sized(image: Any) -> Tensor:
        found = prepare(image)
        fixed = tuple(size if isinstance(size, int) else own for size, own in zip(expected, found.shape, strict=False))
        if len(expected) != found.ndim or fixed != tuple(found.shape):
            raise DataError(
                f"the preprocessing of {traced.subject.source} makes pictures of another size than was traced",
                expected=f"[{', '.join(map(str, expected))}]",
                found=f"{list(found.shape)}",
                remedy="trace the model with an example of this size: --inputs FILE",
            )
        return found

    return sized


def _no_preparation(traced: TracedModel, found: str) -> DataError:
    return DataError(
        f"{traced.subject.source} does not say how pictures become its inputs",
        expected="a Hugging Face directory with preprocessor_config.json, a timm or a torchvision model",
        found=found,
        remedy="give prepared arrays in a .safetensors file",
    )


def _preparation(traced: TracedModel) -> Callable[[Any], Tensor] | None:
    subject = traced.subject
    folder = subject.tokenizer or Path(subject.source)
    if (folder / "preprocessor_config.json").exists():
        from transformers import AutoImageProcessor

        processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return lambda image: processor(images=image, return_tensors="pt")["pixel_values"][0]
    if getattr(subject.module, "pretrained_cfg", None):
        from timm.data import create_transform, resolve_model_data_config

        transform = create_transform(**resolve_model_data_config(subject.module), is_training=False)
        return lambda image: transform(image)
    scheme, _, model = subject.source.partition(":")
    if scheme == "torchvision":
        from torchvision.models import get_model_weights

        transforms = get_model_weights(model)["DEFAULT"].transforms()
        return lambda image: transforms(image)
    return None

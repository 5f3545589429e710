"""Models of torchvision and timm by name, and the example inputs of their classes."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fxaudit.errors import LoadError, nearest

_IMAGE = (3, 224, 224)
_VIDEO = (3, 16, 112, 112)


def build_zoo_model(zoo: str, name: str, *, pretrained: bool) -> tuple[nn.Module, Callable[[], Any]]:
    """The model `name` of `zoo` (a key of `ZOOS`), and a function that makes example inputs.

    Raises:
        LoadError: the zoo is not installed, has no such model, or could not build it.
    """
    return ZOOS[zoo](name, pretrained)


def example_images(module: nn.Module) -> Tensor | None:
    """Two random images, or clips, of the size that a torchvision or timm model takes; None for other models.

    torchvision does not keep the size with the model: 224 pixels is what its classifiers and segmenters take,
    Inception v3 takes 299; clips have 16 frames of 112 pixels.
    """
    package, _, rest = type(module).__module__.partition(".")
    if package == "timm":
        config: Any = getattr(module, "pretrained_cfg", None) or {}
        return torch.randn(2, *(config.get("input_size") or _IMAGE))
    if package != "torchvision" or rest.startswith("models.detection"):
        return None
    if rest.startswith("models.video"):
        return torch.randn(2, *_VIDEO)
    size = 299 if type(module).__name__ == "Inception3" else _IMAGE[1]
    return torch.randn(2, 3, getattr(module, "image_size", size), getattr(module, "image_size", size))


def _torchvision(name: str, pretrained: bool) -> tuple[nn.Module, Callable[[], Any]]:
    models = _import_zoo("torchvision.models", "torchvision")
    known = models.list_models()
    if name not in known:
        raise _unknown_zoo_model("torchvision", name, known)
    weights = models.get_model_weights(name).DEFAULT
    preset = weights.transforms()
    # Left to itself, a segmentation or detection model without weights still downloads its backbone's.
    takes_backbone = "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters
    backbone = {"weights_backbone": None} if takes_backbone and not pretrained else {}
    module = _zoo_model(
        "torchvision",
        name,
        pretrained,
        lambda: models.get_model(name, weights=weights if pretrained else None, **backbone),
    )

    crop = preset.crop_size[0] if hasattr(preset, "crop_size") else _IMAGE[1]
    frames = _VIDEO[1:2] if type(module).__module__.startswith("torchvision.models.video") else ()
    return module, lambda: torch.randn(2, 3, *frames, crop, crop)


def _timm(name: str, pretrained: bool) -> tuple[nn.Module, Callable[[], Any]]:
    timm = _import_zoo("timm", "timm")
    if not timm.is_model(name.partition(".")[0]):
        raise _unknown_zoo_model("timm", name, timm.list_models())
    module = _zoo_model("timm", name, pretrained, lambda: timm.create_model(name, pretrained=pretrained))
    return module, lambda: example_images(module)


ZOOS: dict[str, Callable[[str, bool], tuple[nn.Module, Callable[[], Any]]]] = {
    "torchvision": _torchvision,
    "timm": _timm,
}


def _import_zoo(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise LoadError(
            f"{package} is not installed",
            expected=f"the package {package} for {package}:NAME",
            found=str(error),
            remedy="pip install 'fxaudit[vision]'",
        ) from error


def _unknown_zoo_model(zoo: str, name: str, known: list[str]) -> LoadError:
    return LoadError(
        f"{zoo} has no model `{name}`{nearest(name, known)}",
        expected=f"one of the {len(known)} models of {zoo}",
        found=name,
        remedy=f"see {'torchvision.models.list_models()' if zoo == 'torchvision' else 'timm.list_models()'}",
    )


def _zoo_model(zoo: str, name: str, pretrained: bool, build: Callable[[], nn.Module]) -> nn.Module:
    try:
        return build()
    except Exception as error:
        if pretrained:
            expected = "a model with its pretrained weights, which are downloaded once"
            remedy = "--random-init for the architecture alone, or --weights FILE.safetensors for your own weights"
        else:
            expected = "a model that is built without a download"
            remedy = f"name a function that builds it, in a Python file of your own, or use another version of {zoo}"
        raise LoadError(
            f"{zoo} could not build {name}",
            where=f"{zoo}:{name}",
            expected=expected,
            found=f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}",
            remedy=remedy,
        ) from error

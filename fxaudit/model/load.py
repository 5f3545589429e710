"""What the user names becomes a `Subject`: a module with example inputs.

Files are hostile until the user says otherwise. Nothing here unpickles: the only code that runs is a Python file or
package that the user named.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxaudit.errors import LoadError, nearest
from fxaudit.model import hugging_face
from fxaudit.model.files import describe_file
from fxaudit.model.functions import Purpose, call_function
from fxaudit.model.inputs import Arguments, as_arguments, with_batch_of_two, with_window

FORMS = (
    "torchvision:NAME, timm:NAME, a Hugging Face directory, path/to/file.py:function or package.module:function"
    " (a function that returns a module, or a module and its example inputs)"
)
_ZOOS = ("torchvision", "timm")
_PURPOSE = Purpose(LoadError, "model", "a module, or a module and its example inputs", FORMS, _ZOOS)
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True)
class Subject:
    """The model under audit.

    `arguments` are the example inputs (positional, keyword); their first axis is the input axis where they share one.
    `tokenizer` is the directory of the model's own tokenizer, for data given as text.
    """

    source: str
    module: nn.Module
    arguments: Arguments
    tokenizer: Path | None = None

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())


def load(
    model: str,
    *,
    weights: str | Path | None = None,
    random_init: bool = False,
    seed: int = 0,
    inputs: Any = None,
    window: int | None = None,
) -> Subject:
    """The subject that `model` names; see `FORMS`.

    Args:
        weights: a safetensors file with a state dict that replaces the weights of the module.
        random_init: build a zoo model without its pretrained weights (no download).
        seed: seeds the construction of the module and random example inputs.
        inputs: example inputs (a tensor, tuple or dict) that replace the model's own.
        window: the number of tokens of each example input, for models that take token ids.

    Raises:
        LoadError: with what the name was taken for, and what would work.
        UsageError: a window for a model that takes no token ids.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, own = _build(model, pretrained=not random_init and weights is None)
        if weights is not None:
            load_weights(module, Path(weights))
        if inputs is None:
            inputs = own() if callable(own) else own
        made = subject(module, inputs, source=model, seed=seed)
    if window is not None:
        made = replace(made, arguments=with_window(made.arguments, window, seed))
    return replace(made, tokenizer=hugging_face.tokenizer_directory(Path(model)))


def subject(module: nn.Module, inputs: Any, *, source: str = "", seed: int = 0) -> Subject:
    """The subject of a module that the caller holds, with example inputs (a tensor, tuple or dict).

    An example of one input is joined by a second one, made from it: a traced axis of size 1 would be a constant.
    """
    if inputs is None:
        raise LoadError(
            f"{source or type(module).__name__} came without example inputs",
            expected="inputs to trace the model with",
            found="a module alone",
            remedy="return (module, inputs) from the function, inputs being a tensor, tuple or dict",
        )
    arguments = with_batch_of_two(as_arguments(inputs), seed)
    return Subject(source or f"{type(module).__module__}.{type(module).__qualname__}", module, arguments)


def _build(model: str, *, pretrained: bool) -> tuple[nn.Module, Any]:
    scheme, _, name = model.partition(":")
    if scheme in _ZOOS and name:
        return _ZOO_BUILDERS[scheme](name, pretrained)
    path = Path(model)
    if path.suffix in (*_PICKLES, ".pt2"):
        raise _refused_file(path)
    if scheme and name:
        return _module_and_inputs(model, call_function(model, _PURPOSE))
    if path.is_dir():
        return hugging_face.load_directory(path, pretrained=pretrained)
    if path.suffix == ".py" and path.exists():
        raise LoadError(
            f"{model} names a file but no function in it",
            expected="file.py:function",
            found=model,
            remedy=f"name the function that returns the model: {model}:build",
        )
    exists = path.exists()
    raise LoadError(
        f"{model} is not a model that fxaudit can load" if exists else f"{model} does not exist",
        expected=FORMS,
        found=f"a file ending in {path.suffix or 'nothing'}" if exists else "no such file",
        remedy="check the spelling and the working directory"
        if not exists
        else "name a function that builds the model",
    )


def _module_and_inputs(model: str, made: Any) -> tuple[nn.Module, Any]:
    """What a user's function returned, in two parts; without inputs the second is None."""
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise LoadError(
            f"{model} did not return a model",
            expected="a torch.nn.Module, or (module, inputs)",
            found=f"{type(made).__module__}.{type(made).__name__}",
            remedy="return the module itself, with its weights loaded",
        )
    return module, inputs


# --- model zoos -----------------------------------------------------------------------------------------------------


def _torchvision(name: str, pretrained: bool) -> tuple[nn.Module, Any]:
    models = _import_zoo("torchvision.models", "torchvision")
    known = models.list_models()
    if name not in known:
        raise _unknown_zoo_model("torchvision", name, known)
    weights = models.get_model_weights(name).DEFAULT
    preset = weights.transforms()
    size = preset.crop_size[0] if hasattr(preset, "crop_size") else 224
    # Left to itself, a segmentation or detection model without weights still downloads its backbone's.
    takes_backbone = "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters
    backbone = {"weights_backbone": None} if takes_backbone and not pretrained else {}
    module = _zoo_model(
        "torchvision",
        name,
        pretrained,
        lambda: models.get_model(name, weights=weights if pretrained else None, **backbone),
    )
    return module, lambda: torch.randn(2, 3, size, size)


def _timm(name: str, pretrained: bool) -> tuple[nn.Module, Any]:
    timm = _import_zoo("timm", "timm")
    if not timm.is_model(name.partition(".")[0]):
        raise _unknown_zoo_model("timm", name, timm.list_models())
    module = _zoo_model("timm", name, pretrained, lambda: timm.create_model(name, pretrained=pretrained))
    config: Any = module.pretrained_cfg
    return module, lambda: torch.randn(2, *config.get("input_size", (3, 224, 224)))


_ZOO_BUILDERS: dict[str, Callable[[str, bool], tuple[nn.Module, Any]]] = {"torchvision": _torchvision, "timm": _timm}


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


# --- weights and refused files --------------------------------------------------------------------------------------


def load_weights(module: nn.Module, path: Path) -> None:
    """Load a safetensors state dict into `module`, every name and shape checked.

    Raises:
        LoadError: no such file, not safetensors, or names and shapes that do not fit.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.exists():
        raise LoadError(
            f"{path} does not exist", expected="a safetensors file", found="no such file", remedy="check --weights"
        )
    try:
        state = load_file(path)
    except (SafetensorError, OSError) as error:
        raise LoadError(
            f"{path} is not a safetensors file",
            expected="a state dict in safetensors form",
            found=describe_file(path),
            remedy="convert it once:\n"
            "safetensors.torch.save_file(torch.load(path, weights_only=True), 'weights.safetensors')",
        ) from error
    try:
        missing, unexpected = module.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise LoadError(
            f"the weights in {path} do not fit the model",
            expected="the shapes of the model's own parameters",
            found="\n".join(str(error).splitlines()[1:4]).strip(),
            remedy="build the model with the configuration that the weights were saved from",
        ) from error
    # A tied weight is saved once, under any of its names; its other names are missing without being absent.
    tensors = dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])
    saved = {id(tensors[name]) for name in state if name in tensors}
    missing = [name for name in missing if name not in tensors or id(tensors[name]) not in saved]
    if missing or unexpected:
        raise LoadError(
            f"the weights in {path} do not fit the model",
            expected=f"{len(module.state_dict())} tensors named as in the model's state dict",
            found=f"missing {_few(missing)}; unexpected {_few(unexpected)}",
            remedy="build the model with the configuration that the weights were saved from",
        )


def _few(names: list[str]) -> str:
    return f"{', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}" if names else "none"


def _refused_file(path: Path) -> LoadError:
    if not path.exists():
        return LoadError(
            f"{path} does not exist",
            expected=FORMS,
            found="no such file",
            remedy="check the spelling and the working directory",
        )
    return LoadError(
        f"{path} is refused: loading it could run code that it carries",
        where=str(path),
        expected=FORMS,
        found=describe_file(path),
        remedy="name the function that builds the model, and give the weights as safetensors:\n"
        "fxaudit trace file.py:function --weights weights.safetensors",
    )

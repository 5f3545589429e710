"""What the user names becomes a `Subject`: a module with example inputs.

Files are hostile until the user says otherwise. The only code that runs is a Python file or package that the user
named; `trust_pickle` and `trust_remote_code` let a file or a repository bring its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxaudit.errors import LoadError, UsageError
from fxaudit.model import exported, hugging_face
from fxaudit.model.archives import FileKind, kind_of
from fxaudit.model.files import describe_file
from fxaudit.model.functions import Purpose, call_function
from fxaudit.model.hugging_face_inputs import example_inputs
from fxaudit.model.input_files import read_inputs
from fxaudit.model.inputs import Arguments, as_arguments, map_tensors, with_batch_of_two, with_window
from fxaudit.model.pickled import is_model_file, load_pickled_module, state_dict_alone
from fxaudit.model.placement import Placement, parse_device, parse_dtype, place
from fxaudit.model.weights import Checkpoint, load_weights, read_weights
from fxaudit.model.zoos import ZOOS, build_zoo_model, example_images

FORMS = (
    "torchvision:NAME, timm:NAME, a Hugging Face directory or hub id (org/name), a torch file (.pt, .pth) or .pt2"
    " archive, path/to/file.py:function or package.module:function (a function that returns a module, or a module and"
    " its example inputs)"
)
_PURPOSE = Purpose(LoadError, "model", "a module, or a module and its example inputs", FORMS, tuple(ZOOS))
_PREPARE = Purpose(
    LoadError,
    "function",
    "the module, the module and its example inputs, or None",
    "path/to/file.py:function or package.module:function",
    takes="the module",
)


@dataclass(frozen=True, slots=True)
class Subject:
    """The model under audit.

    `arguments` are the example inputs (positional, keyword); their first axis is the input axis where they share one.
    `tokenizer` is the directory of the model's own tokenizer, for data given as text. `loading` holds the options of
    `load` that were given, by name, as text: what was loaded depends on them.
    """

    source: str
    module: nn.Module
    arguments: Arguments
    tokenizer: Path | None = None
    loading: Mapping[str, str] = field(default_factory=dict)

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())


@dataclass(frozen=True, slots=True)
class _Built:
    """A module before it is prepared: its own example inputs, or a function that makes them, and its tokenizer.

    `is_exported`: its shapes are fixed already, those of its own inputs or of symbols.
    """

    module: nn.Module
    inputs: Any = None
    tokenizer: Path | None = None
    is_exported: bool = False


@dataclass(frozen=True, slots=True)
class _Options:
    pretrained: bool
    placement: Placement
    trust_pickle: bool
    trust_remote_code: bool


def load(
    model: str,
    *,
    weights: str | Path | None = None,
    random_init: bool = False,
    seed: int = 0,
    inputs: Any = None,
    window: int | None = None,
    prepare: str | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    trust_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Subject:
    """The subject that `model` names; see `FORMS`.

    Args:
        weights: a state dict (safetensors, or a torch file without code) that replaces the weights of the module.
        random_init: build the model without its pretrained weights (no download).
        seed: seeds the construction of the module and random example inputs.
        inputs: example inputs that replace the model's own: a tensor, tuple or dict, or the path of a .safetensors,
            .npz or .pt file.
        window: the number of tokens of each example input, for models that take token ids.
        prepare: ``file.py:function``, called on the module before its first forward call; what it returns, if anything,
            takes the place of the module; it may bring example inputs as well, as ``(module, inputs)``.
        dtype: float32, bfloat16, float16 or float64, for the floating point weights and example inputs.
        device: cpu, cuda, cuda:N or meta. On meta nothing is allocated where the model can be built so.
        trust_pickle: unpickle MODEL even if it names code.
        trust_remote_code: run the code that a Hugging Face directory or repository brings.

    Raises:
        LoadError: with what the name was taken for, and what would work.
        UsageError: an option without a meaning for this model.
    """
    given = {
        "weights": weights,
        "random_init": random_init,
        "seed": seed,
        "inputs": inputs if isinstance(inputs, str | Path | None) else "in memory",
        "window": window,
        "prepare": prepare,
        "dtype": dtype,
        "device": device,
        "trust_pickle": trust_pickle,
        "trust_remote_code": trust_remote_code,
    }
    loading = {name: str(value) for name, value in given.items() if value is not None and value is not False}
    placement = Placement(parse_dtype(dtype), parse_device(device))
    if weights is not None and placement.is_meta:
        raise UsageError(
            "weights have no place on the meta device",
            expected="--weights, or --device meta",
            found="both",
            remedy="leave one of them out",
        )
    pretrained = not random_init and weights is None and not placement.is_meta
    options = _Options(pretrained, placement, trust_pickle, trust_remote_code)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built = _build(model, options)
        module = built.module
        if weights is not None:
            load_weights(module, Path(weights))
        module = place(module, placement)
        own = built.inputs
        if prepare is not None:
            module, own = _prepared(module, own, prepare)
        if inputs is None:
            inputs = own() if callable(own) else own
        elif isinstance(inputs, str | Path):
            inputs = read_inputs(Path(inputs))
        made = subject(module, inputs, source=model, seed=seed, widen=not built.is_exported)
    if window is not None:
        made = replace(made, arguments=with_window(made.arguments, window, seed))
    return replace(made, arguments=_placed(made, placement), tokenizer=built.tokenizer, loading=loading)


def subject(module: nn.Module, inputs: Any, *, source: str = "", seed: int = 0, widen: bool = True) -> Subject:
    """The subject of a module that the caller holds, with example inputs (a tensor, tuple or dict).

    With `widen`, an example of one input is joined by a second one, made from it: a traced axis of size 1 would be a
    constant.
    """
    if inputs is None:
        raise LoadError(
            f"{source or type(module).__name__} came without example inputs",
            expected="inputs to trace the model with",
            found="a module alone",
            remedy="give them in a file: --inputs FILE.safetensors, an array for each argument of the model;\n"
            "or return (module, inputs) from the function, inputs being a tensor, tuple or dict",
        )
    arguments = as_arguments(inputs)
    if widen:
        arguments = with_batch_of_two(arguments, seed)
    return Subject(source or f"{type(module).__module__}.{type(module).__qualname__}", module, arguments)


def _placed(made: Subject, placement: Placement) -> Arguments:
    """The example inputs in the dtype that was asked for, on the device of the module."""
    devices = {tensor.device for tensor in [*made.module.parameters(), *made.module.buffers()]}
    device = placement.device or (devices.pop() if len(devices) == 1 else None)

    def put(tensor: Tensor) -> Tensor:
        return placement.converted(tensor) if device is None else placement.converted(tensor).to(device)

    return map_tensors(put, made.arguments)


def _prepared(module: nn.Module, inputs: Any, function: str) -> tuple[nn.Module, Any]:
    """The prepared module, and its example inputs: those that the function brings, else `inputs`."""
    made = call_function(function, _PREPARE, module)
    if isinstance(made, tuple) and len(made) == 2:
        made, inputs = made
    if made is None or isinstance(made, nn.Module):
        return module if made is None else made, inputs
    raise LoadError(
        f"{function} did not return a module",
        where=function,
        expected="the module that it was given, another one, either with example inputs, or None",
        found=f"{type(made).__module__}.{type(made).__name__}",
        remedy="return the prepared module, (module, inputs), or nothing",
    )


def _build(model: str, options: _Options) -> _Built:
    path = Path(model)
    scheme, _, name = model.partition(":")
    if scheme in ZOOS and name:
        return _Built(*options.placement.build(lambda: build_zoo_model(scheme, name, pretrained=options.pretrained)))
    is_hub_id = not path.exists() and hugging_face.is_hub_id(model) and not is_model_file(path)
    if path.is_dir() or is_hub_id:
        directory = path if path.is_dir() else hugging_face.snapshot(model, code=options.trust_remote_code)
        module, inputs = hugging_face.load_directory(
            directory,
            pretrained=options.pretrained,
            placement=options.placement,
            trust_remote_code=options.trust_remote_code,
            name=model,
        )
        return _Built(module, inputs, hugging_face.tokenizer_directory(directory))
    if is_model_file(path):
        return _from_file(path, options)
    if scheme and name:
        return _Built(*_module_and_inputs(model, call_function(model, _PURPOSE)))
    raise _no_model(model, path)


def _from_file(path: Path, options: _Options) -> _Built:
    kind = kind_of(path)
    if kind is FileKind.SAFETENSORS:
        raise state_dict_alone(path, Checkpoint(read_weights(path)))
    if kind is FileKind.EXPORTED:
        return _Built(*exported.load_exported(path, trust=options.trust_pickle), is_exported=True)
    module = load_pickled_module(path, kind, trust=options.trust_pickle)
    if hugging_face.is_pretrained_model(module):
        return _Built(module, lambda: example_inputs(module, str(path)))
    return _Built(module, lambda: example_images(module))


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


def _no_model(model: str, path: Path) -> LoadError:
    if path.suffix == ".py" and path.exists():
        return LoadError(
            f"{model} names a file but no function in it",
            expected="file.py:function",
            found=model,
            remedy=f"name the function that returns the model: {model}:build",
        )
    if not path.exists():
        return LoadError(
            f"{model} does not exist",
            expected=FORMS,
            found="no such file",
            remedy="check the spelling and the working directory",
        )
    return LoadError(
        f"{model} is not a model that fxaudit can load",
        where=str(path),
        expected=FORMS,
        found=f"a file ending in {path.suffix or 'nothing'}: {describe_file(path)}",
        remedy="name a function that builds the model",
    )

"""A torch file as MODEL: told apart by content, loaded where that runs no code, otherwise refused with what works."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxaudit.errors import LoadError
from fxaudit.model.admission import Admission, admit, is_module
from fxaudit.model.archives import FileKind, kind_of, read_torch_pickle, unreadable
from fxaudit.model.files import describe_file, printable
from fxaudit.model.frames import user_frame
from fxaudit.model.functions import first_on_path
from fxaudit.model.weights import Checkpoint, checkpoint_of, load_plain

ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".safetensors", ".pt2")
_NAMES_SHOWN = 5


def load_pickled_module(path: Path, kind: FileKind, *, trust: bool) -> nn.Module:
    """The module in a torch file.

    Without `trust` only a module of known layers loads, and no code of the file runs: see `admission`. With `trust` the
    file is unpickled as Python does it, and may run anything.

    Raises:
        LoadError: a state dict, with the command that works; an archive of another kind; a pickle that needs trust; or
            a file that is damaged.
    """
    if not kind.is_pickled:
        raise _another_kind(path, kind)
    found = _trusted(path, kind) if trust else _admitted(path, kind)
    if isinstance(found, nn.Module):
        _check_whole(found, path)
        return found
    if isinstance(found, Mapping):
        modules = {str(key): value for key, value in found.items() if isinstance(value, nn.Module)}
        if len(modules) == 1:
            return next(iter(modules.values()))
    raise _no_module(path, found)


def _admitted(path: Path, kind: FileKind) -> Any:
    followed = read_torch_pickle(path, kind)
    if not is_module(followed):
        return load_plain(path, kind)
    admission = admit(followed)
    if admission.refused or kind is not FileKind.TORCH:
        raise _needs_trust(path, kind, admission)
    try:
        with torch.serialization.safe_globals(admission.allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # the last word is torch's
        admission.refused.append(printable(str(error).splitlines()[0] if str(error) else type(error).__name__))
        raise _needs_trust(path, kind, admission) from error


def _trusted(path: Path, kind: FileKind) -> Any:
    # Classes of the user's own are found from the working directory, as they are when Python runs a script there.
    try:
        with first_on_path(Path.cwd()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if kind is FileKind.PICKLE:
                with path.open("rb") as file:
                    return pickle.load(file)
            return torch.load(path, map_location="cpu", weights_only=False)
    except (Exception, SystemExit) as error:
        raise LoadError(
            f"{path} could not be unpickled",
            where=user_frame(error) or str(path),
            expected="a module whose classes can be imported",
            found=f"{type(error).__name__}: {error}",
            remedy="run the command where its Python files lie, or name a function that builds the model and give\n"
            "the state dict with --weights",
        ) from error


def _check_whole(module: nn.Module, path: Path) -> None:
    """A module that is filled from a file may lack what every module has, or contain itself."""
    try:
        module.state_dict()
    except Exception as error:  # whatever is missing
        text = printable(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        raise unreadable(path, "a whole module", text) from error


def _needs_trust(path: Path, kind: FileKind, admission: Admission) -> LoadError:
    shown = ", ".join(printable(name) for name in admission.refused[:_NAMES_SHOWN])
    rest = len(admission.refused) - _NAMES_SHOWN
    if not shown:
        shown = "the old format, which holds the source of its classes"
    form = "" if kind is FileKind.TORCH else f"{kind.value}: "
    return LoadError(
        f"{path} is refused: unpickling it could run code that it carries",
        where=str(path),
        expected="a module of classes of torch, torchvision, timm and transformers only",
        found=f"{form}a pickled {printable(admission.root)}, with {shown}" + (f" and {rest} more" if rest > 0 else ""),
        remedy=_two_ways(path),
        globals=tuple(admission.refused),
    )


def _no_module(path: Path, found: Any) -> LoadError:
    checkpoint = checkpoint_of(found)
    if checkpoint is not None:
        return state_dict_alone(path, checkpoint)
    return LoadError(
        f"{path} holds no model",
        where=str(path),
        expected="a pickled module, or a state dict",
        found=f"{describe_file(path)}: a {type(found).__name__}",
        remedy="name the function that builds the model: fxaudit trace file.py:function",
    )


def state_dict_alone(path: Path, checkpoint: Checkpoint) -> LoadError:
    return LoadError(
        f"{path} is a state dict: it has the weights of a model, but not the model",
        where=str(path),
        expected="a model, or a function that builds one",
        found=checkpoint.describe(),
        remedy="name the function that builds the model, and give this file as its weights:\n"
        f"fxaudit trace file.py:function --weights {path}",
    )


def _another_kind(path: Path, kind: FileKind) -> LoadError:
    if kind is FileKind.MISSING:
        return LoadError(
            f"{path} does not exist",
            expected="a model file",
            found="no such file",
            remedy="check the spelling and the working directory",
        )
    what, remedy = f"{path} is refused: loading it could run code that it carries", _two_ways(path)
    if kind is FileKind.SCRIPT:
        what = f"{path} is a TorchScript archive, which holds a compiled program instead of a module"
        remedy = (
            "name the function that builds the module, and take its weights out of the archive once, in Python:\n"
            "torch.save(torch.jit.load(path).state_dict(), 'weights.pt')\n"
            "fxaudit trace file.py:function --weights weights.pt"
        )
    elif kind is FileKind.TORCH_TAR:
        remedy = "load and save it once with the torch that wrote it, then give the state dict with --weights"
    return LoadError(
        what,
        where=str(path),
        expected="a torch file with a pickled module, a .pt2 archive, or a function that builds the model",
        found=kind.value if kind is not FileKind.OTHER else describe_file(path),
        remedy=remedy,
    )


def _two_ways(path: Path) -> str:
    return (
        f"where you trust the file: fxaudit trace {path} --trust-pickle\n"
        "otherwise name the function that builds the model, and give the state dict:\n"
        "fxaudit trace file.py:function --weights weights.safetensors"
    )


def is_model_file(path: Path) -> bool:
    """Whether MODEL names a torch or safetensors file: by what it holds, or, where it is missing, by its ending."""
    return path.suffix in ENDINGS or (path.is_file() and kind_of(path) is not FileKind.OTHER)

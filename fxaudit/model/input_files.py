"""Example inputs from a file: named arrays of a .safetensors or .npz file, or what a .pt file holds."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxaudit.errors import LoadError
from fxaudit.model.archives import FileKind, kind_of
from fxaudit.model.files import describe_file, printable
from fxaudit.model.inputs import tensors_of
from fxaudit.model.weights import load_plain, read_safetensors

_POSITION = re.compile(r"(?:arg_?)?(\d+)")
# Arrays may be compressed, so a file may hold more than its size; far more is refused before it is read.
_ALWAYS_READ = 1 << 30
_COMPRESSION = 64


def read_inputs(path: Path) -> Any:
    """The example inputs in a file, in the form that a model is called with: a dict of keyword arguments, or a tuple.

    Names are those of arguments; names that are numbers (`0`, `1`, or `arg0`, `arg1`) are positions. A .pt file is
    read without running code and may also hold one tensor, a tuple or list, and nested containers. Dtypes are kept.

    Raises:
        LoadError: no such file, a file of another kind or damaged, or names that are neither arguments nor positions.
    """
    if not path.exists():
        raise LoadError(
            f"{path} does not exist",
            expected="a file of example inputs",
            found="no such file",
            remedy="check --inputs",
        )
    kind = kind_of(path)
    if kind is FileKind.SAFETENSORS or path.suffix == ".safetensors":
        inputs: Any = read_safetensors(path)
    elif kind.is_pickled:
        inputs = load_plain(path, kind)
    else:
        inputs = _read_npz(path)
    _check_size(inputs, path)
    return _by_position(inputs, path) if isinstance(inputs, Mapping) else _as_tuple(inputs, path)


def _read_npz(path: Path) -> dict[str, Tensor]:
    import numpy as np

    try:
        with zipfile.ZipFile(path) as archive:
            declared = sum(entry.file_size for entry in archive.infolist())
        if declared > max(_ALWAYS_READ, _COMPRESSION * path.stat().st_size):
            raise ValueError(f"{declared:,} bytes declared in a file of {path.stat().st_size:,}")
        with np.load(path, allow_pickle=False) as arrays:
            # torch has no place for arrays whose bytes are in another order.
            found = {name: np.asarray(arrays[name]) for name in arrays.files}
        return {n: torch.from_numpy(a.astype(a.dtype.newbyteorder("="), copy=True)) for n, a in found.items()}
    except Exception as error:  # hostile bytes fail in as many ways as the zip and npy formats have fields
        raise LoadError(
            f"{path} cannot be read as example inputs",
            where=str(path),
            expected="a .safetensors, .npz or .pt file of arrays",
            found=f"{describe_file(path)}\n{printable(f'{type(error).__name__}: {error}')}",
            remedy="write it with safetensors.torch.save_file({'argument': tensor, ...}, 'inputs.safetensors')",
        ) from error


def _check_size(inputs: Any, path: Path) -> None:
    """A tensor may claim far more elements than it stores; its first use would allocate them all."""
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(((inputs,), {})))
    limit = max(_ALWAYS_READ, _COMPRESSION * path.stat().st_size)
    if claimed > limit:
        raise LoadError(
            f"the example inputs in {path} are too large to be true",
            where=str(path),
            expected=f"at most {limit:,} bytes in a file of {path.stat().st_size:,}",
            found=f"tensors of {claimed:,} bytes",
            remedy="save the inputs themselves, not views of them",
        )


def _as_tuple(inputs: Any, path: Path) -> Any:
    if isinstance(inputs, Tensor | tuple | list):
        return inputs
    raise _unusable(path, f"a {type(inputs).__name__}")


def _by_position(inputs: Mapping[Any, Any], path: Path) -> Any:
    names = [str(name) for name in inputs]
    if not names:
        raise _unusable(path, "nothing")
    values = dict(zip(names, inputs.values(), strict=True))
    matches = {name: _POSITION.fullmatch(name) for name in names}
    positions = {name: int(match[1]) for name, match in matches.items() if match is not None}
    if not positions:
        if odd := [name for name in names if not name.isidentifier()]:
            raise _unusable(path, f"the name `{printable(odd[0])}`")
        return values
    if len(positions) != len(names) or sorted(positions.values()) != list(range(len(names))):
        raise _unusable(path, f"the names {', '.join(map(printable, names[:8]))}")
    return tuple(values[name] for name in sorted(positions, key=lambda name: positions[name]))


def _unusable(path: Path, found: str) -> LoadError:
    return LoadError(
        f"{path} holds no inputs that a model could be called with",
        where=str(path),
        expected="arrays under the names of the model's arguments, or under 0, 1, 2 and so on by position",
        found=found,
        remedy="write it with safetensors.torch.save_file({'argument': tensor, ...}, 'inputs.safetensors')",
    )

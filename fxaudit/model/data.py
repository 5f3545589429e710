"""DATA becomes a `DataSet`: named inputs, read a batch at a time where the file allows it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fxaudit import ops
from fxaudit.errors import DataError, nearest
from fxaudit.model.inputs import resampled
from fxaudit.model.load import _function
from fxaudit.model.trace import TracedModel
from fxaudit.provenance import tensor_bytes

FORMS = (
    "a .safetensors or .npz file with one array for each model input, file.py:function returning a dict of them,"
    " `example`, or `resampled:N` (N inputs drawn from the example's own elements)"
)
TARGETS = "targets"
_DIGEST_ROWS = 64


class Column(Protocol):
    """One named array, read by rows."""

    def __len__(self) -> int: ...
    def rows(self, start: int, stop: int) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Loaded:
    tensor: Tensor

    def __len__(self) -> int:
        return self.tensor.shape[0]

    def rows(self, start: int, stop: int) -> Tensor:
        return self.tensor[start:stop]


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A tensor of a safetensors file, of which only the rows asked for are read."""

    slice: Any

    def __len__(self) -> int:
        return int(self.slice.get_shape()[0])

    def rows(self, start: int, stop: int) -> Tensor:
        return self.slice[start:stop]


@dataclass(frozen=True, slots=True)
class DataSet:
    """Inputs for one traced model: `count` of them, by the names of its input leaves, and their content hash."""

    source: str
    count: int
    columns: Mapping[str, Column]
    digest: str

    def leaves(self, traced: TracedModel, start: int, size: int) -> tuple[list[Any], int]:
        """The input leaves of `size` inputs from `start` on, and how many of them are real.

        Past the end the last batch is filled by repeating its inputs from the first on, so that every batch has one
        size.
        """
        real = min(size, self.count - start)
        example = dict(zip(traced.input_names, traced.flatten(traced.subject.arguments), strict=True))
        leaves = []
        for name in traced.input_names:
            if name in self.columns:
                rows = self.columns[name].rows(start, start + real)
                leaves.append(rows if real == size else rows[torch.arange(size) % real])
            else:
                leaves.append(example[name])
        return leaves, real


def load_data(place: str | Path | Mapping[str, Any], traced: TracedModel) -> DataSet:
    """The data set that `place` names, checked against the inputs of `traced`.

    Raises:
        DataError: no such file, an unknown form, or arrays that do not fit the model's inputs.
    """
    if isinstance(place, Mapping):
        return _checked(
            "given arrays", {name: _Loaded(torch.as_tensor(value)) for name, value in place.items()}, traced
        )
    text = str(place)
    if text == "example" or re.fullmatch(r"resampled:\d+", text):
        return _checked(text, _from_example(text, traced), traced)
    path = Path(text)
    if re.search(r"\.py:\w+$", text):
        made = _function(text)()
        if not isinstance(made, Mapping):
            raise DataError(
                f"{text} did not return data",
                expected="a dict of arrays by input name",
                found=type(made).__name__,
                remedy="return {'input name': tensor}",
            )
        return _checked(text, {name: _Loaded(torch.as_tensor(value)) for name, value in made.items()}, traced)
    if not path.exists():
        raise DataError(
            f"{path} does not exist",
            expected=FORMS,
            found="no such file",
            remedy="check --data and the working directory",
        )
    readers = {".safetensors": _safetensors, ".npz": _npz}
    if path.suffix not in readers:
        raise DataError(
            f"{path} is not data that fxaudit can read",
            expected=FORMS,
            found=path.suffix or "a file without an ending",
            remedy="save it with safetensors.torch.save_file",
        )
    return _checked(text, readers[path.suffix](path), traced)


def _from_example(text: str, traced: TracedModel) -> dict[str, Column]:
    arguments = traced.subject.arguments
    if text != "example":
        count = int(text.partition(":")[2])
        if count < 1:
            raise DataError(
                f"`{text}` asks for no input",
                expected="resampled:N with N of at least 1",
                found=text,
                remedy="ask for some",
            )
        # As many rows as asked for, whatever batch the graph takes at once.
        arguments = resampled(arguments, seed=1, batch=count)
    import torch.utils._pytree as pytree

    leaves = dict(zip(traced.input_names, pytree.tree_leaves(arguments), strict=True))
    return {name: _Loaded(leaves[name]) for name in batched_inputs(traced)}


def _safetensors(path: Path) -> dict[str, Column]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="pt")
        return {name: _Mapped(file.get_slice(name)) for name in file.keys() if file.get_slice(name).get_shape()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"{path} is not a safetensors file",
            expected="named arrays in safetensors form",
            found=str(error),
            remedy="write it again with safetensors.torch.save_file",
        ) from error


def _npz(path: Path) -> dict[str, Column]:
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: _Loaded(torch.from_numpy(file[name])) for name in file.files if file[name].ndim}
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} is not an .npz file of plain arrays",
            expected="arrays of numbers, saved with numpy.savez",
            found=str(error),
            remedy="write it again with numpy.savez; object arrays are pickles and are refused",
        ) from error


def batched_inputs(traced: TracedModel) -> list[str]:
    """The names of the input leaves that have an input axis."""
    names = []
    for node, name in zip(traced.placeholders(), traced.input_names, strict=True):
        shape = ops.sizes(node)
        if shape and traced.sample is not None and shape[0] == traced.sample:
            names.append(name)
    return names


def _checked(source: str, columns: dict[str, Column], traced: TracedModel) -> DataSet:
    wanted = batched_inputs(traced)
    given = [name for name in columns if name != TARGETS]
    missing = [name for name in wanted if name not in columns]
    unknown = [name for name in given if name not in wanted]
    if missing or unknown:
        hint = nearest(unknown[0], wanted) if unknown else ""
        raise DataError(
            f"{source} does not hold the inputs of {traced.subject.source}{hint}",
            expected=", ".join(wanted),
            found=", ".join(columns) or "no array",
            remedy="name the arrays as the model's forward names its arguments",
            missing=missing,
        )
    counts = {name: len(column) for name, column in columns.items()}
    if len(set(counts.values())) != 1 or not all(counts.values()):
        raise DataError(
            f"the arrays in {source} differ in their number of inputs, or have none",
            expected="one size of the first axis",
            found=", ".join(f"{n}: {c}" for n, c in counts.items()),
            remedy="cut them to the same inputs",
        )
    for node, name in zip(traced.placeholders(), traced.input_names, strict=True):
        if name in columns:
            _check_column(source, name, columns[name].rows(0, 1), node)
    return DataSet(source, next(iter(counts.values())), {n: columns[n] for n in wanted}, _digest(columns))


def _check_column(source: str, name: str, row: Tensor, node: Any) -> None:
    shape, dtype = ops.sizes(node) or (), ops.dtype(node)
    fits = len(shape) == row.ndim and all(
        not isinstance(e, int) or e == s for e, s in zip(shape[1:], row.shape[1:], strict=True)
    )
    if not fits or row.dtype != dtype:
        raise DataError(
            f"`{name}` in {source} does not fit the model",
            expected=f"[inputs, {', '.join(map(str, shape[1:]))}] {dtype}",
            found=f"[inputs, {', '.join(map(str, row.shape[1:]))}] {row.dtype}",
            remedy="convert the array, or trace the model with an example of this shape and dtype",
        )


def _digest(columns: Mapping[str, Column]) -> str:
    """SHA-256 over names, dtypes, shapes and values, read a few rows at a time."""
    digest = hashlib.sha256()
    for name in sorted(columns):
        column = columns[name]
        first: Sequence[int] = column.rows(0, 1).shape[1:]
        digest.update(f"{name};{column.rows(0, 1).dtype};{(len(column), *first)};".encode())
        for start in range(0, len(column), _DIGEST_ROWS):
            digest.update(tensor_bytes(column.rows(start, min(start + _DIGEST_ROWS, len(column)))))
    return digest.hexdigest()

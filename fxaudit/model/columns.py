"""Named arrays of a data set, read by rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor


class Column(Protocol):
    """One named array, read by rows."""

    def __len__(self) -> int: ...
    def rows(self, start: int, stop: int) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """An array in memory."""

    tensor: Tensor

    def __len__(self) -> int:
        return self.tensor.shape[0]

    def rows(self, start: int, stop: int) -> Tensor:
        return self.tensor[start:stop]


@dataclass(frozen=True, slots=True)
class Mapped:
    """A tensor of a safetensors file, of which only the rows asked for are read."""

    slice: Any

    def __len__(self) -> int:
        return int(self.slice.get_shape()[0])

    def rows(self, start: int, stop: int) -> Tensor:
        return self.slice[start:stop]


@dataclass(frozen=True, slots=True)
class Head:
    """The first rows of a column."""

    column: Column
    count: int

    def __len__(self) -> int:
        return self.count

    def rows(self, start: int, stop: int) -> Tensor:
        return self.column.rows(start, min(stop, self.count))


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens, widened to int64 when they are read."""

    tensor: Tensor

    def __len__(self) -> int:
        return self.tensor.shape[0]

    def rows(self, start: int, stop: int) -> Tensor:
        return self.tensor[start:stop].long()


@dataclass(frozen=True, slots=True)
class Images:
    """Image files, opened and prepared when they are read."""

    paths: Sequence[Path]
    prepare: Callable[[Path], Tensor]

    def __len__(self) -> int:
        return len(self.paths)

    def rows(self, start: int, stop: int) -> Tensor:
        return torch.stack([self.prepare(path) for path in self.paths[start:stop]])


@dataclass(frozen=True, slots=True)
class Table:
    """A column of a Hugging Face data set; each entry is prepared when it is read."""

    dataset: Any
    name: str
    prepare: Callable[[Any], Tensor]

    def __len__(self) -> int:
        return len(self.dataset)

    def rows(self, start: int, stop: int) -> Tensor:
        return torch.stack([self.prepare(entry) for entry in self.dataset[start:stop][self.name]])

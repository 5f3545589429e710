"""The coefficient store: a directory of safetensors shards, one for each recorded batch, and a manifest.

    manifest.json          what was recorded, from what, in which batches
    batch-000000.safetensors ...
    shards.jsonl           one line for each finished shard: its SHA-256 and a digest of the model's outputs

Every tensor is stored with the input axis first and products factored, so a record does not depend on how the model
lays its coefficients out: a router's ``batch*token k`` is stored as ``batch token k``. Shards keep the strides that
each tensor had, since strides can change bits downstream. Shards and manifest are written aside and renamed, so a
file that is there is complete; a line of `shards.jsonl` is written only after its shard. Nothing is pickled.

A shard is hashed once by each process that reads it, and then read memory-mapped. Who records holds a lock on the
directory, which ends with the process; reading needs none, and no right to write.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save as save_safetensors
from torch import Tensor

from fxaudit.controllers.controller import Coefficient
from fxaudit.errors import StoreError
from fxaudit.provenance import differences

SCHEMA = "fxaudit.store/1"
_MANIFEST = "manifest.json"
_LOG = "shards.jsonl"
# What a shard's header needs beside the values, for each tensor: its name twice, shape, offsets and strides.
_HEADER, _HEADER_PER_TENSOR = 256, 320


@dataclass(frozen=True, slots=True)
class Batch:
    """One recorded batch: inputs `start` to `start + real`, filled up to `size` by repetition."""

    index: int
    start: int
    real: int
    size: int

    @property
    def file(self) -> str:
        return f"batch-{self.index:06d}.safetensors"


def plan_batches(count: int, size: int) -> tuple[Batch, ...]:
    """Batches of one size that cover `count` inputs."""
    starts = range(0, count, size)
    return tuple(Batch(i, start, min(size, count - start), size) for i, start in enumerate(starts))


@dataclass(frozen=True, slots=True)
class CoefficientStore:
    """A store on disk. `shards` maps the index of each finished batch to its line of the log."""

    directory: Path
    manifest: Mapping[str, Any]
    shards: Mapping[int, Mapping[str, Any]]
    # The batches whose bytes have been found to be what the log says.
    _whole: set[int] = field(default_factory=set, repr=False, compare=False)

    @property
    def batches(self) -> tuple[Batch, ...]:
        return plan_batches(self.manifest["count"], self.manifest["batch_size"])

    @property
    def is_complete(self) -> bool:
        return all(batch.index in self.shards for batch in self.batches)

    @property
    def size_bytes(self) -> int:
        return sum((self.directory / batch.file).stat().st_size for batch in self.batches if batch.index in self.shards)

    def outputs_digest(self, batch: Batch) -> str:
        """SHA-256 of the live model's outputs on a recorded batch."""
        return str(self.shards[batch.index]["outputs"])

    def samples(self, batch: Batch) -> dict[str, Tensor]:
        """Every recorded tensor of a batch by key, input axis first; rows from `batch.real` on are repetitions.

        Raises:
            StoreError: the shard is missing or differs from what was recorded.
        """
        return self.read(batch)[0]

    def bound(self, batch: Batch, coefficients: Sequence[Coefficient]) -> list[Tensor]:
        """The recorded tensors of a batch as the graph takes them: own dimension order, own strides.

        Raises:
            StoreError: the shard is missing or differs from what was recorded.
        """
        tensors, strides = self.read(batch)
        return [from_samples(tensors[c.key], c, strides[c.key]) for c in coefficients]

    def rows(self, keys: Sequence[str], inputs: Sequence[int]) -> dict[str, Tensor]:
        """The recorded tensors of given inputs by key, in that order, input axis first.

        Each shard is opened once, and no more of it is read than these inputs.

        Raises:
            StoreError: a shard is missing or differs from what was recorded.
        """
        size = int(self.manifest["batch_size"])
        places = [divmod(i, size) for i in inputs]
        parts: dict[str, list[Tensor | None]] = {key: [None] * len(places) for key in keys}
        for index in sorted({batch for batch, _ in places}):
            with safe_open(self._verified(self.batches[index]), framework="pt") as shard:
                slices = {key: shard.get_slice(key) for key in keys}
                for row, (batch, offset) in enumerate(places):
                    if batch == index:
                        for key in keys:
                            parts[key][row] = slices[key][offset : offset + 1][0]
        return {key: torch.stack([part for part in rows if part is not None]) for key, rows in parts.items()}

    def read(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
        """The `samples` of a batch, and the strides that each tensor had in the graph; mapped, not to be written to.

        Raises:
            StoreError: the shard is missing or differs from what was recorded.
        """
        with safe_open(self._verified(batch), framework="pt") as shard:
            tensors = {key: shard.get_tensor(key) for key in shard.keys()}  # noqa: SIM118
            return tensors, json.loads(shard.metadata()["strides"])

    def _verified(self, batch: Batch) -> Path:
        """The path of a shard whose bytes are what was recorded.

        Raises:
            StoreError: the shard is missing or differs from what was recorded.
        """
        path = self.directory / batch.file
        if batch.index not in self.shards or not path.exists():
            raise StoreError(
                f"{self.directory} has no batch {batch.index}",
                where=str(path),
                expected=f"{len(self.batches)} recorded batches",
                found=f"{len(self.shards)}",
                remedy="run `fxaudit record` again; it goes on where it stopped",
            )
        if batch.index in self._whole:
            return path
        recorded = self.shards[batch.index]["sha256"]
        found = _file_digest(path)
        if found != recorded:
            raise StoreError(
                f"{path} is not what was recorded",
                where=str(path),
                expected=f"sha256 {recorded}",
                found=f"sha256 {found}",
                remedy="delete the file and run `fxaudit record` again; only this batch is recorded anew",
            )
        self._whole.add(batch.index)
        return path


def describe(coefficient: Coefficient) -> dict[str, Any]:
    """A coefficient as the manifest holds it."""
    return {
        "key": coefficient.key,
        "name": coefficient.name,
        "node": coefficient.node.name,
        "dtype": str(coefficient.dtype).removeprefix("torch."),
        "dimensions": ["*".join(axis) for axis in coefficient.axes],
        "axes": stored_axes(coefficient),
        "roles": dict(coefficient.roles),
        "domain": str(coefficient.domain),
    }


def stored_axes(coefficient: Coefficient) -> list[str]:
    """The axis names of the stored tensor: factored, the input axis first."""
    factors = [name for axis in coefficient.axes for name in axis]
    sample = factors.index(coefficient.sample_axis)
    return [factors[sample], *factors[:sample], *factors[sample + 1 :]]


def to_samples(tensor: Tensor, coefficient: Coefficient, batch: int) -> Tensor:
    """A coefficient with products factored and the input axis first, contiguous."""
    factors = [name for axis in coefficient.axes for name in axis]
    sizes = [_factor_size(name, coefficient, batch) for name in factors]
    sample = factors.index(coefficient.sample_axis)
    return tensor.reshape(sizes).movedim(sample, 0).contiguous()


def from_samples(tensor: Tensor, coefficient: Coefficient, strides: Sequence[int]) -> Tensor:
    """The inverse of `to_samples`, in memory of its own with the given strides."""
    factors = [name for axis in coefficient.axes for name in axis]
    sample = factors.index(coefficient.sample_axis)
    factored = tensor.movedim(0, sample)
    shape, start = [], 0
    for axis in coefficient.axes:
        width = len(axis)
        shape.append(int(torch.Size(factored.shape[start : start + width]).numel()))
        start += width
    return with_strides(factored.reshape(shape), strides)


def with_strides(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy of `tensor` with the given strides; a stride of 0 is an expanded axis."""
    expanded = [stride == 0 and size > 1 for stride, size in zip(strides, tensor.shape, strict=True)]
    base = tensor[tuple(slice(0, 1) if is_expanded else slice(None) for is_expanded in expanded)]
    copy = torch.empty_strided(base.shape, tuple(strides), dtype=tensor.dtype, device=tensor.device)
    copy.copy_(base)
    return copy.expand(tensor.shape) if any(expanded) else copy


def _factor_size(name: str, coefficient: Coefficient, batch: int) -> int:
    if name == coefficient.sample_axis:
        return batch
    size = int(name) if name.isdigit() else coefficient.sizes[name]
    if not isinstance(size, int):
        raise StoreError(
            f"`{coefficient.key}` has an axis of unknown size",
            expected=f"a fixed size of `{name}`",
            found=str(size),
            remedy="trace the model with one length",
        )
    return size


def bytes_per_input(coefficients: Sequence[Coefficient]) -> int:
    """What one input needs on disk, without the few hundred bytes of a shard's header."""
    total = 0
    for coefficient in coefficients:
        elements = 1
        for name in (name for axis in coefficient.axes for name in axis):
            elements *= _factor_size(name, coefficient, 1)
        total += elements * coefficient.dtype.itemsize
    return total


def bytes_needed(coefficients: Sequence[Coefficient], batches: int, size: int) -> int:
    """What the shards of some batches need on disk: padded batches, headers included, rounded up."""
    return batches * (size * bytes_per_input(coefficients) + _HEADER + _HEADER_PER_TENSOR * len(coefficients))


# --- writing --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the right to write a store, waiting for a process that has it; it ends with the process, however it ends.

    Where directories cannot be locked (Windows, some network file systems) nothing is held.
    """
    try:
        import fcntl

        if not directory.exists():
            directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except (ImportError, OSError):
        yield
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logging.getLogger(__name__).warning("another process records into %s; waiting for it", directory)
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough where a forked child holds the handle, too
        os.close(handle)


@dataclass(slots=True)
class Writer:
    """A store that is being written; shards that are already there and whole are kept."""

    store: CoefficientStore

    def missing(self) -> list[Batch]:
        return [batch for batch in self.store.batches if batch.index not in self.store.shards]

    def write(
        self, batch: Batch, tensors: Mapping[str, Tensor], strides: Mapping[str, Sequence[int]], outputs: str
    ) -> None:
        """Write the shard of a batch, then its line of the log; after a kill, both are there or the line is not.

        Raises:
            StoreError: the disk is full, or the directory cannot be written to.
        """
        try:
            self._write(batch, tensors, strides, outputs)
        except OSError as error:
            raise StoreError(
                f"{batch.file} could not be written",
                where=str(self.store.directory),
                expected="room on the disk and the right to write",
                found=str(error),
                remedy="make room, or name a directory that can be written to; recording goes on where it stopped",
            ) from error

    def _write(
        self, batch: Batch, tensors: Mapping[str, Tensor], strides: Mapping[str, Sequence[int]], outputs: str
    ) -> None:
        data = save_safetensors(
            dict(tensors), metadata={"strides": json.dumps({k: list(v) for k, v in strides.items()})}
        )
        _write_atomically(self.store.directory / batch.file, data)
        line = {
            "batch": batch.index,
            "file": batch.file,
            "sha256": hashlib.sha256(data).hexdigest(),
            "outputs": outputs,
        }
        with (self.store.directory / _LOG).open("ab") as log:
            log.write(json.dumps(line).encode() + b"\n")
            log.flush()
            os.fsync(log.fileno())
        self.store = CoefficientStore(
            self.store.directory, self.store.manifest, {**self.store.shards, batch.index: line}, self.store._whole
        )


def create(directory: Path, manifest: Mapping[str, Any], need_bytes: int) -> Writer:
    """A writer for a new store, or for one that was begun with the same manifest; a complete one is not written to.

    Raises:
        StoreError: the directory holds something else, or the disk is too small.
    """
    manifest = {"schema": SCHEMA, **manifest}
    if (directory / _MANIFEST).exists():
        existing = open_store(directory)
        check_manifest(existing, manifest)
        whole = _without_damaged(existing)
        if not whole.is_complete:
            _remove_leftovers(directory)
            _end_last_line(directory / _LOG)
            missing = sum(batch.index not in whole.shards for batch in whole.batches)
            _require_room(directory, need_bytes * missing // len(whole.batches))
        return Writer(whole)
    if directory.is_dir():
        _remove_leftovers(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise StoreError(
            f"{directory} holds something that is no coefficient store",
            expected="an empty or new directory",
            found=", ".join(sorted(p.name for p in directory.iterdir())[:4]) if directory.is_dir() else "a file",
            remedy="name another directory",
        )
    directory.mkdir(parents=True, exist_ok=True)
    _require_room(directory, need_bytes)
    _write_atomically(directory / _MANIFEST, json.dumps(manifest, indent=1).encode())
    return Writer(open_store(directory))


def _require_room(directory: Path, need_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if need_bytes > free:
        raise StoreError(
            f"{directory} is on a disk that is too small",
            expected=f"{need_bytes:,} bytes",
            found=f"{free:,} bytes free",
            remedy="record fewer inputs, or name a directory on another disk",
        )


def _remove_leftovers(directory: Path) -> None:
    """Remove what a killed recording was writing: files that were never renamed into place."""
    for path in directory.glob(".*"):
        if re.fullmatch(r"\.(manifest\.json|batch-\d+\.safetensors)\.\d+", path.name):
            path.unlink(missing_ok=True)


def _end_last_line(log: Path) -> None:
    """End a line of the log that a kill tore, so that the next one starts at its own beginning."""
    if log.exists() and not log.read_bytes().endswith(b"\n"):
        with log.open("ab") as file:
            file.write(b"\n")


def _without_damaged(store: CoefficientStore) -> CoefficientStore:
    """The store without the shards whose bytes are not what the log says, so that they are recorded anew."""
    whole = {}
    for index, line in store.shards.items():
        path = store.directory / str(line["file"])
        if path.exists() and _file_digest(path) == line["sha256"]:
            whole[index] = line
    return CoefficientStore(store.directory, store.manifest, whole, set(whole))


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_manifest(store: CoefficientStore, manifest: Mapping[str, Any]) -> None:
    """Raise when a store was recorded from something else than `manifest` describes, saying what changed.

    Raises:
        StoreError: with each difference.
    """
    recorded, present = dict(store.manifest), json.loads(json.dumps({"schema": SCHEMA, **manifest}))
    changed = differences(recorded, present)
    if changed:
        raise StoreError(
            f"{store.directory} was recorded from something else",
            where=str(store.directory / _MANIFEST),
            expected="the model, graph, patterns, data, batches and environment that it was recorded with",
            found="\n".join(changed[:8]),
            remedy="restore what changed, or record into another directory",
            changed=changed,
        )


def open_store(directory: Path | str) -> CoefficientStore:
    """The store in a directory, complete or not.

    Raises:
        StoreError: there is none, or its manifest or log cannot be read.
    """
    directory = Path(directory)
    path = directory / _MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{directory} is no coefficient store",
            where=str(path),
            expected="a manifest written by `fxaudit record`",
            found=str(error),
            remedy="record first: fxaudit record MODEL --data DATA -o DIRECTORY",
        ) from error
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        found = manifest.get("schema") if isinstance(manifest, dict) else type(manifest).__name__
        raise StoreError(
            f"{directory} has a manifest of another kind",
            where=str(path),
            expected=SCHEMA,
            found=str(found),
            remedy="record again with this version",
        )
    if not all(_is_count(manifest.get(key)) for key in ("count", "batch_size")):
        raise StoreError(
            f"{directory} has a damaged manifest",
            where=str(path),
            expected="a number of inputs and a batch size",
            found=f"count {manifest.get('count')!r}, batch_size {manifest.get('batch_size')!r}",
            remedy="record again into another directory",
        )
    return CoefficientStore(directory, manifest, dict(_read_log(directory / _LOG, directory)))


def _read_log(path: Path, directory: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if not path.exists():
        return
    for raw in path.read_bytes().split(b"\n"):
        try:
            line = json.loads(raw)
        except ValueError:
            continue  # the torn last line of a recording that was killed: its batch is recorded again
        # A shard's name follows from its number: a log from elsewhere cannot point outside the store.
        texts = ("sha256", "outputs")
        if (
            isinstance(line, dict)
            and _is_count(line.get("batch"), least=0)
            and all(isinstance(line.get(t), str) for t in texts)
        ):
            yield line["batch"], {**line, "file": Batch(line["batch"], 0, 0, 0).file}


def _is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _write_atomically(path: Path, data: bytes) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

"""Torch files as they lie on disk: what kind they are, and whether what they declare can be true.

All checks come before anything is unpickled or allocated. Records are read through torch's own reader, so that what is
checked is what torch will load.
"""

from __future__ import annotations

import enum
import io
import json
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxaudit.errors import LoadError
from fxaudit.model.files import describe_file, is_zip, printable
from fxaudit.model.pickles import Container, Global, Pickle, Pickles, constant_of, read_pickles

# A pickle of 100 000 tensors takes about 20 MB; a longer one is not read.
LONGEST_PICKLE = 100_000_000
# What safetensors itself allows for its header.
_LONGEST_HEADER = 100_000_000


class FileKind(enum.Enum):
    """What a file is by its content."""

    MISSING = "no such file"
    SAFETENSORS = "a state dict in safetensors form"
    TORCH = "a torch archive"
    TORCH_OLD = "a torch file of the old format"
    TORCH_TAR = "a torch tar file of before 2017"
    PICKLE = "a bare pickle"
    SCRIPT = "a TorchScript archive"
    EXPORTED = "a torch.export archive (.pt2)"
    OTHER = "neither a torch archive nor a pickle"

    @property
    def is_pickled(self) -> bool:
        return self in (FileKind.TORCH, FileKind.TORCH_OLD, FileKind.PICKLE)


def kind_of(path: Path) -> FileKind:
    """What the file at `path` is; its name has no say."""
    try:
        with path.open("rb") as file:
            start = file.read(1 << 16)
            size = path.stat().st_size
    except OSError:
        return FileKind.OTHER if path.exists() else FileKind.MISSING
    length = int.from_bytes(start[:8], "little")
    if len(start) > 8 and start[8:9] == b"{" and 2 <= length <= min(size - 8, _LONGEST_HEADER):
        return FileKind.SAFETENSORS
    # The order is torch's own: a file that begins as a pickle is unpickled, even with an archive behind it.
    if start[:2] == b"PK":
        return _kind_of_archive(path)
    if start[257:262] == b"ustar" and tarfile.is_tarfile(path):
        return FileKind.TORCH_TAR
    pickles = read_pickles(start)
    if pickles.is_old_format:
        return FileKind.TORCH_OLD
    if pickles.is_pickle or start[:1] == b"\x80":
        return FileKind.PICKLE
    return _kind_of_archive(path) if is_zip(path) else FileKind.OTHER


def _kind_of_archive(path: Path) -> FileKind:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except Exception:  # hostile bytes fail in as many ways as the zip format has fields
        return FileKind.OTHER
    inner = {name.partition("/")[2] for name in names}
    # Archives of torch 2.7 and older have no folder of their own.
    if "archive_format" in inner or "serialized_exported_program.json" in {*names, *inner}:
        return FileKind.EXPORTED
    # As torch has it: this member makes `torch.load` hand over to `torch.jit.load`.
    if "constants.pkl" in inner or any(name.startswith("code/") for name in inner):
        return FileKind.SCRIPT
    return FileKind.TORCH if "data.pkl" in inner else FileKind.OTHER


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive that torch can open, whose members are all stored as they are, once each, and no larger than it."""

    path: Path
    reader: Any
    sizes: dict[str, int]

    def read(self, name: str, at_most: int) -> bytes:
        """The bytes of a member.

        Raises:
            LoadError: there is none, or it is longer than `at_most`.
        """
        size = self.sizes.get(name)
        if size is None or size > at_most:
            found = "no such member" if size is None else f"{size:,} bytes"
            raise unreadable(self.path, f"`{name}` of at most {at_most:,} bytes", found)
        try:
            return bytes(self.reader.get_record(name))
        except RuntimeError as error:  # the member itself is damaged, though the directory of the archive is whole
            raise unreadable(self.path, f"a whole member `{name}`", _first_line(error)) from error


def open_archive(path: Path, content: bytes | None = None) -> Archive:
    """The archive at `path`, or the one that `content`, a member of that archive, holds.

    Raises:
        LoadError: damaged, compressed, overlapping or duplicate members, or names that lead out of it.
    """
    try:
        with zipfile.ZipFile(path if content is None else io.BytesIO(content)) as archive:
            entries = archive.infolist()
        names = [entry.filename for entry in entries]
        if odd := [name for name in names if name.startswith("/") or "\\" in name or ".." in name.split("/")]:
            raise unreadable(path, "members inside one folder", f"a member named {printable(odd[0])}")
        if len(set(names)) != len(names):
            raise unreadable(path, "members of different names", "two members of one name")
        if compressed := [
            e for e in entries if e.compress_type != zipfile.ZIP_STORED or e.file_size != e.compress_size
        ]:
            largest = max(compressed, key=lambda entry: entry.file_size)
            raise unreadable(
                path,
                "members that are stored uncompressed, as torch writes them",
                f"`{printable(largest.filename)}`, {largest.compress_size:,} bytes that declare {largest.file_size:,}",
            )
        reader = torch._C.PyTorchFileReader(str(path) if content is None else io.BytesIO(content))
        sizes = {name: int(reader.get_record_size(name)) for name in reader.get_all_records()}
    except LoadError:
        raise
    except Exception as error:  # as above
        raise unreadable(path, "a whole archive", _first_line(error)) from error
    total, size = sum(sizes.values()), path.stat().st_size if content is None else len(content)
    if total > size:
        raise unreadable(path, f"members that fit into its {size:,} bytes", f"members that declare {total:,} bytes")
    return Archive(path, reader, sizes)


def unreadable(path: Path, expected: str, found: str) -> LoadError:
    return LoadError(
        f"{path} is damaged or was made to mislead, and is not read",
        where=str(path),
        expected=expected,
        found=found,
        remedy="save it again with torch.save, or better with safetensors.torch.save_file",
    )


def read_torch_pickle(path: Path, kind: FileKind, content: bytes | None = None) -> Pickle:
    """The pickle that holds the object of a torch file, followed without unpickling; its storages fit the file.

    `content` is that of an archive within the one at `path`.

    Raises:
        LoadError: damaged or unfinished, or a storage larger than the bytes that are there for it.
    """
    if kind is FileKind.TORCH:
        archive = open_archive(path, content)
        pickles = read_pickles(archive.read("data.pkl", LONGEST_PICKLE))
        if pickles.ended != 1:
            raise unreadable(path, "one whole pickle in `data.pkl`", f"{pickles.ended} pickles")
        pickle = pickles.whole[0]
        for storage in _storages(pickle, path):
            there = archive.sizes.get(f"data/{storage.key}", -1)
            if storage.bytes > there:
                found = f"storage `{printable(storage.key)}` of {storage.bytes:,} bytes"
                raise unreadable(path, "storages of the size of their members", f"{found}, in a member of {there:,}")
        return pickle
    with path.open("rb") as file:
        data = file.read(LONGEST_PICKLE)
    size = path.stat().st_size
    pickles = read_pickles(data)
    if not pickles.is_finished or not pickles.whole:
        raise unreadable(path, "whole pickles", describe_file(path))
    pickle = _object_of(pickles, path)
    total = sum({storage.key: storage.bytes for storage in _storages(pickle, path)}.values())
    if total > size:
        raise unreadable(path, f"storages that fit into its {size:,} bytes", f"storages of {total:,} bytes")
    return pickle


def _object_of(pickles: Pickles, path: Path) -> Pickle:
    if not pickles.is_old_format:
        return pickles.whole[0]
    if pickles.ended < 5:
        raise unreadable(path, "the five pickles of the old format", f"{pickles.ended}")
    # The others are read by the same restricted unpickler, and must not do anything at all.
    for other in (*pickles.whole[:3], pickles.whole[4]):
        if other.globals or other.calls or other.stored:
            raise unreadable(path, "numbers and texts around the object", "a pickle that would call something")
    return pickles.whole[3]


def plain_names() -> set[str]:
    """The names that torch's restricted unpickler allows of itself, built-ins by both of their spellings."""
    from torch import _weights_only_unpickler as restricted

    names = set(restricted._get_allowed_globals())
    return names | {name.replace("builtins.", "__builtin__.", 1) for name in names}


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    bytes: int


def _storages(pickle: Pickle, path: Path) -> list[_Storage]:
    found = []
    for stored in pickle.stored:
        items = stored.identifier.items if isinstance(stored.identifier, Container) else []
        if len(items) == 4 and constant_of(items[0]) == "module":
            continue  # the class of a pickled module in the old format, with its source
        width = _element_size(items[1]) if len(items) in (5, 6) else None
        key, count = (constant_of(items[2]), constant_of(items[4])) if width is not None else (None, None)
        if width is None or not isinstance(key, str) or not isinstance(count, int) or count < 0:
            raise unreadable(path, "storages with a type, a key and a size", "something else outside the pickle")
        found.append(_Storage(key, count * width))
    return found


def _element_size(storage_type: Any) -> int | None:
    if not isinstance(storage_type, Global):
        return None
    if storage_type.path == "torch.storage.UntypedStorage":
        return 1
    try:
        dtype = torch.serialization.StorageType(storage_type.name).dtype
    except Exception:  # a name that is no storage
        return None
    return int(torch._utils._element_size(dtype))


def _first_line(error: BaseException) -> str:
    text = (str(error).splitlines() or [""])[0]
    return printable(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def read_json(data: bytes, path: Path) -> Any:
    """The value of JSON text.

    Raises:
        LoadError: not JSON, or nested too deeply.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise unreadable(path, "JSON text", _first_line(error)) from error

"""Files that would create a folder if anything in them were executed, and the error that each must end in instead."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fxaudit.errors import LoadError


class Bomb:
    """Unpickling it creates a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def saved(what: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(what, buffer, **options)
    return buffer.getvalue()


def archive(pickled: bytes, storages: dict[str, bytes] | None = None, **more: bytes) -> bytes:
    """A torch archive around a pickle that was written by hand."""
    members = {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n", **more}
    members |= {f"data/{key}": data for key, data in (storages or {}).items()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, data in members.items():
            file.writestr(f"archive/{name}", data)
    return buffer.getvalue()


def tar(marker: Path) -> bytes:
    """A file in the format of torch before 2017, every pickle in it a bomb."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for name in ("storages", "tensors", "pickle"):
            data = pickle.dumps(Bomb(marker), protocol=2)
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            file.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def header(content: bytes, length: int | None = None) -> bytes:
    """The header of a safetensors file, which declares its own length."""
    return (len(content) if length is None else length).to_bytes(8, "little") + content


# Opcodes of protocol 2, as far as torch's restricted unpickler knows them.


def named(path: str) -> bytes:
    module, _, name = path.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def call(path: str, *arguments: bytes) -> bytes:
    return named(path) + b"(" + b"".join(arguments) + b"tR"


def new(path: str, state: bytes = b"", arguments: bytes = b")") -> bytes:
    return named(path) + arguments + b"\x81" + (state + b"b" if state else b"")


def mapping(*pairs: tuple[str, bytes]) -> bytes:
    return b"}(" + b"".join(text(key) + value for key, value in pairs) + b"u"


def program(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


# Every container that a bomb can come in.
CONTAINERS: dict[str, Callable[[Path], bytes]] = {
    "torch archive": lambda marker: saved(Bomb(marker)),
    "state dict": lambda marker: saved({"weight": torch.zeros(2), "more": Bomb(marker)}),
    "training checkpoint": lambda marker: saved({"state_dict": {"weight": torch.zeros(2)}, "optimizer": Bomb(marker)}),
    "legacy torch file": lambda marker: saved(Bomb(marker), _use_new_zipfile_serialization=False),
    "torch tar": tar,
    "pickle": lambda marker: pickle.dumps(Bomb(marker)),
    "text pickle": lambda marker: pickle.dumps(Bomb(marker), protocol=0),
    "pickle in front of an archive": lambda marker: pickle.dumps(Bomb(marker)) + saved({"weight": torch.zeros(2)}),
    "archive with the name of another pickle": lambda marker: archive(
        pickle.dumps(Bomb(marker), protocol=2), **{"constants.pkl": b"N."}
    ),
}


def require_refusal(act: Callable[[], object], marker: Path | None = None) -> LoadError:
    """What `act` is refused with: an error in four parts that ends in exit code 3; and nothing was executed."""
    with pytest.raises(LoadError) as caught:
        act()
    error = caught.value
    assert marker is None or not marker.exists(), "code of the file was executed"
    assert error.exit_code == 3
    assert all([error.what, error.where or error.found, error.expected, error.found, error.remedy]), str(error)
    assert str(error).isprintable() or str(error).replace("\n", "").isprintable()
    return error

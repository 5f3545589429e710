"""What a file that is refused holds, read off its bytes: nothing in it is imported, called or unpickled."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch

from fxaudit.model.pickles import Pickles, read_pickles

# Bytes of pickles that are read. A state dict of 10 000 tensors takes about 2 MB; more is called unfinished.
_READ_AT_MOST = 4_000_000
_NAMES_SHOWN = 5

_STORAGES = (
    "Float Double Half BFloat16 Long Int Short Char Byte Bool ComplexFloat ComplexDouble QInt8 QUInt8 QInt32"
).split()
_TENSORS = {
    *(f"torch._utils._rebuild_{kind}" for kind in "tensor tensor_v2 tensor_v3 parameter qtensor sparse_tensor".split()),
    *(f"torch.{device}{kind}Storage" for device in ("", "cuda.") for kind in _STORAGES),
    # By name: `torch.storage._load_from_bytes` unpickles what it is given.
    "torch.storage.TypedStorage",
    "torch.storage.UntypedStorage",
}
_PLAIN = {"collections.OrderedDict", "torch.Size", "torch.device", "torch.serialization._get_layout"} | {
    f"torch.{name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}

_DAMAGED = "a truncated or damaged archive"


def describe_file(path: Path) -> str:
    """What a weight file is, told from its content."""
    try:
        with path.open("rb") as file:
            data = file.read(_READ_AT_MOST)
    except OSError as error:
        return f"an unreadable file ({error})"
    if not data:
        return "an empty file"
    # The order is torch's own: a file that begins as a pickle is unpickled, even with an archive behind it.
    if data[:2] == b"PK":
        return _describe_archive(path) if is_zip(path) else _DAMAGED
    pickles = read_pickles(data)
    if pickles.is_pickle or data[:1] == b"\x80":
        form = "a torch file of the old format" if pickles.is_old_format else "a bare pickle"
        return f"{form}; {_describe_pickles(pickles)}"
    return _describe_archive(path) if is_zip(path) else "neither a torch archive nor a pickle"


def is_zip(path: Path) -> bool:
    """Whether a file ends as zip archives do; damaged ends, at which zipfile fails, do not count."""
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:
        return False


def _describe_archive(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            tops = {name.split("/", 1)[-1] for name in names}
            if "archive_format" in tops or any(name.endswith("models/model.json") for name in names):
                return "a torch.export archive (.pt2)"
            if any(name.startswith("code/") for name in tops):
                return "a TorchScript archive"
            # By entry, not by name: two entries may share one, and which of them is loaded depends on the reader.
            entries = [entry for entry in archive.infolist() if entry.filename.rpartition("/")[2] == "data.pkl"]
            if not entries:
                return "a zip archive that torch did not write"
            pickles = Pickles()
            for entry in entries:
                with archive.open(entry) as file:
                    pickles.add(read_pickles(file.read(_READ_AT_MOST)))
            return _describe_pickles(pickles)
    except Exception as error:  # hostile bytes fail in as many ways as the zip format has fields
        return f"{_DAMAGED} ({printable(str(error) or type(error).__name__)})"


def _describe_pickles(pickles: Pickles) -> str:
    named = [name for name in dict.fromkeys(pickles.names) if name not in _TENSORS | _PLAIN]
    if named:
        # Those of torch last, so that many of them do not hide another.
        named.sort(key=lambda name: name.startswith("torch."))
        rest = len(named) - _NAMES_SHOWN
        shown = ", ".join(printable(name) for name in named[:_NAMES_SHOWN])
        return f"a pickle that would call {shown}" + (f" and {rest} more" if rest > 0 else "")
    if not pickles.is_finished:
        return "a damaged or unfinished pickle"
    is_state = not _TENSORS.isdisjoint(pickles.names)
    return "a pickled state dict (tensors only)" if is_state else "a pickle of plain values"


def printable(text: str) -> str:
    """`text` of a hostile file as it may go to a terminal: no control characters, and short."""
    shown = "".join(character if character.isprintable() else "?" for character in text)
    return shown if len(shown) <= 100 else f"{shown[:100]}..."

"""What a file that is refused holds, read off its bytes: nothing in it is imported, called or unpickled."""

from __future__ import annotations

import io
import pickletools
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

# Bytes of pickles that are read. A state dict of 10 000 tensors takes about 2 MB; more is called unfinished.
_READ_AT_MOST = 4_000_000
_NAMES_SHOWN = 5

# The number that the first of the pickles in a torch file of the old format holds, and how many of them there are:
# number, protocol, system, object, storage keys. What follows are the bytes of the storages.
_OLD_FORMAT_NUMBER = 0x1950A86A20F9469CFC6C
_OLD_FORMAT_PICKLES = 5

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

_STRING_OPCODES = "STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8".split()
_UNKNOWN_GLOBAL = "an unknown global"
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
        return _describe_archive(path) if zipfile.is_zipfile(path) else _DAMAGED
    pickles = _read_pickles(data)
    if pickles.is_pickle or data[:1] == b"\x80":
        form = "a torch file of the old format" if pickles.is_old_format else "a bare pickle"
        return f"{form}; {pickles.describe()}"
    return _describe_archive(path) if zipfile.is_zipfile(path) else "neither a torch archive nor a pickle"


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
            pickles = _Pickles()
            for entry in entries:
                with archive.open(entry) as file:
                    pickles.add(_read_pickles(file.read(_READ_AT_MOST)))
            return pickles.describe()
    except Exception as error:  # hostile bytes fail in as many ways as the zip format has fields
        return f"{_DAMAGED} ({_printable(str(error) or type(error).__name__)})"


# --- pickles --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Pickles:
    """The globals that pickles in a row name, and how far they could be read."""

    globals: list[str] = field(default_factory=list)
    ended: int = 0
    is_finished: bool = True
    is_old_format: bool = False

    @property
    def is_pickle(self) -> bool:
        return self.ended > 0 or any(_is_dotted_name(name) for name in self.globals)

    def add(self, other: _Pickles) -> None:
        self.globals += other.globals
        self.ended += other.ended
        self.is_finished &= other.is_finished

    def describe(self) -> str:
        named = [name for name in dict.fromkeys(self.globals) if name not in _TENSORS | _PLAIN]
        if named:
            # Those of torch last, so that many of them do not hide another.
            named.sort(key=lambda name: name.startswith("torch."))
            rest = len(named) - _NAMES_SHOWN
            shown = ", ".join(_printable(name) for name in named[:_NAMES_SHOWN])
            return f"a pickle that would call {shown}" + (f" and {rest} more" if rest > 0 else "")
        if not self.is_finished:
            return "a damaged or unfinished pickle"
        is_state = not _TENSORS.isdisjoint(self.globals)
        return "a pickled state dict (tensors only)" if is_state else "a pickle of plain values"


def _read_pickles(data: bytes) -> _Pickles:
    """All pickles in a row from the start of `data` on; what follows the last of them is left alone."""
    found = _Pickles()
    stream = io.BytesIO(data)
    while stream.tell() < len(data) and not (found.is_old_format and found.ended == _OLD_FORMAT_PICKLES):
        machine = _Machine()
        try:
            for opcode, argument, _ in pickletools.genops(stream):
                found.is_old_format |= not found.ended and argument == _OLD_FORMAT_NUMBER
                machine.step(opcode, argument)
        except Exception:  # truncated, hostile, or no pickle at all: what was read so far is all there is to say
            # Bytes behind a whole pickle may be anything; in the old format the object itself may be what is cut off.
            found.is_finished = found.ended > 0 and not found.is_old_format
            # A pickle that breaks off behind a whole one still runs up to there, other bytes only look like opcodes.
            found.globals += [name for name in machine.globals if not found.ended or _is_dotted_name(name)]
            break
        found.globals += machine.globals
        found.ended += 1
    return found


class _Machine:
    """Follows a pickle's opcodes without doing what they say.

    Of the values on the stack and in the memo only strings are known, since only they can become names; a name made in
    any other way is an unknown global.
    """

    def __init__(self) -> None:
        self.globals: list[str] = []
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        """Follow one opcode; raises IndexError where the real machine would find its stack empty."""
        match opcode.name:
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = self.stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                self.stack.append(self.memo[argument])
            case "DUP":
                self.stack.append(self.stack[-1])
            case "STACK_GLOBAL":
                name, module = self.stack.pop(), self.stack.pop()
                known = isinstance(module, str) and isinstance(name, str)
                self._push_global(f"{module}.{name}" if known else _UNKNOWN_GLOBAL)
            case "GLOBAL":
                self._push_global(argument.replace(" ", "."))
            case "INST":
                self._pop_mark()
                self._push_global(argument.replace(" ", "."))
            case "EXT1" | "EXT2" | "EXT4":  # a number that stands for a global in a registry of the process
                self._push_global(_UNKNOWN_GLOBAL)
            case _:
                self._step_by_signature(opcode, argument)

    def _step_by_signature(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        before = opcode.stack_before
        if pickletools.markobject in before and opcode.name != "MARK":
            self._pop_mark()
            before = before[: before.index(pickletools.markobject)]
        for _ in before:
            self.stack.pop()
        for kind in opcode.stack_after:
            if kind is pickletools.markobject:
                self.stack.append(kind)
            else:
                self.stack.append(argument if opcode.name in _STRING_OPCODES else None)

    def _push_global(self, name: str) -> None:
        self.globals.append(name)
        self.stack.append(None)

    def _pop_mark(self) -> None:
        while self.stack.pop() is not pickletools.markobject:
            pass


def _is_dotted_name(name: str) -> bool:
    return name == _UNKNOWN_GLOBAL or all(part.isidentifier() for part in name.split("."))


def _printable(text: str) -> str:
    """`text` of a hostile file as it may go to a terminal: no control characters, and short."""
    shown = "".join(character if character.isprintable() else "?" for character in text)
    return shown if len(shown) <= 100 else f"{shown[:100]}..."

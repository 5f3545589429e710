"""What a pickle would do, followed opcode by opcode without doing it: nothing is imported, called or built.

The machine keeps the values that the real one would have on its stack as descriptions: constants, names of globals,
containers, calls. Which names a pickle uses, what it calls and with which arguments is read off them.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# The number that the first of the pickles in a torch file of the old format holds, and how many of them there are:
# number, protocol, system, object, storage keys. What follows are the bytes of the storages.
_OLD_FORMAT_NUMBER = 0x1950A86A20F9469CFC6C
OLD_FORMAT_PICKLES = 5

UNKNOWN_GLOBAL = "an unknown global"


@dataclass(frozen=True, slots=True)
class Constant:
    """A number, a text, bytes, a truth value or None."""

    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class Global:
    """A name that would be imported: a class or a function."""

    path: str
    module: str = ""
    name: str = ""


@dataclass(slots=True, eq=False)
class Container:
    """A tuple, list, set or dict; the items of a dict are its keys and values in turn."""

    kind: str
    items: list[Any] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Call:
    """An object that `callee` makes of `arguments`: by a call, or by `__new__` alone (`is_new`).

    `states` are what it is then built with, `items` what is put into it.
    """

    callee: Any
    arguments: Any
    is_new: bool = False
    states: list[Any] = field(default_factory=list)
    items: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """An object that lies outside the pickle under `identifier`: in torch files a storage."""

    identifier: Any


UNKNOWN = Constant(None)
_MARK = pickletools.markobject


@dataclass(slots=True)
class Pickle:
    """One pickle: what it would make (`result`), and everything that is made on the way."""

    result: Any = None
    globals: list[Global] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    containers: list[Container] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    opcodes: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Pickles:
    """Pickles in a row, and how far they could be read."""

    whole: list[Pickle] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    is_finished: bool = True
    is_old_format: bool = False

    @property
    def ended(self) -> int:
        return len(self.whole)

    @property
    def is_pickle(self) -> bool:
        return self.ended > 0 or any(_is_dotted_name(name) for name in self.names)

    def add(self, other: Pickles) -> None:
        self.whole += other.whole
        self.names += other.names
        self.is_finished &= other.is_finished


def read_pickles(data: bytes) -> Pickles:
    """All pickles in a row from the start of `data` on; what follows the last of them is left alone."""
    found = Pickles()
    stream = io.BytesIO(data)
    while stream.tell() < len(data) and not (found.is_old_format and found.ended == OLD_FORMAT_PICKLES):
        machine = _Machine()
        try:
            for opcode, argument, _ in pickletools.genops(stream):
                found.is_old_format |= not found.ended and argument == _OLD_FORMAT_NUMBER
                machine.step(opcode, argument)
        except Exception:  # truncated, hostile, or no pickle at all: what was read so far is all there is to say
            # Bytes behind a whole pickle may be anything; in the old format the object itself may be what is cut off.
            found.is_finished = found.ended > 0 and not found.is_old_format
            # A pickle that breaks off behind a whole one still runs up to there, other bytes only look like opcodes.
            names = [name.path for name in machine.pickle.globals]
            found.names += [name for name in names if not found.ended or _is_dotted_name(name)]
            break
        found.names += [name.path for name in machine.pickle.globals]
        found.whole.append(machine.pickle)
    return found


_CONSTANTS = {
    *"INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT".split(),
    *"STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8".split(),
    *"BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8".split(),
}
_NAMED = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_TUPLE": "tuple", "EMPTY_LIST": "list", "EMPTY_DICT": "dict", "EMPTY_SET": "set"}
_MARKED = {"TUPLE": "tuple", "LIST": "list", "DICT": "dict", "FROZENSET": "frozenset"}
_SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """Follows a pickle's opcodes; raises IndexError or KeyError where the real machine would find nothing."""

    def __init__(self) -> None:
        self.pickle = Pickle()
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        name = opcode.name
        self.pickle.opcodes.add(name)
        if name in _CONSTANTS:
            self.stack.append(Constant(argument))
        elif name in _NAMED:
            self.stack.append(Constant(_NAMED[name]))
        elif name in _EMPTY:
            self._push_container(_EMPTY[name], [])
        elif name in _MARKED:
            self._push_container(_MARKED[name], self._pop_mark())
        elif name in _SHORT_TUPLES:
            count = _SHORT_TUPLES[name]
            items = [self.stack.pop() for _ in range(count)]
            self._push_container("tuple", items[::-1])
        else:
            self._step_by_name(opcode, argument)

    def _step_by_name(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        match opcode.name:
            case "MARK":
                self.stack.append(_MARK)
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = self.stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                self.stack.append(self.memo[argument])
            case "DUP":
                self.stack.append(self.stack[-1])
            case "APPEND" | "SETITEM" | "APPENDS" | "SETITEMS" | "ADDITEMS":
                self._put(opcode.name)
            case "GLOBAL":
                self._push_global(*argument.split(" ", 1))
            case "STACK_GLOBAL":
                name, module = self.stack.pop(), self.stack.pop()
                self._push_global(getattr(module, "value", None), getattr(name, "value", None))
            case "EXT1" | "EXT2" | "EXT4":  # a number that stands for a global in a registry of the process
                self._push_global(None, None)
            case "INST":
                arguments = Container("tuple", self._pop_mark())
                self._push_global(*argument.split(" ", 1))
                self._push_call(self.stack.pop(), arguments)
            case "OBJ":
                callee, *items = self._pop_mark()
                self._push_call(callee, Container("tuple", items))
            case "REDUCE" | "NEWOBJ":
                arguments, callee = self.stack.pop(), self.stack.pop()
                self._push_call(callee, arguments, is_new=opcode.name == "NEWOBJ")
            case "NEWOBJ_EX":
                keywords, arguments, callee = self.stack.pop(), self.stack.pop(), self.stack.pop()
                self._push_call(callee, Container("tuple", [arguments, keywords]), is_new=True)
            case "BUILD":
                state = self.stack.pop()
                if isinstance(self.stack[-1], Call):
                    self.stack[-1].states.append(state)
                else:
                    self._push_call(UNKNOWN, state)
            case "BINPERSID":
                self._push_stored(self.stack.pop())
            case "PERSID":
                self._push_stored(Constant(argument))
            case "STOP":
                self.pickle.result = self.stack.pop()
            case _:
                self._step_by_signature(opcode)

    def _step_by_signature(self, opcode: pickletools.OpcodeInfo) -> None:
        before = opcode.stack_before
        if _MARK in before:
            self._pop_mark()
            before = before[: before.index(_MARK)]
        for _ in before:
            self.stack.pop()
        self.stack += [UNKNOWN] * len(opcode.stack_after)

    def _put(self, name: str) -> None:
        if name in ("APPEND", "SETITEM"):
            items = [self.stack.pop() for _ in range(1 if name == "APPEND" else 2)][::-1]
        else:
            items = self._pop_mark()
        target = self.stack[-1]
        if isinstance(target, Container | Call):
            target.items += items

    def _push_container(self, kind: str, items: list[Any]) -> None:
        self.stack.append(Container(kind, items))
        self.pickle.containers.append(self.stack[-1])

    def _push_global(self, module: Any, name: Any) -> None:
        known = isinstance(module, str) and isinstance(name, str)
        found = Global(f"{module}.{name}", module, name) if known else Global(UNKNOWN_GLOBAL)
        self.pickle.globals.append(found)
        self.stack.append(found)

    def _push_call(self, callee: Any, arguments: Any, *, is_new: bool = False) -> None:
        self.stack.append(Call(callee, arguments, is_new))
        self.pickle.calls.append(self.stack[-1])

    def _push_stored(self, identifier: Any) -> None:
        self.stack.append(Stored(identifier))
        self.pickle.stored.append(self.stack[-1])

    def _pop_mark(self) -> list[Any]:
        items: list[Any] = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]


def values_inside(value: Any) -> Iterator[Any]:
    """`value` and every value that it holds, each once."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, Container):
            waiting += value.items
        elif isinstance(value, Call):
            waiting += [value.callee, value.arguments, *value.states, *value.items]
        elif isinstance(value, Stored):
            waiting.append(value.identifier)


def constant_of(value: Any) -> Any:
    """The value of a constant, or None where it is none."""
    return value.value if isinstance(value, Constant) else None


def pairs_of(value: Any) -> list[tuple[Any, Any]] | None:
    """Keys and values of a dict, or None where it is none."""
    if not isinstance(value, Container) or value.kind != "dict" or len(value.items) % 2:
        return None
    return list(zip(value.items[::2], value.items[1::2], strict=True))


def _is_dotted_name(name: str) -> bool:
    return name == UNKNOWN_GLOBAL or all(part.isidentifier() for part in name.split("."))

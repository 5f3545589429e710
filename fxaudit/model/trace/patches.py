"""Reversible changes to what model code sees while it is traced, so that what is traced is what eager runs."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fxaudit.errors import TraceError

_TORCH = os.path.dirname(os.path.realpath(torch.__file__)) + os.sep
_QUESTIONS = ("is_exporting", "is_compiling")


@contextlib.contextmanager
def eager_answers() -> Iterator[None]:
    """Code outside torch that asks whether it is being exported or compiled is told no, so that it runs the code that
    it runs in eager mode; torch itself gets the true answer.

    Also where a module has imported `torch.compiler.is_exporting` under its own name.
    """
    with contextlib.ExitStack() as stack:
        for question in _QUESTIONS:
            original = getattr(torch.compiler, question)
            answer = _no_outside_torch(original)
            for name, module in list(sys.modules.items()):
                is_torchs = name.startswith("torch.") and name != "torch.compiler"
                if not is_torchs and getattr(module, "__dict__", {}).get(question) is original:
                    stack.callback(setattr, module, question, original)
                    setattr(module, question, answer)
        yield


def _no_outside_torch(original: Callable[[], bool]) -> Callable[[], bool]:
    @functools.wraps(original)
    def answer() -> bool:
        return original() and _is_torchs(sys._getframe(1).f_code.co_filename)

    return answer


def _is_torchs(file: str) -> bool:
    return file.startswith(_TORCH) or os.path.realpath(file).startswith(_TORCH)


@contextlib.contextmanager
def unmoved_modules() -> Iterator[None]:
    """`module.to(...)` returns the module untouched where nothing would change: torch cannot trace the swap of
    parameters that it makes even then."""
    original = nn.Module.to

    @functools.wraps(original)
    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        tensors = [*self.parameters(), *self.buffers()]
        fits = all(
            (device is None or tensor.device == torch.empty(0, device=device).device)
            and (dtype is None or tensor.dtype == dtype or not (tensor.is_floating_point() or tensor.is_complex()))
            for tensor in tensors
        )
        return self if fits and memory_format is None else original(self, *args, **kwargs)

    nn.Module.to = to  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.to = original  # type: ignore[method-assign]


# --- Python numbers that are read from tensors ----------------------------------------------------------------------

_READS = {getattr(Tensor, name): name for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__")}
# The messages of checks that a traced graph makes begin with it; `flat` takes them out of the graph.
DECISION = "fxaudit decision: "


@dataclass(slots=True)
class Reading:
    """Python values that model code read from tensors in one eager call, in order."""

    values: list[tuple[str, tuple[int, ...], Any]] = field(default_factory=list)


class Recording(TorchFunctionMode):
    """Records what model code reads from tensors as Python values."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = Reading()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        if func in _READS and _is_model_code():
            self.reading.values.append((_READS[func], tuple(args[0].shape), value))
        return value


class Replaying(TorchFunctionMode):
    """Gives model code under trace the Python values of an eager call, and puts a check of each into the graph."""

    def __init__(self, reading: Reading) -> None:
        super().__init__()
        self._left = iter(reading.values)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _READS or not _is_model_code():
            return func(*args, **(kwargs or {}))
        name, shape, value = next(self._left, ("", (), None))
        tensor = args[0]
        if name == "__contains__":
            tensor, shape = (tensor == args[1]).any(), ()
        if name != _READS[func] or len(shape) != tensor.ndim:
            raise TraceError("model code reads other values under trace than in eager mode")
        same = (tensor == torch.tensor(value, dtype=tensor.dtype, device=tensor.device)).all()
        torch._assert_async(same, f"{DECISION}{value!r} at {_model_line()}")
        return value


@contextlib.contextmanager
def eager_masks() -> Iterator[None]:
    """transformers makes attention masks from values in eager mode, and from shapes when it sees a fake tensor; it is
    told that there is none, so that with `Replaying` it does what it does in eager mode."""
    masks = sys.modules.get("transformers.masking_utils")
    original = getattr(masks, "is_tracing", None)
    if masks is None or original is None:
        yield
        return
    vars(masks)["is_tracing"] = lambda tensor=None: False
    try:
        yield
    finally:
        vars(masks)["is_tracing"] = original


def _is_model_code() -> bool:
    return not _is_torchs(_caller().f_code.co_filename)


def _model_line() -> str:
    frame = _caller()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _caller() -> Any:
    """The frame that called a tensor method, below the function modes that handle it and this module."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename == __file__ or frame.f_code.co_name == "__torch_function__"
    ):
        frame = frame.f_back
    return frame

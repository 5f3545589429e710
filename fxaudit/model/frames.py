"""The user's source line behind an exception."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

import torch

_THIRD_PARTY = tuple(os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
_STANDARD_LIBRARY = os.path.realpath(sysconfig.get_path("stdlib"))
_MACHINERY = tuple(os.path.realpath(os.path.dirname(file)) for file in (torch.__file__, os.path.dirname(__file__)))


def user_frame(error: BaseException) -> str:
    """``file:line   source`` of the innermost frame outside torch, fxaudit and the standard library.

    For a file that does not parse it is the place in that file. Empty where no frame is the user's.
    """
    if isinstance(error, SyntaxError) and error.filename and error.lineno and _is_users(error.filename):
        return _place(error.filename, error.lineno, error.text)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame.filename):
            return _place(frame.filename, frame.lineno, frame.line)
    return ""


def _place(file: str, line: int | None, text: str | None) -> str:
    return f"{file}:{line}   {(text or '').strip()}".rstrip()


def _is_users(file: str) -> bool:
    # Code without a file (`<frozen importlib._bootstrap>`, `<eval_with_key>.3`) has no line that could be looked up.
    if file.startswith("<"):
        return False
    path = os.path.realpath(file)
    if _is_inside(path, _MACHINERY):
        return False
    # The packages of an environment may lie within its standard library: lib/python3.x/site-packages.
    return _is_inside(path, _THIRD_PARTY) or not _is_inside(path, (_STANDARD_LIBRARY,))


def _is_inside(path: str, folders: tuple[str, ...]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)

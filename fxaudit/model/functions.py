"""A function that the user names is imported and called; what goes wrong in it is reported at the user's own line.

This is the only code that fxaudit runs on its own initiative, and the user named it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fxaudit.errors import AuditError, nearest
from fxaudit.model.frames import user_frame


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a function is called for, in the words of the errors that it ends in.

    `what` the place names, what the function `returns`, every one of the `forms` that a place can have, and the words
    before a colon (`schemes`) that a misspelt package name may have meant; what the function `takes`.
    """

    error: type[AuditError]
    what: str
    returns: str
    forms: str
    schemes: tuple[str, ...] = ()
    takes: str = "no argument"

    @property
    def function(self) -> str:
        return f"a function that takes {self.takes} and returns {self.returns}"


def find_function(place: str, purpose: Purpose) -> Callable[..., Any]:
    """The function that `place` names: ``path/to/file.py:function`` or ``package.module:function``.

    While it is imported, the folder of its file (for a package: the working directory) is first on the import path, as
    it is when Python runs a script.

    Raises:
        purpose.error: no such file, package or function; or the user's code failed, at which of its lines.
    """
    module_place, _, name = place.rpartition(":")
    is_file = module_place.endswith(".py")
    with first_on_path(_folder(place)):
        module = _file(Path(module_place), purpose) if is_file else _package(module_place, place, purpose)
        return _member(module, name, module_place, purpose)


def call_function(place: str, purpose: Purpose, *arguments: Any) -> Any:
    """What the function that `place` names returns for `arguments`; see `find_function`.

    Raises:
        purpose.error: no such file, package or function; or the user's code failed, at which of its lines.
    """
    function = find_function(place, purpose)
    with first_on_path(_folder(place)):
        try:
            return function(*arguments)
        except (Exception, SystemExit) as error:
            raise _failed(f"{place} raised {type(error).__name__}", place, purpose, error) from error


def _folder(place: str) -> Path:
    module_place = place.rpartition(":")[0]
    return Path(module_place).resolve().parent if module_place.endswith(".py") else Path.cwd()


@contextmanager
def first_on_path(folder: Path) -> Iterator[None]:
    """With `folder` first on the import path."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()  # the folder may hold files younger than what the finders remember of it
    try:
        yield
    finally:
        # Only this entry goes: what the user's code put on the path itself may be needed when the model runs.
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


def _file(path: Path, purpose: Purpose) -> ModuleType:
    if not path.exists():
        raise purpose.error(
            f"{path} does not exist",
            expected="a Python file",
            found="no such file",
            remedy="check the spelling and the working directory",
        )
    name = f"fxaudit_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "every path that ends in .py can be imported from"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Registered, so that dataclasses inside the file find their module.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failed(f"importing {path} failed", str(path), purpose, error) from error
    return module


def _package(package: str, place: str, purpose: Purpose) -> ModuleType:
    if "/" in package or "\\" in package:
        raise purpose.error(
            f"{place} is not a {purpose.what} that fxaudit can load",
            expected=purpose.forms,
            found=f"`{package}`, which is neither a .py file nor an importable package",
            remedy="write file.py:function, with the ending",
        )
    try:
        return importlib.import_module(package)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        # A package that is there but misses one of its own imports is no missing package.
        if missing is not None and f"{package}.".startswith(f"{missing}."):
            raise purpose.error(
                f"there is no package `{package}`{nearest(package, purpose.schemes)}",
                expected=purpose.forms,
                found=place,
                remedy="install the package, or name a file as path/to/file.py:function",
            ) from error
        raise _failed(f"importing {package} failed", package, purpose, error) from error


def _member(module: ModuleType, name: str, place: str, purpose: Purpose) -> Callable[..., Any]:
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            raise purpose.error(
                f"{place} has no `{name}`{nearest(name, callables)}",
                where=place,
                expected=purpose.function,
                found=f"callables {', '.join(callables[:12]) or 'none'}",
                remedy="name one of them",
            ) from error
        except Exception as error:  # a package that imports its members when they are asked for
            raise _failed(f"importing `{name}` from {place} failed", place, purpose, error) from error
    if not callable(found):
        raise purpose.error(
            f"`{name}` in {place} is not callable",
            where=place,
            expected=purpose.function,
            found=f"a {type(found).__name__}",
            remedy=f"wrap it: def build(): return {name}",
        )
    return found


def _failed(what: str, place: str, purpose: Purpose, error: BaseException) -> AuditError:
    """The error that stands for one in the user's own code, with the line it was raised at."""
    return purpose.error(
        what,
        where=user_frame(error) or place,
        expected=purpose.function,
        found=f"{type(error).__name__}: {error}",
        remedy="run the function in Python by itself; it must return without an error",
    )

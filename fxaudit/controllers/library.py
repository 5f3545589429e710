"""Which patterns are searched for: the shipped ones, those of installed packages, and the user's own files."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from fxaudit.controllers.pattern import Pattern, library_path, load_patterns
from fxaudit.errors import PatternError, UsageError

ENTRY_POINTS = "fxaudit.patterns"


def available_patterns(places: Sequence[Path | str] = (), *, shipped: bool = True) -> list[Pattern]:
    """The patterns in `places`, beside the shipped ones and those of installed packages, sorted by name.

    Of two patterns of one name the user's stays before an installed one, and that before a shipped one.

    Raises:
        PatternError: a broken file, or two of one name in `places`.
        UsageError: nothing is left to search for.
    """
    if not shipped and not places:
        raise UsageError(
            "there is no pattern to search for",
            expected="--patterns FILE|DIR beside --no-library",
            found="--no-library alone",
            remedy="leave --no-library out to search for the shipped patterns",
        )
    found: dict[str, Pattern] = {}
    if shipped:
        found.update((pattern.name, pattern) for pattern in load_patterns(library_path()))
        for folder in installed_folders():
            found.update((pattern.name, pattern) for pattern in load_patterns(folder))
    if places:
        found.update((pattern.name, pattern) for pattern in load_patterns(*places))
    return [found[name] for name in sorted(found)]


def installed_folders() -> list[Path]:
    """The folders that installed packages name under the entry point ``fxaudit.patterns``.

    The value is a package that holds the files, ``acme_patterns``, or a folder inside one, ``acme:patterns``. A
    top-level package is found without being imported.

    Raises:
        PatternError: a package that is not there, or has no such folder.
    """
    return [_folder(entry) for entry in sorted(metadata.entry_points(group=ENTRY_POINTS), key=lambda e: e.name)]


def _folder(entry: metadata.EntryPoint) -> Path:
    package, _, inside = entry.value.partition(":")
    try:
        spec = importlib.util.find_spec(package.strip())
    except (ImportError, ValueError):
        spec = None
    for location in spec.submodule_search_locations or () if spec is not None else ():
        folder = Path(location) / inside.strip().replace(".", "/")
        if folder.is_dir():
            return folder
    raise PatternError(
        f"the patterns `{entry.name}` of an installed package cannot be found",
        where=f"entry point {ENTRY_POINTS}: {entry.name} = {entry.value}",
        expected="a package that holds .toml files, or package:folder",
        found="no such package" if spec is None else "no such folder",
        remedy="install the package again, or remove it",
    )

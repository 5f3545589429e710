"""A TOML file that a person wrote, read so that every complaint names the file and the line of the key it is about."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from fxaudit.errors import PatternError, nearest


class Document:
    """A parsed file with its text. `within` says which table is being read, so that its keys are looked for there."""

    def __init__(self, path: Path, text: str, document: dict[str, Any]) -> None:
        self.path, self.text, self.document = path, text, document
        # The table that is being read, and which one of several of that name: its keys are looked for inside it.
        self.section, self.section_number = "", 0

    @classmethod
    def read(cls, path: Path) -> Self:
        """The document in a file.

        Raises:
            PatternError: the file is not UTF-8 text, or not TOML.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PatternError(
                f"{path} cannot be read", expected="a UTF-8 text file", found=str(error), remedy="check the file"
            ) from error
        return cls.parse(path, text)

    @classmethod
    def parse(cls, path: Path, text: str) -> Self:
        """The document that a text is, as if it stood in `path`.

        Raises:
            PatternError: the text is not TOML.
        """
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            line = re.search(r"line (\d+)", str(error))
            raise PatternError(
                f"{path} is not TOML",
                where=f"{path}:{line.group(1)}" if line else str(path),
                expected="TOML 1.0",
                found=str(error),
                remedy="check the quotes; the match block stands between ''' and '''",
            ) from error
        return cls(path, text, document)

    def error(self, what: str, key: str, expected: str, found: str, line: int | None = None) -> PatternError:
        number = line if line is not None else self.line_of(key)
        return PatternError(
            what,
            where=f"{self.path}:{number}" if number else str(self.path),
            expected=expected,
            found=found,
            remedy="docs/patterns.md lists every key and construct",
            path=self.path,
            key=key,
        )

    def line_of(self, key: str) -> int:
        """The line of a key in the table that is being read, or of that table's header; 1 where there is neither."""
        start, stop = self._span()
        found = (
            re.compile(rf"^[ \t]*{re.escape(key)}[ \t]*=", re.MULTILINE).search(self.text, start, stop) if key else None
        )
        if found is None and not self.section and key:
            found = re.search(rf"^[ \t]*\[+[ \t]*{re.escape(key)}[ \t]*\]+", self.text, re.MULTILINE)
        position = found.end() if found is not None else start
        return self.text.count("\n", 0, position) + 1

    def _span(self) -> tuple[int, int]:
        """Where the table that is being read stands in the text, its header included."""
        headers = list(re.finditer(r"^[ \t]*\[+[ \t]*([\w.-]+)[ \t]*\]+[ \t]*(?:#.*)?$", self.text, re.MULTILINE))
        if not self.section:
            return 0, headers[0].start() if headers else len(self.text)
        own = [i for i, header in enumerate(headers) if header.group(1) == self.section]
        if len(own) <= self.section_number:
            return 0, len(self.text)
        first = own[self.section_number]
        return headers[first].start(), headers[first + 1].start() if first + 1 < len(headers) else len(self.text)

    @contextmanager
    def within(self, section: str, number: int = 0) -> Iterator[None]:
        """While a table is read: its keys are looked for inside it."""
        before = self.section, self.section_number
        self.section, self.section_number = section, number
        try:
            yield
        finally:
            self.section, self.section_number = before

    def known_keys(self, table: Mapping[str, Any], known: tuple[str, ...], owner: str) -> None:
        for key in table:
            if key not in known:
                raise self.error(
                    f"unknown key `{key}`{nearest(key, known)}", key, f"{owner} has {', '.join(known)}", key
                )

    def typed(self, key: str, kind: type, table: Mapping[str, Any] | None = None) -> Any:
        value = (self.document if table is None else table).get(key)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            found = "nothing" if value is None else f"{type(value).__name__} {value!r}"
            raise self.error(f"`{key}` has the wrong type", key, kind.__name__, found)
        return value

    def table(self, key: str) -> dict[str, Any]:
        value: dict[str, Any] = self.typed(key, dict)
        return value

    def strings(self, key: str, table: Mapping[str, Any] | None = None) -> list[str]:
        value = (self.document if table is None else table).get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(f"`{key}` has the wrong type", key, "a list of strings", repr(value))
        return value

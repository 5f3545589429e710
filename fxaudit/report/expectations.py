"""Expectations about a result, such as `counts.se-gate==9`: what `--expect` states, so that a job can fail on it."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxaudit.errors import ExpectationError, UsageError, nearest

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_STATED = re.compile(r"\s*(?P<key>[^=!<>]*?)\s*(?P<comparison>==|!=|<=|>=|<|>)\s*(?P<value>.*?)\s*")


@dataclass(frozen=True, slots=True)
class Expectation:
    """A dotted key of a result's JSON, a comparison, and the JSON value or bare word to compare with."""

    text: str
    key: str
    comparison: str
    value: Any


def parse_expectation(text: str) -> Expectation:
    """The expectation stated as KEY, comparison, VALUE; spaces around them do not count.

    Raises:
        UsageError: a part is missing.
    """
    stated = _STATED.fullmatch(text)
    if stated is None or not stated["key"] or not stated["value"]:
        raise UsageError(
            f"`{text}` is no expectation",
            expected=f"a key, one of {' '.join(COMPARISONS)}, and a value: counts.se-gate==9",
            found=text,
            remedy="quote it for the shell; --json shows the keys",
        )
    try:
        value = json.loads(stated["value"])
    except ValueError:
        value = stated["value"]
    return Expectation(text, stated["key"], stated["comparison"], value)


def check_expectations(expectations: Iterable[Expectation], result: Mapping[str, Any]) -> None:
    """Nothing, when all of them hold of a result as printed by `--json`.

    Raises:
        ExpectationError: one or more do not; a key that the result lacks meets no expectation.
    """
    broken = [line for one in expectations if (line := _broken(one, result)) is not None]
    if broken:
        raise ExpectationError(
            "the result is not as expected" if len(broken) == 1 else f"{len(broken)} expectations are not met",
            expected="\n".join(text for text, _ in broken),
            found="\n".join(found for _, found in broken),
            remedy="--json shows the whole result",
        )


def _broken(expectation: Expectation, result: Mapping[str, Any]) -> tuple[str, str] | None:
    """What was expected and what was found, unless it holds."""
    try:
        found = _value(result, expectation.key.split("."))
    except LookupError as error:
        return expectation.text, str(error.args[0])
    try:
        holds = COMPARISONS[expectation.comparison](found, expectation.value)
    except TypeError:
        holds = False
    return None if holds else (expectation.text, f"{expectation.key} is {_short(found)}")


def _value(node: Any, parts: Sequence[str]) -> Any:
    """The value at a path; a key may hold dots itself, as ids of controllers do.

    Raises:
        LookupError: there is none; its text says what there is.
    """
    if not parts:
        return node
    if isinstance(node, list | tuple):
        if parts[0].isdigit() and int(parts[0]) < len(node):
            return _value(node[int(parts[0])], parts[1:])
        raise LookupError(f"no item `{parts[0]}` in a list of {len(node)}")
    if isinstance(node, Mapping):
        for end in range(len(parts), 0, -1):
            key = ".".join(parts[:end])
            if key in node:
                return _value(node[key], parts[end:])
        keys = [str(key) for key in node]
        raise LookupError(f"no key `{parts[0]}`{nearest(parts[0], keys)}; there are {_listed(keys)}")
    raise LookupError(f"no key `{parts[0]}` in {_short(node)}")


def _listed(keys: list[str]) -> str:
    return ", ".join(keys[:12]) + (f" and {len(keys) - 12} more" if len(keys) > 12 else "") if keys else "none"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "..."

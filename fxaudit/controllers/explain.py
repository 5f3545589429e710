"""Why a pattern does not match: the nearest misses, what stopped each, and the one-token edit that would let it pass.

Edits are not guessed: each candidate is written into the pattern's text, read as a pattern file is, and tried at the
site of the miss; only one that matches there is suggested.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from fxaudit import ops
from fxaudit.axes import Size, format_size, same_size
from fxaudit.controllers.graphs import Dataflow
from fxaudit.controllers.language import Chain, Op
from fxaudit.controllers.match import Match, NearMiss, find_matches
from fxaudit.controllers.pattern import Pattern, parse_pattern
from fxaudit.controllers.unify import absolute, describe
from fxaudit.errors import PatternError

SHOWN = 3


@dataclass(frozen=True, slots=True)
class Edit:
    """One token of a pattern file, written anew: the line of the file as it is and as it would be."""

    line: int
    before: str
    after: str

    def apply(self, text: str) -> str:
        """The text of the file with the edit."""
        lines = text.split("\n")
        lines[self.line - 1] = self.after
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Explanation:
    """One near miss: how many sites miss alike, what each name is bound to, and an edit that would accept the site."""

    miss: NearMiss
    sites: int
    captures: tuple[tuple[str, str], ...]
    edit: Edit | None


@dataclass(frozen=True, slots=True)
class Explained:
    """What `fxaudit explain` shows: the matches, and the nearest misses, best first."""

    pattern: Pattern
    matches: tuple[Match, ...]
    explanations: tuple[Explanation, ...]


def explain(pattern: Pattern, dataflow: Dataflow, sample: Size | None, shown: int = SHOWN) -> Explained:
    """The matches of a pattern and its nearest misses, looked for at every node that may be an apply site.

    Raises:
        PatternError: the pattern is too ambiguous.
    """
    found = find_matches(pattern, dataflow, sample, thorough=True)
    alike: dict[tuple[Any, ...], list[NearMiss]] = {}
    for miss in found.near_misses:
        alike.setdefault((miss.line, miss.template, miss.source, miss.bound), []).append(miss)
    explanations = [
        Explanation(misses[0], len(misses), _captures(misses[0]), _edit(misses[0], dataflow, sample))
        for misses in list(alike.values())[:shown]
    ]
    return Explained(pattern, found.matches, tuple(explanations))


def _captures(miss: NearMiss) -> tuple[tuple[str, str], ...]:
    names = [name for name in miss.pattern.equations if name in miss.nodes]
    free = [name for name in miss.nodes if name not in miss.pattern.equations]
    return tuple((name, describe(miss.nodes[name])) for name in (*free, *names))


# --- edits ----------------------------------------------------------------------------------------------------------


def _edit(miss: NearMiss, dataflow: Dataflow, sample: Size | None) -> Edit | None:
    text = miss.pattern.path.read_text(encoding="utf-8")
    for edit in _candidates(miss, text):
        try:
            edited = parse_pattern(miss.pattern.path, edit.apply(text))
            found = find_matches(edited, dataflow, sample, anchors=[miss.anchor] if miss.anchor else None)
        except PatternError:
            continue
        if found.matches:
            return edit
    return None


def _candidates(miss: NearMiss, text: str) -> Iterator[Edit]:
    lines = text.split("\n")
    pattern, about = miss.pattern, miss.about
    match about:
        case ("op", Op() | Chain() as term):
            if isinstance(miss.node, Node) and miss.node.op == "call_function":
                yield from _with_another_op(term, miss.node, pattern.match_line + term.line, lines)
            if isinstance(term, Chain):
                yield from _with_other_bounds(term, pattern.match_line + term.line, lines)
        case ("attribute", Op() as term, str() as key, found):
            number = pattern.match_line + term.line
            for value in dict.fromkeys((found, absolute(miss.node, found) if isinstance(miss.node, Node) else found)):
                yield from _replaced(lines, number, rf"\b{key}\s*=\s*[^,)]+", f"{key}={value!r}")
        case ("over", Op() as term, list() as found):
            number = pattern.match_line + term.line
            yield from _replaced(lines, number, r"over\s*=\s*\[[^\]]*\]", f"over=[{', '.join(found)}]")
        case ("shape", str() as name, dict() as sizes):
            yield from _with_another_layout(name, miss, sizes, lines)
        case ("where" | "exclude" as key, str() as line):
            yield from _with_another_comparison(line, lines)
            yield from _without(key, line, lines)


def _replaced(lines: list[str], number: int, wanted: str, new: str) -> Iterator[Edit]:
    """An edit for each occurrence of `wanted` in one line."""
    if not 0 < number <= len(lines):
        return
    line = lines[number - 1]
    for found in re.finditer(wanted, line):
        yield Edit(number, line, line[: found.start()] + new + line[found.end() :])


def _with_another_op(term: Op | Chain, node: Node, number: int, lines: list[str]) -> Iterator[Edit]:
    """The op that was found beside those that were expected: by name, or by a class that holds it."""
    op = ops.op_name(node)
    narrowest = sorted(ops.CLASS_NAMES, key=lambda name: len(ops.CLASSES.get(name, ())))
    classes = [name for name in narrowest if ops.in_class(node, name)]
    written = r"\s*\|\s*".join(map(re.escape, term.names))
    for name in dict.fromkeys((op, *classes)):
        if not name.isidentifier():
            continue
        kinds = " | ".join((*term.names, name))
        if isinstance(term, Op) and len(term.names) == 1:
            yield from _replaced(lines, number, rf"\b{written}(?=\()", f"({kinds})")
        yield from _replaced(lines, number, rf"\b{written}(?=\s*[),])", kinds)


def _with_other_bounds(term: Chain, number: int, lines: list[str]) -> Iterator[Edit]:
    written = r"\s*\|\s*".join(map(re.escape, term.names))
    if term.least > 0:
        yield from _replaced(lines, number, rf"\b{written}(?=\))", f"{' | '.join(term.names)}, least=0")
        yield from _replaced(lines, number, r"least\s*=\s*\d+", "least=0")
    yield from _replaced(lines, number, r"most\s*=\s*\d+", f"most={4 * term.most}")
    yield from _replaced(lines, number, rf"\b{written}(?=\))", f"{' | '.join(term.names)}, most={4 * term.most}")


def _with_another_layout(name: str, miss: NearMiss, known: Mapping[str, Size], lines: list[str]) -> Iterator[Edit]:
    """An alternative more: each axis by a name of its size that is known, or its size."""
    sizes = ops.sizes(miss.node) if isinstance(miss.node, Node) else None
    if not sizes:
        return
    roles = miss.pattern.intervene.axes
    free = [axis for axis in known if axis in roles or name not in miss.pattern.bound]
    axes: list[str] = []
    for size in sizes:
        named = [axis for axis in free if axis not in axes and same_size(known[axis], size) and size != 1]
        axes.append(named[0] if named else format_size(size) if size == 1 or name in miss.pattern.bound else "_")
    inside = "[shape]" in [line.strip() for line in lines]
    start = next((i for i, line in enumerate(lines) if line.strip().startswith("[shape]")), 0) if inside else 0
    for i in range(start, len(lines)):
        if re.match(rf"\s*{re.escape(name)}\s*=\s*\"", lines[i]):
            closing = lines[i].rindex('"', 0, lines[i].find("#") if "#" in lines[i] else None)
            yield Edit(i + 1, lines[i], f"{lines[i][:closing]} | {' '.join(axes)}{lines[i][closing:]}")
            return


_LOOSER = {">": ">=", "<": "<=", "==": ">="}


def _with_another_comparison(written: str, lines: list[str]) -> Iterator[Edit]:
    for sign, looser in _LOOSER.items():
        if len(parts := re.split(rf"(?<![<>=!]){sign}(?!=)", written)) == 2:
            for i, line in enumerate(lines):
                if written in line:
                    yield Edit(i + 1, line, line.replace(written, looser.join(parts)))


def _without(key: str, written: str, lines: list[str]) -> Iterator[Edit]:
    """The line of the file without one entry of a list."""
    entry = rf"""(?:'{re.escape(written)}'|"{re.escape(written)}")"""
    for i, line in enumerate(lines):
        if re.search(entry, line):
            shorter = re.sub(rf"{entry}\s*,\s*|,\s*{entry}|{entry}", "", line, count=1)
            yield Edit(i + 1, line, shorter)

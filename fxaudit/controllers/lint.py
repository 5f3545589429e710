"""What is wrong with a pattern that reads well: static checks, none of which needs a model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fxaudit import axes, ops
from fxaudit.controllers import language
from fxaudit.controllers.anchors import root_kinds
from fxaudit.controllers.language import Name, Op, Term
from fxaudit.controllers.pattern import Pattern

# Commutative ops on one path of which both operands may be the same node: each doubles the orders that are tried.
MOST_COMMUTATIVE = 4
_KEEPS_RANK = frozenset(["squash", "activation", "norm", "pointwise"]).union(
    ops.CLASSES["squash"], ops.CLASSES["activation"], ops.CLASSES["norm"]
)


@dataclass(frozen=True, slots=True)
class Complaint:
    """One complaint: the place in the file, a kind, and what to do."""

    kind: str
    where: str
    text: str


def lint(pattern: Pattern) -> list[Complaint]:
    """Everything about a pattern that its author should look at."""
    file = str(pattern.path)
    found = [*_unused(pattern), *_commutative(pattern), *_impossible_shapes(pattern)]
    if not pattern.cite:
        found.append(Complaint("no-cite", file, "nothing says where the family comes from: add `cite`"))
    if len(pattern.summary.split()) < 3:
        found.append(Complaint("no-summary", file, "`summary` is one sentence that says what the coefficient does"))
    for wanted, kind, text in (
        (True, "no-positive-example", "no example must match: nothing shows that the pattern finds its family"),
        (False, "no-negative-example", "no example has `expect = 0`: nothing shows what the pattern leaves alone"),
    ):
        if not any((example.expect > 0) == wanted for example in pattern.examples):
            found.append(Complaint(kind, file, text))
    return found


def _unused(pattern: Pattern) -> Iterator[Complaint]:
    """Equations that share no name with the rest: nothing says where their nodes are, so nothing can look for them."""
    intervene = pattern.intervene
    names = {name: {name} | language.names_in(term) for name, term in pattern.equations.items()}
    connected = {"apply", *pattern.bound, *intervene.taps.values()}
    grown = True
    while grown:
        new = {n for mentioned in names.values() if mentioned & connected for n in mentioned} - connected
        connected |= new
        grown = bool(new)
    for name, term in pattern.equations.items():
        if name not in connected:
            text = f"`{name}` shares no name with the rest of `match`: remove it, or use a name of it"
            yield Complaint("unused-capture", pattern.where_in_file(term.line), text)


def _commutative(pattern: Pattern) -> Iterator[Complaint]:
    for name in ("apply", "coefficient"):
        term = pattern.equations[name]
        count = _nested(term, pattern.equations)
        if count > MOST_COMMUTATIVE:
            text = f"{count} commutative ops on one path of `{name}` are tried in 2**{count} orders"
            yield Complaint("commutativity", pattern.where_in_file(term.line), text)
            return


def _nested(term: Term, equations: Mapping[str, Term]) -> int:
    """The most commutative ops on any path down from a term of which two operands may change places."""
    if isinstance(term, Name):
        return _nested(equations[term.name], equations) if term.name in equations else 0
    own = False
    if isinstance(term, Op) and not ops.UNORDERED.isdisjoint(term.names):
        kinds = [root_kinds(operand, equations) for operand in term.operands]
        own = any(a == b or (a is not None and b is not None and a & b) for a, b in itertools.combinations(kinds, 2))
    return own + max((_nested(inner, equations) for inner in language.children(term)), default=0)


def _impossible_shapes(pattern: Pattern) -> Iterator[Complaint]:
    for name, term in pattern.equations.items():
        if name not in pattern.shapes or not isinstance(term, Op) or not term.operands:
            continue
        shape, operand = pattern.shapes[name], term.operands[0]
        if term.over is not None:
            for layout in shape.layouts:
                if kept := sorted(layout.names.intersection(term.over)):
                    text = f"`{name}` is reduced over {', '.join(kept)}, which its shape `{layout}` still has"
                    yield Complaint("impossible-shape", f"{pattern.path}", text)
        elif isinstance(operand, Name) and operand.name in pattern.shapes and _KEEPS_RANK.issuperset(term.names):
            ranks, others = _ranks(shape), _ranks(pattern.shapes[operand.name])
            if ranks and others and ranks.isdisjoint(others):
                text = f"`{name}` has the shape of `{operand.name}`, but no alternatives have the same number of axes"
                yield Complaint("impossible-shape", f"{pattern.path}", text)


def _ranks(shape: axes.Shape) -> set[int]:
    """The numbers of axes that a shape may have; empty when any."""
    return set() if shape.has_rest else {len(layout.axes) for layout in shape.layouts}

"""Where to look for a pattern in one graph.

A `Plan` holds what a graph says about a pattern before any of it is unified: whether it can match at all, which
alternatives cannot, of which kinds the node that a term describes must be, and the few nodes at which it is worth
trying. Those are found from the rarest thing that the pattern needs: the way from there to the apply site is walked
forward, and what is reached is verified backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch.fx import Node

from fxaudit import ops
from fxaudit.controllers.graphs import Dataflow
from fxaudit.controllers.language import Chain, Either, Fold, Item, Name, Op, Region, Term, names_in, walk
from fxaudit.controllers.pattern import Pattern

# How many times rarer than the apply op something must be for the way from it to the apply site to be worth a walk.
_RARER = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What a graph says about a pattern.

    `missing` are the op names of which none occurs although one must, None where the pattern may match. `roots` are the
    kinds that a term's node may have (None: any), `options` the alternatives of each `Either` that may match.
    `mentions` are the names in each equation, `absent` the equations that hold nowhere in the graph.

    The rest is what the pattern alone says. `behind` are a name and all that its equation mentions, through other
    equations, too; `needed` is what is bound or recorded, `optional` are the optional captures that an equation
    mentions. `closures_last` are an op's operands and their places, closures behind the rest, so that a region stops at
    captures which a cheaper operand has bound. `filtered` are the chains at whose ends the kind of a node says all that
    unification would say about one that does not fit.
    """

    missing: tuple[str, ...] | None
    roots: Mapping[Term, frozenset[str] | None]
    options: Mapping[Term, tuple[Term, ...]]
    anchors: tuple[Node, ...]
    mentions: Mapping[str, frozenset[str]]
    absent: frozenset[str]
    behind: Mapping[str, frozenset[str]]
    needed: frozenset[str]
    optional: frozenset[str]
    closures_last: Mapping[Term, tuple[tuple[Term, ...], tuple[int, ...]]]
    filtered: frozenset[Term]


def plan(pattern: Pattern, dataflow: Dataflow, *, thorough: bool = False) -> Plan:
    """The plan of one pattern for one graph; a thorough one leaves nothing out that could be a near miss."""
    needed = {"apply", *pattern.bound, *pattern.intervene.taps.values()}.difference(pattern.intervene.optional)
    terms = [*pattern.equations.values(), *(term for *_, term in pattern.exclude)]
    every = [inner for term in terms for inner in walk(term)]
    missing = next((m for name in sorted(needed) if (m := _missing(pattern.equations[name], pattern, dataflow))), None)
    options: dict[Term, tuple[Term, ...]] = {
        term: tuple(o for o in term.options if thorough or not _missing(o, pattern, dataflow))
        for term in every
        if isinstance(term, Either)
    }
    roots = {term: _roots(term, pattern.equations, options) for term in every}
    mentions = {name: frozenset(names_in(term)) for name, term in pattern.equations.items()}
    named = frozenset(mentions).union(*mentions.values())
    absent = frozenset(name for name, term in pattern.equations.items() if _missing(term, pattern, dataflow))
    anchors: Collection[Node] = ()
    if thorough:
        anchors = sorted(_nodes_of(roots[pattern.equations["apply"]], dataflow), key=dataflow.order.__getitem__)
        missing = None if anchors else missing
    elif not missing:
        anchors = _anchors(pattern, dataflow, roots, options)
    return Plan(
        missing,
        roots,
        options,
        tuple(anchors),
        mentions,
        absent,
        behind={name: _behind(name, mentions) for name in named},
        needed=frozenset((*pattern.bound, *pattern.intervene.taps.values())),
        optional=frozenset().union(*mentions.values()).intersection(pattern.intervene.optional),
        closures_last={term: _closures_last(term) for term in every if isinstance(term, Op)},
        filtered=frozenset(t for t in every if isinstance(t, Chain) and _is_told_by_kind(t.source, pattern.equations)),
    )


def _behind(name: str, mentions: Mapping[str, frozenset[str]]) -> frozenset[str]:
    names, queue = {name}, [name]
    while queue:
        new = mentions.get(queue.pop(), frozenset()) - names
        names |= new
        queue.extend(new)
    return frozenset(names)


def _closures_last(term: Op) -> tuple[tuple[Term, ...], tuple[int, ...]]:
    places = sorted(
        range(len(term.operands)), key=lambda place: isinstance(term.operands[place], Chain | Region | Fold)
    )
    return tuple(term.operands[place] for place in places), tuple(places)


def _is_told_by_kind(term: Term, equations: Mapping[str, Term]) -> bool:
    """Whether a node of another kind is refused in one way: of alternatives, each has its own."""
    match term:
        case Name(name=name) if name in equations:
            return _is_told_by_kind(equations[name], equations)
        case Chain(least=0, source=source):
            return _is_told_by_kind(source, equations)
    return isinstance(term, Op | Item | Fold | Chain)


def _missing(term: Term, pattern: Pattern, dataflow: Dataflow) -> tuple[str, ...] | None:
    """Op names of which one must occur for a term to match anywhere, and none does."""
    match term:
        case Name(name=name) if name in pattern.equations:
            return _missing(pattern.equations[name], pattern, dataflow)
        case Op(names=names, operands=operands):
            if not any(map(dataflow.nodes_of, names)):
                return names
            return next((m for operand in operands if (m := _missing(operand, pattern, dataflow))), None)
        case Item(source=source):
            return _missing(source, pattern, dataflow)
        case Chain(names=names, source=source, least=least):
            if least > 0 and not any(map(dataflow.nodes_of, names)):
                return names
            return _missing(source, pattern, dataflow)
        case Fold(names=names, term=inner):
            return names if not any(map(dataflow.nodes_of, names)) else _missing(inner, pattern, dataflow)
        case Either(options=options):
            found = [_missing(option, pattern, dataflow) for option in options]
            if all(found):
                return tuple(dict.fromkeys(name for names in found if names for name in names))
    return None


def root_kinds(term: Term, equations: Mapping[str, Term]) -> frozenset[str] | None:
    """The kinds that a term's node may have in any graph; None: any."""
    inner = [part for equation in (term, *equations.values()) for part in walk(equation)]
    return _roots(term, equations, {part: part.options for part in inner if isinstance(part, Either)})


def _roots(
    term: Term, equations: Mapping[str, Term], options: Mapping[Term, tuple[Term, ...]]
) -> frozenset[str] | None:
    match term:
        case Name(name=name) if name in equations:
            return _roots(equations[name], equations, options)
        case Op(names=names) | Fold(names=names):
            return frozenset(names)
        case Item():
            return frozenset(["getitem"])
        case Either():
            return _union([_roots(option, equations, options) for option in options[term]])
        case Chain(names=names, source=source, least=least):
            return _union([frozenset(names), _roots(source, equations, options) if least == 0 else frozenset()])
    return None


def _union(kinds: list[frozenset[str] | None]) -> frozenset[str] | None:
    known = [kind for kind in kinds if kind is not None]
    return frozenset().union(*known) if len(known) == len(kinds) else None


# --- anchors --------------------------------------------------------------------------------------------------------


def _anchors(
    pattern: Pattern,
    dataflow: Dataflow,
    roots: Mapping[Term, frozenset[str] | None],
    options: Mapping[Term, tuple[Term, ...]],
) -> tuple[Node, ...]:
    found: set[Node] = set()
    for branch in _branches(pattern.equations["apply"], pattern, options):
        kinds = roots[branch]
        at = _nodes_of(kinds, dataflow)
        # Of all that the branch needs, the rarest, and the kinds of node that may stand between it and the apply site.
        rarest, between = len(at) / _RARER, None
        for term, way in _needs(branch, pattern, options, frozenset()):
            if roots[term] is not None and (count := len(_nodes_of(roots[term], dataflow))) < rarest:
                rarest, between, start = count, way, term
        if between is None or kinds is None:
            found.update(at)
        else:
            found.update(_reached(_nodes_of(roots[start], dataflow), between, kinds, dataflow))
    return tuple(sorted(found, key=dataflow.order.__getitem__))


def _nodes_of(kinds: frozenset[str] | None, dataflow: Dataflow) -> Collection[Node]:
    if kinds is None:
        return [node for node in dataflow.nodes if node.op == "call_function"]
    if len(kinds) == 1:
        return dataflow.nodes_of(next(iter(kinds)))
    return dict.fromkeys(node for kind in sorted(kinds) for node in dataflow.nodes_of(kind))


def _branches(term: Term, pattern: Pattern, options: Mapping[Term, tuple[Term, ...]]) -> Iterator[Term]:
    """The alternatives of an expression, those inside alternatives and names, too."""
    if isinstance(term, Name) and term.name in pattern.equations:
        yield from _branches(pattern.equations[term.name], pattern, options)
    elif isinstance(term, Either):
        for option in options[term]:
            yield from _branches(option, pattern, options)
    else:
        yield term


def _needs(
    term: Term, pattern: Pattern, options: Mapping[Term, tuple[Term, ...]], way: frozenset[str]
) -> Iterator[tuple[Term, frozenset[str]]]:
    """Every term that `term` cannot match without, with the kinds of the nodes between the two."""
    match term:
        case Name(name=name) if name in pattern.equations:
            inner, passed = [pattern.equations[name]], way
        case Either() if len(options[term]) == 1:
            inner, passed = list(options[term]), way
        case Op(names=names, operands=operands):
            inner, passed = list(operands), way | frozenset(names)
        case Item(source=source):
            inner, passed = [source], way | {"getitem"}
        case Chain(names=names, source=source):
            inner, passed = [source], way | frozenset(names)
        case Fold(names=names, term=folded):
            inner, passed = [folded], way | frozenset(names)
        case _:
            return
    for part in inner:
        yield part, passed
        yield from _needs(part, pattern, options, passed)


def _reached(start: Collection[Node], between: frozenset[str], wanted: frozenset[str], dataflow: Dataflow) -> set[Node]:
    """The nodes of a wanted kind that are read from `start`, directly or through nodes of the kinds `between`."""
    found: set[Node] = set()
    queue, seen = deque(start), set(start)
    found.update(node for node in start if not wanted.isdisjoint(dataflow.kinds(node)))
    while queue:
        for user in queue.popleft().users:
            if user in seen:
                continue
            kinds = dataflow.kinds(user)
            if not wanted.isdisjoint(kinds):
                found.add(user)
            # A norm of several outputs is read through the first of them, which is what counts as the norm.
            if not between.isdisjoint(kinds) or ops.is_norm_of_several_outputs(user):
                seen.add(user)
                queue.append(user)
    return found

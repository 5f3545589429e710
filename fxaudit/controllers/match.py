"""Patterns against one graph: every node that may be an `apply` is an anchor, and yields a `Match` or a `NearMiss`.

A pattern whose mandatory ops do not occur in the graph costs no visit. Cost is linear in anchors times pattern size; a
budget bounds what one anchor may take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from fxaudit import axes, ops
from fxaudit.axes import Size
from fxaudit.controllers import predicates, structure
from fxaudit.controllers.graphs import Dataflow, exclusive_cone
from fxaudit.controllers.language import Chain, Either, Fold, Item, Name, Op, Term
from fxaudit.controllers.pattern import Pattern
from fxaudit.controllers.unify import OVERS, Bindings, Unifier, describe

AxisNames = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Match:
    """A pattern found at one apply site: captured nodes, axis sizes, and the axis names of each captured tensor."""

    pattern: Pattern
    nodes: Mapping[str, Any]
    sizes: Mapping[str, Size]
    layouts: Mapping[str, AxisNames]

    @property
    def coefficient(self) -> Node:
        node: Node = self.nodes["coefficient"]
        return node

    @property
    def apply(self) -> Node:
        node: Node = self.nodes["apply"]
        return node

    @property
    def bound_names(self) -> tuple[str, ...]:
        """The coefficient, and of what is coupled with it all that something still reads once the coefficient is bound.

        Indices that only place weights inside a dense coefficient die with it; optional captures may be missing.
        """
        names = [name for name in self.pattern.bound if name in self.nodes]
        return tuple(
            name
            for name in names
            if name == "coefficient"
            or not exclusive_cone([self.nodes[other] for other in names if other != name]).issuperset(
                self.nodes[name].users
            )
        )

    @property
    def bound(self) -> tuple[Node, ...]:
        """The nodes of `bound_names`."""
        return tuple(self.nodes[name] for name in self.bound_names)


@dataclass(frozen=True, slots=True)
class NearMiss:
    """The deepest partial match at one anchor, and what stopped it.

    `line` is the line of the match block, 0 when a shape, a predicate or a structural test failed; `progress` orders
    near misses: names bound, then nodes visited on the way. `anchor` is None when the graph lacks an op that the
    pattern needs.
    """

    pattern: Pattern
    anchor: Node | None
    node: Node | None
    reason: str
    line: int
    bound: tuple[str, ...]
    progress: tuple[int, int]

    @property
    def source(self) -> str:
        """The user's source line of the node that failed."""
        node = self.node or self.anchor
        return ops.source_line(node) if node is not None else ""


@dataclass(frozen=True, slots=True)
class MatchResult:
    """All matches of one pattern in one graph, the near misses best first, and the number of node visits it took."""

    pattern: Pattern
    matches: tuple[Match, ...]
    near_misses: tuple[NearMiss, ...]
    visits: int


def find_matches(pattern: Pattern, dataflow: Dataflow, sample: Size | None) -> MatchResult:
    """Where `pattern` occurs.

    Args:
        sample: the size of the input axis, to which the pattern's sample axis is bound from the start.

    Raises:
        PatternError: the pattern is too ambiguous for one anchor's visit budget.
    """
    needed = {"apply", *pattern.bound, *pattern.intervene.taps.values()}.difference(pattern.intervene.optional)
    for names in (group for name in sorted(needed) for group in _mandatory(pattern.equations[name], pattern.equations)):
        if not any(_occurs(name, dataflow) for name in names):
            reason = f"no `{' | '.join(names)}` in the graph"
            return MatchResult(pattern, (), (NearMiss(pattern, None, None, reason, 0, (), (0, 0)),), 0)
    matches: list[Match] = []
    near: list[NearMiss] = []
    visits = 0
    for anchor in _anchors(pattern.equations["apply"], pattern.equations, dataflow):
        unifier = Unifier(pattern, dataflow, anchor)
        found = next(filter(None, (_verdict(unifier, reading, sample) for reading in unifier.readings())), None)
        visits += unifier.visits
        if found is not None:
            matches.append(found)
        elif (failure := unifier.failure) is not None:
            near.append(
                NearMiss(pattern, anchor, failure.node, failure.reason, failure.line, failure.bound, failure.progress)
            )
    near.sort(key=lambda miss: miss.progress, reverse=True)
    return MatchResult(pattern, tuple(matches), tuple(near), visits)


# --- where to look --------------------------------------------------------------------------------------------------


def _mandatory(term: Term, equations: Mapping[str, Term]) -> Iterator[tuple[str, ...]]:
    """Groups of op names, of each of which one must occur for `term` to match anywhere."""
    match term:
        case Name(name=name) if name in equations:
            yield from _mandatory(equations[name], equations)
        case Op(names=names, operands=operands):
            yield names
            for operand in operands:
                yield from _mandatory(operand, equations)
        case Item(source=source):
            yield from _mandatory(source, equations)
        case Chain(names=names, source=source, least=least):
            if least > 0:
                yield names
            yield from _mandatory(source, equations)
        case Fold(names=names, term=inner):
            yield names
            yield from _mandatory(inner, equations)
        case Either(options=options):
            roots = [root_names(option, equations) for option in options]
            if all(root is not None for root in roots):
                yield tuple(sorted(set().union(*(root for root in roots if root))))


def _occurs(name: str, dataflow: Dataflow) -> bool:
    if name in ops.CLASSES:
        return any(op in dataflow.by_op for op in ops.CLASSES[name])
    return name in ops.TAGGED_CLASSES or name in dataflow.by_op


def _anchors(term: Term, equations: Mapping[str, Term], dataflow: Dataflow) -> list[Node]:
    """The nodes at which `term` may be rooted, in graph order."""
    names = root_names(term, equations)
    if names is None:
        return [node for node in dataflow.nodes if node.op == "call_function"]
    found: set[Node] = set()
    for name in names:
        if name in ops.TAGGED_CLASSES:
            found.update(node for node in dataflow.nodes if ops.in_class(node, name))
        else:
            for op in ops.CLASSES.get(name, (name,)):
                found.update(dataflow.by_op.get(op, ()))
    return sorted(found, key=dataflow.order.__getitem__)


def root_names(term: Term, equations: Mapping[str, Term]) -> set[str] | None:
    """The ops and classes of which the node that `term` describes is one; None when it may be anything."""
    match term:
        case Name(name=name) if name in equations:
            return root_names(equations[name], equations)
        case Op(names=names) | Fold(names=names):
            return set(names)
        case Item():
            return {"getitem"}
        case Either(options=options):
            roots = [root_names(option, equations) for option in options]
            return None if any(root is None for root in roots) else set().union(*(root for root in roots if root))
        case Chain(names=names, source=source, least=least):
            below = root_names(source, equations) if least == 0 else set()
            return None if below is None else set(names) | below
    return None


# --- shapes, predicates, structure ----------------------------------------------------------------------------------


def _verdict(unifier: Unifier, bindings: Bindings, sample: Size | None) -> Match | None:
    """The match behind one reading, or None with the failure noted: shapes, `over`, `where`, `exclude`, structure."""
    pattern, dataflow = unifier.pattern, unifier.dataflow
    fitted = _fit_shapes(unifier, bindings, {} if sample is None else {pattern.sample_axis: sample})
    if fitted is None:
        return None
    sizes, layouts = fitted
    for term, node in bindings.get(OVERS, ()):
        reason = _over_refusal(term, node, layouts)
        if reason is not None:
            unifier.fail(bindings, node, term.line, "{}", reason, depth=1)
            return None
    nodes = {key: value for key, value in bindings.items() if isinstance(value, Node)}
    for predicate in pattern.where:
        reason = predicates.refused_by(predicate, sizes, nodes, dataflow)
        if reason is not None:
            unifier.fail(bindings, bindings["coefficient"], 0, "{}", reason, depth=1)
            return None
    for text, name, term in pattern.exclude:
        if name in bindings and _excludes(unifier, name, term, bindings, layouts):
            unifier.fail(bindings, bindings[name], 0, "excluded: `{}`", text, depth=1)
            return None
    reason = structure.refusal(dataflow, bindings["coefficient"], bindings["apply"])
    if reason is not None:
        unifier.fail(bindings, bindings["coefficient"], 0, "{}", reason, depth=2)
        return None
    return Match(pattern, {k: v for k, v in bindings.items() if not k.startswith("#")}, sizes, layouts)


def _excludes(unifier: Unifier, name: str, term: Term, bindings: Bindings, layouts: Mapping[str, AxisNames]) -> bool:
    """Whether an `exclude` equation matches the node that `name` is bound to."""
    others = {key: value for key, value in bindings.items() if key not in (name, OVERS)}
    return any(
        all(_over_refusal(over, node, layouts) is None for over, node in reading.get(OVERS, ()))
        for reading in unifier.unify(term, bindings[name], others)
    )


def _fit_shapes(
    unifier: Unifier, bindings: Bindings, sizes: dict[str, Size]
) -> tuple[dict[str, Size], dict[str, AxisNames]] | None:
    """Axis sizes and axis names of all captures that have a [shape].

    Alternatives are tried in order, and the first combination in which all shapes agree wins.
    """
    tensors: list[tuple[str, Node]] = []
    for name in unifier.pattern.shapes:
        captured = bindings.get(name)
        for node in captured if isinstance(captured, tuple) else [captured] if captured is not None else []:
            if ops.sizes(node) is None:
                unifier.fail(bindings, node, 0, "[shape] {}: {} is not one tensor", name, node, depth=1)
                return None
            tensors.append((name, node))
    return _fit_rest(unifier, bindings, tensors, sizes, None, {})


def _fit_rest(
    unifier: Unifier,
    bindings: Bindings,
    tensors: Sequence[tuple[str, Node]],
    sizes: dict[str, Size],
    rest: tuple[Size, ...] | None,
    layouts: dict[str, AxisNames],
) -> tuple[dict[str, Size], dict[str, AxisNames]] | None:
    if not tensors:
        return sizes, layouts
    (name, node), *others = tensors
    fitting, mismatch = axes.fits(unifier.pattern.shapes[name], ops.sizes(node) or (), sizes, rest)
    for fit in fitting:
        found = _fit_rest(unifier, bindings, others, dict(fit.sizes), fit.rest, {**layouts, name: fit.axes})
        if found is not None:
            return found
    if not fitting:
        known = ", ".join(f"{axis}={axes.format_size(size)}" for axis, size in sizes.items())
        template = "[shape] {} = {}" + (" where {}" if known else "")
        unifier.fail(bindings, node, 0, template, name, mismatch, known, depth=1)
    return None


def _over_refusal(term: Op, node: Node, layouts: Mapping[str, AxisNames]) -> str | None:
    """Why a reduction is not over the axes that `over` names; None when it is."""
    operand = term.operands[0]
    assert isinstance(operand, Name)
    assert term.over is not None  # both checked when the pattern was read
    layout = ["*".join(axis) for axis in layouts[operand.name]]
    wanted = {i for i, axis in enumerate(layout) if axis in term.over}
    found = _reduced_axes(node, len(layout))
    if wanted == found:
        return None
    reduced = [f"axis {i}" if layout[i] == axes.REST else layout[i] for i in sorted(found)]
    return (
        f"expected a reduction over {', '.join(term.over)}, found one over {', '.join(reduced) or 'nothing'}"
        f" in {describe(node)}"
    )


def _reduced_axes(node: Node, rank: int) -> set[int]:
    """The axes that a pooling or reduction node reduces to one value each."""
    given = ops.attributes(node)
    if "output_size" in given:
        size = given["output_size"]
        size = list(size) if isinstance(size, list | tuple) else [size]
        return set(range(rank - len(size), rank)) if all(s == 1 for s in size) else set()
    dims = given.get("dim")
    if dims is None or dims == []:
        return set(range(rank))
    return {d % rank for d in (dims if isinstance(dims, list | tuple) else [dims])}

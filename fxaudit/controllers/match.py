"""Patterns against one graph: every node that may be an `apply` is an anchor, and yields a `Match` or a `NearMiss`.

A pattern whose mandatory ops do not occur in the graph costs no visit. Cost is linear in anchors times pattern size; a
budget bounds what one anchor may take.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from fxaudit import axes, ops
from fxaudit.axes import Size
from fxaudit.controllers import predicates, structure
from fxaudit.controllers.anchors import plan
from fxaudit.controllers.graphs import Dataflow, exclusive_cone
from fxaudit.controllers.language import Name, Op, Term
from fxaudit.controllers.pattern import Pattern
from fxaudit.controllers.unify import BUDGET, OVERS, Bindings, Unifier, describe
from fxaudit.errors import PatternError

# Near misses that are kept of one pattern, the best ones.
NEAR_MISSES = 100

# Visits that a pattern may take in all, for each node of the graph. The shipped patterns need fewer than ten as a rule,
# and up to 77 where one value has very many readings, as in Gemma 3n.
GRAPH_BUDGET = 400

AxisNames = tuple[tuple[str, ...], ...]
_Fitted = tuple[dict[str, Size], dict[str, AxisNames]]


@dataclass(frozen=True, slots=True)
class Match:
    """A pattern found at one apply site: captured nodes, axis sizes, and the axis names of each captured tensor.

    `bound_names` are the coefficient and, of what is coupled with it, all that something still reads once the
    coefficient is bound: indices that only place weights inside a dense coefficient die with it. `applied` is what of
    the bound nodes meets the value there.
    """

    pattern: Pattern
    nodes: Mapping[str, Any]
    sizes: Mapping[str, Size]
    layouts: Mapping[str, AxisNames]
    bound_names: tuple[str, ...]
    applied: Node

    @property
    def coefficient(self) -> Node:
        node: Node = self.nodes["coefficient"]
        return node

    @property
    def apply(self) -> Node:
        node: Node = self.nodes["apply"]
        return node

    @property
    def bound(self) -> tuple[Node, ...]:
        """The nodes of `bound_names`."""
        return tuple(self.nodes[name] for name in self.bound_names)


@dataclass(frozen=True, slots=True)
class NearMiss:
    """The deepest partial match at one anchor, and what stopped it.

    `line` is the line of the match block, 0 when a shape, a predicate or a structural test failed; `progress` orders
    near misses: names bound, then nodes visited on the way. `anchor` is None when the graph lacks an op that the
    pattern needs. `template`, `nodes` and `about` are those of the failure: see `unify.Failure`.
    """

    pattern: Pattern
    anchor: Node | None
    node: Node | None
    reason: str
    line: int
    bound: tuple[str, ...]
    progress: tuple[int, int]
    template: str = ""
    nodes: Mapping[str, Any] = field(default_factory=dict)
    about: tuple[Any, ...] | None = None

    @property
    def source(self) -> str:
        """The user's source line of the node that failed."""
        node = self.node or self.anchor
        return ops.source_line(node) if node is not None else ""


@dataclass(frozen=True, slots=True)
class MatchResult:
    """All matches of one pattern in one graph, its best near misses, best first, and the number of node visits."""

    pattern: Pattern
    matches: tuple[Match, ...]
    near_misses: tuple[NearMiss, ...]
    visits: int


def find_matches(
    pattern: Pattern,
    dataflow: Dataflow,
    sample: Size | None,
    *,
    thorough: bool = False,
    anchors: Sequence[Node] | None = None,
) -> MatchResult:
    """Where `pattern` occurs.

    Args:
        sample: the size of the input axis, to which the pattern's sample axis is bound from the start.
        thorough: look for near misses at every node that may be an apply site, whatever else the graph lacks.
        anchors: look at these nodes only.

    Raises:
        PatternError: the pattern is too ambiguous for one anchor's visit budget.
    """
    chosen = plan(pattern, dataflow, thorough=thorough)
    if chosen.missing is not None:
        reason = f"no `{' | '.join(chosen.missing)}` in the graph"
        return MatchResult(pattern, (), (NearMiss(pattern, None, None, reason, 0, (), (0, 0)),), 0)

    admitted: tuple[Bindings, _Fitted, Node] | None = None

    def admits(unifier: Unifier, bindings: Bindings) -> bool:
        # Asked before conditions are sought elsewhere in the graph, which in a long scan hold in many ways.
        nonlocal admitted
        admitted = None
        fitted = _fit_shapes(unifier, bindings, known)
        if fitted is not None and (applied := _applied_controller(unifier, bindings, fitted[1])) is not None:
            admitted = bindings, fitted, applied
        return admitted is not None

    def verdict(unifier: Unifier, bindings: Bindings) -> Match | None:
        if admitted is not None and admitted[0] is bindings:  # no condition was sought
            return _verdict(unifier, bindings, *admitted[1:])
        fitted = _fit_shapes(unifier, bindings, known)
        return None if fitted is None else _verdict(unifier, bindings, fitted, None)

    known: dict[str, Size] = {} if sample is None else {pattern.sample_axis: sample}
    matches: list[Match] = []
    # A heap of the best near misses, of equals those found first; the others are forgotten at once.
    best: list[tuple[tuple[int, int], int, Unifier]] = []
    visits = 0
    for place, anchor in enumerate(chosen.anchors if anchors is None else anchors):
        unifier = Unifier(pattern, dataflow, anchor, chosen, admits)
        found = next(filter(None, (verdict(unifier, reading) for reading in unifier.readings())), None)
        visits += unifier.visits
        if visits > BUDGET + GRAPH_BUDGET * len(dataflow.nodes):
            raise PatternError(
                f"`{pattern.name}` is too ambiguous: it took {visits:,} visits of {len(dataflow.nodes):,} nodes",
                where=str(pattern.path),
                expected=f"at most {GRAPH_BUDGET} visits for each node of the graph",
                found=f"{len(chosen.anchors):,} anchors, of which many take hundreds of visits",
                remedy="name what lies between with narrower classes, or lower `most=`",
            )
        if found is not None:
            matches.append(found)
        elif unifier.progress is not None:
            keep = heapq.heappush if len(best) < NEAR_MISSES else heapq.heappushpop
            keep(best, (unifier.progress, -place, unifier))
    near = [
        NearMiss(pattern, u.anchor, f.node, f.reason, f.line, f.bound, f.progress, f.template, f.nodes, f.about)
        for *_, u in sorted(best, key=lambda entry: entry[:2], reverse=True)
        if (f := u.failure) is not None
    ]
    return MatchResult(pattern, tuple(matches), tuple(near), visits)


# --- shapes, predicates, structure ----------------------------------------------------------------------------------


def _verdict(unifier: Unifier, bindings: Bindings, fitted: _Fitted, applied: Node | None) -> Match | None:
    """The match behind one reading, or None with the failure noted: `over`, `where`, `exclude`, structure.

    `applied` is given where the structure has been tested.
    """
    pattern, dataflow = unifier.pattern, unifier.dataflow
    sizes, layouts = fitted
    for term, node in bindings.get(OVERS, ()):
        reason = _over_refusal(term, node, layouts)
        if reason is not None:
            about = ("over", term, _axes_reduced(term, node, layouts))
            unifier.fail(bindings, node, term.line, "{}", reason, depth=1, about=about)
            return None
    nodes = {key: value for key, value in bindings.items() if isinstance(value, Node)}
    for predicate in pattern.where:
        reason = predicates.refused_by(predicate, sizes, nodes, dataflow)
        if reason is not None:
            unifier.fail(bindings, bindings["coefficient"], 0, "{}", reason, depth=1, about=("where", predicate.text))
            return None
    for text, name, term in pattern.exclude:
        if name in bindings and _excludes(unifier, name, term, bindings, layouts):
            unifier.fail(bindings, bindings[name], 0, "excluded: `{}`", text, depth=1, about=("exclude", text))
            return None
    applied = applied or _applied_controller(unifier, bindings, layouts)
    if applied is None:
        return None
    bound_names = _bound_names([name for name in pattern.bound if name in bindings], bindings)
    return Match(
        pattern, {k: v for k, v in bindings.items() if not k.startswith("#")}, sizes, layouts, bound_names, applied
    )


def _applied_controller(unifier: Unifier, bindings: Bindings, layouts: Mapping[str, AxisNames]) -> Node | None:
    """What of the bound nodes meets the value at `apply`; None, with the failure noted, where it is no controller."""
    pattern, dataflow = unifier.pattern, unifier.dataflow
    bound = [bindings[name] for name in pattern.bound if name in bindings]  # optional captures may be missing
    applied = structure.applied(dataflow, bound, bindings["apply"])
    reason = structure.refusal(
        dataflow,
        applied,
        bindings["apply"],
        waives=pattern.waives,
        selects=pattern.intervene.acts == "select",
        positions=_positions(pattern, bindings, layouts, applied),
    )
    if reason is not None:
        unifier.fail(bindings, applied, 0, "{}", reason, depth=2)
    return applied if reason is None else None


def _bound_names(names: Sequence[str], bindings: Bindings) -> tuple[str, ...]:
    if len(names) == 1:
        return tuple(names)

    def is_read(name: str) -> bool:
        dead = exclusive_cone([bindings[other] for other in names if other != name])
        return not dead.issuperset(bindings[name].users)

    return tuple(name for name in names if name == "coefficient" or is_read(name))


def _positions(pattern: Pattern, bindings: Bindings, layouts: Mapping[str, AxisNames], node: Node) -> set[int]:
    """The dimensions of a bound node that hold positions and nothing else."""
    name = next(name for name in pattern.bound if bindings.get(name) is node)
    roles = pattern.intervene.axes
    return {i for i, axis in enumerate(layouts[name]) if all(roles.get(factor) == "position" for factor in axis)}


def _excludes(unifier: Unifier, name: str, term: Term, bindings: Bindings, layouts: Mapping[str, AxisNames]) -> bool:
    """Whether an `exclude` equation matches the node that `name` is bound to."""
    others = {key: value for key, value in bindings.items() if key not in (name, OVERS)}
    return any(
        all(_over_refusal(over, node, layouts) is None for over, node in reading.get(OVERS, ()))
        for reading in unifier.unify(term, bindings[name], others)
    )


def _fit_shapes(unifier: Unifier, bindings: Bindings, sizes: dict[str, Size]) -> _Fitted | None:
    """Axis sizes and axis names of all captures that have a [shape].

    Alternatives are tried in order, and the first combination in which all shapes agree wins. Two captures that are one
    node read its axes alike: sizes cannot tell apart axes that happen to be equally long.
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
) -> _Fitted | None:
    if not tensors:
        return sizes, layouts
    (name, node), *others = tensors
    fitting, mismatch = axes.fits(unifier.pattern.shapes[name], ops.sizes(node) or (), sizes, rest)
    aliases = {other: layout for other, layout in layouts.items() if bindings[other] is node}
    alike = [fit for fit in fitting if all(_reads_alike(fit.axes, layout) for layout in aliases.values())]
    for fit in alike:
        found = _fit_rest(unifier, bindings, others, dict(fit.sizes), fit.rest, {**layouts, name: fit.axes})
        if found is not None:
            return found
    if not fitting:
        known = ", ".join(f"{axis}={axes.format_size(size)}" for axis, size in sizes.items())
        template = "[shape] {} = {}" + (" where {}" if known else "")
        unifier.fail(bindings, node, 0, template, name, mismatch, known, depth=1, about=("shape", name, dict(sizes)))
    elif not alike:
        template = "[shape] {} names the axes of {} otherwise than {}"
        unifier.fail(bindings, node, 0, template, name, node, " and ".join(aliases), depth=1)
    return None


def _reads_alike(first: AxisNames, second: AxisNames) -> bool:
    """Whether two readings of one tensor give no axis two names."""

    def names(axis: tuple[str, ...]) -> bool:
        return not any(factor in (axes.ANY, axes.REST) or factor.isdigit() for factor in axis)

    return all(a == b or not (names(a) and names(b)) for a, b in zip(first, second, strict=True))


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


def _axes_reduced(term: Op, node: Node, layouts: Mapping[str, AxisNames]) -> list[str]:
    """The names of the axes that a reduction is over."""
    operand = term.operands[0]
    assert isinstance(operand, Name)  # checked when the pattern was read
    layout = ["*".join(axis) for axis in layouts[operand.name]]
    return list(dict.fromkeys(layout[i] for i in sorted(_reduced_axes(node, len(layout)))))


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

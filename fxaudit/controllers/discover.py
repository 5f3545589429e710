"""Controllers without a pattern: meetings of two paths that pass the structural tests, found from dataflow alone.

A *meeting* is a node where one operand may steer another: a product, an interpolation, a broadcast addition, a
contraction, a convolution with computed weights, or a selection by computed indices. One operand is proposed as the
coefficient when

    it depends on an input through learned ops of its own (T1, T2) and is no mask (T6);
    all of it comes through one node, the *anchor*: a learned op, a slice of what one returns, or a bounded join of few;
        indices and masks say which values are taken, and are no way of their own;
    it is narrow or bounded (T4): broadcast along an axis of the meeting, or squashed on every way from the anchor;
    it is not computed from a product of two input-dependent tensors, pools no positions and makes none from others, as
        attention does (T5);
    weights, be it those of a norm, read the result on the way to the output (T7).

Sites with a common anchor are one candidate: what a scan derives from one step size is that step size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch.fx import Node

from fxaudit import ops
from fxaudit.controllers.controller import Controller, place_of
from fxaudit.controllers.graphs import Dataflow, count_parameters, exclusive_cone, shape_hash
from fxaudit.controllers.paths import Paths, is_squashed, is_whole
from fxaudit.controllers.roles import POSITION, SAMPLE, UNIT, WINDOW

_CLAMPS = frozenset(["clamp", "hardtanh", "clamp_min", "clamp_max"])
_CONVOLUTIONS = frozenset("conv1d conv2d conv3d convolution".split())
_SELECTORS = frozenset("index index_select gather take_along_dim embedding scatter scatter_add index_add".split())


@dataclass(frozen=True, slots=True)
class Candidate:
    """What may be a controller that no pattern describes.

    `coefficients` come from one anchor; `applies` are the meetings; `cone` is what dies when all coefficients are
    replaced, `parameters` counts the parameter elements in it. `axes` guesses a role for each axis of each
    coefficient. Candidates of the same `form` have the same cone up to renaming, and `repeats` counts them.
    `claimed_by` names the pattern that owns it already.
    """

    module: str
    call: int
    coefficients: tuple[Node, ...]
    applies: tuple[Node, ...]
    cone: frozenset[Node]
    parameters: int
    axes: tuple[tuple[str, ...], ...]
    form: str
    repeats: int
    claimed_by: str | None

    @property
    def source(self) -> str:
        """The user's source line of the first meeting."""
        return ops.source_line(self.applies[0])


@dataclass(frozen=True, slots=True)
class _Site:
    coefficient: Node
    apply: Node
    anchor: Node


_Group: TypeAlias = tuple[tuple[Node, ...], list[_Site]]  # coefficients, and where they act


def discover(dataflow: Dataflow, controllers: Sequence[Controller] = ()) -> tuple[Candidate, ...]:
    """All candidates of a graph, those with the most repeats and parameters first.

    Args:
        controllers: what patterns have found; a candidate that shares nodes with one is marked as claimed by it.
    """
    paths = Paths(dataflow)
    by_anchor: dict[Node, list[_Site]] = {}
    for node in dataflow.nodes:
        if node.op == "call_function" and dataflow.is_dynamic(node) and paths.goes_on_through_weights(node):
            for site in _sites(node, paths):
                for one in _parts(site, paths):
                    by_anchor.setdefault(one.anchor, []).append(one)
    groups = {anchor: (_bind_points(sites, paths), sites) for anchor, sites in by_anchor.items()}
    found = [_candidate(bound, sites, paths) for bound, sites in _packed(groups, paths)]
    found = [replace(one, claimed_by=_owner(one, controllers)) for one in _outermost(found)]
    counts = Counter(one.form for one in found)
    found = [replace(one, repeats=counts[one.form]) for one in found]
    return tuple(sorted(found, key=lambda c: (-c.repeats * max(c.parameters, 1), dataflow.order[c.applies[0]])))


# --- where two paths meet -------------------------------------------------------------------------------------------


def _sites(node: Node, paths: Paths) -> Iterator[_Site]:
    """The operands of `node` that may be coefficients, each with where it is bound."""
    name = ops.op_name(node)
    if name in _SELECTORS:
        yield from _selections(node, paths)
    elif name == "unseen":
        yield from _handed_over(node, paths)
    elif name in _CONVOLUTIONS:
        yield from _computed_weights(node, paths)
    elif name in ("mul", "lerp", "addcmul"):
        yield from _products(node, paths)
    elif name in ("add", "sub"):
        yield from _shifts(node, paths)
    elif ops.in_class(node, "matmul") and not paths.dataflow.is_learned_op(node):
        yield from _contractions(node, paths)


def _products(node: Node, paths: Paths) -> Iterator[_Site]:
    operands = list(dict.fromkeys(paths.dataflow.operands(node)))
    sides = [side for side in operands if paths.is_own_path(side, [v for v in operands if v is not side])]
    if len(operands) < 2 or not sides:
        return
    sides = [side for side in sides if not paths.pools_positions(side)]
    bounded = [side for side in sides if paths.is_bounded(side)]
    narrow = [side for side in sides if paths.is_narrow(side, node)]
    static = [side for side in operands if not paths.dataflow.is_dynamic(side)]
    if static:
        # A parameter that scales is no apply site; a bank or bias that a narrow gate scales is one (T10). What is made
        # from sizes alone, such as an identity matrix, only lays the coefficient out.
        chosen = [side for side in bounded if side in narrow and all(map(paths.is_stored, static))]
    elif bounded:
        chosen = [side for side in bounded if side in narrow] or _gates(bounded)
    elif len(narrow) == 1 and not paths.is_statistic(narrow[0]) and not _is_written_out(node, narrow[0], paths):
        chosen = narrow
    else:
        chosen = []
    for side in chosen:
        yield _Site(side, node, paths.anchor(side))


def _gates(sides: list[Node]) -> list[Node]:
    """Of several squashed operands, those squashed to non-negative values: `sigmoid(a) * tanh(b)` is gated by a."""
    return sides if len(sides) == 1 else [s for s in sides if "tanh" not in _ops_above(s)] or sides


def _ops_above(node: Node, steps: int = 6) -> set[str]:
    found = set()
    for _ in range(steps):
        found.add(ops.op_name(node))
        sources = [source for source in ops.operands(node) if source.op == "call_function"]
        if len(sources) != 1:
            break
        node = sources[0]
    return found


def _shifts(node: Node, paths: Paths) -> Iterator[_Site]:
    operands = list(dict.fromkeys(paths.dataflow.operands(node)))
    if len(operands) != 2 or not all(map(paths.dataflow.is_dynamic, operands)):
        return
    narrow = [side for side in operands if paths.is_narrow(side, node) and not paths.is_encoding(side)]
    if len(narrow) == 1 and paths.is_own_path(narrow[0], [side for side in operands if side is not narrow[0]]):
        yield _Site(narrow[0], node, paths.anchor(narrow[0]))


def _contractions(node: Node, paths: Paths) -> Iterator[_Site]:
    operands = list(dict.fromkeys(paths.dataflow.operands(node)))
    if len(operands) < 2:
        return
    sides = [side for side in operands if paths.is_own_path(side, [v for v in operands if v is not side])]
    sides = [s for s in sides if not paths.pools_positions(s) and not paths.moves_positions(s, node)]
    bounded = [side for side in sides if paths.is_bounded(side)]
    for side in bounded or [side for side in sides if paths.mixes_at_each_position(side, node)]:
        yield _Site(side, node, paths.anchor(side))


def _computed_weights(node: Node, paths: Paths) -> Iterator[_Site]:
    weight = node.args[1]
    if not isinstance(weight, Node) or not paths.dataflow.is_dynamic(weight):
        return
    bank = paths.above_layout(weight)
    mixed = paths.dataflow.is_learned_op(bank)
    coefficient = next(filter(paths.dataflow.is_dynamic, paths.dataflow.operands(bank))) if mixed else weight
    if paths.is_learned(coefficient):
        yield _Site(coefficient, node, paths.anchor(coefficient))


def _selections(node: Node, paths: Paths) -> Iterator[_Site]:
    for side in paths.dataflow.operands(node):
        if is_whole(side) and paths.is_ranked(side):
            yield _Site(side, node, paths.anchor(side))


def _handed_over(node: Node, paths: Paths) -> Iterator[_Site]:
    """What a part that the trace keeps whole reads beside its data: choices, and what is squashed."""
    yield from _selections(node, paths)
    operands = list(dict.fromkeys(paths.dataflow.operands(node)))
    for side in operands:
        others = [value for value in operands if value is not side]
        if paths.is_bounded(side) and paths.is_own_path(side, others) and not paths.pools_positions(side):
            yield _Site(side, node, paths.anchor(side))


def _is_written_out(node: Node, side: Node, paths: Paths) -> bool:
    """Whether a product belongs to an outer product or a contraction written out, whose sides have equal rights."""
    for operand in paths.dataflow.operands(node):
        core = paths.above_layout(operand)
        product = [node] if operand is side else [node, core] if ops.op_name(core) == "mul" else [node]
        for one in product:
            if all(paths.is_narrow(factor, one) for factor in paths.dataflow.operands(one)):
                return True
    return _is_summed(node, side, paths)


def _is_summed(node: Node, side: Node, paths: Paths) -> bool:
    """Whether a product is a contraction written out: summed over an axis along which `side` is not broadcast.

    Over a window of positions it is a convolution whose taps are computed.
    """
    sums = [user for user in node.users if ops.op_name(user) == "sum"]
    if len(sums) != len(node.users):
        return False
    sizes, whole = paths.tight_sizes(side), ops.sizes(node) or ()
    sizes = (1,) * (len(whole) - len(sizes)) + tuple(sizes)
    for user in sums:
        dims = ops.attributes(user).get("dim") or []
        for dim in dims if isinstance(dims, list | tuple) else [dims]:
            if sizes[dim % len(whole)] != 1 and WINDOW not in paths.roles.holds(node, dim):
                return True
    return False


def _parts(site: _Site, paths: Paths) -> Iterator[_Site]:
    """The site, or where its anchor joins paths that were squashed before, one for each of those that join."""
    joined = paths.joined_by(site.anchor)
    if not any(paths.was_squashed(source) for source in joined):
        yield site
        return
    for source in dict.fromkeys(joined):
        if paths.is_learned(source):
            yield from _parts(_Site(source, site.apply, paths.anchor(source)), paths)


# --- candidates -----------------------------------------------------------------------------------------------------


def _packed(groups: Mapping[Node, _Group], paths: Paths) -> list[_Group]:
    """Slices that all act, and each as it was cut, are one coefficient: the tensor of which they are slices."""
    single, joined = dict(groups), []
    for whole, slices in paths.packs.items():
        used = [one for one in slices if one.users]
        if len(used) > 1 and all(one in groups and _is_as_cut(groups[one][0], one, paths) for one in used):
            joined.append(((paths.above_layout(whole),), [site for one in used for site in single.pop(one)[1]]))
    return [*single.values(), *joined]


def _is_as_cut(bound: Sequence[Node], slice_: Node, paths: Paths) -> bool:
    """Whether what is bound of a slice is the slice itself or a part of it, scaled or shifted by something static."""
    for node in bound:
        while node is not slice_:
            passed = paths.passed_on(node)
            if len(passed) != 1 or not (ops.in_class(node, "layout") or ops.op_name(node) in ops.ARITHMETIC):
                return False
            node = passed[0]
    return True


def _bind_points(sites: Sequence[_Site], paths: Paths) -> tuple[Node, ...]:
    """The coefficients of sites with one anchor; sites that pass a common tensor after it share theirs."""
    clusters: list[list[Node]] = []
    for site in sites:
        trail = [node for node in paths.ancestors(site.coefficient) if ops.sizes(node) is not None]
        own = trail[:-1] if paths.above_layout(site.coefficient) is not site.anchor and len(trail) > 1 else trail[-1:]
        for i, cluster in enumerate(clusters):
            if common := [node for node in cluster if node in own]:
                clusters[i] = common
                break
        else:
            clusters.append(own)
    return tuple(dict.fromkeys(_bind_point(cluster, paths) for cluster in clusters))


def _bind_point(trail: Sequence[Node], paths: Paths) -> Node:
    """Of tensors each made from the next: the last squashed one, scaled and shifted by constants and parameters.

    Where something else is made from the same anchor, as a decay's square root beside the decay, it is the last tensor
    from which all of that is made, if there is one: whoever replaces it has replaced the anchor.
    """
    squashed = [i for i, node in enumerate(trail) if is_squashed(node)]
    last = 0
    if squashed:
        last = squashed[0]
        while last and ops.op_name(trail[last - 1]) in ops.ARITHMETIC | _CLAMPS:
            last -= 1
    anchor = paths.anchor(trail[0])
    whole = next((node for node in trail[last:] if anchor in exclusive_cone([node])), trail[last])
    return whole if squashed else paths.above_layout(whole)


def _candidate(coefficients: tuple[Node, ...], sites: Sequence[_Site], paths: Paths) -> Candidate:
    dataflow = paths.dataflow
    cone = exclusive_cone(coefficients)
    module, call = place_of(dataflow, cone, coefficients[0])
    return Candidate(
        module=module,
        call=call,
        coefficients=coefficients,
        applies=tuple(dict.fromkeys(site.apply for site in sites)),
        cone=frozenset(cone),
        parameters=count_parameters(dataflow.module, cone),
        axes=tuple(_axis_guesses(node, paths) for node in coefficients),
        form=shape_hash(cone),
        repeats=1,
        claimed_by=None,
    )


def _outermost(found: Iterable[Candidate]) -> list[Candidate]:
    """Candidates that act nowhere but inside another's cone belong to it."""
    found = list(found)
    return [
        one
        for one in found
        if not any(other is not one and all(apply in other.cone for apply in one.applies) for other in found)
    ]


def _axis_guesses(node: Node, paths: Paths) -> tuple[str, ...]:
    """A role for each axis: `sample`, `position`, a product of both, `1` for a broadcast axis, else `unit`."""
    roles: list[str] = []
    for dim, size in enumerate(ops.sizes(node) or ()):
        held = paths.roles.holds(node, dim)
        known = [role for role in (SAMPLE, POSITION) if role in held] if UNIT not in held else []
        roles.append("1" if size == 1 else "*".join(known) or "unit")
    return tuple(roles)


def stands_for(candidate: Candidate, controller: Controller) -> bool:
    """Whether a candidate hands over what a controller does: the same tensor, a piece of it, or one on the way that
    only it needs."""
    bound = {coefficient.node for coefficient in controller.coefficients}
    own = {*candidate.cone, *candidate.coefficients}
    whole = {above for node in candidate.coefficients for above in _cut_from(node)}
    return bool(bound & (own | whole) or set(candidate.coefficients) & controller.cone)


def _cut_from(node: Node) -> Iterator[Node]:
    """The tensors that a node is a piece of, in another layout, or scaled or shifted by a number: `1 + scale`."""
    passed = ops.CLASSES["layout"] | ops.ARITHMETIC
    while len(node.all_input_nodes) == 1 and (ops.is_selection(node) or ops.op_name(node) in passed):
        (node,) = node.all_input_nodes
        yield node


def _owner(candidate: Candidate, controllers: Sequence[Controller]) -> str | None:
    """The pattern whose controller a candidate stands for."""
    return next((k.pattern for k in controllers if stands_for(candidate, k)), None)

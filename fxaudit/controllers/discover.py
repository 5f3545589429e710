"""Controllers without a pattern: meetings of two paths that pass the structural tests, found from dataflow alone.

A *meeting* is a node where one operand may steer another: a product, an interpolation, a broadcast addition, a
contraction, a convolution with computed weights, or a selection by computed indices. One operand is proposed as the
coefficient when

    it depends on an input through learned ops of its own (T1, T2) and is no mask (T6);
    all of it comes through one node, the *anchor*: a learned op, a slice of what one returns, or a bounded join of few;
    it is narrow or bounded (T4): broadcast along an axis of the meeting, or squashed on the way from the anchor;
    it is not computed from a product of two input-dependent tensors, as attention weights are (T5);
    a learned op reads the result on the way to the output (T7).

Sites with a common anchor are one candidate: what a scan derives from one step size is that step size.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from fxaudit import ops
from fxaudit.axes import Size
from fxaudit.controllers.controller import Controller, place_of
from fxaudit.controllers.graphs import Dataflow, count_parameters, exclusive_cone, shape_hash

# A tensor that mixes more learned ops than this is the main path, not a coefficient.
_MOST_ROOTS = 4
_BOUNDING = ops.CLASSES["squash"] | frozenset("exp log_sigmoid log_sigmoid_forward topk argmax".split())
_CONTRACTIONS = ops.CLASSES["matmul"] | {"baddbmm", "scaled_dot_product_attention"}
_CLAMPS = frozenset(["clamp", "hardtanh", "clamp_min", "clamp_max"])
_STATISTICS = frozenset("pow sqrt rsqrt reciprocal var std linalg_vector_norm norm".split())
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


def discover(
    dataflow: Dataflow, controllers: Sequence[Controller] = (), *, sample: Size | None = None
) -> tuple[Candidate, ...]:
    """All candidates of a graph, those with the most repeats and parameters first.

    Args:
        controllers: what patterns have found; a candidate that shares nodes with one is marked as claimed by it.
        sample: the size of the input axis.
    """
    paths = _Paths(dataflow)
    by_anchor: dict[Node, list[_Site]] = {}
    for node in dataflow.nodes:
        if node.op == "call_function" and dataflow.is_dynamic(node) and paths.is_read_by_learned_op(node):
            for site in _sites(node, paths):
                for one in _parts(site, paths):
                    by_anchor.setdefault(one.anchor, []).append(one)
    found = [
        _candidate(coefficients, sites, paths, sample)
        for sites in by_anchor.values()
        for coefficients in [_bind_points(sites, paths)]
    ]
    found = [replace(one, claimed_by=_owner(one, controllers)) for one in _outermost(found)]
    counts = Counter(one.form for one in found)
    found = [replace(one, repeats=counts[one.form]) for one in found]
    return tuple(sorted(found, key=lambda c: (-c.repeats * max(c.parameters, 1), dataflow.order[c.applies[0]])))


# --- where two paths meet -------------------------------------------------------------------------------------------


def _sites(node: Node, paths: _Paths) -> Iterator[_Site]:
    """The operands of `node` that may be coefficients, each with where it is bound."""
    name = ops.op_name(node)
    if name in _SELECTORS:
        yield from _selections(node, paths)
    elif name in _CONVOLUTIONS:
        yield from _computed_weights(node, paths)
    elif name in ("mul", "lerp", "addcmul"):
        yield from _products(node, paths)
    elif name in ("add", "sub"):
        yield from _shifts(node, paths)
    elif ops.in_class(node, "matmul") and not paths.dataflow.is_learned_op(node):
        yield from _contractions(node, paths)


def _products(node: Node, paths: _Paths) -> Iterator[_Site]:
    operands = list(dict.fromkeys(paths.dataflow.operands(node)))
    sides = [side for side in operands if paths.is_own_path(side, [v for v in operands if v is not side])]
    if len(operands) < 2 or not sides:
        return
    sides = [side for side in sides if not paths.pools_positions(side)]
    bounded = [side for side in sides if paths.is_bounded(side)]
    narrow = [side for side in sides if paths.is_narrow(side, node)]
    static = any(not paths.dataflow.is_dynamic(side) for side in operands)
    if static:
        # A parameter that scales is no apply site; a bank or bias that a narrow gate scales is one (T10).
        chosen = [side for side in bounded if side in narrow]
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


def _shifts(node: Node, paths: _Paths) -> Iterator[_Site]:
    operands = list(dict.fromkeys(paths.dataflow.operands(node)))
    if len(operands) != 2 or not all(map(paths.dataflow.is_dynamic, operands)):
        return
    narrow = [side for side in operands if paths.is_narrow(side, node)]
    if len(narrow) == 1 and paths.is_own_path(narrow[0], [side for side in operands if side is not narrow[0]]):
        yield _Site(narrow[0], node, paths.anchor(narrow[0]))


def _contractions(node: Node, paths: _Paths) -> Iterator[_Site]:
    operands = list(dict.fromkeys(paths.dataflow.operands(node)))
    if len(operands) < 2:
        return
    sides = [side for side in operands if paths.is_own_path(side, [v for v in operands if v is not side])]
    sides = [side for side in sides if not paths.pools_positions(side)]
    bounded = [side for side in sides if paths.is_bounded(side)]
    for side in bounded or [side for side in sides if paths.mixes_at_each_position(side, node)]:
        yield _Site(side, node, paths.anchor(side))


def _computed_weights(node: Node, paths: _Paths) -> Iterator[_Site]:
    weight = node.args[1]
    if not isinstance(weight, Node) or not paths.dataflow.is_dynamic(weight):
        return
    bank = paths.above_layout(weight)
    mixed = paths.dataflow.is_learned_op(bank)
    coefficient = next(filter(paths.dataflow.is_dynamic, paths.dataflow.operands(bank))) if mixed else weight
    if paths.is_learned(coefficient):
        yield _Site(coefficient, node, paths.anchor(coefficient))


def _selections(node: Node, paths: _Paths) -> Iterator[_Site]:
    for side in paths.dataflow.operands(node):
        dtype = ops.dtype(side)
        if dtype is None or dtype.is_floating_point or not paths.is_ranked(side):
            continue
        yield _Site(side, node, paths.anchor(side))


def _is_written_out(node: Node, side: Node, paths: _Paths) -> bool:
    """Whether a product belongs to an outer product or a contraction written out, whose sides have equal rights."""
    for operand in paths.dataflow.operands(node):
        core = paths.above_layout(operand)
        product = [node] if operand is side else [node, core] if ops.op_name(core) == "mul" else [node]
        for one in product:
            if all(paths.is_narrow(factor, one) for factor in paths.dataflow.operands(one)):
                return True
    return _is_summed(node, side, paths)


def _is_summed(node: Node, side: Node, paths: _Paths) -> bool:
    """Whether a product is a contraction written out: summed over an axis along which `side` is not broadcast."""
    sums = [user for user in node.users if ops.op_name(user) == "sum"]
    if len(sums) != len(node.users):
        return False
    sizes, whole = paths.tight_sizes(side), ops.sizes(node) or ()
    sizes = (1,) * (len(whole) - len(sizes)) + tuple(sizes)
    for user in sums:
        dims = ops.attributes(user).get("dim") or []
        if any(sizes[d % len(whole)] != 1 for d in (dims if isinstance(dims, list | tuple) else [dims])):
            return True
    return False


def _parts(site: _Site, paths: _Paths) -> Iterator[_Site]:
    """The site, or where its anchor joins paths that were squashed before, one for each of those that join."""
    joined = paths.joined_by(site.anchor)
    if not any(paths.was_squashed(source) for source in joined):
        yield site
        return
    for source in dict.fromkeys(joined):
        if paths.is_learned(source):
            yield from _parts(_Site(source, site.apply, paths.anchor(source)), paths)


# --- paths ----------------------------------------------------------------------------------------------------------


class _Paths:
    """For each node: its learned sources, and the tree of nodes through which all of it passes.

    A *source* is a runtime input, a learned op or a slice of what a learned op returns. The parent of a node is the
    nearest node through which all its input-dependent operands pass (their lowest common dominator below the sources);
    a node without one is a source or a *join*. The topmost ancestor is the anchor.
    """

    def __init__(self, dataflow: Dataflow) -> None:
        self.dataflow = dataflow
        self._sources: dict[Node, int] = {}
        self._parent: dict[Node, Node | None] = {}
        self._depth: dict[Node, int] = {}
        self._learned = 0
        self._product: set[Node] = set()
        self.positions = _position_sizes(dataflow)
        self.has_images = any(node.op == "placeholder" and len(ops.sizes(node) or ()) == 4 for node in dataflow.nodes)
        for index, node in enumerate(dataflow.nodes):
            if not dataflow.is_dynamic(node):
                continue
            operands = [source for source in dataflow.operands(node) if dataflow.is_dynamic(source)]
            learned = dataflow.is_learned_op(node)
            if not operands or learned or self._is_packed_slice(node, operands):
                self._sources[node], self._parent[node], self._depth[node] = 1 << index, None, 0
                self._learned |= (1 << index) if operands else 0
                continue
            mask = 0
            for operand in operands:
                mask |= self._sources[operand]
            parent: Node | None = operands[0]
            for operand in operands[1:]:
                parent = self._meet(parent, operand)
            self._sources[node], self._parent[node] = mask, parent
            self._depth[node] = 0 if parent is None else self._depth[parent] + 1
            if any(operand in self._product for operand in operands) or (
                ops.op_name(node) in _CONTRACTIONS and len(set(operands)) > 1
            ):
                self._product.add(node)
        self._read = self._read_by_learned_ops()

    def _meet(self, a: Node | None, b: Node | None) -> Node | None:
        while a is not b:
            if a is None or b is None:
                return None
            if self._depth[a] >= self._depth[b]:
                a = self._parent[a]
            else:
                b = self._parent[b]
        return a

    def _is_packed_slice(self, node: Node, operands: Sequence[Node]) -> bool:
        """Whether a node is a feature slice of what a learned op returns, reshaped or not."""
        if not ops.is_selection(node) or len(operands) != 1:
            return False
        source = operands[0]
        split = source if ops.op_name(node) == "getitem" else node
        dim = ops.attributes(split).get("dim", 0)
        whole = ops.sizes(self.dataflow.operands(split)[0])
        if whole is None or not isinstance(dim, int):
            return False
        dim %= len(whole)
        if dim == 0 or whole[dim] in self.positions:
            return False
        made = self.dataflow.operands(split)[0] if split is source else source
        return self.dataflow.is_learned_op(self.above_layout(made))

    def _read_by_learned_ops(self) -> set[Node]:
        read: set[Node] = set()
        for node in reversed(self.dataflow.nodes):
            if any(user in read or self.dataflow.is_learned_op(user) for user in node.users):
                read.add(node)
        return read

    def is_read_by_learned_op(self, node: Node) -> bool:
        """T7: whether the result goes on through weights, and is not an output head."""
        return node in self._read

    def above_layout(self, node: Node) -> Node:
        """The node whose values `node` holds in another layout, all of them."""
        while ops.in_class(node, "layout") and not ops.is_selection(node) and len(self.dataflow.operands(node)) == 1:
            source = self.dataflow.operands(node)[0]
            if ops.sizes(source) is None:  # one of several outputs
                break
            node = source
        return node

    def anchor(self, node: Node) -> Node:
        while (parent := self._parent[node]) is not None:
            node = parent
        return node

    def ancestors(self, node: Node) -> list[Node]:
        """The node and all through which it passes, up to the anchor."""
        found = [node]
        while (parent := self._parent[found[-1]]) is not None:
            found.append(parent)
        return found

    def joined_by(self, anchor: Node) -> list[Node]:
        """The input-dependent operands of an anchor that is a join; none of one that is a source."""
        if self._sources[anchor].bit_count() == 1:
            return []
        return [source for source in self.dataflow.operands(anchor) if self.dataflow.is_dynamic(source)]

    def was_squashed(self, node: Node) -> bool:
        """Whether a node, or something that joins in it, is squashed."""
        return self.is_bounded(node) or any(map(self.was_squashed, self.joined_by(self.anchor(node))))

    def is_learned(self, node: Node) -> bool:
        mask = self._sources.get(node, 0)
        return mask & self._learned != 0 and mask.bit_count() <= _MOST_ROOTS

    def is_own_path(self, side: Node, others: Sequence[Node]) -> bool:
        """T1, T2, T5, T6: whether `side` has learned sources that none of the others has, and passes one anchor."""
        dtype = ops.dtype(side)
        if not self.dataflow.is_dynamic(side) or dtype is None or not dtype.is_floating_point:
            return False
        if not self.is_learned(side) or side in self._product:
            return False
        shared = functools.reduce(lambda mask, other: mask | self._sources.get(other, 0), others, 0)
        if not self._sources[side] & self._learned & ~shared:
            return False
        return self._sources[side].bit_count() == 1 or self.is_bounded(side)

    def is_bounded(self, node: Node) -> bool:
        """T4: whether a node is squashed on the way from its anchor; a clamp counts when it leaves [0, 1]."""
        return any(ops.op_name(step) in _BOUNDING or _is_unit_clamp(step) for step in self.ancestors(node))

    def is_statistic(self, node: Node) -> bool:
        """T3: whether a node is a norm or a moment."""
        return any(ops.op_name(step) in _STATISTICS for step in self.ancestors(node))

    def is_ranked(self, node: Node) -> bool:
        """T9: whether a tensor of indices was chosen by ranking learned scores."""
        if node not in self._sources or not self.is_learned(node):
            return False
        return any(ops.op_name(step) in ("topk", "argmax", "sort", "argsort", "max") for step in self.ancestors(node))

    def tight_sizes(self, node: Node) -> tuple[Size, ...]:
        """The sizes before broadcasting."""
        while ops.op_name(node) in ("expand", "repeat", "clone", "expand_as", "contiguous", "to"):
            node = self.dataflow.operands(node)[0]
        return ops.sizes(node) or ()

    def is_narrow(self, side: Node, node: Node) -> bool:
        """T4: whether `side` is broadcast along an axis of `node`."""
        whole, sizes = ops.sizes(node) or (), self.tight_sizes(side)
        sizes = (1,) * (len(whole) - len(sizes)) + tuple(sizes)
        return any(a == 1 and b != 1 for a, b in zip(sizes, whole, strict=False))

    def pools_positions(self, side: Node) -> bool:
        """T5: whether `side` is a softmax over an axis that no learned op made."""
        for step in self.ancestors(side):
            if ops.op_name(step) == "softmax":
                whole = ops.sizes(step) or ()
                axis = whole[int(ops.attributes(step)["dim"]) % len(whole)]
                # Over one element it is constant.
                return axis == 1 or axis in self.positions or not _divides(axis, self._features(self.anchor(side)))
        return False

    def _features(self, anchor: Node) -> Size:
        """The number of features that a learned op, or the slice of it that the anchor is, returns."""
        sizes = ops.sizes(anchor) or (1,)
        if ops.is_selection(anchor):
            split = self.dataflow.operands(anchor)[0] if ops.op_name(anchor) == "getitem" else anchor
            return sizes[int(ops.attributes(split).get("dim", 0))]
        return sizes[1] if ops.op_name(anchor) in _CONVOLUTIONS else sizes[-1]

    def mixes_at_each_position(self, side: Node, node: Node) -> bool:
        """Whether a contraction mixes few values separately at each position, with weights from one source."""
        whole, sizes = ops.sizes(node) or (), ops.sizes(side) or ()
        if self._sources[side].bit_count() != 1 or len(whole) < 3 or not self.positions:
            return False
        batch = functools.reduce(lambda a, b: a * b, whole[:-2], 1)
        return any(_divides(p, batch) for p in self.positions) and all(_is_small(s) for s in sizes[-2:])


def _is_unit_clamp(node: Node) -> bool:
    if ops.op_name(node) not in ("clamp", "hardtanh"):
        return False
    given = ops.attributes(node)
    return (given.get("min", given.get("min_val")), given.get("max", given.get("max_val"))) == (0, 1)


def _divides(size: Size, whole: Size) -> bool:
    return bool(whole % size == 0)


def _is_small(size: Size) -> bool:
    return isinstance(size, int) and size <= 32


def _position_sizes(dataflow: Dataflow) -> set[Size]:
    """Sizes of the position axis: the second axis of token ids and of sequences of vectors."""
    found: set[Size] = set()
    for node in dataflow.nodes:
        sizes, dtype = ops.sizes(node), ops.dtype(node)
        if node.op != "placeholder" or sizes is None or dtype is None:
            continue
        if len(sizes) == (3 if dtype.is_floating_point else 2):
            found.add(sizes[1])
    return found - {1}


# --- candidates -----------------------------------------------------------------------------------------------------


def _bind_points(sites: Sequence[_Site], paths: _Paths) -> tuple[Node, ...]:
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


def _bind_point(trail: Sequence[Node], paths: _Paths) -> Node:
    """Of tensors each made from the next: the last squashed one, scaled and shifted by constants and parameters."""
    squashed = [i for i, node in enumerate(trail) if ops.op_name(node) in _BOUNDING or _is_unit_clamp(node)]
    if not squashed:
        return paths.above_layout(trail[0])
    i = squashed[0]
    while i and ops.op_name(trail[i - 1]) in ops.ARITHMETIC | _CLAMPS:
        i -= 1
    return trail[i]


def _candidate(coefficients: tuple[Node, ...], sites: Sequence[_Site], paths: _Paths, sample: Size | None) -> Candidate:
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
        axes=tuple(_axis_guesses(node, paths, sample) for node in coefficients),
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


def _axis_guesses(node: Node, paths: _Paths, sample: Size | None) -> tuple[str, ...]:
    """A role for each axis: `sample`, `position`, `1` for a broadcast axis, else `unit`."""
    roles: list[str] = []
    sizes = ops.sizes(node) or ()
    for i, size in enumerate(sizes):
        if size == 1:
            roles.append("1")
        elif paths.has_images and len(sizes) == 4 and i > 1:
            roles.append("position")
        elif sample is not None and size == sample:
            roles.append("sample")
        elif sample is not None and _divides(sample, size) and size != sample:
            roles.append("sample*position")
        else:
            roles.append("position" if size in paths.positions else "unit")
    return tuple(roles)


def stands_for(candidate: Candidate, controller: Controller) -> bool:
    """Whether a candidate hands over what a controller does: the same tensor, or one on the way that only it needs."""
    bound = {coefficient.node for coefficient in controller.coefficients}
    own = {*candidate.cone, *candidate.coefficients}
    return bool(bound & own or set(candidate.coefficients) & controller.cone)


def _owner(candidate: Candidate, controllers: Sequence[Controller]) -> str | None:
    """The pattern whose controller a candidate stands for."""
    return next((k.pattern for k in controllers if stands_for(candidate, k)), None)

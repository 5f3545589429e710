"""For each node of a graph, through what all of it passes on the way from learned ops, and what it may steer."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch.fx import Node

from fxaudit import ops
from fxaudit.axes import Size
from fxaudit.controllers.graphs import Dataflow
from fxaudit.controllers.roles import POSITION, SAMPLE, WINDOW, AxisRoles
from fxaudit.controllers.structure import is_norm

# A tensor that mixes more learned ops than this is the main path, not a coefficient.
_MOST_ROOTS = 4
_BOUNDING = ops.CLASSES["squash"] | frozenset("exp log_sigmoid log_sigmoid_forward topk argmax".split())
_CONTRACTIONS = ops.CLASSES["matmul"] | {"baddbmm", "scaled_dot_product_attention"}
_STATISTICS = frozenset("pow sqrt rsqrt reciprocal var std linalg_vector_norm norm".split())
_RANKINGS = frozenset("topk argmax sort argsort max".split())
_LOOK_UPS = frozenset(["embedding", "index", "index_select", "gather"])
_FILLS = frozenset("zeros zeros_like new_zeros full full_like new_full".split())
_COPIES = frozenset("expand repeat clone expand_as contiguous to".split())


class Paths:
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
        self._bounded: set[Node] = set()
        self._ranked: set[Node] = set()
        self.packs: dict[Node, list[Node]] = {}  # what a learned op returns -> the slices that are taken of it
        self.roles = AxisRoles(dataflow)
        for index, node in enumerate(dataflow.nodes):
            if not dataflow.is_dynamic(node):
                continue
            operands = self.passed_on(node)
            learned = dataflow.is_learned_op(node)
            is_slice = self._is_packed_slice(node, operands)
            if is_slice:
                self.packs.setdefault(self.pack_of(node), []).append(node)
            if not operands or learned or is_slice:
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
            for steps, marked in ((_RANKINGS, self._ranked), (_BOUNDING, self._bounded)):
                if ops.op_name(node) in steps or all(operand in marked for operand in operands):
                    marked.add(node)
            if is_unit_clamp(node):
                self._bounded.add(node)
            if any(operand in self._product for operand in operands) or (
                ops.op_name(node) in _CONTRACTIONS and len(set(operands)) > 1
            ):
                self._product.add(node)
        self._read = self._read_with_weights()

    def passed_on(self, node: Node) -> list[Node]:
        """The operands whose values a node passes on.

        Masks and indices say which values, they are none themselves; the inverse of a reduction only normalises.
        """
        dynamic = [source for source in self.dataflow.operands(node) if self.dataflow.is_dynamic(source)]
        if is_whole(node):
            return dynamic
        values = [source for source in dynamic if not is_whole(source)] or dynamic
        if ops.op_name(node) == "mul" and len(values) == 2:
            values = [source for source in values if not is_norm(self.dataflow, source)] or values
        return values

    def pack_of(self, node: Node) -> Node:
        """The tensor of which a packed slice is one."""
        cut = self.dataflow.operands(node)[0]
        return self.dataflow.operands(cut)[0] if ops.op_name(node) == "getitem" else cut

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
        if self.roles.holds(self.dataflow.operands(split)[0], dim) & {SAMPLE, POSITION, WINDOW}:
            return False
        made = self.above_layout(self.dataflow.operands(split)[0] if split is source else source)
        # Scaled or shifted by something static before it is cut. Single elements that are picked of such a tensor are
        # the taps of one mixture, not features side by side.
        is_cut = len(ops.sizes(node) or ()) == len(whole)
        while is_cut and ops.op_name(made) in ops.ARITHMETIC and len(scaled := self.passed_on(made)) == 1:
            made = self.above_layout(scaled[0])
        return self.dataflow.is_learned_op(made)

    def _read_with_weights(self) -> set[Node]:
        read: set[Node] = set()
        for node in reversed(self.dataflow.nodes):
            if any(user in read or self._applies_weights(user) for user in node.users):
                read.add(node)
        return read

    def _applies_weights(self, node: Node) -> bool:
        return any(map(self.dataflow.is_learned_static, self.dataflow.operands(node)))

    def goes_on_through_weights(self, node: Node) -> bool:
        """T7: whether the result goes on through weights, and is not an output head."""
        return node in self._read

    def above_layout(self, node: Node) -> Node:
        """The node whose values `node` holds in another layout, all of them."""
        while ops.in_class(node, "layout") and len(self.dataflow.operands(node)) == 1:
            source = self.dataflow.operands(node)[0]
            if ops.sizes(source) is None:  # one of several outputs
                break
            if ops.is_selection(node) and ops.sizes(node) != ops.sizes(source):
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
        return self.passed_on(anchor)

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
        values = [other for other in others if not is_whole(other)]
        shared = functools.reduce(lambda mask, other: mask | self._sources.get(other, 0), values, 0)
        if not self._sources[side] & self._learned & ~shared:
            return False
        return self._sources[side].bit_count() == 1 or self.is_bounded(side)

    def is_bounded(self, node: Node) -> bool:
        """T4: whether a node is squashed on every way from its sources; a clamp counts when it leaves [0, 1]."""
        return node in self._bounded

    def is_stored(self, node: Node) -> bool:
        """Whether a node is made from a parameter or buffer of the model, or is a state before its first step."""
        if ops.op_name(self.above_layout(node)) in _FILLS:
            return True
        return any(source.op == "get_attr" for source in self.dataflow.walk_back([node], self.dataflow.is_dynamic))

    def is_looked_up(self, node: Node) -> bool:
        """Whether a node is rows of a learned table, in any layout: an embedding, or the weights of a chosen expert."""
        source = self.above_layout(node)
        return ops.op_name(source) in _LOOK_UPS and self.dataflow.is_learned_op(source)

    def is_encoding(self, node: Node) -> bool:
        """Whether a node is what a table holds for an input, in any layout: how that input enters the model."""
        source = self.above_layout(node)
        if not self.is_looked_up(node):
            return False
        ids = [operand for operand in self.dataflow.operands(source) if self.dataflow.is_dynamic(operand)]
        return all(self._sources.get(self.above_layout(one), 0) & self._learned == 0 for one in ids)

    def is_statistic(self, node: Node) -> bool:
        """T3: whether a node is a norm or a moment."""
        return any(ops.op_name(step) in _STATISTICS for step in self.ancestors(node))

    def is_ranked(self, node: Node) -> bool:
        """T9: whether a tensor of indices was chosen by ranking learned scores."""
        return node in self._ranked and self.is_learned(node)

    def tight_sizes(self, node: Node) -> tuple[Size, ...]:
        """The sizes before broadcasting, and before something static is added, such as static taps."""
        while (name := ops.op_name(node)) in _COPIES or name == "add":
            passed = self.passed_on(node)
            if name == "add" and (len(passed) != 1 or len(ops.sizes(passed[0]) or ()) != len(ops.sizes(node) or ())):
                break
            node = passed[0]
        return ops.sizes(node) or ()

    def is_narrow(self, side: Node, node: Node) -> bool:
        """T4: whether `side` is broadcast along an axis of `node`."""
        whole, sizes = ops.sizes(node) or (), self.tight_sizes(side)
        sizes = (1,) * (len(whole) - len(sizes)) + tuple(sizes)
        return any(a == 1 and b != 1 for a, b in zip(sizes, whole, strict=False))

    def pools_positions(self, side: Node) -> bool:
        """T5: whether `side` is a softmax over positions; over one element it is constant."""
        for step in self.ancestors(side):
            if ops.op_name(step) == "softmax":
                dim = int(ops.attributes(step)["dim"])
                return (ops.sizes(step) or (1,))[dim] == 1 or self.roles.is_spread(step, dim)
        return False

    def moves_positions(self, side: Node, node: Node) -> bool:
        """T5: whether a contraction with `side` makes positions from positions, as attention does."""
        operands = self.dataflow.operands(node)
        if len(operands) != 2 or side not in operands:
            return False
        other = operands[1 - operands.index(side)]
        for contracted, kept in _contracted_axes(node, operands.index(side)):
            sizes = ops.sizes(side) or ()
            if self.roles.is_spread(other, contracted) and any(sizes[dim] != 1 for dim in kept):
                return True
        return False

    def mixes_at_each_position(self, side: Node, node: Node) -> bool:
        """Whether a contraction mixes few values separately at each position, with weights from one source."""
        whole, sizes = ops.sizes(node) or (), ops.sizes(side) or ()
        if self._sources[side].bit_count() != 1 or len(whole) < 3 or self.is_looked_up(side):
            return False
        batch = frozenset().union(*(self.roles.holds(node, dim) for dim in range(len(whole) - 2)))
        if any(self.roles.is_spread(side, dim) for dim in (-2, -1)):
            return False
        return POSITION in batch and all(_is_small(size) for size in sizes[-2:])


def is_whole(node: Node) -> bool:
    """Whether a node holds whole numbers or truth values."""
    dtype = ops.dtype(node)
    return dtype is not None and not dtype.is_floating_point and not dtype.is_complex


def is_squashed(node: Node) -> bool:
    """Whether a node bounds its operand."""
    return ops.op_name(node) in _BOUNDING or is_unit_clamp(node)


def _contracted_axes(node: Node, which: int) -> list[tuple[int, list[int]]]:
    """Of a contraction, each axis of the other operand that is summed over, and what operand `which` keeps."""
    if ops.op_name(node) != "einsum":
        return [(-2, [-2])] if which == 0 else [(-1, [-1])]
    terms, _, result = str(ops.attributes(node)["equation"]).replace(" ", "").partition("->")
    letters = terms.split(",")
    own, other = letters[which], letters[1 - which]
    kept = [dim for dim, letter in enumerate(own) if letter in result and letter not in other]
    return [(dim, kept) for dim, letter in enumerate(other) if letter in own and letter not in result]


def is_unit_clamp(node: Node) -> bool:
    if ops.op_name(node) not in ("clamp", "hardtanh"):
        return False
    given = ops.attributes(node)
    return (given.get("min", given.get("min_val")), given.get("max", given.get("max_val"))) == (0, 1)


def _is_small(size: Size) -> bool:
    return isinstance(size, int) and size <= 32

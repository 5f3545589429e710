"""Structural tests that every match must pass, so that pattern authors need not repeat them.

Let P(v) be the nodes reachable backward from v through ops that neither learn nor select, up to and including the first
learned op or selection; the *head* of a coefficient c is what computes it from its last learned ops on. A coefficient c
applied to a value v is a controller only if

    T1  c depends on the values of a runtime input, not only on positions, masks, shapes or parameters;
    T2  the part of c that lies outside P(v) contains a learned op: otherwise c is a function of v along v's own path,
        as in SiLU, hard-swish, GELU and softcaps;
    T3  c is no norm: no inverse and no ratio of reductions;
    T4  c is narrow (broadcast over some axis of v) or passes through a bounded head: otherwise it is a GLU's half; over
        a v that no input reaches it is narrow, otherwise it is the data and v its weight;
    T5  c is no attention weight: no softmax of a product of two data operands, none over positions;
    T6  c is a floating-point tensor, and no mask that comparisons made;
    T7  what c is applied to reaches a model output, and is more than a constant scale of an output head.

T8 (what a scan computes from its coefficients belongs to the scan) is `overlaps`; T9 (what passed through a choice is
discrete) is `is_discrete`; T10: v may be a parameter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence

from torch.fx import Node

from fxaudit import ops
from fxaudit.controllers.graphs import Dataflow

_CARRIERS = ("layout", "gather")
_PLAIN = ("layout", "pointwise")
_CARRIER_STEPS = 12
_SQUASHES = frozenset("sigmoid hardsigmoid tanh softmax softplus log_sigmoid log_sigmoid_forward log_softmax".split())
# What bounds its result, or is bounded on the way into a scan, as a decay under `exp` is; clamps are hard sigmoids
# written out, `exp` and `log1p` a softplus.
_BOUNDED = _SQUASHES | frozenset("hardtanh clamp relu6 exp log1p erf".split())
_COMPARISONS = frozenset(
    "gt ge lt le eq ne logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not isinf".split()
)
_INVERSES = frozenset(["rsqrt", "reciprocal", "div"])
_REDUCTIONS = frozenset("sum mean var std amax amin max linalg_vector_norm norm prod logsumexp".split())
_CHOICES = frozenset("topk sort argsort argmax argmin multinomial".split())
_WIDENING = frozenset("expand expand_as repeat repeat_interleave".split())
_ELEMENTWISE = frozenset("mul add sub div".split())


def refusal(
    dataflow: Dataflow,
    coefficient: Node,
    apply: Node,
    *,
    waives: Collection[str] = (),
    selects: bool = False,
    positions: Collection[int] = (),
) -> str | None:
    """Why `coefficient`, applied at `apply`, is no controller; None when it is one.

    Args:
        waives: tests that the pattern's family fails by nature.
        selects: whether the coefficient chooses, so that it may be 0 or 1.
        positions: the dimensions of the coefficient that are positions.
    """
    values = value_operands(dataflow, coefficient, apply)
    tests: tuple[tuple[str, Callable[[], str | None]], ...] = (
        ("T6", lambda: _not_a_number(dataflow, coefficient, selects)),
        ("T1", lambda: _not_dynamic(dataflow, coefficient)),
        ("T2", lambda: _not_learned(dataflow, coefficient, values)),
        ("T3", lambda: _a_norm(dataflow, coefficient)),
        ("T4", lambda: _a_wide_factor(dataflow, coefficient, apply, values)),
        ("T5", lambda: _attention(dataflow, coefficient, positions)),
        ("T7", lambda: _an_output_head(dataflow, apply, values)),
    )
    for test, reason_of in tests:
        if test not in waives and (reason := reason_of()) is not None:
            return f"{reason} ({test})"
    return None


# --- T1, T2, T6 -----------------------------------------------------------------------------------------------------


def _not_a_number(dataflow: Dataflow, coefficient: Node, selects: bool) -> str | None:
    dtype = ops.dtype(coefficient)
    if dtype is None or not dtype.is_floating_point:
        return f"`coefficient` is {dtype}, a mask or an index, not a coefficient"
    if not selects and _is_mask(dataflow, coefficient):
        return "`coefficient` is a mask that a comparison made, not a coefficient"
    return None


def _is_mask(dataflow: Dataflow, node: Node) -> bool:
    """Whether all that is dynamic in a node is comparisons in another layout, dtype or arithmetic."""
    pending, found = [node], False
    seen = {node}
    while pending:
        current = pending.pop()
        if dataflow.name(current) in _COMPARISONS:
            found = True
            continue
        if current.op != "call_function" or not _is_plain(dataflow, current):
            return False
        new = [s for s in dataflow.operands(current) if dataflow.is_dynamic(s) and s not in seen]
        seen.update(new)
        pending.extend(new)
    return found


def _is_plain(dataflow: Dataflow, node: Node) -> bool:
    """Whether a node is a layout or an elementwise op."""
    return not dataflow.kinds(node).isdisjoint(_PLAIN)


def _not_dynamic(dataflow: Dataflow, coefficient: Node) -> str | None:
    if not dataflow.is_dynamic(coefficient):
        return "`coefficient` does not depend on the values of any input"
    if not dataflow.reads_content(coefficient):
        return "`coefficient` depends on positions or masks only, not on the values of any input"
    return None


def _not_learned(dataflow: Dataflow, coefficient: Node, values: list[Node]) -> str | None:
    own_path = same_path(dataflow, values)
    is_outside = dataflow.reaches_back(
        coefficient,
        lambda node: dataflow.is_learned_op(node) and node not in own_path,
        lambda node: node in own_path or not dataflow.is_dynamic(node),
    )
    if not is_outside:
        return "`coefficient` has no learned op of its own: it is a function of the value that it multiplies"
    return None


# --- T3, T4, T5 -----------------------------------------------------------------------------------------------------


def _head(dataflow: Dataflow, coefficient: Node) -> list[Node]:
    """What computes a coefficient from its last learned ops on, those left out."""
    found = dataflow.walk_back([coefficient], lambda n: dataflow.is_learned_op(n) or not dataflow.is_dynamic(n))
    return [n for n in found if n.op == "call_function" and dataflow.is_dynamic(n) and not dataflow.is_learned_op(n)]


def _a_norm(dataflow: Dataflow, coefficient: Node) -> str | None:
    if is_norm(dataflow, coefficient):
        return "`coefficient` is an inverse or a ratio of reductions, as in a norm"
    return None


def is_norm(dataflow: Dataflow, node: Node) -> bool:
    """Whether a node is an inverse or a ratio of statistics: of reductions, or elementwise arithmetic on them."""
    inverse = False
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        name = dataflow.name(current)
        if name in _REDUCTIONS or (name == "getitem" and _is_reduction_output(current)):
            continue
        if name in _SQUASHES or current.op != "call_function" or dataflow.is_learned_op(current):
            return False
        if not _is_plain(dataflow, current):
            return False
        inverse = inverse or name in _INVERSES or (name == "pow" and _is_negative(current))
        new = [s for s in dataflow.operands(current) if dataflow.is_dynamic(s) and s not in seen]
        seen.update(new)
        pending.extend(new)
    return inverse


def _is_reduction_output(node: Node) -> bool:
    source = node.args[0]
    return isinstance(source, Node) and ops.op_name(source) in ("max", "min", "var_mean", "std_mean")


def _is_negative(node: Node) -> bool:
    exponent = node.args[1] if len(node.args) > 1 else None
    return isinstance(exponent, int | float) and exponent < 0


def _a_wide_factor(dataflow: Dataflow, coefficient: Node, apply: Node, values: list[Node]) -> str | None:
    if dataflow.name(apply) not in _ELEMENTWISE or not values:
        return None
    carried = [node for node in dataflow.operands(apply) if node not in values]
    way = way_to(dataflow, coefficient, apply)
    if any(dataflow.name(n) in _WIDENING for n in way):
        return None
    if any(ops.sizes(operand) != ops.sizes(apply) for operand in carried):
        return None
    if _is_widened_by_a_bias(dataflow, coefficient):
        return None
    if not any(map(dataflow.is_dynamic, values)):
        return "`coefficient` is the data, scaled by a constant"
    if any(dataflow.name(n) in _BOUNDED for n in (*_head(dataflow, coefficient), *way)):
        return None
    return "`coefficient` is as wide as the value and unbounded: half of a GLU"


def _is_widened_by_a_bias(dataflow: Dataflow, coefficient: Node) -> bool:
    """Whether a coefficient is a narrower one and something static, such as static taps, added to it."""
    if ops.op_name(coefficient) not in ("add", "sub"):
        return False
    dynamic = [node for node in dataflow.operands(coefficient) if dataflow.is_dynamic(node)]
    return len(dynamic) == 1 and ops.sizes(dynamic[0]) != ops.sizes(coefficient)


def way_to(dataflow: Dataflow, coefficient: Node, apply: Node) -> list[Node]:
    """The nodes from the coefficient to the operands of `apply` that carry it, the coefficient included."""
    values = value_operands(dataflow, coefficient, apply)
    carried = [node for node in dataflow.operands(apply) if node not in values]
    return [n for operand in carried for n in _way(dataflow, operand, coefficient)]


def _way(dataflow: Dataflow, operand: Node, coefficient: Node) -> list[Node]:
    """The nodes from the coefficient to one that is computed from it, both included."""
    first = dataflow.order[coefficient]
    behind = dataflow.walk_back([operand], lambda n: dataflow.order[n] <= first or dataflow.is_learned_op(n))
    found = {coefficient}
    for node in sorted(behind, key=dataflow.order.__getitem__):
        if any(source in found for source in dataflow.operands(node)):
            found.add(node)
    return list(found)


def _attention(dataflow: Dataflow, coefficient: Node, positions: Collection[int]) -> str | None:
    for node in _through_arithmetic(dataflow, coefficient):
        if dataflow.name(node) != "softmax":
            continue
        if any(_is_product(dataflow, n) for n in _through_arithmetic(dataflow, node)):
            return "`coefficient` is a softmax of a product of two data operands: an attention weight"
        rank = len(ops.sizes(node) or ())
        dim = ops.attributes(node).get("dim")
        if isinstance(dim, int) and rank == len(ops.sizes(coefficient) or ()) and dim % rank in positions:
            return "`coefficient` is a softmax over positions: pooling by attention"
    return None


def _through_arithmetic(dataflow: Dataflow, start: Node) -> Iterator[Node]:
    """The nodes behind `start` through layout and elementwise ops; where those end, the node that is neither, too."""
    queue, seen = deque([start]), {start}
    while queue:
        node = queue.popleft()
        yield node
        passes = _is_plain(dataflow, node) or dataflow.name(node) == "masked_fill"
        if node is start or (passes and not dataflow.is_learned_op(node)):
            new = [s for s in dataflow.operands(node) if dataflow.is_dynamic(s) and s not in seen]
            seen.update(new)
            queue.extend(new)


def _is_product(dataflow: Dataflow, node: Node) -> bool:
    """Whether a node contracts two data operands, as queries with keys."""
    is_matmul = dataflow.is_a(node, "matmul") or dataflow.name(node) == "baddbmm"
    return is_matmul and sum(map(dataflow.is_dynamic, dataflow.operands(node))) >= 2


# --- T7, T9 ---------------------------------------------------------------------------------------------------------


def _an_output_head(dataflow: Dataflow, apply: Node, values: list[Node]) -> str | None:
    if not dataflow.reaches_output(apply):
        return "what `coefficient` is applied to never reaches a model output"
    if any(map(dataflow.is_dynamic, values)):
        return None
    if not values:
        return "`coefficient` is applied to a number: nothing but a scale"
    queue, seen = deque([apply]), {apply}
    while queue:
        for user in queue.popleft().users:
            if user in seen or user.op == "output":
                continue
            if sum(map(dataflow.is_dynamic, dataflow.operands(user))) > 1 or dataflow.is_learned_op(user):
                return None
            seen.add(user)
            queue.append(user)
    return "`coefficient` only scales a model output: an output head"


def is_discrete(dataflow: Dataflow, bound: Sequence[Node], apply: Node) -> bool:
    """Whether a choice (top-k, argmax, sort) stands on the way to the bound nodes, or from them to `apply` (T9)."""
    if any(dtype is not None and not dtype.is_floating_point for dtype in map(ops.dtype, bound)):
        return True
    ways = way_to(dataflow, applied(dataflow, bound, apply), apply)
    nodes = [n for node in bound for n in _head(dataflow, node)]
    return any(dataflow.name(n) in _CHOICES or _is_indexed_maximum(n) for n in (*nodes, *ways))


def _is_indexed_maximum(node: Node) -> bool:
    return ops.op_name(node) == "max" and len(node.args) > 1


# --- what is applied to what ----------------------------------------------------------------------------------------


def value_operands(dataflow: Dataflow, coefficient: Node, apply: Node) -> list[Node]:
    """The operands of `apply` that do not carry the coefficient: what it is applied to. Masks and indices are none."""
    operands = [node for node in dataflow.operands(apply) if not _is_whole(node)]
    if dataflow.name(apply) == "add" and all(dataflow.depends(node, coefficient) for node in operands):
        # As in g * new + (1 - g) * old: what each term scales.
        return [value for node in operands for value in value_operands(dataflow, coefficient, node)]
    carriers = [node for node in operands if carries(dataflow, node, coefficient)]
    if not carriers:
        carriers = _nearest(dataflow, operands, coefficient)
    return [node for node in operands if node not in carriers]


def _is_whole(node: Node) -> bool:
    """Whether a node holds whole numbers or truth values."""
    dtype = ops.dtype(node)
    return dtype is not None and not dtype.is_floating_point and not dtype.is_complex


def _nearest(dataflow: Dataflow, operands: list[Node], coefficient: Node) -> list[Node]:
    """Of the operands that are computed from the coefficient, those that take the fewest steps.

    In an unrolled scan both sides of a step are computed from it: the decay, and the state behind many steps.
    """
    first = dataflow.order[coefficient]
    fronts = {node: ({node}, {node}) for node in operands}
    while any(front for front, _ in fronts.values()):
        found = [node for node, (front, _) in fronts.items() if coefficient in front]
        if found:
            return found
        for node, (front, seen) in fronts.items():
            step = {s for n in front for s in dataflow.operands(n) if dataflow.order[s] >= first} - seen
            fronts[node] = step, seen | step
    return []


def applied(dataflow: Dataflow, bound: Sequence[Node], apply: Node) -> Node:
    """Of the nodes that a match binds, the one that its apply site reads: in another layout, or else the nearest."""
    for node in bound:
        if any(carries(dataflow, operand, node) for operand in dataflow.operands(apply)):
            return node
    targets = set(bound)
    queue, seen = deque([apply]), {apply}
    while queue:
        node = queue.popleft()
        if node in targets:
            return node
        new = [source for source in dataflow.operands(node) if source not in seen]
        seen.update(new)
        queue.extend(new)
    return bound[0]


def carries(dataflow: Dataflow, node: Node, coefficient: Node) -> bool:
    """Whether a node is the coefficient in another layout."""
    for _ in range(_CARRIER_STEPS):
        if node is coefficient:
            return True
        if dataflow.kinds(node).isdisjoint(_CARRIERS):
            return False
        sources = [source for source in dataflow.operands(node) if dataflow.depends(source, coefficient)]
        if len(sources) != 1:
            return False
        node = sources[0]
    return node is coefficient


def same_path(dataflow: Dataflow, values: list[Node]) -> set[Node]:
    """P(v): see the module's docstring. Indices say where a value comes from, they are no part of its path."""

    def ends(node: Node) -> bool:
        dtype = ops.dtype(node)
        is_index = dtype is not None and not dtype.is_floating_point and not dtype.is_complex
        return is_index or dataflow.is_learned_op(node) or dataflow.is_selection(node)

    return set(dataflow.walk_back(values, ends))

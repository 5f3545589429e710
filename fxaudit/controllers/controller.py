"""Matches become controllers: grouped by coefficient, overlaps resolved, cones and leaks computed.

A controller is one coefficient with everything coupled to it and all its apply sites. Its id is the deepest module that
holds all of its learned ops, and the number of that module's call: ``layers.3.mlp.gate#0``.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from fxaudit import ops
from fxaudit.axes import Size
from fxaudit.controllers import structure
from fxaudit.controllers.graphs import Dataflow, count_parameters, exclusive_cone, parameter_names
from fxaudit.controllers.match import Match, MatchResult
from fxaudit.controllers.pattern import Intervene, Pattern
from fxaudit.model.trace import Finding

ROOT = "<root>"


@dataclass(frozen=True, slots=True)
class Domain:
    """The values that a coefficient can take.

    `kind` is ``interval`` (between `low` and `high`), ``simplex`` (and summing to `total` along `axis`), ``index``
    (whole numbers that select along some axis) or ``real``.
    """

    kind: str
    low: float | None = None
    high: float | None = None
    axis: str | None = None
    total: float | None = None

    def __str__(self) -> str:
        match self.kind:
            case "interval":
                return f"[{self.low:g}, {self.high:g}]"
            case "simplex":
                return f"simplex over {self.axis}"
        return self.kind


@dataclass(frozen=True, slots=True)
class Coefficient:
    """One tensor that a controller hands over, or that is recorded beside what it hands over.

    `axes` names the factors of each dimension of the tensor: a router's ``(("batch", "token"), ("k",))`` holds inputs
    and positions in one dimension. `sizes` and `roles` are by axis name.
    """

    key: str
    name: str
    node: Node
    dtype: torch.dtype
    axes: tuple[tuple[str, ...], ...]
    sizes: Mapping[str, Size]
    roles: Mapping[str, str]
    domain: Domain

    @property
    def sample_axis(self) -> str:
        return next(axis for axis, role in self.roles.items() if role == "sample")

    @property
    def shape(self) -> tuple[Size, ...]:
        """The size of each dimension."""
        shape = []
        for axis in self.axes:
            size: Size = 1
            for name in axis:
                size = size * (int(name) if name.isdigit() else self.sizes[name])
            shape.append(size)
        return tuple(shape)


@dataclass(frozen=True, slots=True)
class Leak:
    """A value of the controller that something else reads.

    `kind` is ``use`` (the coefficient is read by a node that is no apply site; it reads the bound value once frozen) or
    ``path`` (something computed on the way to the coefficient survives freezing, and the output depends on it: the
    controller is only partially frozen).
    """

    kind: str
    node: Node
    reader: Node

    @property
    def source(self) -> str:
        return ops.source_line(self.reader) if self.reader.op == "call_function" else ops.source_line(self.node)


@dataclass(frozen=True, slots=True)
class Controller:
    """A coefficient with its apply sites, and what disappears when it is replaced.

    `coefficients` are bound together; `taps` are recorded beside them. `cone` holds the nodes that die when all
    coefficients are replaced, `parameters` counts the parameter elements among them.
    """

    id: str
    pattern: str
    module: str
    call: int
    coefficients: tuple[Coefficient, ...]
    taps: tuple[Coefficient, ...]
    applies: tuple[Node, ...]
    cone: frozenset[Node]
    parameters: int
    leaks: tuple[Leak, ...]
    intervene: Intervene

    @property
    def parameter_names(self) -> set[str]:
        """The state-dict names that only this controller reads."""
        return parameter_names(self.cone)

    @property
    def is_partially_frozen(self) -> bool:
        return any(leak.kind == "path" for leak in self.leaks)


def build_controllers(
    results: Sequence[MatchResult], dataflow: Dataflow
) -> tuple[tuple[Controller, ...], tuple[Finding, ...]]:
    """The controllers behind all matches, in graph order, and what was dropped or is remarkable about them."""
    groups: dict[tuple[Node, ...], list[Match]] = {}
    for result in results:
        for match in result.matches:
            groups.setdefault(match.bound, []).append(match)
    kept, findings = _resolve_overlaps(groups, dataflow)
    kept.sort(key=lambda group: dataflow.order[group[0].coefficient])
    places = [_place(dataflow, exclusive_cone(group[0].bound), group[0].coefficient) for group in kept]
    ids = _unique_ids(places)
    controllers = tuple(
        _controller(identifier, place, group, dataflow)
        for identifier, place, group in zip(ids, places, kept, strict=True)
    )
    return controllers, (*findings, *_remarks(controllers))


def _resolve_overlaps(
    groups: Mapping[tuple[Node, ...], list[Match]], dataflow: Dataflow
) -> tuple[list[list[Match]], list[Finding]]:
    """Of groups that share a coefficient node the one with the larger cone stays; of equal ones, the first by name."""
    by_pattern: list[list[Match]] = []
    for group in groups.values():
        for name in dict.fromkeys(match.pattern.name for match in group):
            by_pattern.append([match for match in group if match.pattern.name == name])
    by_pattern.sort(
        key=lambda g: (-len(exclusive_cone(g[0].bound)), g[0].pattern.name, dataflow.order[g[0].coefficient])
    )
    claimed: dict[Node, Match] = {}
    kept, findings = [], []
    for group in by_pattern:
        owner = next((claimed[node] for node in group[0].bound if node in claimed), None)
        if owner is None:
            kept.append(group)
            claimed.update(dict.fromkeys(group[0].bound, group[0]))
        else:
            loser = group[0]
            text = f"`{loser.pattern.name}` also matches `{loser.coefficient.name}`, claimed by `{owner.pattern.name}`"
            findings.append(Finding("overlap", text, ops.source_line(loser.coefficient)))
    return kept, findings


def _place(dataflow: Dataflow, cone: set[Node], coefficient: Node) -> tuple[str, int]:
    """The deepest module call that holds every learned op of a cone; that of the coefficient when it has none."""
    learned = [node for node in cone if dataflow.is_learned_op(node)] or [coefficient]
    paths = [ops.module_path(node) for node in learned]
    common = ""
    for step in zip(*paths, strict=False):
        if len(set(step)) > 1:
            break
        common = step[0]
    path, _, call = common.partition("@")
    return path or ROOT, int(call or 0)


def _unique_ids(places: Sequence[tuple[str, int]]) -> list[str]:
    """``path#call``; where one module call holds several controllers, ``path#call:2`` and so on for the later ones."""
    seen: collections.Counter[str] = collections.Counter()
    ids = []
    for path, call in places:
        identifier = f"{path}#{call}"
        seen[identifier] += 1
        ids.append(identifier if seen[identifier] == 1 else f"{identifier}:{seen[identifier]}")
    return ids


def _controller(identifier: str, place: tuple[str, int], group: list[Match], dataflow: Dataflow) -> Controller:
    match = group[0]
    pattern = match.pattern
    cone = exclusive_cone(match.bound)
    return Controller(
        id=identifier,
        pattern=pattern.name,
        module=place[0],
        call=place[1],
        coefficients=tuple(_coefficient(identifier, name, match) for name in match.bound_names),
        taps=tuple(
            replace(_coefficient(identifier, capture, match), name=tap, key=f"{identifier}/{tap}")
            for tap, capture in pattern.intervene.taps.items()
        ),
        applies=tuple(m.apply for m in group),
        cone=frozenset(cone),
        parameters=count_parameters(dataflow.module, cone),
        leaks=tuple(_leaks(group, cone, dataflow)),
        intervene=pattern.intervene,
    )


def _coefficient(identifier: str, name: str, match: Match) -> Coefficient:
    node = match.nodes[name]
    dtype = ops.dtype(node)
    assert dtype is not None  # a captured node with a [shape] is one tensor
    layout = match.layouts[name]
    names = [factor for axis in layout for factor in axis if not factor.isdigit()]
    return Coefficient(
        key=f"{identifier}/{name}",
        name=name,
        node=node,
        dtype=dtype,
        axes=layout,
        sizes={axis: match.sizes[axis] for axis in names},
        roles={axis: match.pattern.intervene.axes[axis] for axis in names},
        domain=_domain(name, dtype, match.pattern, names),
    )


def _domain(name: str, dtype: torch.dtype, pattern: Pattern, names: list[str]) -> Domain:
    intervene = pattern.intervene
    if not dtype.is_floating_point:
        return Domain("index")
    if name != "coefficient" or intervene.low is None or intervene.high is None:
        return Domain("real")
    if intervene.simplex_axis in names:
        return Domain("simplex", intervene.low, intervene.high, intervene.simplex_axis, intervene.simplex_sum)
    return Domain("interval", intervene.low, intervene.high)


def _leaks(group: list[Match], cone: set[Node], dataflow: Dataflow) -> Iterable[Leak]:
    """Uses of the coefficient that are no apply site, then survivors on the controller's own way to it."""
    match = group[0]
    applies = {m.apply for m in group}
    # What the pattern itself names between the coefficient and an apply site is part of the apply.
    between = {node for m in group for name, node in m.nodes.items() if name in m.pattern.equations} - applies
    queue, seen = [match.coefficient], {match.coefficient}
    while queue:
        node = queue.pop()
        for user in node.users:
            if user in applies or user in seen or user in cone:
                continue
            seen.add(user)
            if (user in between or any(ops.in_class(user, name) for name in ("layout", "gather"))) and user.users:
                queue.append(user)
            elif not ops.is_symbolic_scalar(user):
                yield Leak("use", node, user)
    free = {v for k, v in match.nodes.items() if k not in match.pattern.equations and isinstance(v, Node)}
    values = structure.same_path(dataflow, structure.value_operands(dataflow, match.coefficient, match.apply))
    own = dataflow.walk_back(
        match.bound, lambda n: n in free or n in values or dataflow.is_learned_op(n) or ops.is_selection(n)
    )
    for node in own:
        if node in cone or node in free or node in values or not dataflow.is_dynamic(node):
            continue
        if not any(n.op == "placeholder" for n in dataflow.walk_back([node], lambda n: n in match.bound)):
            continue  # computed from bound values alone, such as a mask made of the chosen indices: nothing live in it
        for reader in node.users:
            if reader not in cone and reader not in own:
                yield Leak("path", node, reader)


def _remarks(controllers: Sequence[Controller]) -> Iterable[Finding]:
    for controller in controllers:
        for leak in controller.leaks:
            reader = "a model output" if leak.reader.op == "output" else f"`{leak.reader.name}`"
            if leak.kind == "path":
                text = f"{controller.id}: `{leak.node.name}` is also read by {reader}; it is only partially frozen"
            else:
                text = f"{controller.id}: {reader} also reads the coefficient, and reads the bound value once frozen"
            yield Finding(f"{leak.kind}-leak", text, leak.source)
        for other in controllers:
            if other is not controller and all(apply in other.cone for apply in controller.applies):
                text = f"{controller.id} acts only inside {other.id}; freezing both leaves it without effect"
                yield Finding("nested", text)

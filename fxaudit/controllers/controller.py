"""Matches become controllers: grouped by coefficient, overlaps resolved, cones and leaks computed.

A controller is one coefficient with everything coupled to it and all its apply sites. Its id is the deepest module that
holds all of its learned ops, and the number of that module's call: ``layers.3.mlp.gate#0``.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from fxaudit import ops
from fxaudit.axes import Size
from fxaudit.controllers import structure
from fxaudit.controllers.graphs import Dataflow, count_parameters, exclusive_cone, parameter_names
from fxaudit.controllers.language import names_in
from fxaudit.controllers.match import Match, MatchResult
from fxaudit.controllers.overlaps import claimed_region, resolve
from fxaudit.controllers.pattern import DEFAULT, DETECT_ONLY, EXTERNAL, Intervene, Pattern
from fxaudit.model.trace import Finding

ROOT = "<root>"


@dataclass(frozen=True, slots=True)
class Domain:
    """The values that a coefficient can take.

    `kind` is ``interval`` (between `low` and `high`), ``simplex`` (and summing to `total` along `axis`), ``index``
    (whole numbers that select along some axis), ``log-decay``, ``doubly-stochastic`` or ``real``.
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
    coefficients are replaced, `parameters` counts the parameter elements among them. A controller that is not audited
    is only counted: its family is opt-in, report-only, external or detect-only, and not enabled. A discrete one makes a
    choice.
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
    family_class: str = DEFAULT
    is_audited: bool = True
    is_discrete: bool = False

    @property
    def parameter_names(self) -> set[str]:
        """The state-dict names that only this controller reads."""
        return parameter_names(self.cone)

    @property
    def is_partially_frozen(self) -> bool:
        return any(leak.kind == "path" for leak in self.leaks)


def build_controllers(
    results: Sequence[MatchResult], dataflow: Dataflow, enabled: Collection[str] = ()
) -> tuple[tuple[Controller, ...], tuple[Finding, ...]]:
    """The controllers behind all matches, and what was dropped or is remarkable about them.

    Those that are audited come first, then those that are only counted, each in graph order.
    """
    groups: dict[tuple[str, tuple[Node, ...]], list[Match]] = {}
    for result in results:
        for match in result.matches:
            groups.setdefault((match.pattern.name, match.bound), []).append(match)
    kept, findings = resolve(list(groups.values()), dataflow, enabled)
    external = _external(kept, dataflow)
    classes = [external.get(i, group[0].pattern.family_class) for i, group in enumerate(kept)]
    standing = [
        (_is_audited(c, group[0].pattern.name, enabled), c, group) for c, group in zip(classes, kept, strict=True)
    ]
    standing.sort(key=lambda row: (not row[0], dataflow.order[row[2][0].coefficient]))
    cones = [exclusive_cone(group[0].bound) for *_, group in standing]
    places = [place_of(dataflow, cone, group[0].coefficient) for cone, (*_, group) in zip(cones, standing, strict=True)]
    controllers = tuple(
        _controller(identifier, place, group, cone, dataflow, family_class, audited)
        for identifier, place, cone, (audited, family_class, group) in zip(
            _unique_ids(places), places, cones, standing, strict=True
        )
    )
    return controllers, (*findings, *_remarks([c for c in controllers if c.is_audited]))


def _is_audited(family_class: str, name: str, enabled: Collection[str]) -> bool:
    return family_class == DEFAULT or (name in enabled and family_class != DETECT_ONLY)


def _external(groups: Sequence[list[Match]], dataflow: Dataflow) -> dict[int, str]:
    """The class of each group of an `external` family, by its place in `groups`.

    A member is external where no input reaches both its coefficient and, other than through such coefficients, the
    value that it acts on (for a value that no input reaches: the model's outputs). Elsewhere it is a default one.
    """
    members = {i: group for i, group in enumerate(groups) if group[0].pattern.family_class == EXTERNAL}
    if not members:
        return {}
    reach = dataflow.input_sets()
    direct = dataflow.input_sets([node for group in members.values() for node in group[0].bound])
    outputs = [n for node in dataflow.nodes if node.op == "output" for n in node.all_input_nodes]
    found = {}
    for i, group in members.items():
        own = _union(reach, group[0].bound)
        values = [n for m in group for n in structure.value_operands(dataflow, m.applied, m.apply)]
        acted_on = _union(direct, values) or _union(direct, outputs)
        found[i] = DEFAULT if own & acted_on else EXTERNAL
    return found


def _union(sets: Mapping[Node, int], nodes: Iterable[Node]) -> int:
    found = 0
    for node in nodes:
        found |= sets[node]
    return found


def place_of(dataflow: Dataflow, cone: set[Node], coefficient: Node) -> tuple[str, int]:
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


def _controller(
    identifier: str,
    place: tuple[str, int],
    group: list[Match],
    cone: set[Node],
    dataflow: Dataflow,
    family_class: str,
    is_audited: bool,
) -> Controller:
    match = group[0]
    pattern = match.pattern
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
        intervene=pattern.intervene.at(ops.op_name(match.apply)),
        family_class=family_class,
        is_audited=is_audited,
        is_discrete=structure.is_discrete(dataflow, match.bound, match.apply),
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
    low, high = intervene.range_of(name) or (None, None)
    if name in intervene.domains:
        return Domain(intervene.domains[name], low, high)
    if low is None or high is None:
        return Domain("real")
    if name == "coefficient" and intervene.simplex_axis in names:
        return Domain("simplex", low, high, intervene.simplex_axis, intervene.simplex_sum)
    return Domain("interval", low, high)


def _leaks(group: list[Match], cone: set[Node], dataflow: Dataflow) -> Iterable[Leak]:
    """Uses of the coefficient that are no apply site, then survivors on the controller's own way to it."""
    yield from _use_leaks(group, cone, dataflow)
    yield from _path_leaks(group[0], cone, dataflow)


def _use_leaks(group: list[Match], cone: set[Node], dataflow: Dataflow) -> Iterable[Leak]:
    # What indices select, the family itself says; what is computed for an apply site, or claimed, is no leak.
    bound = [node for node in group[0].bound if (dtype := ops.dtype(node)) is not None and dtype.is_floating_point]
    claimed = claimed_region(group, dataflow)
    passed = {node for match in group for node in structure.way_to(dataflow, match.applied, match.apply)}
    # What the pattern itself names between the coefficient and an apply site is part of the apply.
    passed |= {node for match in group for name, node in match.nodes.items() if name in match.pattern.equations}
    known = {match.apply for match in group} | claimed | cone | _coupled_sites(group)
    queue, seen = list(bound), set(bound)
    while queue:
        node = queue.pop()
        for user in node.users:
            if user in known or user in seen:
                continue
            seen.add(user)
            if (user in passed or any(ops.in_class(user, name) for name in ("layout", "gather"))) and user.users:
                queue.append(user)
            elif not ops.is_symbolic_scalar(user):
                yield Leak("use", node, user)


def _coupled_sites(group: list[Match]) -> set[Node]:
    """The nodes whose equations mention a coupled capture: where it is applied, if not at `apply`."""
    pattern = group[0].pattern
    coupled = set(pattern.intervene.coupled)
    names = [name for name, term in pattern.equations.items() if not coupled.isdisjoint(names_in(term))]
    return {match.nodes[name] for match in group for name in names if name in match.nodes} - set(group[0].bound)


def _path_leaks(match: Match, cone: set[Node], dataflow: Dataflow) -> Iterable[Leak]:
    bound = set(match.bound)
    free = {v for k, v in match.nodes.items() if k not in match.pattern.equations and isinstance(v, Node)}
    values = structure.same_path(dataflow, structure.value_operands(dataflow, match.applied, match.apply))
    way = dataflow.walk_back(
        match.bound, lambda n: n in free or n in values or dataflow.is_learned_op(n) or ops.is_selection(n)
    )
    own = set(way)
    live: set[Node] = set()  # computed from bound values alone, such as a mask of the chosen indices, is not live
    for node in sorted(way, key=dataflow.order.__getitem__):
        sources = [n for n in dataflow.operands(node) if n not in bound and dataflow.is_dynamic(n)]
        if node.op == "placeholder" or any(n in live or n not in own for n in sources):
            live.add(node)
    for node in way:
        if node in cone or node in free or node in values or node not in live or not dataflow.is_dynamic(node):
            continue
        for reader in node.users:
            if reader not in cone and reader not in own:
                yield Leak("path", node, reader)


def _remarks(controllers: Sequence[Controller]) -> Iterable[Finding]:
    around: dict[Node, list[Controller]] = {}
    for controller in controllers:
        for node in controller.cone:
            around.setdefault(node, []).append(controller)
    for controller in controllers:
        for leak in controller.leaks:
            reader = "a model output" if leak.reader.op == "output" else f"`{leak.reader.name}`"
            if leak.kind == "path":
                text = f"{controller.id}: `{leak.node.name}` is also read by {reader}; it is only partially frozen"
            else:
                text = f"{controller.id}: {reader} also reads the coefficient, and reads the bound value once frozen"
            yield Finding(f"{leak.kind}-leak", text, leak.source)
        for other in around.get(controller.applies[0], ()):
            if other is not controller and all(apply in other.cone for apply in controller.applies):
                text = f"{controller.id} acts only inside {other.id}; freezing both leaves it without effect"
                yield Finding("nested", text)

"""Where several patterns, or several readings of one, claim the same controller: one stays, the others are reported.

Of two groups of matches that compete, the one that is audited stays before one that is only counted, then the one
whose pattern has the higher `priority`, then the one with the larger cone, then the one whose pattern comes first by
name. Two groups compete where

- they bind the same node;
- one's coefficient is computed from the other's alone: it is the same information, further along;
- one's coefficient lies inside the region that the other claims (`claims`): what a scan computes from its
  coefficients on the way to its output belongs to the scan (T8).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from torch.fx import Node

from fxaudit import ops
from fxaudit.controllers.graphs import Dataflow, exclusive_cone
from fxaudit.controllers.match import Match
from fxaudit.controllers.pattern import DEFAULT, EXTERNAL
from fxaudit.model.trace import Finding

Group = list[Match]


def resolve(groups: Sequence[Group], dataflow: Dataflow, enabled: Collection[str]) -> tuple[list[Group], list[Finding]]:
    """The groups that stay, best first, and a finding for each that does not."""

    def rank(group: Group) -> tuple[bool, int, int, str, int]:
        pattern = group[0].pattern
        is_audited = pattern.family_class in (DEFAULT, EXTERNAL) or pattern.name in enabled
        cone = exclusive_cone(group[0].bound)
        return not is_audited, -pattern.priority, -len(cone), pattern.name, dataflow.order[group[0].coefficient]

    owners: dict[Node, Group] = {}
    heads: dict[Node, list[Group]] = {}
    regions: dict[Node, Group] = {}
    kept: list[Group] = []
    findings: list[Finding] = []
    for group in sorted(groups, key=rank):
        head = _head(group, dataflow)
        rivals = _rivals(group, head, owners, heads, dataflow)
        owner = next(rivals, None) or regions.get(group[0].coefficient)
        if owner is not None:
            findings.append(_loss(group, owner))
            continue
        kept.append(group)
        owners.update(dict.fromkeys(group[0].bound, group))
        for node in head:
            heads.setdefault(node, []).append(group)
        regions.update((node, group) for node in claimed_region(group, dataflow) if node not in regions)
    return kept, findings


def _rivals(
    group: Group, head: Iterable[Node], owners: dict[Node, Group], heads: dict[Node, list[Group]], dataflow: Dataflow
) -> Iterator[Group]:
    """The groups that were kept before and bind the same information."""
    bound = group[0].bound
    yield from (owners[node] for node in bound if node in owners)
    yield from (owners[node] for node in head if node in owners and _is_computed_from(group, owners[node], dataflow))
    yield from (other for node in bound for other in heads.get(node, ()) if _is_computed_from(other, group, dataflow))


def _head(group: Group, dataflow: Dataflow) -> list[Node]:
    """What computes a coefficient from its last learned ops on, those left out."""
    found = dataflow.walk_back(group[0].bound, dataflow.is_learned_op)
    return [node for node in found if node.op == "call_function" and not dataflow.is_learned_op(node)]


def _is_computed_from(group: Group, other: Group, dataflow: Dataflow) -> bool:
    """Whether the coefficient of `group` is a function of what `other` binds and of nothing else that is dynamic."""
    bound = set(other[0].bound)
    met = False
    for node in dataflow.walk_back([group[0].coefficient], lambda n: n in bound or dataflow.is_learned_op(n)):
        if node in bound:
            met = True
        elif dataflow.is_dynamic(node) and (dataflow.is_learned_op(node) or node.op == "placeholder"):
            return False
    return met


def claimed_region(group: Group, dataflow: Dataflow) -> set[Node]:
    """The nodes on the way from the coefficient to what the pattern claims."""
    match = group[0]
    targets = [node for m in group for name in match.pattern.claims if isinstance(node := m.nodes.get(name), Node)]
    if not targets:
        return set()
    first = min(dataflow.order[node] for node in match.bound)
    behind = dataflow.walk_back(targets, lambda node: dataflow.order[node] <= first)
    found = set(match.bound)
    for node in sorted(behind, key=dataflow.order.__getitem__):
        if any(source in found for source in dataflow.operands(node)):
            found.add(node)
    return found - set(match.bound)


def _loss(group: Group, owner: Group) -> Finding:
    loser = group[0]
    text = f"`{loser.pattern.name}` also matches `{loser.coefficient.name}`, claimed by `{owner[0].pattern.name}`"
    if owner[0].coefficient is not loser.coefficient:
        text += f" with `{owner[0].coefficient.name}`"
    return Finding("overlap", text, ops.source_line(loser.coefficient))

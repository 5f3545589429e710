"""Which bodies of the control-flow nodes of an ONNX model ran, and how often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx

from fxaudit.execution.proof import all_nodes, modules_of, source_line, subgraphs

CONTROL_FLOW = frozenset(["If", "Loop", "Scan"])


@dataclass(frozen=True, slots=True)
class Control:
    """A node with bodies: an ``If`` has a then and an else branch, a ``Loop`` or ``Scan`` one body.

    `inside` names for each body the nodes directly in it: each runs at most once when the body runs, and some do.
    """

    node: str
    op: str
    module: str
    source: str
    bodies: tuple[str, ...]
    inside: tuple[tuple[str, ...], ...]


def controls(graph: onnx.GraphProto) -> tuple[Control, ...]:
    """The control-flow nodes of a graph and of all bodies in it."""
    modules = modules_of(graph)
    return tuple(
        Control(
            node.name,
            node.op_type,
            modules[node.name],
            source_line(node),
            tuple(name for name, _ in subgraphs(node)),
            tuple(tuple(inner.name for inner in body.node) for _, body in subgraphs(node)),
        )
        for node in all_nodes(graph)
        if node.op_type in CONTROL_FLOW
    )


def taken(found: Sequence[Control], events: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """How often each body of each control-flow node ran; `events` says how often each node did."""
    result = {}
    for control in found:
        counts = [max((events.get(name, 0) for name in names), default=0) for names in control.inside]
        if control.op == "If" and () in control.inside:
            # A branch without nodes leaves no trace but that the other one did not run.
            counts[control.inside.index(())] = events.get(control.node, 0) - sum(counts)
        result[control.node] = tuple(counts)
    return result

"""What routers activate: experts, their load, and their work against that of all experts on every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxaudit.controllers.controller import Coefficient, Controller
from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.execution.flops import NodeFlops


def expert_use(
    frozen: FrozenModel, values: Sequence[Mapping[str, Tensor]], counted: Sequence[Sequence[NodeFlops]]
) -> list[dict[str, Any]]:
    """One dict for each router that hands over expert indices.

    Args:
        values: for each input the coefficients by key.
        counted: for each input the FLOPs of every node of the live graph.

    Returns:
        ``controller``, ``experts``, ``chosen`` (for each token), ``load`` (choices by expert, over all inputs),
        ``activated`` (experts with any choice, by input), ``never_used``, ``routed_flops`` (by input: those on the way
        from the choice to where the weights are applied), and ``dense_flops`` (what the whole model would take by input
        if each token went to every expert; None where experts do not run by choice).
    """
    found = []
    for controller in frozen.controllers:
        indices, experts = _indices(controller), _expert_count(controller)
        if indices is None or experts is None:
            continue
        chosen = _size_of(indices, "slot")
        routed_nodes = _routed(indices.node, controller.applies)
        loads = [torch.bincount(v[indices.key].reshape(-1), minlength=experts) for v in values]
        load = torch.stack(loads).sum(0)
        routed = [_flops_of(run, routed_nodes) for run in counted]
        totals = [_flops_of(run, None) for run in counted]
        by_choice = chosen is not None and any(routed)
        found.append(
            {
                "controller": controller.id,
                "experts": experts,
                "chosen": chosen,
                "load": load.tolist(),
                "activated": [int((one > 0).sum()) for one in loads],
                "never_used": [e for e, count in enumerate(load.tolist()) if count == 0],
                "routed_flops": routed,
                "dense_flops": [
                    total + part * experts // chosen - part for total, part in zip(totals, routed, strict=True)
                ]
                if by_choice and chosen is not None
                else None,
            }
        )
    return found


def _indices(controller: Controller) -> Coefficient | None:
    """The coefficient that names experts: whole numbers along a slot axis."""
    return next((c for c in controller.coefficients if c.domain.kind == "index" and "slot" in c.roles.values()), None)


def _expert_count(controller: Controller) -> int | None:
    """The number of dense scores, of which there is one for each expert."""
    scores = next((tap for tap in controller.taps if tap.name == "scores"), None)
    return _size_of(scores, "unit") if scores is not None else None


def _size_of(coefficient: Coefficient, role: str) -> int | None:
    sizes = [coefficient.sizes[axis] for axis, own in coefficient.roles.items() if own == role]
    return sizes[0] if len(sizes) == 1 and isinstance(sizes[0], int) else None


def _routed(choice: Node, applies: Sequence[Node]) -> set[Node]:
    """The nodes between a choice and the places where its controller is applied, those included."""
    after = _reached([choice], lambda node: node.users)
    before = _reached(applies, lambda node: node.all_input_nodes)
    return after & before


def _reached(start: Sequence[Node], following: Any) -> set[Node]:
    found, left = set(start), list(start)
    while left:
        for node in following(left.pop()):
            if node not in found:
                found.add(node)
                left.append(node)
    return found


def _flops_of(run: Sequence[NodeFlops], nodes: set[Node] | None) -> int:
    return sum(item.flops or 0 for item in run if nodes is None or item.outer in nodes)

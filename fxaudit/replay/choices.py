"""Choices of experts: fixed ones made from mean scores, and whether what is replayed is a choice at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from fxaudit import ops
from fxaudit.controllers.controller import Coefficient, Controller
from fxaudit.errors import SelfCheckError
from fxaudit.model.trace import TracedModel, run_flat
from fxaudit.replay.intervene import is_choice, position_count, scores_of
from fxaudit.replay.store import stored_axes


@dataclass(frozen=True, slots=True)
class Chooser:
    """The router's own nodes from its dense scores on: what it would choose, had it computed these scores."""

    traced: TracedModel
    module: GraphModule

    def choose(self, leaves: Sequence[Any], scores: Tensor) -> tuple[Tensor, ...]:
        """The controller's coefficients for scores as the graph lays them out."""
        return run_flat(self.module, [*leaves, scores], {})


def chooser(traced: TracedModel, controller: Controller) -> Chooser | str:
    """The nodes between a controller's scores and its coefficients, or why the scores alone do not decide."""
    scores = scores_of(controller)
    if scores is None:
        return "the dense scores of the choice are not recorded"
    bound = [coefficient.node for coefficient in controller.coefficients]
    reads_input = set()
    for node in traced.graph.nodes:
        sources = ops.operands(node)
        if node is not scores.node and (node.op == "placeholder" or any(s in reads_input for s in sources)):
            reads_input.add(node)
    if any(node in reads_input for node in bound):
        return "the choice depends on more than the scores that are recorded"
    graph = Graph()
    copied: dict[Any, Any] = {}
    graph.graph_copy(traced.graph, copied)
    last = copied[traced.placeholders()[-1]]
    with graph.inserting_after(last):
        given = graph.placeholder("scores")
    given.meta = dict(copied[scores.node].meta)
    copied[scores.node].replace_all_uses_with(given)
    graph.output(tuple(copied[node] for node in bound))
    # Written buffers and everything else that the choice does not need go, whatever they do.
    needed = set()
    queue = [copied[node] for node in bound]
    while queue:
        node = queue.pop()
        if node not in needed:
            needed.add(node)
            queue += node.all_input_nodes
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and node not in needed:
            graph.erase_node(node)
    graph.lint()
    return Chooser(traced, GraphModule(traced.graph_module, graph, class_name="Chooser").eval())


def expert_count(controller: Controller) -> int | None:
    """The number of experts that a controller chooses from, None when its scores are not recorded."""
    scores = scores_of(controller)
    if scores is None:
        return None
    sizes = [scores.sizes[axis] for axis, role in scores.roles.items() if role == "unit"]
    return int(sizes[0]) if sizes and isinstance(sizes[0], int) else None


def require_choice(rows: Tensor, coefficient: Coefficient, experts: int | None, what: str) -> None:
    """Raise unless every choice in `rows` names experts that exist, each once.

    Raises:
        SelfCheckError: an index twice in one choice, or out of range.
    """
    if not is_choice(coefficient) or not rows.numel():
        return
    slots = [i for i, name in enumerate(stored_axes(coefficient)) if coefficient.roles.get(name) == "slot"]
    chosen = rows.movedim(slots[0], -1).sort(-1).values
    low, high = int(chosen.min()), int(chosen.max())
    twice = bool((chosen[..., 1:] == chosen[..., :-1]).any())
    if low < 0 or (experts is not None and high >= experts) or twice:
        raise SelfCheckError(
            f"{what} makes a choice of `{coefficient.key}` that the router could not make",
            expected=f"distinct experts from 0 to {experts - 1 if experts is not None else '...'}",
            found="an expert that is chosen twice" if twice else f"experts from {low} to {high}",
            remedy="please report this model",
        )


@dataclass(slots=True)
class ChoiceCounts:
    """How often each expert of one router is chosen, and how often the choice was a tie."""

    controller: Controller
    indices: Coefficient
    experts: int | None
    load: Tensor
    ties: int = 0
    choices: int = 0
    ranked_by_scores: bool = True

    def add(self, tensors: dict[str, Tensor], real: int, valid: Tensor | None) -> None:
        """Take in a batch of recorded tensors; with `valid` ([inputs, positions]) only valid positions."""
        rows = _by_position(tensors[self.indices.key][:real], self.indices, "slot")
        kept = _kept(rows, self.indices, valid)
        chosen = rows[kept].long()
        self.load += torch.bincount(chosen.reshape(-1), minlength=len(self.load))[: len(self.load)]
        self.choices += chosen.shape[0]
        scores = scores_of(self.controller)
        if scores is None or self.experts is None:
            return
        dense = _by_position(tensors[scores.key][:real], scores, "unit")[kept]
        slots = chosen.shape[-1]
        if slots >= dense.shape[-1]:
            return
        largest = dense.topk(slots + 1, -1).values
        self.ties += int((largest[..., -1] == largest[..., -2]).sum())
        # A router that ranks by something else than its scores (a bias, groups) chooses some that are not the largest.
        self.ranked_by_scores &= bool((dense.gather(-1, chosen).amin(-1) >= largest[..., -2]).all())


def choice_counts(controller: Controller) -> ChoiceCounts | None:
    """A counter for a controller that chooses experts, None for others."""
    indices = next((c for c in controller.coefficients if is_choice(c)), None)
    if indices is None:
        return None
    experts = expert_count(controller)
    return ChoiceCounts(controller, indices, experts, torch.zeros(experts or 0, dtype=torch.int64))


def _by_position(rows: Tensor, coefficient: Coefficient, role: str) -> Tensor:
    """[inputs, positions, entries]; the entries are those along the axis of a role."""
    names = stored_axes(coefficient)
    last = next(i for i, name in enumerate(names) if coefficient.roles.get(name) == role)
    return rows.movedim(last, -1).reshape(rows.shape[0], -1, rows.shape[last])


def _kept(rows: Tensor, coefficient: Coefficient, valid: Tensor | None) -> Tensor:
    if valid is None or position_count(coefficient) != valid.shape[1] or rows.shape[1] != valid.shape[1]:
        return torch.ones(rows.shape[:2], dtype=torch.bool)
    return valid

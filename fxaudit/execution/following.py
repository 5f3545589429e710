"""Running a traced graph node by node, into the branch that is taken and through every step of a loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Interpreter, Node
from torch.utils import _pytree as pytree

_FOLLOWED = frozenset(["cond", "while_loop", "scan"])


def is_followed(node: Node) -> bool:
    """Whether a node runs a body that is interpreted, too."""
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() in _FOLLOWED


class Following(Interpreter):
    """An interpreter that also interprets the bodies of ``cond``, ``while_loop`` and ``scan``.

    `outer` is the node of the whole graph whose body this is; None for the whole graph.
    """

    def __init__(self, module: nn.Module, outer: Node | None = None) -> None:
        super().__init__(module)
        self.outer = outer

    def inside(self, module: nn.Module, outer: Node) -> Following:
        """The interpreter of a body; what it finds belongs to `outer`."""
        return type(self)(module, outer)

    def run_node(self, n: Node) -> Any:
        if not is_followed(n):
            return super().run_node(n)
        args, _ = self.fetch_args_kwargs_from_env(n)
        match n.target.name():  # type: ignore[union-attr]
            case "cond":
                return self._body(args[1] if bool(args[0]) else args[2], args[3], n)
            case "while_loop":
                return self._while(args, n)
            case _:
                return self._scan(args, n)

    def _while(self, args: Sequence[Any], node: Node) -> tuple[Any, ...]:
        condition, body, state = args[0], args[1], tuple(args[2])
        fixed = tuple(args[3]) if len(args) > 3 else ()
        while bool(_first(self._body(condition, (*state, *fixed), node))):
            state = tuple(self._body(body, (*state, *fixed), node))
        return state

    def _scan(self, args: Sequence[Any], node: Node) -> tuple[Any, ...]:
        """A body over the first axis of `xs`: its last state, and what each step returned, stacked along that axis."""
        body, state, xs = args[0], tuple(args[1]), tuple(args[2])
        fixed = tuple(args[3]) if len(args) > 3 else ()
        rows: list[tuple[Any, ...]] = []
        for step in range(xs[0].shape[0]):
            result = tuple(self._body(body, (*state, *(x[step] for x in xs), *fixed), node))
            state, row = result[: len(state)], result[len(state) :]
            rows.append(row)
        return (*state, *(torch.stack(column) for column in zip(*rows, strict=True)))

    def _body(self, module: nn.Module, args: Sequence[Any], node: Node) -> Any:
        return self.inside(module, self.outer or node).run(*args)


def _first(value: Any) -> Any:
    return next(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor | bool))

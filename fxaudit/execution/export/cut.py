"""The torch graphs that become ONNX: only tensors go in and out, and each coefficient is cut by a barrier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fxaudit import ops
from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.errors import ExportError
from fxaudit.execution.translation import barrier_op
from fxaudit.model.trace import restore_state


@dataclass(frozen=True, slots=True)
class PureGraph:
    """A graph of tensors without side effects, and which placeholder and output of its source each end of it is."""

    graph: Graph
    copied: dict[Node, Node]
    input_positions: tuple[int, ...]
    output_positions: tuple[int, ...]


def pure_graph(source: Graph, keep: Sequence[Node] = ()) -> PureGraph:
    """A copy of `source` without inputs and outputs that are no tensors, and without writes.

    Writes to buffers and inputs are the last thing that a run does, and no run sees another's. An input that nothing
    reads stays only if it is a tensor; of those in `keep`, only if something reads it.

    Raises:
        ExportError: an input that is no tensor is read.
    """
    graph = Graph()
    copied: dict[Node, Node] = {}
    found = graph.graph_copy(source, copied)
    outputs = list(found) if isinstance(found, tuple | list) else [found]
    output_positions = tuple(i for i, value in enumerate(outputs) if is_tensor(value))
    graph.output(tuple(outputs[i] for i in output_positions))
    for node in list(graph.nodes):
        if ops.op_name(node) == "copy_" and not node.users:
            graph.erase_node(node)
    positions = []
    optional = {copied[node] for node in keep}
    for i, node in enumerate(n for n in list(graph.nodes) if n.op == "placeholder"):
        if is_tensor(node) and (node.users or node not in optional):
            positions.append(i)
        elif not node.users:
            graph.erase_node(node)
        else:
            raise ExportError(
                f"input `{node.name}` is not a tensor",
                where=node.name,
                expected="tensors as inputs of an ONNX graph",
                found=str(node.meta.get("val")),
                remedy="fix the value inside the model",
            )
    return PureGraph(graph, copied, tuple(positions), output_positions)


def with_barriers(frozen: FrozenModel) -> PureGraph:
    """The traced graph with a barrier after each coefficient."""
    pure = pure_graph(frozen.traced.graph)
    for i, coefficient in enumerate(frozen.coefficients):
        node = pure.copied[coefficient.node]
        with pure.graph.inserting_after(node):
            barrier = pure.graph.call_function(barrier_op(), (node, i))
        barrier.meta = dict(node.meta)
        for user in [user for user in node.users if user is not barrier]:
            user.replace_input_with(node, barrier)
    return pure


def module_of(frozen: FrozenModel, graph: Graph, root: GraphModule, name: str) -> GraphModule:
    """A graph as a module over the tensors of `root`, its buffers in the state in which every run starts."""
    module = GraphModule(root, graph, class_name=name).eval()
    buffers = dict(module.named_buffers())
    restore_state(module, {key: value for key, value in frozen.traced.initial_state.items() if key in buffers})
    return module


def is_tensor(value: Any) -> bool:
    return isinstance(value, Node) and isinstance(value.meta.get("val"), Tensor)


def idle_keys(frozen: FrozenModel) -> tuple[str, ...]:
    """The keys of coefficients that nothing reads in the frozen graph: they act only inside another controller."""
    bound = [n for n in frozen.frozen.graph.nodes if n.op == "placeholder"][len(frozen.traced.input_names) :]
    return tuple(c.key for c, node in zip(frozen.coefficients, bound, strict=True) if not node.users)

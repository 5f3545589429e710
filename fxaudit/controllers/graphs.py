"""Questions about one graph: what depends on what, what is learned, what dies with what."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fxaudit import ops


class Dataflow:
    """The value flow of one graph, indexed once.

    A node is *dynamic* when its values depend on the values of a runtime input; positions, masks built from shapes and
    parameters are not. It is *learned-static* when it is a parameter or computed from parameters alone.
    """

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.nodes = list(module.graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.dynamic: set[Node] = set()
        self._from_parameter: set[Node] = set()
        self.by_op: dict[str, list[Node]] = {}
        self._operands: dict[Node, list[Node]] = {}
        self._data: dict[Node, list[Node]] = {}
        for node in self.nodes:
            sources = self._operands[node] = ops.operands(node)
            if node.op == "placeholder" or any(source in self.dynamic for source in sources):
                self.dynamic.add(node)
            if (node.op == "get_attr" and isinstance(_attribute(module, str(node.target)), nn.Parameter)) or any(
                source in self._from_parameter for source in sources
            ):
                self._from_parameter.add(node)
            self.by_op.setdefault(ops.op_name(node), []).append(node)

    def operands(self, node: Node) -> list[Node]:
        """The nodes whose values `node` reads."""
        return self._operands[node]

    def data_operands(self, node: Node) -> list[Node]:
        """The operands that are data: neither parameters and buffers nor anything computed from parameters alone."""
        if node not in self._data:
            self._data[node] = [n for n in self._operands[node] if n.op != "get_attr" and not self.is_learned_static(n)]
        return self._data[node]

    def is_dynamic(self, node: Node) -> bool:
        return node in self.dynamic

    def is_learned_static(self, node: Node) -> bool:
        return node in self._from_parameter and node not in self.dynamic

    def is_learned_op(self, node: Node) -> bool:
        """Whether a node applies learned weights to data: a linear map, convolution or table look-up."""
        if not (ops.in_class(node, "linear") or ops.op_name(node) in ("embedding", "index", "index_select", "gather")):
            return False
        sources = self._operands[node]
        return any(map(self.is_learned_static, sources)) and any(map(self.is_dynamic, sources))

    def is_a(self, node: Node, name: str) -> bool:
        """Whether a node is the op, or in the op class, `name`; `linear` needs a learned operand."""
        return ops.in_class(node, name) and (name != "linear" or self.is_learned_op(node))

    def depends(self, node: Node, on: Node) -> bool:
        """Whether the values of `node` are computed from those of `on`; a node depends on itself."""
        first = self.order[on]
        seen, queue = {node}, [node]
        while queue:
            current = queue.pop()
            if current is on:
                return True
            for source in self._operands[current]:
                if source not in seen and self.order[source] >= first:
                    seen.add(source)
                    queue.append(source)
        return False

    def exclusive_parameters(self, node: Node) -> int:
        """The number of parameters that only `node` needs."""
        return count_parameters(self.module, exclusive_cone([node]))

    def walk_back(self, start: Iterable[Node], stop: Callable[[Node], bool]) -> list[Node]:
        """The nodes reachable backward from `start` along value edges, not going past a `stop` node."""
        seen = dict.fromkeys(start)
        queue = deque(seen)
        while queue:
            node = queue.popleft()
            if stop(node):
                continue
            for source in self._operands[node]:
                if source not in seen:
                    seen[source] = None
                    queue.append(source)
        return list(seen)


def exclusive_cone(replaced: Collection[Node]) -> set[Node]:
    """The nodes that die when every use of the nodes in `replaced` is replaced, those nodes included.

    Joint, not the union of single cones: indices and weights of a router keep each other's router alive. By reference
    counting, linear in the edges of the cone.
    """
    dead = set(replaced)
    remaining: dict[Node, int] = {}
    queue = [source for node in dead for source in node.all_input_nodes]
    while queue:
        node = queue.pop()
        remaining[node] = remaining.get(node, len(node.users)) - 1
        if remaining[node] == 0 and node not in dead and node.op != "placeholder":
            dead.add(node)
            queue.extend(node.all_input_nodes)
    return dead


def parameter_names(cone: Iterable[Node]) -> set[str]:
    """The state-dict names that the nodes of a cone read."""
    return {str(node.target) for node in cone if node.op == "get_attr"}


def count_parameters(module: GraphModule, cone: Iterable[Node]) -> int:
    """The number of parameter elements among the nodes of a cone; a parameter read twice counts once."""
    found = {}
    for name in parameter_names(cone):
        value = _attribute(module, name)
        if isinstance(value, nn.Parameter):
            found[id(value)] = value.numel()
    return sum(found.values())


def _attribute(module: nn.Module, path: str) -> torch.Tensor | object:
    owner: object = module
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner

"""Questions about one graph: what depends on what, what is learned, what dies with what."""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import networkx
import torch
from torch import nn
from torch.fx import GraphModule, Node

from fxaudit import ops

_LOOK_UPS = frozenset(["embedding", "index", "index_select", "gather"])


@dataclass(frozen=True, slots=True)
class Walk:
    """A walk back along a chain: where it may end, the farthest first, and the first node that ends it too early."""

    ends: tuple[Node, ...]
    broken: Node | None
    steps: int


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
        self._operands: dict[Node, list[Node]] = {}
        self._data: dict[Node, list[Node]] = {}
        self._written: dict[Node, Sequence[Any]] = {}
        self._factors: dict[Node, Any] = {}
        self._walks: dict[tuple[tuple[str, ...], int, int], dict[Node, Walk]] = {}
        self._content: set[Node] | None = None
        self._live: set[Node] | None = None
        for node in self.nodes:
            sources = self._operands[node] = ops.operands(node)
            if node.op == "placeholder" or any(source in self.dynamic for source in sources):
                self.dynamic.add(node)
            if (node.op == "get_attr" and isinstance(_attribute(module, str(node.target)), nn.Parameter)) or any(
                source in self._from_parameter for source in sources
            ):
                self._from_parameter.add(node)
        self._names: dict[Node, str] = {}
        self._kinds: dict[Node, frozenset[str]] = {}
        self._learned: set[Node] = set()
        self._selections: set[Node] = set()
        self._of_kind: dict[str, list[Node]] = {}
        self._classify()

    def _classify(self) -> None:
        """The op name and op classes of each node; `linear` needs a learned operand, which only the graph can tell."""
        known: dict[tuple[Any, str], tuple[frozenset[str], frozenset[str]]] = {}
        for node in self.nodes:
            name = self._names[node] = ops.op_name(node)
            if node.op != "call_function":
                self._kinds[node] = frozenset()
                self._of_kind.setdefault(name, []).append(node)
                continue
            key = (node.target, name)
            if key not in known:
                classes = frozenset(kind for kind in ops.CLASS_NAMES if ops.in_class(node, kind))
                known[key] = (classes | {name}, (classes | {name}) - {"linear"})
            kinds = known[key][0 if "linear" not in known[key][0] or self._is_learned_matmul(node) else 1]
            self._kinds[node] = kinds
            if "linear" in kinds or (name in _LOOK_UPS and self._is_learned_matmul(node)):
                self._learned.add(node)
            if ops.is_selection(node):
                self._selections.add(node)
            for kind in kinds:
                self._of_kind.setdefault(kind, []).append(node)

    def name(self, node: Node) -> str:
        """The op name of a node."""
        return self._names[node]

    def is_selection(self, node: Node) -> bool:
        """Whether a node takes a part of its operand."""
        return node in self._selections

    def kinds(self, node: Node) -> frozenset[str]:
        """The op name and the op classes of a node."""
        return self._kinds[node]

    def nodes_of(self, kind: str) -> list[Node]:
        """The nodes of an op name or an op class, in graph order."""
        return self._of_kind.get(kind, [])

    def _is_learned_matmul(self, node: Node) -> bool:
        sources = self._operands[node]
        return any(map(self.is_learned_static, sources)) and any(source in self.dynamic for source in sources)

    def operands(self, node: Node) -> list[Node]:
        """The nodes whose values `node` reads."""
        return self._operands[node]

    def data_operands(self, node: Node) -> list[Node]:
        """The operands that are data: neither parameters and buffers nor anything computed from parameters alone."""
        if node not in self._data:
            self._data[node] = [n for n in self._operands[node] if n.op != "get_attr" and not self.is_learned_static(n)]
        return self._data[node]

    def written_operands(self, node: Node) -> Sequence[Any]:
        """The operands that a pattern sees: of arithmetic both sides, numbers and parameters too; else data only.

        Of an einsum parameters, too: which side is learned depends on the model, not on the contraction.
        """
        found = self._written.get(node)
        if found is None:
            name = self._names[node]
            if name in ops.ARITHMETIC:
                found = ops.arithmetic_operands(node)
            else:
                found = self._operands[node] if name == "einsum" else self.data_operands(node)
            self._written[node] = found
        return found

    def factor(self, node: Node) -> Any:
        """The ``alpha`` of an op that scales an operand by it, 1 of all others."""
        if node not in self._factors:
            self._factors[node] = ops.attributes(node).get("alpha", 1)
        return self._factors[node]

    def walk(self, node: Node, names: tuple[str, ...], least: int, most: int, limit: int) -> Walk:
        """Back from `node` along data through `least` to `most` nodes of the kinds `names`; given up at `limit` steps.

        A node that is reached by ways of several lengths is an end of each of them.
        """
        known = self._walks.setdefault((names, least, most), {})
        if node not in known:
            known[node] = self._walk(node, names, least, most, limit)
        return known[node]

    def _walk(self, node: Node, names: tuple[str, ...], least: int, most: int, limit: int) -> Walk:
        seen: set[Node] = set()
        ends: list[tuple[int, Node]] = []
        broken: Node | None = None
        steps = 0
        queue = deque([(node, 0)])
        while queue and steps <= limit:
            steps += 1
            current, depth = queue.popleft()
            if depth >= least:
                ends.append((depth, current))
            if not self._kinds[current].isdisjoint(names):
                if depth < most and current not in seen:
                    seen.add(current)
                    queue.extend((source, depth + 1) for source in self.data_operands(current))
            elif depth < least and broken is None:
                broken = current
        ends.sort(key=lambda end: -end[0])
        return Walk(tuple(end for _, end in ends), broken, steps)

    def is_dynamic(self, node: Node) -> bool:
        return node in self.dynamic

    def is_learned_static(self, node: Node) -> bool:
        return node in self._from_parameter and node not in self.dynamic

    def is_learned_op(self, node: Node) -> bool:
        """Whether a node applies learned weights to data: a linear map, convolution or table look-up."""
        return node in self._learned

    def is_a(self, node: Node, name: str) -> bool:
        """Whether a node is the op, or in the op class, `name`; `linear` needs a learned operand."""
        return name in self._kinds[node]

    def reads_content(self, node: Node) -> bool:
        """Whether a runtime input reaches a node that holds more than positions or a mask."""
        if self._content is None:
            self._content = set()
            for current in self.nodes:
                is_content = current.op == "placeholder" and not _is_positional(current)
                if is_content or any(source in self._content for source in self._operands[current]):
                    self._content.add(current)
        return node in self._content

    def reaches_output(self, node: Node) -> bool:
        """Whether a model output, or a buffer that outlives the call, depends on a node."""
        if self._live is None:
            self._live = set(self.walk_back((n for n in self.nodes if n.op == "output"), lambda _: False))
        return node in self._live

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

    def input_sets(self, cut: Collection[Node] = ()) -> dict[Node, int]:
        """The runtime inputs whose values reach each node, one bit each; nothing passes through the nodes of `cut`."""
        blocked, bits = set(cut), itertools.count()
        found: dict[Node, int] = {}
        for node in self.nodes:
            reached = 1 << next(bits) if node.op == "placeholder" else 0
            for source in self._operands[node]:
                reached |= found[source]
            found[node] = 0 if node in blocked else reached
        return found

    def exclusive_parameters(self, node: Node) -> int:
        """The number of parameters that only `node` needs."""
        return count_parameters(self.module, exclusive_cone([node]))

    def reaches_back(self, start: Node, wanted: Callable[[Node], bool], stop: Callable[[Node], bool]) -> bool:
        """Whether a wanted node is reachable backward from `start`, not going past a `stop` node."""
        seen, queue = {start}, deque([start])
        while queue:
            node = queue.popleft()
            if wanted(node):
                return True
            if stop(node):
                continue
            for source in self._operands[node]:
                if source not in seen:
                    seen.add(source)
                    queue.append(source)
        return False

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


# Inputs of transformers models that hold positions or masks whatever their dtype.
_POSITIONAL = ("position_ids", "cache_position", "attention_mask", "token_type_ids")


def _is_positional(node: Node) -> bool:
    return ops.dtype(node) is torch.bool or str(node.target).endswith(_POSITIONAL)


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


def shape_hash(nodes: Iterable[Node]) -> str:
    """Equal for sets of nodes that do the same ops in the same order, whatever their names, sizes and weights."""
    members = set(nodes)
    graph = networkx.DiGraph()
    for node in members:
        graph.add_node(node, op=ops.op_name(node))
        graph.add_edges_from((source, node) for source in ops.operands(node) if source in members)
    with warnings.catch_warnings():  # that hashes differ from those of older releases
        warnings.simplefilter("ignore", UserWarning)
        return networkx.weisfeiler_lehman_graph_hash(graph, node_attr="op")

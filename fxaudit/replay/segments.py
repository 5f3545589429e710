"""Many replays of one batch, of which each runs only what it does not share with another.

A graph is cut into pieces where a coefficient is bound: in the frozen graph before the first node that reads it, in the
live graph after the node that computes it. Replays that bind the same values up to a cut share everything before it, so
that a sweep over single controllers costs the sum of the suffixes, not a pass for each.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.fx import Graph, GraphModule, Node

from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.model.trace import (
    RandomStates,
    TracedModel,
    fresh_inputs,
    is_random,
    random_states,
    run_from,
    written_inputs,
)


@dataclass(frozen=True, slots=True)
class Segment:
    """The nodes between two cuts: the values that they read from and give to other segments, by name, and the values
    that nothing after them reads."""

    module: Callable[..., tuple[Any, ...]] | None
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    last: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """A graph in segments. Before segment i + 1 the coefficient `order[i]`, a value called `bound[i]`, is bound.

    `stateful` graphs write to buffers or inputs; their replays share nothing. Random ops draw from `states`, those of
    the live run on the same input leaves, whatever a replay shares with others.
    """

    traced: TracedModel
    inputs: tuple[str, ...]
    order: tuple[int, ...]
    bound: tuple[str, ...]
    segments: tuple[Segment, ...]
    outputs: tuple[Any, ...]
    stateful: bool
    states: RandomStates

    def start(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """The values before the first segment."""
        self.states.update(random_states(self.traced, list(leaves)))
        if self.stateful:
            leaves = fresh_inputs(self.traced.graph_module, list(leaves), self.traced.initial_state)
        return dict(zip(self.inputs, leaves, strict=True))

    def advance(self, index: int, values: dict[str, Any]) -> None:
        """Run one segment, adding to `values` what it gives and dropping what nothing reads any more."""
        segment = self.segments[index]
        if segment.module is not None:
            values |= zip(segment.gives, segment.module(*(values[name] for name in segment.takes)), strict=True)
        for name in segment.last:
            values.pop(name, None)

    def leaves(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """The output leaves, after the last segment."""
        return tuple(values[value.name] if isinstance(value, Node) else value for value in self.outputs)


def frozen_chain(frozen: FrozenModel, *, compiled: bool = False) -> Chain:
    """The frozen graph, cut before the first use of each coefficient."""
    nodes = list(frozen.frozen.graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    inputs = [node for node in nodes if node.op == "placeholder"]
    count = len(inputs) - len(frozen.coefficients)
    cuts = [(min(map(order.__getitem__, node.users), default=len(nodes) - 1), node) for node in inputs[count:]]
    return _chain(frozen.traced, frozen.frozen, inputs[:count], cuts, compiled)


def live_chain(frozen: FrozenModel, *, compiled: bool = False) -> Chain:
    """The live graph, cut after each coefficient."""
    graph_module = frozen.traced.graph_module
    order = {node: i for i, node in enumerate(graph_module.graph.nodes)}
    cuts = [(order[coefficient.node] + 1, coefficient.node) for coefficient in frozen.coefficients]
    return _chain(frozen.traced, graph_module, frozen.traced.placeholders(), cuts, compiled)


def _chain(
    traced: TracedModel, module: GraphModule, inputs: Sequence[Node], cuts: Sequence[tuple[int, Node]], compiled: bool
) -> Chain:
    nodes = list(module.graph.nodes)
    arranged = sorted(range(len(cuts)), key=lambda i: (cuts[i][0], i))
    places = [cuts[i][0] for i in arranged]
    pieces = [
        [node for node in nodes[start:stop] if node.op not in ("placeholder", "get_attr", "output")]
        for start, stop in zip([0, *places], [*places, len(nodes)], strict=True)
    ]
    (results,) = nodes[-1].args
    outputs = tuple(results) if isinstance(results, tuple | list) else (results,)
    last: dict[Node, int] = {}
    for i, piece in enumerate(pieces):
        last |= dict.fromkeys((source for node in piece for source in node.all_input_nodes), i)
    last |= dict.fromkeys((node for node in outputs if isinstance(node, Node)), len(pieces))
    # A coefficient is bound after the segment that computes it, so it stays until then.
    for cut, i in enumerate(arranged):
        last[cuts[i][1]] = max(last.get(cuts[i][1], 0), cut + 1)
    states: RandomStates = {}
    return Chain(
        traced=traced,
        inputs=tuple(node.name for node in inputs),
        order=tuple(arranged),
        bound=tuple(cuts[i][1].name for i in arranged),
        segments=tuple(_segment(traced, piece, i, last, states, compiled) for i, piece in enumerate(pieces)),
        outputs=outputs,
        stateful=bool(traced.initial_state) or written_inputs(traced.graph_module),
        states=states,
    )


def _segment(
    traced: TracedModel,
    piece: Sequence[Node],
    index: int,
    last: Mapping[Node, int],
    states: RandomStates,
    compiled: bool,
) -> Segment:
    dropped = tuple(node.name for node, at in last.items() if at == index and node.op != "get_attr")
    if not piece:
        return Segment(None, (), (), dropped)
    inside = set(piece)
    sources = dict.fromkeys(source for node in piece for source in node.all_input_nodes if source not in inside)
    graph = Graph()
    copied: dict[Node, Node] = {}
    takes = [source for source in sources if source.op != "get_attr"]
    for source in takes:
        copied[source] = graph.placeholder(source.name)
    for source in sources:
        if source.op == "get_attr":
            copied[source] = graph.node_copy(source)
    for node in piece:
        copied[node] = graph.node_copy(node, copied.__getitem__)
    gives = [node for node in piece if last.get(node, -1) > index]
    graph.output(tuple(copied[node] for node in gives))
    module: Any = GraphModule(traced.graph_module, graph, class_name=f"Segment{index}").eval()
    if any(map(is_random, piece)):
        module = _random_segment(module, states)
    elif compiled:
        module = torch.compile(module)
    own = {node.name for node in piece}
    return Segment(
        module,
        tuple(source.name for source in takes),
        tuple(node.name for node in gives),
        tuple(name for name in dropped if name not in own),
    )


def _random_segment(module: GraphModule, states: RandomStates) -> Callable[..., tuple[Any, ...]]:
    return lambda *values: run_from(module, values, states)


class Replay(Protocol):
    """A replay; `signature` holds for each coefficient, in a chain's order, what stands for the value that is bound.

    None stands for the coefficient's own value.
    """

    @property
    def signature(self) -> tuple[Hashable, ...]: ...


R = TypeVar("R", bound=Replay)


@dataclass(frozen=True, slots=True)
class Explorer(Generic[R]):
    """How replays run on one chain: `bind` gives the value of a coefficient (index, what stands for it, and the value
    computed by the live graph, if any); `finish` takes replays that are one and the same, with their output."""

    chain: Chain
    bind: Callable[[int, Any, Any], Any]
    finish: Callable[[Sequence[R], tuple[Any, ...]], None]

    def run(self, leaves: Sequence[Any], replays: Sequence[R]) -> None:
        """Run all replays on input leaves; the first one finishes first."""
        if not self.chain.stateful:
            self._explore(0, self.chain.start(leaves), replays)
            return
        for group in _grouped(replays, lambda r: r.signature).values():
            self._explore(0, self.chain.start(leaves), group)

    def until(self, leaves: Sequence[Any], replay: Replay, cut: int) -> Any:
        """The value of the coefficient at a cut, as computed with everything before it bound."""
        values = self.chain.start(leaves)
        for index in range(cut + 1):
            self.chain.advance(index, values)
            if index < cut:
                self._bind(index, replay.signature[index], values)
        return values[self.chain.bound[cut]]

    def _explore(self, first: int, values: dict[str, Any], replays: Sequence[R]) -> None:
        """Run `replays`, which agree in what is bound before segment `first`, from there on."""
        waiting: list[tuple[int, dict[str, Any], Sequence[R]]] = []
        for index in range(first, len(self.chain.segments)):
            self.chain.advance(index, values)
            if index == len(self.chain.order):
                break
            groups = _grouped(replays, lambda r, at=index: r.signature[at])  # type: ignore[misc]
            mark = replays[0].signature[index]
            replays = groups.pop(mark)
            waiting += [(index, dict(values), group) for group in groups.values()]
            self._bind(index, mark, values)
        self.finish(replays, self.chain.leaves(values))
        del values
        # The deepest first, so that values kept for a branch go as early as they can.
        while waiting:
            index, kept, group = waiting.pop()
            self._bind(index, group[0].signature[index], kept)
            self._explore(index + 1, kept, group)

    def _bind(self, index: int, mark: Hashable, values: dict[str, Any]) -> None:
        name = self.chain.bound[index]
        values[name] = self.bind(self.chain.order[index], mark, values.get(name))


def _grouped(replays: Sequence[R], key: Callable[[R], Hashable]) -> dict[Hashable, list[R]]:
    groups: dict[Hashable, list[R]] = {}
    for replay in replays:
        groups.setdefault(key(replay), []).append(replay)
    return groups

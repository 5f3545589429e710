"""A traced model becomes two graphs: *tapped*, which also returns every coefficient, and *frozen*, which takes them.

Both are made from the same trace and run the same ops on the same operands, so the frozen graph fed with what the
tapped graph returned reproduces the live output bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import sympy
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from fxaudit.axes import Size
from fxaudit.controllers.controller import Coefficient, Controller, Domain
from fxaudit.controllers.graphs import exclusive_cone
from fxaudit.controllers.pattern import Pattern
from fxaudit.errors import DataError, NoControllerError
from fxaudit.model.inputs import batch_of
from fxaudit.model.settings import exact_numerics
from fxaudit.model.trace import TracedModel, fresh_inputs, random_ops, random_states, run_flat, run_from


class LiveRun(NamedTuple):
    """A run with live controllers: the model's own output, and every coefficient by key."""

    output: Any
    coefficients: dict[str, Tensor]


class FrozenModel(nn.Module):
    """A model whose coefficients are inputs.

    `forward(*inputs, coefficients=...)` returns what the model returns, computed with the coefficients given; `live`
    runs the controllers and returns what they compute. Keys are ``<controller id>/<name>``; see `coefficients`.
    `patterns` are those that the controllers were searched for with, where they are known.
    """

    def __init__(
        self, traced: TracedModel, controllers: Sequence[Controller], patterns: Sequence[Pattern] = ()
    ) -> None:
        super().__init__()
        if not controllers:
            raise NoControllerError(
                f"{traced.subject.source} has no controller to freeze",
                expected="at least one match of a pattern",
                found="none",
                remedy="`fxaudit trace` shows the nearest misses; `--patterns` adds families of your own",
            )
        self.traced = traced
        self.controllers = tuple(controllers)
        self.patterns = tuple(patterns)
        self.coefficients: tuple[Coefficient, ...] = tuple(c for k in controllers for c in k.coefficients)
        self.taps: tuple[Coefficient, ...] = tuple(c for k in controllers for c in k.taps)
        self.tapped = tapped_graph(traced, [*self.coefficients, *self.taps])
        self.frozen = frozen_graph(traced, self.coefficients)
        self.eval()

    def forward(self, *args: Any, coefficients: Mapping[str, Tensor], **kwargs: Any) -> Any:
        leaves = self.traced.flatten((args, kwargs))
        values = self.check(coefficients, batch_of((args, kwargs)))
        with exact_numerics():
            return self.traced.unflatten(self.run_frozen(leaves, values))

    def live(self, *args: Any, **kwargs: Any) -> LiveRun:
        """The model's output with live controllers, and the coefficients that they computed."""
        leaves = self.traced.flatten((args, kwargs))
        with exact_numerics():
            outputs, values = self.run_tapped(leaves)
        named = {c.key: v for c, v in zip(self.coefficients, values, strict=False)}
        return LiveRun(self.traced.unflatten(outputs), named)

    def run_tapped(self, leaves: list[Any]) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
        """Output leaves, then coefficients and taps in order, for input leaves."""
        found = run_flat(self.tapped, leaves, self.traced.initial_state)
        count = len(self.traced.output_names)
        return found[:count], found[count:]

    def run_frozen(self, leaves: list[Any], values: Sequence[Tensor]) -> tuple[Any, ...]:
        """Output leaves for input leaves and one value for each of `coefficients`."""
        kept = {str(n.target) for n in self.frozen.graph.nodes if n.op == "get_attr"}
        state = {name: value for name, value in self.traced.initial_state.items() if name in kept}
        if random_ops(self.frozen):
            states = random_states(self.traced, leaves)
            return run_from(self.frozen, fresh_inputs(self.frozen, [*leaves, *values], state), states)
        return run_flat(self.frozen, [*leaves, *values], state)

    def check(self, coefficients: Mapping[str, Tensor], batch: int | None) -> list[Tensor]:
        """The values of `coefficients` in order.

        Raises:
            DataError: a key is missing or unknown, or a value has another shape or dtype.
        """
        known = [coefficient.key for coefficient in self.coefficients]
        if set(coefficients) != set(known):
            missing = [key for key in known if key not in coefficients]
            unknown = [key for key in coefficients if key not in known]
            raise DataError(
                "the coefficients are not those of this model",
                expected=f"{len(known)} keys: {_few(known)}",
                found=f"missing {_few(missing)}; unknown {_few(unknown)}",
                remedy="start from `frozen.live(inputs).coefficients`",
            )
        for coefficient in self.coefficients:
            value = coefficients[coefficient.key]
            expected = concrete_shape(coefficient.shape, self.traced.sample, batch)
            if tuple(value.shape) != expected or value.dtype != coefficient.dtype:
                axes = " ".join("*".join(axis) for axis in coefficient.axes)
                raise DataError(
                    f"`{coefficient.key}` does not fit",
                    expected=f"{list(expected)} ({axes}), {coefficient.dtype}",
                    found=f"{list(value.shape)}, {value.dtype}",
                    remedy="keep the shape and dtype of the recorded coefficient",
                )
        return [coefficients[key] for key in known]


def concrete_shape(shape: Sequence[Size], sample: Size | None, batch: int | None) -> tuple[int, ...]:
    """A symbolic shape for a given number of inputs."""
    values = {sample: batch} if isinstance(sample, sympy.Expr) else {}
    return tuple(size if isinstance(size, int) else int(size.subs(values)) for size in shape)


def _few(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}" if names else "none"


def tapped_graph(traced: TracedModel, taps: Sequence[Coefficient]) -> GraphModule:
    """The traced graph with the nodes of `taps` as further outputs."""
    graph, copied, outputs = _copy(traced)
    graph.output((*outputs, *(copied[tap.node] for tap in taps)))
    return _module(traced, graph, "Tapped")


def frozen_graph(traced: TracedModel, coefficients: Sequence[Coefficient]) -> GraphModule:
    """The traced graph with each coefficient as a further input, and without everything that only computed them."""
    graph, copied, outputs = _copy(traced)
    graph.output(outputs)
    cone = exclusive_cone([coefficient.node for coefficient in coefficients])
    last_input = copied[traced.placeholders()[-1]] if traced.placeholders() else None
    for i, coefficient in enumerate(coefficients):
        node = copied[coefficient.node]
        with graph.inserting_after(last_input) if last_input is not None else graph.inserting_before():
            bound = graph.placeholder(f"coefficient_{i}")
        bound.meta = {key: value for key, value in node.meta.items() if key in ("val", "tensor_meta")}
        node.replace_all_uses_with(bound)
        last_input = bound
    dead = {copied[node] for node in cone}
    for node in reversed(list(graph.nodes)):
        if node in dead:
            graph.erase_node(node)
    return _module(traced, graph, "Frozen")


def _copy(traced: TracedModel) -> tuple[Graph, dict[Node, Node], tuple[Any, ...]]:
    graph = Graph()
    copied: dict[Node, Node] = {}
    outputs = graph.graph_copy(traced.graph, copied)
    return graph, copied, tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)


def _module(traced: TracedModel, graph: Graph, name: str) -> GraphModule:
    graph.lint()
    module = GraphModule(traced.graph_module, graph, class_name=name)
    return module.eval()


def with_observed_domains(traced: TracedModel, controllers: Sequence[Controller]) -> tuple[Controller, ...]:
    """`controllers` with every domain that the example's own coefficients contradict replaced by a wider one.

    A pattern states the domain of its family; not every member keeps to it: some routers do not renormalise.
    """
    coefficients = [c for controller in controllers for c in controller.coefficients]
    with exact_numerics():
        leaves = traced.flatten(traced.subject.arguments)
        found = run_flat(tapped_graph(traced, coefficients), leaves, traced.initial_state)
    values = dict(zip((c.key for c in coefficients), found[len(traced.output_names) :], strict=True))
    return tuple(
        replace(
            controller,
            coefficients=tuple(replace(c, domain=_observed(c, values[c.key])) for c in controller.coefficients),
        )
        for controller in controllers
    )


# Rounding in a sum of a few numbers; a router that does not renormalise is off by far more.
_SUM_TOLERANCE = 1e-2


def _observed(coefficient: Coefficient, value: Tensor) -> Domain:
    domain = coefficient.domain
    if domain.kind not in ("interval", "simplex") or not value.numel() or value.device.type == "meta":
        return domain
    low, high = domain.low or 0.0, domain.high or 0.0
    if float(value.min()) < low or float(value.max()) > high:
        return Domain("real")
    if domain.kind == "simplex":
        if (str(domain.axis),) not in coefficient.axes:
            return Domain("interval", low, high)  # the axis is part of a product, so sums along it are not at hand
        dimension = coefficient.axes.index((str(domain.axis),))
        if float((value.double().sum(dimension) - (domain.total or 0.0)).abs().max()) > _SUM_TOLERANCE:
            return Domain("interval", low, high)
    return domain

"""The first value at which an exported graph leaves what the traced graph computes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor
from torch.fx import Node

from fxaudit import ops
from fxaudit.controllers.controller import ROOT
from fxaudit.execution.closeness import LIMITS, relative_errors
from fxaudit.execution.following import Following
from fxaudit.execution.runtime import COUNT, Feed, Runtime
from fxaudit.model.settings import exact_numerics
from fxaudit.model.trace.traced import TracedModel, restore_state, same_draws

# Values of this size in all are looked at in one run.
_BYTES_AT_ONCE = 256 << 20


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first node, in the order of the graph, whose value differs, of `compared` of all `nodes` that both graphs
    have."""

    node: str
    op: str
    module: str
    source: str
    error: float
    compared: int
    nodes: int

    def __str__(self) -> str:
        place = f"first at `{self.node}` ({self.op}) in {self.module}: {self.error:.3g} in L2"
        seen = f"{self.compared} of {self.nodes} nodes compared"
        return "\n".join(part for part in (f"{place}; {seen}", self.source) if part)


def first_divergence(
    traced: TracedModel, path: Path, leaves: Sequence[Any], feed: Feed, runtime: Runtime
) -> Divergence | None:
    """Where ``live.onnx`` first leaves the traced graph on one input; None when no value that both name differs.

    Values are read out as further outputs of a copy of the graph, which lies beside it for the time of the search.

    Raises:
        RunError: onnxruntime cannot run the copy.
    """
    model = onnx.load(str(path), load_external_data=False)
    pairs = _pairs(traced, model)
    total = sum(node.op == "call_function" for node in traced.graph.nodes)
    compared = 0
    for chunk in _chunks(traced, pairs, leaves):
        found = _values_in_onnx(model, path, [pairs[node] for node in chunk], feed, runtime)
        for node, value in chunk.items():
            compared += 1
            error = _error(value, found[pairs[node]])
            if not error <= LIMITS["float32"]:
                module = ops.module_path(node)
                return Divergence(
                    node.name,
                    ops.op_name(node),
                    module[-1] if module and module[-1] else ROOT,
                    ops.source_line(node),
                    error,
                    compared,
                    total,
                )
    return None


def _error(expected: Tensor, found: np.ndarray) -> float:
    own = expected.detach().cpu().numpy()
    if expected.is_floating_point():
        return relative_errors(own, found)[0]
    return 0.0 if own.shape == found.shape and bool((own == found).all()) else float("inf")


# --- which value is which -------------------------------------------------------------------------------------------

_EXPORTED = re.compile(r"%(\w+) : .*target=torch\.ops\.([\w.]+)\]")


def _pairs(traced: TracedModel, model: onnx.ModelProto) -> dict[Node, str]:
    """The ONNX value of each node of the traced graph that is surely the same.

    The exporter numbers nodes anew but keeps their order: the n-th node of an op here is the n-th one there, wherever
    both have equally many.
    """
    written: dict[str, str] = {}
    for node in model.graph.node:
        text = next((p.value for p in node.metadata_props if p.key == "pkg.torch.onnx.fx_node"), "")
        match = _EXPORTED.match(text)
        if match is not None and match[1] in node.output:
            written[match[1]] = match[2]
    there: dict[str, list[str]] = defaultdict(list)
    for name, op in written.items():
        there[op].append(name)
    here: dict[str, list[Node]] = defaultdict(list)
    for own in traced.graph.nodes:
        if own.op == "call_function" and isinstance(own.meta.get("val"), Tensor):
            here[str(own.target)].append(own)
    paired: dict[Node, str] = {}
    for op, nodes in here.items():
        if len(nodes) == len(there[op]):
            paired |= dict(zip(nodes, there[op], strict=True))
    return {node: paired[node] for node in traced.graph.nodes if node in paired}


# --- values ---------------------------------------------------------------------------------------------------------


class _Values(Following):
    """Keeps the values of some nodes, as far as they fit."""

    def __init__(self, module: torch.nn.Module, outer: Node | None = None, wanted: Sequence[Node] = ()) -> None:
        super().__init__(module, outer)
        self.wanted = set(wanted)
        self.found: dict[Node, Tensor] = {}
        self.size = 0

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n in self.wanted and isinstance(result, Tensor) and (self.size < _BYTES_AT_ONCE or not self.found):
            self.found[n] = result.clone()
            self.size += result.nbytes
        return result


def _chunks(traced: TracedModel, pairs: Mapping[Node, str], leaves: Sequence[Any]) -> Iterator[dict[Node, Tensor]]:
    """The torch values of paired nodes, in order, as many at once as fit."""
    left = list(pairs)
    while left:
        values = _Values(traced.graph_module, wanted=left)
        restore_state(traced.graph_module, traced.initial_state)
        own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        with exact_numerics(), same_draws(own):
            values.run(*own)
        if not values.found:
            return
        yield values.found
        left = [node for node in left if node not in values.found]


def _values_in_onnx(
    model: onnx.ModelProto, path: Path, names: Sequence[str], feed: Feed, runtime: Runtime
) -> dict[str, np.ndarray]:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    known = {output.name for output in copy.graph.output}
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
    # Beside the original, since large weights are read from a file next to it.
    place = path.with_name(f".{path.stem}.values.onnx")
    try:
        onnx.save(copy, str(place))
        return runtime.run(place, [feed], COUNT).outputs[0]
    finally:
        place.unlink(missing_ok=True)

"""The EVIDENCE role: which kernels onnxruntime really runs when it may optimise, where, and for which modules.

Optimised graphs are inspected, never compared: fusion pads, merges and drops nodes, so FLOPs in them are those of the
kernels, not of the model. onnxruntime drops what the exporter noted about a node as soon as it rewrites anything, so a
kernel is traced back by its name, else by the value that it writes, else by the region of exported nodes behind it.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from fxaudit.errors import ProviderError
from fxaudit.execution.branches import CONTROL_FLOW
from fxaudit.execution.closeness import relative_errors
from fxaudit.execution.formulas import FREE_OPS, FUSED_FREE_OPS, fused_flops
from fxaudit.execution.options import CPU
from fxaudit.execution.profile import node_name, shapes, split_runs
from fxaudit.execution.proof import all_nodes, modules_of
from fxaudit.execution.providers import require_claim
from fxaudit.execution.runtime import EVIDENCE, Feed, Runtime

MAPPED = ("name", "value", "region", "lost")
_SUFFIXES = ("_nchwc",)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A node of the optimised graph that ran: how it was traced back (one of `MAPPED`) to which `modules`, and its
    `flops`, padding included; None for an op without a formula."""

    name: str
    op: str
    provider: str
    mapped: str
    modules: tuple[str, ...]
    flops: int | None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one model ran as when optimised: its kernels for the first feed, how many different sequences of kernels and
    shapes all feeds had, what each provider claimed before the last fusions, and the outputs."""

    kernels: tuple[Kernel, ...]
    sequences: int
    claimed: Mapping[str, int]
    outputs: tuple[dict[str, np.ndarray], ...]

    @property
    def ops(self) -> dict[str, int]:
        return dict(sorted(Counter(kernel.op for kernel in self.kernels).items()))

    def to_json(self, expected: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Any]:
        """Kernels by op and provider with the modules they serve, the totals, and the largest difference from the
        `expected` outputs, relative to their largest element."""
        moved = [
            relative_errors(value, found[name])[1]
            for own, found in zip(expected, self.outputs, strict=True)
            for name, value in own.items()
        ]
        groups: dict[tuple[str, str], list[Kernel]] = {}
        for kernel in self.kernels:
            groups.setdefault((kernel.op, kernel.provider), []).append(kernel)
        return {
            "executed_nodes": len(self.kernels),
            "flops_padded": sum(kernel.flops or 0 for kernel in self.kernels),
            "flops_unknown": sorted({kernel.op for kernel in self.kernels if kernel.flops is None}),
            "sequences": self.sequences,
            "difference": max(moved, default=0.0),
            "mapped": {how: sum(kernel.mapped == how for kernel in self.kernels) for how in MAPPED},
            "claimed": dict(self.claimed),
            "providers": dict(Counter(kernel.provider for kernel in self.kernels)),
            "kernels": [
                {
                    "op": op,
                    "provider": provider,
                    "count": len(group),
                    "flops_padded": sum(kernel.flops or 0 for kernel in group),
                    "modules": sorted({module for kernel in group for module in kernel.modules}),
                }
                for (op, provider), group in sorted(groups.items())
            ],
        }


def gather_evidence(path: Path, feeds: Sequence[Feed], runtime: Runtime, provider: str = CPU) -> Evidence:
    """What `path` runs as on `provider` with every optimisation.

    Raises:
        RunError: onnxruntime cannot load or run the model.
        ProviderError: `provider` is not used, or work of matrix products ran elsewhere.
    """
    session = runtime.run(path, feeds, EVIDENCE, provider, optimized=True)
    split = split_runs(session.events, len(feeds), path)
    assert session.optimized is not None
    exported = onnx.load(str(path), load_external_data=False)
    optimized = onnx.load(str(session.optimized), load_external_data=False)
    kernels = tuple(_kernels(split[0], exported, optimized))
    claimed = dict(Counter(entry["provider"] for entry in session.assignment))
    require_claim(path, provider, claimed)
    require_work_on(path, provider, kernels)
    return Evidence(
        kernels=kernels,
        sequences=len({tuple(_signature(event) for event in events) for events in split}),
        claimed=claimed,
        outputs=session.outputs,
    )


def require_work_on(path: Path, requested: str, kernels: Iterable[Kernel]) -> None:
    """Raise when FLOPs ran on another provider: size arithmetic may, the work itself may not.

    Raises:
        ProviderError: naming the first such kernel.
    """
    elsewhere = [kernel for kernel in kernels if kernel.flops != 0 and kernel.provider != requested]
    if elsewhere:
        first = elsewhere[0]
        raise ProviderError(
            f"onnxruntime does not run all work of {path.name} on {requested}",
            where=f"{first.op} `{first.name}` of {', '.join(first.modules) or 'no known module'}",
            expected=f"every matrix product, convolution and recurrent layer on {requested}",
            found=f"{len(elsewhere)} such kernels on {', '.join(sorted({k.provider for k in elsewhere}))}",
            remedy="ask for --provider cpu: this provider has no kernel for the op in this precision",
            requested=requested,
            used=tuple(sorted({k.provider for k in elsewhere})),
        )


def require_usable(provider: str) -> None:
    """Raise unless a product of two small matrices really runs on `provider`: asked before a long audit, not after it.

    Raises:
        ProviderError: it does not.
    """
    kind = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"], name="product")],
        "probe",
        [onnx.helper.make_tensor_value_info("x", kind, (2, 3))],
        [onnx.helper.make_tensor_value_info("y", kind, (2, 4))],
        initializer=[onnx.numpy_helper.from_array(np.ones((3, 4), np.float32), "w")],
    )
    opset = onnx.helper.make_opsetid("", 20)
    with tempfile.TemporaryDirectory(prefix="fxaudit-provider-") as folder, Runtime() as runtime:
        path = Path(folder) / "probe.onnx"
        onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10), str(path))
        gather_evidence(path, [{"x": np.ones((2, 3), np.float32)}], runtime, provider)


def _signature(event: Mapping[str, Any]) -> tuple[str, str]:
    arguments = event["args"]
    return node_name(event), f"{shapes(arguments, 'input_type_shape')}{shapes(arguments, 'output_type_shape')}"


def _kernels(
    events: Sequence[Mapping[str, Any]], exported: onnx.ModelProto, optimized: onnx.ModelProto
) -> Iterable[Kernel]:
    origin = _Origin(exported)
    by_name: dict[str, onnx.NodeProto] = {}
    for node in all_nodes(optimized.graph):
        if node.name:
            by_name.setdefault(node.name, node)
    weights = {i.name: list(i.dims) for i in optimized.graph.initializer}
    producers = {name: node for node in all_nodes(optimized.graph) for name in node.output if name}
    # Nodes without a name show as their op and their place among the nodes; they are told by their order instead.
    unnamed: dict[str, list[onnx.NodeProto]] = {}
    for node in all_nodes(optimized.graph):
        if not node.name:
            unnamed.setdefault(node.op_type, []).append(node)
    for event in events:
        arguments, name = event["args"], node_name(event)
        op, provider = arguments["op_name"], arguments.get("provider", "")
        if op in CONTROL_FLOW:
            continue
        kernel = by_name.get(name)
        if kernel is None and unnamed.get(op):
            kernel = unnamed[op].pop(0)
        mapped, modules = ("lost", ()) if kernel is None else origin.of(kernel, producers)
        flops = 0 if op in FREE_OPS or op in FUSED_FREE_OPS else None
        if flops is None and kernel is not None:
            inputs = _with_weights(shapes(arguments, "input_type_shape"), kernel, weights)
            flops = fused_flops(op, inputs, shapes(arguments, "output_type_shape"), kernel)
        yield Kernel(name, op, provider, mapped, modules, flops)


def _with_weights(profiled: list[list[int]], node: onnx.NodeProto, weights: Mapping[str, list[int]]) -> list[list[int]]:
    """The shapes of all operands: a prepacked weight is missing from a profile, and stands in the graph."""
    given = [name for name in node.input if name]
    missing = len(given) - len(profiled)
    if missing <= 0:
        return profiled
    left = iter(profiled)
    found = []
    for name in given:
        if missing and name in weights and math.prod(weights[name]) > 1:
            found.append(weights[name])
            missing -= 1
        else:
            found.append(next(left, []))
    return found


class _Origin:
    """The exported nodes that a node of the optimised graph stands for."""

    def __init__(self, exported: onnx.ModelProto) -> None:
        self.modules = modules_of(exported.graph)
        self.producers = {name: node for node in all_nodes(exported.graph) for name in node.output if name}
        self.known = {*self.producers, *(v.name for v in exported.graph.input)}
        self.known |= {i.name for i in exported.graph.initializer}

    def of(self, node: onnx.NodeProto, optimized: Mapping[str, onnx.NodeProto]) -> tuple[str, tuple[str, ...]]:
        """How `node` was traced back, and the modules of the exported nodes that it stands for."""
        # Some fusions append their own name to that of the node.
        for name in (node.name, node.name.rpartition("/")[0]):
            if name in self.modules:
                return "name", (self.modules[name],)
        # A kernel in onnxruntime's blocked layout is named after the value that it writes in the end.
        outputs = [self._plain(name) for name in (*node.output, node.name)]
        written = [self.producers[name] for name in outputs if name in self.producers]
        if not written:
            return self._behind(node, optimized)
        if all(name in self.known for name in map(self._plain, node.input) if name) and node.op_type == (
            written[0].op_type
        ):
            return "value", tuple({self.modules[found.name] for found in written})
        region = self._region(written, self._sources(node, optimized))
        return "region", tuple(sorted({self.modules[found.name] for found in region}))

    def _behind(self, node: onnx.NodeProto, optimized: Mapping[str, onnx.NodeProto]) -> tuple[str, tuple[str, ...]]:
        """For a node that only rearranges, the modules of what it reads."""
        read = [self.producers[name] for name in self._sources(node, optimized) if name in self.producers]
        return ("region", tuple(sorted({self.modules[found.name] for found in read}))) if read else ("lost", ())

    def _plain(self, name: str) -> str:
        return next((name.removesuffix(s) for s in _SUFFIXES if name.removesuffix(s) in self.known), name)

    def _sources(self, node: onnx.NodeProto, optimized: Mapping[str, onnx.NodeProto]) -> set[str]:
        """The nearest values behind `node` that exist in the exported graph."""
        found: set[str] = set()
        seen: set[str] = set()
        left = list(node.input)
        while left:
            name = left.pop()
            plain = self._plain(name)
            if plain in self.known:
                found.add(plain)
            elif name in optimized and name not in seen:
                seen.add(name)
                left.extend(optimized[name].input)
        return found

    def _region(self, ends: Sequence[onnx.NodeProto], sources: set[str]) -> list[onnx.NodeProto]:
        """The exported nodes between `sources` and `ends`."""
        found: dict[str, onnx.NodeProto] = {}
        left = list(ends)
        while left:
            node = left.pop()
            if node.name in found:
                continue
            found[node.name] = node
            left.extend(self.producers[name] for name in node.input if name not in sources and name in self.producers)
        return list(found.values())

"""Counting runs: what onnxruntime executed for each input, read from its own profile.

The COUNT role runs a model as it stands: no graph optimisation, weights not prepacked (a prepacked weight vanishes from
the profiled shapes), one thread. Times in such a profile mean nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx

from fxaudit.errors import SelfCheckError
from fxaudit.execution.branches import CONTROL_FLOW, Control, controls, taken
from fxaudit.execution.formulas import CLASSES, FREE_OPS, node_flops
from fxaudit.execution.proof import all_nodes, modules_of, prove
from fxaudit.execution.runtime import COUNT, Feed, Runtime

# onnxruntime stops recording at a million events, with no more than a line on stderr.
_MAX_EVENTS = 800_000
_EVENT_SUFFIX = "_kernel_time"


@dataclass(frozen=True, slots=True)
class Work:
    """Work of some nodes in one run: `flops` and `setup` as in `CountedRun`, elements that nodes without FLOPs wrote,
    and bytes of what all of them read and wrote (operands and results, each counted once for each node)."""

    flops: int = 0
    setup: int = 0
    elements: int = 0
    read: int = 0
    written: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.setup + other.setup,
            self.elements + other.elements,
            self.read + other.read,
            self.written + other.written,
        )


@dataclass(frozen=True, slots=True)
class CountedRun:
    """What one run executed.

    `flops` are those of nodes that input data reaches, `setup` of all others; `elementwise` is the number of elements
    that nodes without FLOPs wrote. Ops with neither a formula nor a place among those that cost nothing are in
    `unknown`. The two sequences are digests of the executed nodes, without and with the shapes they had. `modules` has
    the work of each module, `branches` how often each body of each control-flow node ran.
    """

    flops: int
    setup: int
    by_class: Mapping[str, int]
    elementwise: int
    nodes: int
    ops: Mapping[str, int]
    unknown: tuple[str, ...]
    op_sequence: str
    shape_sequence: str
    modules: Mapping[str, Work] = field(default_factory=lambda: MappingProxyType({}), compare=False)
    branches: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}), compare=False)

    @property
    def bytes_read(self) -> int:
        return sum(work.read for work in self.modules.values())

    @property
    def bytes_written(self) -> int:
        return sum(work.written for work in self.modules.values())


@dataclass(frozen=True, slots=True)
class CountedRuns:
    """The runs of one model, one for each feed, its outputs by name, and its control-flow nodes."""

    runs: tuple[CountedRun, ...]
    outputs: tuple[dict[str, np.ndarray], ...]
    controls: tuple[Control, ...] = ()


def count_runs(
    path: Path, feeds: Sequence[Feed], tainted: Collection[str] | None = None, runtime: Runtime | None = None
) -> CountedRuns:
    """What `path` executes for each of `feeds`; inputs not named in `tainted` (default: all) count as constants.

    Args:
        runtime: the process to run it in; by default one of its own.

    Raises:
        RunError: onnxruntime cannot load or run the model, or died on it.
        SelfCheckError: the profile is not a complete record of the runs.
    """
    if runtime is None:
        with Runtime() as own:
            return count_runs(path, feeds, tainted, own)
    model = onnx.load(str(path), load_external_data=False)
    graph = _Graph(model, tainted)
    runs: list[CountedRun] = []
    outputs: list[dict[str, np.ndarray]] = []
    # A loop may run a node many times, so this is a guess; the number of recorded runs is checked below.
    chunk = max(1, _MAX_EVENTS // max(1, len(graph.nodes)))
    for start in range(0, len(feeds), chunk):
        session = runtime.run(path, feeds[start : start + chunk], COUNT)
        outputs.extend(session.outputs)
        runs.extend(_counted(events, graph) for events in split_runs(session.events, len(session.outputs), path))
    return CountedRuns(tuple(runs), tuple(outputs), graph.controls)


class _Graph:
    """What the events of a profile are looked up in."""

    def __init__(self, model: onnx.ModelProto, tainted: Collection[str] | None) -> None:
        self.nodes = {node.name: node for node in all_nodes(model.graph)}
        self.modules = modules_of(model.graph)
        self.dependent = prove(model, tainted).dependent
        self.controls = controls(model.graph)


def split_runs(events: Sequence[dict[str, Any]], count: int, path: Path) -> list[list[dict[str, Any]]]:
    """The node events of each run, by the time window of the run.

    Raises:
        SelfCheckError: there are not `count` runs, or a node event lies in none of them.
    """
    windows = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") == "model_run")
    nodes = [e for e in events if e.get("cat") == "Node" and e["name"].endswith(_EVENT_SUFFIX)]
    nodes.sort(key=lambda e: (e["ts"], -e["dur"]))
    split = [[e for e in nodes if low <= e["ts"] <= high] for low, high in windows]
    if len(windows) != count or sum(map(len, split)) != len(nodes):
        raise SelfCheckError(
            f"the profile of {path.name} is not a complete record",
            where=str(path),
            expected=f"{count} runs and each node event in one of them",
            found=f"{len(windows)} runs; {sum(map(len, split))} of {len(nodes)} events in them",
            remedy="report this model",
        )
    return split


def node_name(event: Mapping[str, Any]) -> str:
    """The name of the node that an event is of."""
    return str(event["name"]).removesuffix(_EVENT_SUFFIX)


def _counted(events: Sequence[dict[str, Any]], graph: _Graph) -> CountedRun:
    by_class: Counter[str] = Counter()
    modules: dict[str, Work] = {}
    unknown: set[str] = set()
    plain, shaped = hashlib.sha256(), hashlib.sha256()
    for event in events:
        arguments = event["args"]
        op, name = arguments["op_name"], node_name(event)
        inputs, outputs = shapes(arguments, "input_type_shape"), shapes(arguments, "output_type_shape")
        plain.update(f"{name} {op}\n".encode())
        shaped.update(f"{name} {op} {inputs} {outputs}\n".encode())
        if op in CONTROL_FLOW:
            continue
        flops = setup = elements = 0
        if op in FREE_OPS:
            elements = sum(map(math.prod, outputs))
        else:
            node = graph.nodes.get(name)
            found = node_flops(op, inputs, outputs, node) if node is not None else None
            if found is None:
                unknown.add(op)
            elif name in graph.dependent:
                flops = found
                by_class[CLASSES[op]] += found
            else:
                setup = found
        work = Work(flops, setup, elements, _size(arguments, "activation") + _size(arguments, "parameter"))
        work += Work(written=_size(arguments, "output"))
        module = graph.modules.get(name, "")
        modules[module] = modules.get(module, Work()) + work
    return CountedRun(
        flops=sum(work.flops for work in modules.values()),
        setup=sum(work.setup for work in modules.values()),
        by_class={name: flops for name, flops in by_class.items() if flops},
        elementwise=sum(work.elements for work in modules.values()),
        nodes=len(events),
        ops=dict(sorted(Counter(e["args"]["op_name"] for e in events).items())),
        unknown=tuple(sorted(unknown)),
        op_sequence=plain.hexdigest(),
        shape_sequence=shaped.hexdigest(),
        modules=modules,
        branches=taken(graph.controls, Counter(map(node_name, events))),
    )


def shapes(arguments: Mapping[str, Any], key: str) -> list[list[int]]:
    """The shapes of operands or results in the arguments of an event."""
    return [next(iter(entry.values())) for entry in arguments.get(key, [])]


def _size(arguments: Mapping[str, Any], kind: str) -> int:
    return int(arguments.get(f"{kind}_size", 0))

"""What an export consists of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from fxaudit.execution.folding import Folding
from fxaudit.model.trace import Finding

# Every graph that an export can write; `tapped` is live with the coefficients as further outputs.
GRAPHS = ("live", "tapped", "bound", "baked")


@dataclass(frozen=True, slots=True)
class RemovedNode:
    """A node of the live graph that the bound graph lacks."""

    name: str
    op: str
    module: str


@dataclass(frozen=True, slots=True)
class RemovedParameter:
    """A parameter or buffer of the live graph that the bound graph lacks, with the number of its elements and bytes."""

    name: str
    elements: int
    bytes: int
    module: str


@dataclass(frozen=True, slots=True)
class ExportedGraphs:
    """The files of one export, and how their inputs and outputs relate to the model's.

    `paths` has the file of each graph that was written. `live`, `bound` and `baked` take the model's own inputs, bound
    also the coefficients; `tapped` is live with the coefficients as further outputs. `input_positions` and
    `output_positions` say which flat leaf of the model each input and output is. `coefficient_names` maps keys to ONNX
    names; `idle` are the keys of coefficients that nothing reads once all are frozen, which bound therefore does not
    take. `expanded` are the keys whose profile had to be expanded to the size of the input before use. `dimensions`
    names the dynamic axes of each input by their place; `batch` is the name of the input axis, None when its size is
    fixed, to `fixed_batch`. `external` is the file with the larger tensors of all graphs, None when each holds its own.
    `programs` are the torch graphs of bound and baked, the latter before anything was folded; `folding` has it
    afterwards, with what became of each coefficient, and is None where nothing was to be folded.
    """

    paths: Mapping[str, Path]
    profile: Mapping[str, Tensor] | None
    input_names: tuple[str, ...]
    input_positions: tuple[int, ...]
    output_names: tuple[str, ...]
    output_positions: tuple[int, ...]
    coefficient_names: Mapping[str, str]
    idle: tuple[str, ...]
    expanded: tuple[str, ...]
    dimensions: tuple[Mapping[int, str], ...]
    batch: str | None
    fixed_batch: int | None
    opset: int
    external: Path | None
    live_nodes: int
    removed_nodes: tuple[RemovedNode, ...]
    removed_parameters: tuple[RemovedParameter, ...]
    programs: Mapping[str, GraphModule]
    folding: Folding | None
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def live(self) -> Path:
        return self.paths["live"]

    @property
    def tapped(self) -> Path:
        return self.paths["tapped"]

    @property
    def bound(self) -> Path:
        return self.paths["bound"]

    @property
    def baked(self) -> Path | None:
        return self.paths.get("baked")

    @property
    def removed_by_module(self) -> list[dict[str, Any]]:
        """What live has and bound has not, by module: ``nodes``, and ``parameters`` (elements) with their ``bytes``."""
        nodes = Counter(node.module for node in self.removed_nodes)
        parameters: Counter[str] = Counter()
        size: Counter[str] = Counter()
        for parameter in self.removed_parameters:
            parameters[parameter.module] += parameter.elements
            size[parameter.module] += parameter.bytes
        return [
            {"module": module, "nodes": nodes[module], "parameters": parameters[module], "bytes": size[module]}
            for module in sorted({*nodes, *parameters})
        ]

    @property
    def bound_inputs(self) -> dict[str, str]:
        """The ONNX input of each coefficient that bound takes, by key."""
        return {key: name for key, name in self.coefficient_names.items() if key not in self.idle}

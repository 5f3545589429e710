"""An export as a directory that stands for itself: graphs, samples, and a manifest that says how each was made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import onnx
from torch import Tensor
from torch.fx import GraphModule

from fxaudit import __version__, ops
from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.errors import ExportError
from fxaudit.execution.export import ExportedGraphs
from fxaudit.execution.export.files import WEIGHTS
from fxaudit.execution.export.programs import live_module, save_program
from fxaudit.execution.flops import executed_nodes, input_dependent, summed
from fxaudit.execution.proof import all_nodes, prove
from fxaudit.execution.samples import SAMPLES, Sample, take_samples, with_referee, write_samples
from fxaudit.model.settings import exact_numerics
from fxaudit.model.trace import Finding, TracedModel
from fxaudit.provenance import environment

SCHEMA = "fxaudit.bundle/1"
MANIFEST = "manifest.json"
PROGRAMS = ("bound", "baked")
# Every file that a bundle can have: a name outside of these is no part of one.
FILES = frozenset(
    [*(f"{graph}.onnx" for graph in ("live", "tapped", "bound", "baked")), WEIGHTS, "bound.pt2", "baked.pt2", SAMPLES]
)
PRECISIONS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}

_HOW = {
    "live": "torch.onnx.export of the traced graph with a barrier behind each coefficient; then without the barriers",
    "tapped": "the same export, the coefficients as further outputs",
    "bound": "the same export, each coefficient an input, without the nodes and parameters that only computed them",
    "baked": "the same export, each coefficient the constant of its profile",
}
_FOLDED = "torch.onnx.export of baked.pt2: the frozen graph with its profile folded into the weights"


@dataclass(frozen=True, slots=True)
class Run:
    """The input leaves of one sample, and where they come from."""

    kind: str
    leaves: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Bundle:
    """A written bundle: what its manifest says, and what it was written from.

    `frozen` is the model that was exported: where only the code that a model has for export can be written as ONNX,
    another one than was given.
    """

    directory: Path
    manifest: Mapping[str, Any]
    frozen: FrozenModel
    exported: ExportedGraphs


def write_bundle(
    frozen: FrozenModel,
    exported: ExportedGraphs,
    directory: Path,
    runs: Sequence[Run],
    profile: Mapping[str, Any],
    findings: Sequence[Finding] = (),
) -> Bundle:
    """Put samples, programs and the manifest beside the graphs of `exported`, which lie in `directory`.

    A program that cannot be saved is left out, and the manifest says why.

    Args:
        profile: what the profile was measured on, for the manifest; empty without one.
        findings: what the reader must know, beside what the trace and the export found.
    """
    traced = frozen.traced
    live = live_module(frozen)
    programs = {"live": live, **_programs(exported)}
    samples = take_samples(frozen, exported, [run.leaves for run in runs])
    samples, without_referee = with_referee(samples, live, exported.programs.get("baked"))
    write_samples(samples, directory / SAMPLES)
    saved = {form: _save(form, module, exported, samples[0], directory) for form, module in _programs(exported).items()}
    graphs = {form: _graph(form, path, exported) for form, path in exported.paths.items()}
    manifest = {
        "schema": SCHEMA,
        "model": {
            "source": traced.subject.source,
            "class": f"{type(traced.subject.module).__module__}.{type(traced.subject.module).__qualname__}",
            "parameters": traced.subject.parameter_count,
            "fingerprint": traced.fingerprint,
            "graph": traced.graph_digest(),
        },
        "options": {
            "opset": exported.opset,
            "precision": precision_of(traced),
            "fold": exported.folding is not None,
            "batch": exported.batch if exported.batch is not None else _batch(samples[0]),
            "profile": dict(profile),
        },
        "files": {path.name: _described(path) for path in sorted(directory.iterdir()) if path.name in FILES},
        "graphs": graphs,
        "programs": saved,
        "coefficients": [_coefficient(frozen, exported, key) for key in exported.coefficient_names],
        "removed": {
            "nodes": [asdict(node) for node in exported.removed_nodes],
            "parameters": [asdict(parameter) for parameter in exported.removed_parameters],
            "modules": exported.removed_by_module,
        },
        "folded": [asdict(fold) for fold in exported.folding.folds] if exported.folding is not None else [],
        "samples": {
            "file": SAMPLES,
            "runs": [
                {"kind": run.kind, "batch": _batch(sample), "flops": _flops(programs, exported, sample)}
                for run, sample in zip(runs, samples, strict=True)
            ],
            "without_float64": without_referee,
        },
        "findings": [asdict(finding) for finding in (*traced.findings, *exported.findings, *findings)],
        "provenance": {
            "fxaudit": __version__,
            "loading": dict(traced.subject.loading),
            "settings": traced.settings,
            "environment": environment(),
            "packages": {name: metadata.version(name) for name in ("onnx", "onnxscript", "onnx-ir")},
        },
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return Bundle(directory, manifest, frozen, exported)


def clear(directory: Path) -> None:
    """Remove a bundle that lies in `directory`, its manifest first; whatever else lies there stays."""
    for name in (MANIFEST, *sorted(FILES)):
        (directory / name).unlink(missing_ok=True)


def precision_of(traced: TracedModel) -> str:
    """The dtypes of the floating-point weights, in the words of ``--precision``."""
    tensors = [*traced.graph_module.parameters(), *traced.graph_module.buffers()]
    dtypes = {str(t.dtype).removeprefix("torch.") for t in tensors if t.is_floating_point()}
    return "+".join(sorted(PRECISIONS.get(name, name) for name in dtypes)) or "fp32"


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def program_flops(module: GraphModule, leaves: Sequence[Tensor]) -> int | None:
    """The FLOPs of one run in the nodes that an input reaches; None where an op has no formula."""
    with exact_numerics():
        count = summed(executed_nodes(module, leaves), input_dependent(module.graph))
    return None if count.unknown else count.per_input


# --- parts of the manifest ------------------------------------------------------------------------------------------


def _described(path: Path) -> dict[str, Any]:
    return {"sha256": file_digest(path), "bytes": path.stat().st_size}


def _graph(form: str, path: Path, exported: ExportedGraphs) -> dict[str, Any]:
    model = onnx.load(str(path), load_external_data=False)
    own = None if form != "bound" else set(exported.input_names)
    return {
        "file": path.name,
        "how": _FOLDED if form == "baked" and exported.folding is not None else _HOW[form],
        "inputs": [value_of(value) for value in model.graph.input],
        "outputs": [value_of(value) for value in model.graph.output],
        "nodes": sum(1 for _ in all_nodes(model.graph)),
        "static": prove(model, own).static,
    }


def value_of(value: onnx.ValueInfoProto) -> dict[str, Any]:
    """Name, dtype and shape of an input or output; a dynamic axis by its name."""
    tensor = value.type.tensor_type
    shape = [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim]
    return {"name": value.name, "dtype": onnx.TensorProto.DataType.Name(tensor.elem_type).lower(), "shape": shape}


def _programs(exported: ExportedGraphs) -> dict[str, GraphModule]:
    """The torch graphs to save: baked with what was folded."""
    folded = {"baked": exported.folding.module} if exported.folding is not None else {}
    return {form: folded.get(form, module) for form, module in exported.programs.items()}


def _save(form: str, module: GraphModule, exported: ExportedGraphs, sample: Sample, directory: Path) -> dict[str, Any]:
    arguments = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    described = {"file": f"{form}.pt2", "arguments": arguments, "reason": ""}
    try:
        save_program(module, program_inputs(form, exported.bound_inputs.values(), sample), directory / f"{form}.pt2")
    except ExportError as error:
        return {**described, "file": None, "reason": error.found}
    return described


def program_inputs(form: str, bound: Sequence[str] | Any, sample: Sample) -> list[Tensor]:
    """The arguments of a torch graph: the model's own inputs, and for bound the coefficients named `bound`."""
    coefficients = [sample.coefficients[name] for name in bound] if form == "bound" else []
    return [*sample.inputs.values(), *coefficients]


def _batch(sample: Sample) -> int | None:
    return next((t.shape[0] for t in sample.inputs.values() if t.ndim), None)


def _flops(programs: Mapping[str, GraphModule], exported: ExportedGraphs, sample: Sample) -> dict[str, int | None]:
    bound = exported.bound_inputs.values()
    return {form: program_flops(module, program_inputs(form, bound, sample)) for form, module in programs.items()}


def _coefficient(frozen: FrozenModel, exported: ExportedGraphs, key: str) -> dict[str, Any]:
    controller, coefficient = next((k, c) for k in frozen.controllers for c in k.coefficients if c.key == key)
    name = exported.coefficient_names[key]
    profile = exported.profile[key] if exported.profile is not None else None
    return {
        "key": key,
        "name": name,
        "controller": controller.id,
        "pattern": controller.pattern,
        "module": controller.module,
        "call": controller.call,
        "axes": ["*".join(axis) for axis in coefficient.axes],
        "roles": dict(coefficient.roles),
        "shape": [size if isinstance(size, int) else str(size) for size in coefficient.shape],
        "dtype": str(coefficient.dtype).removeprefix("torch."),
        "domain": str(coefficient.domain),
        "source": ops.source_line(coefficient.node),
        "bound": key not in exported.idle,
        "baked": None if profile is None else {"shape": list(profile.shape), "expanded": key in exported.expanded},
    }

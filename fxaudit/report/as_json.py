"""Results as JSON-like dicts, one schema for each verb: ``fxaudit.<verb>/1``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fxaudit import __version__, ops
from fxaudit.axes import Size
from fxaudit.controllers.controller import Coefficient, Controller
from fxaudit.controllers.explain import Explained
from fxaudit.controllers.match import NearMiss
from fxaudit.controllers.scaffold import Draft
from fxaudit.execution.flops import count_flops
from fxaudit.model.compare import Comparisons
from fxaudit.model.trace import Finding, TracedModel
from fxaudit.ops import source_line
from fxaudit.provenance import environment
from fxaudit.replay.run import IdentityReplay, Recording
from fxaudit.stages import Discovery, Matched, TraceReport

if TYPE_CHECKING:  # importing it for real would import onnx for every command
    from fxaudit.execution.bundle import Bundle
    from fxaudit.execution.verification import Verification

NEAR_MISSES = 3


def provenance(traced: TracedModel) -> dict[str, Any]:
    return {
        "fxaudit": __version__,
        "loading": dict(traced.subject.loading),
        "settings": traced.settings,
        "environment": environment(),
    }


def trace(report: TraceReport) -> dict[str, Any]:
    """The JSON of `fxaudit trace`. Sizes are numbers, or text such as ``7*inputs`` where they follow the batch."""
    traced, matched = report.traced, report.matched
    return {
        "schema": "fxaudit.trace/1",
        "model": {
            "source": traced.subject.source,
            "class": f"{type(traced.subject.module).__module__}.{type(traced.subject.module).__qualname__}",
            "parameters": traced.subject.parameter_count,
            "fingerprint": traced.fingerprint,
        },
        "graph": {
            "nodes": len(traced.graph.nodes),
            "frontend": traced.frontend,
            "seconds": round(traced.seconds, 3),
            "inputs": list(traced.input_names),
            "outputs": list(traced.output_names),
            "batch": "dynamic" if traced.is_batch_dynamic else traced.sample,
            "unseen": [{"module": leaf.path, "parameters": leaf.parameter_count} for leaf in traced.unseen],
            "decisions": list(traced.decisions),
        },
        "fidelity": _comparisons(traced.fidelity) if traced.fidelity.is_measured else None,
        "identity": identity(report.identity),
        "counts": matched.counts,
        "other": matched.other,
        "controllers": [_controller(controller, traced) for controller in matched.controllers],
        "near_misses": _near_misses(matched),
        "findings": [finding(found) for found in report.findings],
        "provenance": provenance(traced),
    }


def discover(discovery: Discovery, drafts: Sequence[Draft] | None = None) -> dict[str, Any]:
    """The JSON of `fxaudit discover`; without `drafts` none were asked for, and none are missing."""
    traced = discovery.matched.traced
    return {
        "schema": "fxaudit.discover/1",
        "candidates": [
            {
                "module": one.module,
                "call": one.call,
                "claimed_by": one.claimed_by,
                "repeats": one.repeats,
                "coefficients": [
                    {
                        "node": node.name,
                        "shape": [size_text(size, traced) for size in ops.sizes(node) or ()],
                        "axes": list(axes),
                    }
                    for node, axes in zip(one.coefficients, one.axes, strict=True)
                ],
                "applies": [node.name for node in one.applies],
                "cone": {
                    "nodes": sum(node.op == "call_function" for node in one.cone),
                    "parameters": one.parameters,
                },
                "source": one.source,
            }
            for one in discovery.candidates
        ],
        "drafts": [{"name": d.name, "also_matches": [node.name for node in d.beyond]} for d in drafts or ()],
        "undrafted": [f"{one.module}#{one.call}" for one in (() if drafts is None else discovery.undrafted(drafts))],
        "counts": discovery.matched.counts,
        "findings": [finding(found) for found in (*traced.findings, *discovery.matched.findings)],
        "provenance": provenance(traced),
    }


def identity(replayed: IdentityReplay | None) -> dict[str, Any] | None:
    return None if replayed is None else _comparisons(replayed)


def record(recording: Recording, traced: TracedModel, replayed: IdentityReplay) -> dict[str, Any]:
    store = recording.store
    return {
        "schema": "fxaudit.record/1",
        "directory": str(store.directory),
        "inputs": store.manifest["count"],
        "batch_size": store.manifest["batch_size"],
        "batches": len(store.batches),
        "recorded": recording.recorded,
        "bytes": store.size_bytes,
        "predicted_bytes": recording.predicted_bytes,
        "coefficients": list(store.manifest["coefficients"].values()),
        "identity": identity(replayed),
        "findings": [finding(found) for found in recording.findings],
        "provenance": provenance(traced),
    }


def export(bundle: Bundle, verification: Verification | None) -> dict[str, Any]:
    """The JSON of `fxaudit export`."""
    manifest = bundle.manifest
    programs = {form: program["file"] for form, program in manifest["programs"].items()}
    graphs = {form: graph["file"] for form, graph in manifest["graphs"].items()}
    return {
        "schema": "fxaudit.export/1",
        "directory": str(bundle.directory),
        "files": {form: str(bundle.directory / file) for form, file in graphs.items()},
        "programs": {form: None if file is None else str(bundle.directory / file) for form, file in programs.items()},
        "options": manifest["options"],
        "inputs": list(bundle.exported.input_names),
        "outputs": list(bundle.exported.output_names),
        "coefficients": {c["key"]: c["name"] for c in manifest["coefficients"]},
        "removed": manifest["removed"]["modules"],
        "folded": manifest["folded"],
        "verified": None if verification is None else verification.to_json(),
        "findings": manifest["findings"],
        "provenance": provenance(bundle.frozen.traced),
    }


def _comparisons(found: Comparisons) -> dict[str, Any]:
    return {
        "max_abs_diff": found.max_abs_diff,
        "bitwise": found.bitwise,
        "comparisons": [
            {"inputs": c.inputs, "max_abs_diff": c.max_abs_diff, "bitwise": c.bitwise} for c in found.comparisons
        ],
    }


def _controller(controller: Controller, traced: TracedModel) -> dict[str, Any]:
    flops = count_flops(controller.cone, traced.sample)
    return {
        "id": controller.id,
        "pattern": controller.pattern,
        "class": controller.family_class,
        "discrete": controller.is_discrete,
        "module": controller.module,
        "call": controller.call,
        "coefficients": [_coefficient(c, traced) for c in controller.coefficients],
        "taps": [_coefficient(c, traced) for c in controller.taps],
        "applies": [node.name for node in controller.applies],
        "cone": {
            "nodes": sum(node.op == "call_function" for node in controller.cone),
            "parameters": controller.parameters,
            "flops": flops.total,
            "flops_unknown": list(flops.unknown),
        },
        "leaks": [
            {"kind": leak.kind, "node": leak.node.name, "reader": leak.reader.name, "source": leak.source}
            for leak in controller.leaks
        ],
        "partially_frozen": controller.is_partially_frozen,
    }


def _coefficient(coefficient: Coefficient, traced: TracedModel) -> dict[str, Any]:
    domain = coefficient.domain
    return {
        "key": coefficient.key,
        "name": coefficient.name,
        "shape": [size_text(size, traced) for size in coefficient.shape],
        "axes": ["*".join(axis) for axis in coefficient.axes],
        "roles": dict(coefficient.roles),
        "dtype": str(coefficient.dtype).removeprefix("torch."),
        "domain": {"kind": domain.kind, "low": domain.low, "high": domain.high, "axis": domain.axis},
    }


def size_text(size: Size, traced: TracedModel) -> int | str:
    """A size as a number, or as text in which the input axis is called ``inputs``."""
    return size if isinstance(size, int) else str(size).replace(str(traced.sample), "inputs")


def _near_misses(matched: Matched) -> list[dict[str, Any]]:
    return [
        _near_miss(miss)
        for result in matched.results
        if not result.matches
        for miss in result.near_misses[:NEAR_MISSES]
    ]


def _near_miss(miss: NearMiss) -> dict[str, Any]:
    return {
        "pattern": miss.pattern.name,
        "anchor": miss.anchor.name if miss.anchor is not None else None,
        "reason": miss.reason,
        "line": miss.pattern.where_in_file(miss.line) if miss.line else None,
        "bound": list(miss.bound),
        "source": miss.source,
    }


def explain(found: Explained) -> dict[str, Any]:
    """The JSON of `fxaudit explain`."""
    return {
        "schema": "fxaudit.explain/1",
        "pattern": found.pattern.name,
        "path": str(found.pattern.path),
        "matches": [
            {"coefficient": m.coefficient.name, "apply": m.apply.name, "source": source_line(m.apply)}
            for m in found.matches
        ],
        "near_misses": [
            {
                **_near_miss(e.miss),
                "sites": e.sites,
                "captures": dict(e.captures),
                "edit": dataclasses.asdict(e.edit) if e.edit is not None else None,
            }
            for e in found.explanations
        ],
    }


def finding(found: Finding) -> dict[str, Any]:
    return {"kind": found.kind, "text": found.text, "where": found.where}

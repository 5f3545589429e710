"""What was executed, as rows of plain dicts for the report."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fxaudit.execution.branches import Control
from fxaudit.execution.checks import TorchRun
from fxaudit.execution.export import ExportedGraphs
from fxaudit.execution.options import CPU, ExecutionOptions
from fxaudit.execution.profile import CountedRun, CountedRuns, Work
from fxaudit.execution.proof import Proof
from fxaudit.execution.runtime import COUNT, EVIDENCE, TIME
from fxaudit.model.trace import TracedModel


def per_input(runs: Mapping[str, CountedRuns], torch_runs: Sequence[TorchRun]) -> list[dict[str, dict[str, int]]]:
    """For each input, each figure by form."""
    rows = []
    for i, in_torch in enumerate(torch_runs):
        own = {form: counted.runs[i] for form, counted in runs.items()}
        rows.append(
            {
                "flops": {form: run.flops for form, run in own.items()},
                "fx": {form: in_torch.flops[form].per_input for form in own},
                "setup": {form: run.setup for form, run in own.items()},
                "elementwise": {form: run.elementwise for form, run in own.items()},
                "read": {form: run.bytes_read for form, run in own.items()},
                "written": {form: run.bytes_written for form, run in own.items()},
                "nodes": {form: run.nodes for form, run in own.items()},
            }
        )
    return rows


def by_module(runs: Mapping[str, CountedRuns]) -> list[dict[str, Any]]:
    """For each module, and each form, the figures of `Work` as lists over inputs; modules that do nothing are left
    out."""
    names = dict.fromkeys(module for counted in runs.values() for run in counted.runs for module in run.modules)
    rows = []
    for name in sorted(names):
        row: dict[str, Any] = {"module": name}
        for form, counted in runs.items():
            works = [run.modules.get(name, Work()) for run in counted.runs]
            row[form] = {
                figure.name: [getattr(work, figure.name) for work in works] for figure in dataclasses.fields(Work)
            }
        rows.append(row)
    return rows


def branches(
    controls: Sequence[Control], real: Sequence[CountedRun], probed: Mapping[str, CountedRun]
) -> list[dict[str, Any]]:
    """How often each body of each control-flow node ran, by input and by probe; `never` names those that never did."""
    rows = []
    for control in controls:
        bodies: dict[str, dict[str, Any]] = {}
        for i, body in enumerate(control.bodies):
            bodies[body] = {
                "inputs": [run.branches[control.node][i] for run in real],
                "probes": {name: run.branches[control.node][i] for name, run in probed.items()},
            }
        rows.append(
            {
                "node": control.node,
                "op": control.op,
                "module": control.module,
                "source": control.source,
                "bodies": bodies,
                "never": [
                    body
                    for body, counts in bodies.items()
                    if not any(counts["inputs"]) and not any(counts["probes"].values())
                ],
            }
        )
    return rows


def probe(name: str, run: CountedRun, real: Sequence[CountedRun], comparable: bool) -> dict[str, Any]:
    """What a made-up input executed: whether its ops and shapes are those of some real input, and whether torch and
    onnxruntime compute the same on it, so that their counts were compared."""
    if run.shape_sequence in {other.shape_sequence for other in real}:
        executed = "as a given input"
    elif run.op_sequence in {other.op_sequence for other in real}:
        executed = "other shapes"
    else:
        executed = "other ops"
    return {"name": name, "flops": run.flops, "executed": executed, "compared": comparable}


def removed(exported: ExportedGraphs) -> dict[str, Any]:
    """What live has and bound has not, in total and by module."""
    modules = exported.removed_by_module
    return {
        "nodes": sum(row["nodes"] for row in modules),
        "parameters": sum(row["parameters"] for row in modules),
        "ops": dict(sorted(Counter(node.op for node in exported.removed_nodes).items())),
        "modules": modules,
    }


def proof(found: Proof) -> dict[str, Any]:
    return {
        "static": found.static,
        "roots": [dataclasses.asdict(root) for root in found.roots],
        "random": list(found.random),
        "opaque": list(found.opaque),
    }


def roles(traced: TracedModel, options: ExecutionOptions) -> dict[str, dict[str, str]]:
    """Provider, optimisation level and precision by role."""
    dtypes = {str(p.dtype).removeprefix("torch.") for p in traced.graph_module.parameters()}
    precision = ", ".join(sorted(dtypes)) or "no parameters"
    used = [(COUNT, CPU)]
    used += [(EVIDENCE, options.provider)] if options.evident else []
    used += [(TIME, options.provider)] if options.timed else []
    return {role.name: {"provider": where, "level": role.level, "precision": precision} for role, where in used}

"""The JSON of `fxaudit audit` and of `fxaudit replay`: schema ``fxaudit.audit/1`` and ``fxaudit.replay/1``."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from fxaudit.audit import PERMUTATIONS, AuditReport
from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.model.data import DataSet
from fxaudit.model.trace import TracedModel
from fxaudit.replay.permutations import named_arrays
from fxaudit.replay.results import Dependence, ReplayResult
from fxaudit.replay.run import IdentityReplay
from fxaudit.replay.variation import PatternVariation, Variation
from fxaudit.report import as_json
from fxaudit.report.claims import QUESTIONS
from fxaudit.stages import TraceReport

AUDIT_SCHEMA = "fxaudit.audit/1"


def audit(report: AuditReport) -> dict[str, Any]:
    """Everything that the audit found, and everything needed to find it again."""
    traced = as_json.trace(TraceReport(report.matched, report.identity))
    return {
        **traced,
        "schema": AUDIT_SCHEMA,
        "verdict": report.verdict,
        "questions": QUESTIONS,
        "data": {
            "evaluation": _data(report.data),
            "calibration": _data(report.calibration),
            "batch_size": report.options["batch_size"],
        },
        "variation": variation(report.variation),
        "dependence": {**dependence(report.dependence), "permutations": {"file": PERMUTATIONS}},
        "execution": execution(report.execution.to_json(), report.matched.traced),
        "findings": [as_json.finding(finding) for finding in report.findings],
        "provenance": {
            **traced["provenance"],
            "options": report.options,
            "seconds": report.seconds,
            "patterns": {pattern.name: pattern.digest for pattern in report.matched.patterns},
        },
    }


def replay(frozen: FrozenModel, data: DataSet, identity: IdentityReplay, found: Dependence | None) -> dict[str, Any]:
    """The JSON of `fxaudit replay`: identity alone, or every intervention as well."""
    return {
        "schema": "fxaudit.replay/1",
        "inputs": data.count,
        "identity": as_json.identity(identity),
        **(dependence(found) if found is not None else {"baseline": None, "interventions": []}),
        "provenance": as_json.provenance(frozen.traced),
    }


def variation(found: Variation) -> dict[str, Any]:
    """Layer identity at every level, then each controller."""
    return {
        "verdict": found.verdict,
        "inputs": found.inputs,
        "layer_identity": [_pattern(p) for p in found.patterns],
        "layer_identity_overall": _pattern(found.overall) if found.overall is not None else None,
        "controllers": [
            {
                "id": c.controller,
                "pattern": c.pattern,
                "mean": c.mean,
                "std": c.std,
                "min": c.minimum,
                "max": c.maximum,
                "saturated": c.saturated,
                "shares": c.shares,
                "unit_means": list(c.unit_means),
                "position_means": list(c.position_means),
                "entropy": c.entropy,
                "entropy_limit": c.entropy_limit,
                "apart": {
                    part: {"count": p.count, "mean": p.mean, "std": p.std, "shares": p.shares}
                    for part, p in c.apart.items()
                },
            }
            for c in found.controllers
        ],
        "routers": [
            {
                "id": r.controller,
                "choices": r.choices,
                "load": list(r.load) if r.load is not None else None,
                "never_used": list(r.never_used) if r.never_used is not None else None,
                "ties": r.ties,
            }
            for r in found.routers
        ],
        "skipped": list(found.skipped),
    }


def _pattern(found: PatternVariation) -> dict[str, Any]:
    return {
        "pattern": found.pattern,
        "controllers": found.controllers,
        "domain": found.domain,
        "share": found.layer_share,
        "apart": found.apart,
    }


def dependence(found: Dependence) -> dict[str, Any]:
    """The baseline and every intervention with its effect; permutations are those that were used, named as in a file
    of them."""
    base = found.baseline
    return {
        "verdict": found.verdict,
        "margin": found.margin,
        "inert": list(found.inert),
        "causal": found.causal,
        "baseline": {
            "metric": base.metric,
            "output": base.output,
            "form": base.form,
            "mean": base.mean,
            "token_weighted": base.token_weighted,
            "accuracy": base.accuracy,
            "per_input": list(base.per_input),
        },
        "interventions": [_result(result, found) for result in found.results],
        "permutations": {name: value.tolist() for name, value in named_arrays(found.draws).items()},
    }


def _result(result: ReplayResult, found: Dependence) -> dict[str, Any]:
    return {
        "name": result.intervention,
        "label": result.label,
        "level": result.level,
        "draws": "each" if result.each else "shared",
        "scope": result.scope,
        "controllers": list(result.controllers),
        "feedback": result.feedback,
        "discrete": result.discrete,
        "seed": result.seed,
        "seeds": [{"seed": s.seed, "delta": s.delta, "per_input": list(s.per_input)} for s in result.seeds],
        "spread": result.spread,
        "metric": result.metric,
        "inputs": sum(value is not None for value in result.per_input),
        "left_out": result.left_out,
        "absent_positions": result.absent_positions,
        "baseline": result.baseline,
        "delta": result.delta,
        "token_weighted": result.token_weighted,
        "interval": list(result.interval) if result.interval is not None else None,
        "p": result.p,
        "adjusted_p": result.adjusted_p,
        "accuracy": result.accuracy,
        "changed": result.changed,
        "outcome": found.outcome(result),
        "non_causal": found.is_non_causal(result),
        "needed": result.needed if found.outcome(result) == "INCONCLUSIVE" else None,
        "refused": result.refused,
        "per_input": list(result.per_input),
    }


def _data(data: DataSet) -> dict[str, Any]:
    return {"source": data.source, "inputs": data.count, "digest": data.digest, "targets": data.targets is not None}


def execution(found: dict[str, Any], traced: TracedModel) -> dict[str, Any]:
    """What ran, by form: `live` with its controllers, `bound` with coefficients as inputs, `baked` as constants.

    `roles` says for each kind of figure with which provider, optimisation level and precision it was made: COUNT for
    all FLOPs, elements, bytes and nodes; EVIDENCE for the kernels of the optimised graphs; TIME for times.
    """
    if not found["per_input"]:
        return {"verdict": found["verdict"]["live"], "error": found["reason"]}
    rows = found["per_input"]
    total = sum(p.numel() for p in traced.graph_module.parameters())
    forms = {}
    for form in rows[0]["flops"]:
        proof = found["proof"].get(form) or {}
        forms[form] = {
            "verdict": found["verdict"].get(form),
            "flops": [row["flops"][form] for row in rows],
            "fx_flops": [row["fx"].get(form) for row in rows],
            "setup_flops": max(row["setup"][form] for row in rows),
            "elements": [row["elementwise"][form] for row in rows],
            "bytes_read": [row["read"][form] for row in rows],
            "bytes_written": [row["written"][form] for row in rows],
            "executed_nodes": [row["nodes"][form] for row in rows],
            "parameters": total - (found["removed"]["parameters"] if form != "live" else 0),
            "static": proof.get("static"),
            "roots": proof.get("roots", []),
            "opaque": proof.get("opaque", []),
            "random": proof.get("random", []),
            "unknown": found["unknown"] if form == "live" else [],
            "evidence": found["evidence"].get(form),
        }
    return {
        "verdict": found["verdict"]["live"],
        "reason": found["reason"],
        "inputs": found["inputs"],
        "exact": found["exact"],
        "roles": found["roles"],
        "forms": forms,
        "removed": found["removed"]["modules"],
        "modules": found["modules"],
        "branches": found["branches"],
        "probes": found["probes"],
        "experts": found["experts"],
        "time": found["time"],
        "agreement": {
            "live_bound_bitwise": found["identity"]["bitwise"],
            "torch_rel_l2": found["fidelity"]["relative_l2"],
            "torch_max_rel": found["fidelity"]["relative_max"],
            "limit": found["fidelity"]["limit"],
            "referee": found["fidelity"]["referee"],
            "baked": found["baked"],
        },
        "onnxruntime": metadata.version("onnxruntime-gpu") if _has_gpu_build() else metadata.version("onnxruntime"),
    }


def _has_gpu_build() -> bool:
    try:
        metadata.version("onnxruntime-gpu")
    except metadata.PackageNotFoundError:
        return False
    return True

"""What the table says, read from the stored audits: per model, and over models that differ in their seed alone."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from typing import Any

from examples.paper.models import AUDITS, MODELS, Model

SCHEMA = "fxaudit.paper/1"
# From the paper, Dynamic Parameterization Is Not Dynamic Inference.
PUBLISHED = {
    "identity": "exact",
    "layer_identity": [0.87, 0.96],
    "muddpythia_1_4b": {"reassign": 1.9067, "shuffle-tokens": 2.9637},
}
LEVELS = ("element", "mean_input_position", "mean_unit", "mean_unit_position")
PARTS = ("unit", "position", "input", "residual")
INTERVENTIONS = ("reassign", "shuffle-tokens", "static:controller", "static:unit", "static:unit-position")
FEEDBACKS = ("frozen", "live", "in-flight")


def read() -> dict[str, Any]:
    """Everything that the table is made of; models without a stored audit are listed under `missing`."""
    present = [model for model in MODELS if model.audit.exists()]
    models = [_model(model) for model in present]
    groups = {}
    for name in dict.fromkeys(model.group for model in MODELS if model.group):
        planned = sum(model.group == name for model in MODELS)
        members = [m for m in models if m["group"] == name]
        groups[name] = {"planned": planned, "models": len(members), **(_over_seeds(members) if members else {})}
    scale = sorted((AUDITS.parent / "scale").glob("*.json"))
    return {
        "schema": SCHEMA,
        "published": PUBLISHED,
        "models": models,
        "missing": [model.name for model in MODELS if not model.audit.exists()],
        "groups": groups,
        "scale": sorted((json.loads(f.read_text(encoding="utf-8")) for f in scale), key=lambda s: s["parameters"]),
    }


def _model(model: Model) -> dict[str, Any]:
    audit = json.loads(model.audit.read_text(encoding="utf-8"))
    record = json.loads(model.record.read_text(encoding="utf-8"))
    rows = audit["dependence"]["interventions"]
    return {
        "name": model.name,
        "title": model.title,
        "group": model.group,
        "parameters": audit["model"]["parameters"],
        "training": {
            key: record[key]
            for key in ("seed", "steps", "precision", "batch", "length", "weights_sha256", "validation_nats_per_byte")
        },
        "inputs": audit["data"]["evaluation"]["inputs"],
        "identity_bitwise": audit["identity"]["bitwise"],
        "verdict": audit["verdict"],
        "variation": _variation(audit["variation"]),
        "dependence": {
            "metric": audit["dependence"]["baseline"]["metric"],
            "baseline": audit["dependence"]["baseline"]["mean"],
            "joint": _by_label(row for row in rows if row["scope"] == "joint"),
            "controllers": {
                controller["id"]: _by_label(
                    row for row in rows if row["scope"] == "controller" and row["controllers"] == [controller["id"]]
                )
                for controller in audit["controllers"]
            },
        },
        "execution": _execution(audit["execution"]),
    }


def _variation(found: dict[str, Any]) -> dict[str, Any]:
    (pattern,) = found["layer_identity"]
    within = [controller["shares"] for controller in found["controllers"]]
    return {
        "pattern": pattern["pattern"],
        "controllers": pattern["controllers"],
        "layer_identity": pattern["share"],
        "within": {part: statistics.fmean(shares[part] for shares in within) for part in PARTS},
    }


def _by_label(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows by intervention and feedback."""
    kept = ("delta", "interval", "spread", "adjusted_p", "outcome", "refused")
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(row["label"], {})[row["feedback"]] = {key: row[key] for key in kept}
    return found


def _execution(found: dict[str, Any]) -> dict[str, Any]:
    if "forms" not in found:
        return {"verdict": found["verdict"], "error": found["error"]}
    forms = {
        name: {"flops": [min(form["flops"]), max(form["flops"])], "parameters": form["parameters"]}
        for name, form in found["forms"].items()
    }
    return {"verdict": found["verdict"], "inputs": found["inputs"], "exact": found["exact"], "forms": forms}


def _over_seeds(members: list[dict[str, Any]]) -> dict[str, Any]:
    first = members[0]["dependence"]

    def deltas(label: str, feedback: str, controller: str | None = None) -> list[float]:
        rows = [m["dependence"]["joint" if controller is None else "controllers"] for m in members]
        found = [(row if controller is None else row[controller])[label][feedback]["delta"] for row in rows]
        return [delta for delta in found if delta is not None]

    def by_label(controller: str | None = None) -> dict[str, dict[str, Any]]:
        own = first["joint"] if controller is None else first["controllers"][controller]
        return {
            label: {feedback: _spread(deltas(label, feedback, controller)) for feedback in feedbacks}
            for label, feedbacks in own.items()
        }

    return {
        "layer_identity": {
            level: _spread([m["variation"]["layer_identity"][level] for m in members]) for level in LEVELS
        },
        "within": {part: _spread([m["variation"]["within"][part] for m in members]) for part in PARTS},
        "baseline": _spread([m["dependence"]["baseline"] for m in members]),
        "joint": by_label(),
        "controllers": {controller: by_label(controller) for controller in first["controllers"]},
    }


def _spread(values: list[float]) -> dict[str, float | int | None] | None:
    """Mean, standard deviation (None for one model), least and largest over models; None without any."""
    if not values:
        return None
    return {
        "n": len(values),
        "mean": statistics.fmean(values),
        "sd": statistics.stdev(values) if len(values) > 1 else None,
        "min": min(values),
        "max": max(values),
    }

"""The self-contained page of `fxaudit audit`, made from the JSON of schema ``fxaudit.audit/1`` and nothing else.

The words and tables of the page are in report.html.j2, its pictures are inline SVG of pictures.py. Nothing on the page
is fetched or executed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined

from fxaudit.errors import DataError
from fxaudit.report import pictures
from fxaudit.report.claims import QUESTIONS, claims, role_text

SCHEMA = "fxaudit.audit/1"
ROWS = 64  # what a picture or table shows at most; the page says how many are left out
FORMS = ("live", "bound", "baked")


def render(audit: Mapping[str, Any]) -> str:
    """The page as text, to be written as UTF-8.

    Raises:
        DataError: the JSON is of another schema.
    """
    if audit.get("schema") != SCHEMA:
        raise DataError(
            "this is no audit",
            expected=f"JSON of schema {SCHEMA}",
            found=str(audit.get("schema", "JSON without a schema")),
            remedy="render the audit.json that `fxaudit audit` wrote",
        )
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "number": pictures.number,
        "percent": pictures.percent,
        "count": pictures.count,
        "spread": pictures.spread,
        "change": pictures.change,
        "interval": pictures.interval,
        "size": _size,
        "domain": _domain,
    }
    source = resources.files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8")
    audit = {**audit, "execution": _completed(audit["execution"])}
    page = environment.from_string(source).render(
        audit=audit,
        questions=QUESTIONS,
        evidence=claims(dict(audit)),
        rows=ROWS,
        columns=pictures.COLUMNS,
        levels=pictures.LEVELS,
        nats=pictures.in_nats(audit["dependence"]["baseline"]["metric"], " nats"),
        shares=pictures.SHARES,
        variation=_variation(audit["variation"]),
        dependence=_dependence(audit),
        execution=_execution(audit["execution"]),
    )
    # A JSON string may hold half a surrogate pair, which no UTF-8 file can.
    return page.encode("utf-8", "replace").decode("utf-8")


def _size(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _domain(domain: Mapping[str, Any]) -> str:
    match domain["kind"]:
        case "interval":
            low, high = (domain[end] if domain[end] is not None else sign * math.inf for end, sign in _ENDS)
            return f"[{low:g}, {high:g}]"
        case "simplex":
            return f"simplex over {domain['axis']}"
    return str(domain["kind"])


_ENDS = (("low", -1), ("high", 1))


def _variation(found: Mapping[str, Any]) -> dict[str, Any]:
    controllers = found["controllers"][:ROWS]
    patterns = list(found["layer_identity"])
    if found["layer_identity_overall"] is not None:
        patterns.append(found["layer_identity_overall"])
    shared = [c for c in controllers if c["shares"] is not None]
    return {
        "heat_maps": pictures.heat_maps(controllers),
        "patterns": patterns,
        "layer_picture": pictures.drawn(partial(pictures.layer_bars, patterns)) if patterns else None,
        "share_picture": pictures.drawn(partial(pictures.stacked_shares, shared)) if shared else None,
        "controllers": controllers,
        "left_out": len(found["controllers"]) - len(controllers),
    }


def _dependence(audit: Mapping[str, Any]) -> dict[str, Any]:
    """Rows by scope. A row on a partially frozen or an inert controller says so, as its number means something else."""
    found = audit["dependence"]
    partly = {c["id"] for c in audit["controllers"] if c["partially_frozen"]}
    names = _intervention_names(found["interventions"])
    rows = []
    for name, row in zip(names, found["interventions"], strict=True):
        marks = ["partially frozen"] if partly & set(row["controllers"]) else []
        if row["scope"] == "controller" and set(row["controllers"]) <= set(found["inert"]):
            marks.append("inert")
        if row.get("non_causal") and row["scope"] != "controller":
            marks.append("non-causal")
        rows.append({**row, "label": name, "marks": marks})
    run = [row for row in rows if row["refused"] is None]
    # One pattern alone is all controllers, and the depths of a cumulative sweep are too many for this page.
    every = max((len(row["controllers"]) for row in rows), default=0)
    together = [
        row for row in run if row["scope"] == "joint" or (row["scope"] == "pattern" and len(row["controllers"]) < every)
    ]
    alone = [row for row in run if row["scope"] == "controller" and row["feedback"] == "frozen"]
    ids = list(dict.fromkeys(row["controllers"][0] for row in alone))
    labels = list(dict.fromkeys(row["label"] for row in alone))
    cells = {(row["label"], row["controllers"][0]): row for row in alone}
    shown, margin, metric = ids[:ROWS], found["margin"], found["baseline"]["metric"]
    return {
        "together": together[:ROWS],
        "together_left_out": max(0, len(together) - ROWS),
        "picture": pictures.drawn(partial(pictures.forest, together[:ROWS], margin, metric)) if together else None,
        "alone": pictures.forests_alone(labels, shown, cells, margin, metric),
        "ids": shown,
        "labels": labels,
        "cells": cells,
        "left_out": len(ids) - len(shown),
        "refused": _refused([row for row in rows if row["refused"] is not None]),
    }


def _intervention_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What tells the rows apart: the intervention, and scope, feedback and seed where they are not the usual ones."""
    bases = [f"{row['name']}:{row['level']}" if row["level"] else row["name"] for row in rows]
    seeds: dict[str, set[Any]] = {}
    for base, row in zip(bases, rows, strict=True):
        seeds.setdefault(base, set()).add(row["seed"])
    names = []
    for base, row in zip(bases, rows, strict=True):
        parts = [base]
        if len(seeds[base]) > 1:
            parts.append(f"seed {row['seed']}")
        if row["scope"] not in ("joint", "controller"):
            parts.append(f"{row['scope']} of {len(row['controllers'])}")
        if row["discrete"] not in (None, "pair"):
            parts.append(row["discrete"])
        if row["feedback"] != "frozen":
            parts.append(row["feedback"])
        if row.get("draws") == "each":
            parts.append("one draw for each")
        names.append(", ".join(parts))
    return names


def _refused(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        groups.setdefault((row["label"], row["scope"], row["refused"]), []).extend(row["controllers"])
    return [
        {"label": label, "scope": scope, "reason": reason, "controllers": list(dict.fromkeys(ids))}
        for (label, scope, reason), ids in groups.items()
    ]


def _completed(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Execution with every field of this version: an audit.json may be older than the fields."""
    if "forms" not in found:
        return found
    count = {"provider": found.get("provider"), "level": "ORT_DISABLE_ALL", "precision": "precision not recorded"}
    forms = {
        name: {"evidence": None, "bytes_read": [], "bytes_written": [], **form} for name, form in found["forms"].items()
    }
    for form in forms.values():
        form["roots"] = [{"source": "", **root} for root in form["roots"]]
    unasked = {"heard": 0, "unheard": "by an earlier version"}
    return {
        **dict.fromkeys(("modules", "branches", "probes", "experts", "time"), ()),
        "roles": {"COUNT": count},
        **found,
        "forms": forms,
        "agreement": {"referee": unasked, **found["agreement"]},
    }


def _execution(found: Mapping[str, Any]) -> dict[str, Any]:
    forms = {name: found["forms"][name] for name in FORMS if name in found["forms"]} if "forms" in found else {}
    roots = [(name, root) for name, form in forms.items() for root in form["roots"]]
    return {
        "forms": forms,
        "picture": pictures.drawn(partial(pictures.execution_bars, forms)) if forms else None,
        "removed": found.get("removed", ()),
        "roots": roots,
        "unknown": [(name, op) for name, form in forms.items() for op in form["unknown"]],
        "roles": {role: role_text(role, how) for role, how in found.get("roles", {}).items()},
        "kernels": [
            (name, kernel) for name, form in forms.items() if form["evidence"] for kernel in form["evidence"]["kernels"]
        ],
        "modules": [row for row in found.get("modules", ()) if any(row[form]["flops"] != [0] for form in forms)],
    }

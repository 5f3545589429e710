"""Writes RESULTS.md and RESULTS.json from the stored audits; nothing is trained or run.

python -m examples.paper.table
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from examples.paper import results
from examples.paper.models import HERE, OPTIONS
from examples.paper.results import FEEDBACKS, INTERVENTIONS, LEVELS, PARTS
from examples.paper.statement import statement

MARKDOWN, JSON = HERE / "RESULTS.md", HERE / "RESULTS.json"

LEVEL_NAMES = {
    "element": "single coefficients",
    "mean_input_position": "means over inputs and positions",
    "mean_unit": "means over units",
    "mean_unit_position": "means over units and positions",
}


def write() -> None:
    found = results.read()
    JSON.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    MARKDOWN.write_text(render(found), encoding="utf-8")


def render(found: dict[str, Any]) -> str:
    """RESULTS.md."""
    blocks = [
        "# The paper's systems, audited here",
        "Written by `make paper-table` from the stored audits in `audits/`; `make paper` trains and audits what is "
        "missing first. Do not edit.",
        _introduction(found),
        "## What is reproduced",
        statement(found),
        "## Models",
        _models(found),
        "## Coefficient variance",
        _layer_identity(found),
        _within(found),
        "## Exchanged coefficients, all controllers at once",
        "Change of the negative log-likelihood, nats per byte, with its 95 % interval over inputs, and ± the standard "
        "deviation over the draws of random exchanges. Seeds: mean ± standard deviation over models (least to "
        "largest).",
        _joint(found),
        _refused(found),
        "## Executed compute",
        _execution(found),
        "## One controller at a time",
        "The others keep their own records (frozen) or are recomputed (live). Nats per byte with the 95 % interval.",
        *_controllers(found),
        *_scale(found),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _introduction(found: dict[str, Any]) -> str:
    command = " ".join(OPTIONS)
    missing = f" Not audited yet: {', '.join(found['missing'])}." if found["missing"] else ""
    return (
        "FeatureGate Transformers are our reconstruction from a description, MUDDPythia is an independent "
        "implementation; all weights are our own, trained on the Python documentation. Every model is audited by\n\n"
        f"    fxaudit audit MODEL {command}\n\n"
        f"on held-out text, in windows of 128 bytes.{missing}"
    )


# --- tables ---------------------------------------------------------------------------------------------------------


def _grid(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def _models(found: dict[str, Any]) -> str:
    head = ["model", "parameters", "controllers", "steps", "precision", "held-out nats per byte", "weights SHA-256"]
    rows = [
        [
            m["title"],
            f"{m['parameters']:,}",
            f"{m['variation']['controllers']} {m['variation']['pattern']}",
            f"{m['training']['steps']:,}",
            m["training"]["precision"],
            f"{m['training']['validation_nats_per_byte']['all held-out files']:.3f}",
            f"`{m['training']['weights_sha256'][:12]}`",
        ]
        for m in found["models"]
    ]
    return _grid(head, rows)


def _layer_identity(found: dict[str, Any]) -> str:
    low, high = found["published"]["layer_identity"]
    head = ["layer identity: share between controllers", *(LEVEL_NAMES[level] for level in LEVELS)]
    rows = [
        [m["title"], *(_percent(m["variation"]["layer_identity"][level]) for level in LEVELS)] for m in found["models"]
    ]
    rows += [
        [
            f"{name}, {group['models']} of {group['planned']} seeds",
            *(_spread(group["layer_identity"][v], 100) for v in LEVELS),
        ]
        for name, group in found["groups"].items()
        if group["models"]
    ]
    rows.append([f"published: {100 * low:.0f} to {100 * high:.0f} %, level not stated", *[""] * len(LEVELS)])
    return _grid(head, rows)


def _within(found: dict[str, Any]) -> str:
    head = ["within a controller, mean over controllers", *PARTS]
    rows = [[m["title"], *(_percent(m["variation"]["within"][part]) for part in PARTS)] for m in found["models"]]
    rows += [
        [
            f"{name}, {group['models']} of {group['planned']} seeds",
            *(_spread(group["within"][part], 100) for part in PARTS),
        ]
        for name, group in found["groups"].items()
        if group["models"]
    ]
    return _grid(head, rows)


def _joint(found: dict[str, Any]) -> str:
    columns = [(label, feedback) for feedback in ("frozen", "in-flight") for label in INTERVENTIONS]
    columns = [c for c in columns if any(_delta(m["dependence"]["joint"], *c) is not None for m in found["models"])]
    head = ["model", "own", *(label if feedback == "frozen" else f"{label}, {feedback}" for label, feedback in columns)]
    rows = [
        [m["title"], f"{m['dependence']['baseline']:.4f}", *(_effect(m["dependence"]["joint"], *c) for c in columns)]
        for m in found["models"]
    ]
    for name, group in found["groups"].items():
        if group["models"]:
            cells = [_spread(group["joint"][label][feedback]) for label, feedback in columns]
            rows.append([f"{name}, {group['models']} of {group['planned']} seeds", _spread(group["baseline"]), *cells])
    published = found["published"]["muddpythia_1_4b"]
    cells = [f"{published[label]:+.4f}" if f == "frozen" and label in published else "" for label, f in columns]
    rows.append(["published: MUDDPythia-1.4B, nats per token", "", *cells])
    return _grid(head, rows)


def _refused(found: dict[str, Any]) -> str:
    reasons: dict[str, list[str]] = {}
    for model in found["models"]:
        for label, feedbacks in model["dependence"]["joint"].items():
            for feedback, row in feedbacks.items():
                if row["refused"]:
                    reasons.setdefault(f"{feedback}: {row['refused']}", []).append(label)
    lines = [f"- {reason} ({', '.join(dict.fromkeys(labels))})" for reason, labels in reasons.items()]
    return "Joint rows that have no meaning:\n\n" + "\n".join(lines) if lines else ""


def _execution(found: dict[str, Any]) -> str:
    head = [
        "model",
        "verdict",
        "FLOPs per input, live",
        "frozen, bound",
        "frozen, baked",
        "parameters removed",
        "counts agree",
    ]
    rows = []
    for m in found["models"]:
        ran = m["execution"]
        if "forms" not in ran:
            rows.append([m["title"], ran["verdict"], *[""] * 5])
            continue
        forms = ran["forms"]
        removed = forms["live"]["parameters"] - forms["bound"]["parameters"]
        flops = [_range(forms[form]["flops"]) if form in forms else "" for form in ("live", "bound", "baked")]
        rows.append([m["title"], ran["verdict"], *flops, f"{removed:,}", "yes" if ran["exact"] else "no"])
    return _grid(head, rows, left=2)


def _controllers(found: dict[str, Any]) -> Iterable[str]:
    for m in found["models"]:
        yield f"### {m['title']}"
        yield _controller_table(m["dependence"]["controllers"], _effect)
    for name, group in found["groups"].items():
        if group["models"] > 1:
            yield f"### {name}: mean ± standard deviation over {group['models']} seeds (least to largest)"
            yield _controller_table(group["controllers"], lambda rows, label, feedback: _spread(rows[label][feedback]))


def _controller_table(controllers: dict[str, Any], cell: Any) -> str:
    columns = [(label, feedback) for label in INTERVENTIONS for feedback in FEEDBACKS[:2]]
    head = ["controller", *(f"{label}, {feedback}" for label, feedback in columns)]
    return _grid(head, [[f"`{name}`", *(cell(rows, *c) for c in columns)] for name, rows in controllers.items()])


def _scale(found: dict[str, Any]) -> Iterable[str]:
    if not found["scale"]:
        return
    yield "## Larger shapes, random weights"
    yield (
        "Whole audits of untrained models: they show what an audit of this size takes, and nothing about dependence. "
        "Wall seconds and peak resident memory (GiB, + that of the process that runs onnxruntime) by stage, on "
        f"{' or '.join(sorted({str(s['threads']) for s in found['scale']}))} thread of a machine with other work; "
        "`python -m examples.paper.scale NAME` measures them again."
    )
    stages = list(dict.fromkeys(stage for s in found["scale"] for stage in s["stages"]))
    head = ["shape", "parameters", "inputs x tokens", "execution", *stages, "whole"]
    rows = []
    for s in found["scale"]:
        cells = [_cost(s["stages"][stage]) if stage in s["stages"] else "" for stage in stages]
        rows.append(
            [s["title"], f"{s['parameters']:,}", f"{s['inputs']} x {s['tokens']}", s["execution"], *cells, _cost(s)]
        )
    yield _grid(head, rows)


# --- cells ----------------------------------------------------------------------------------------------------------


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _delta(rows: dict[str, Any], label: str, feedback: str) -> float | None:
    found = rows.get(label, {}).get(feedback)
    return None if found is None else found["delta"]


def _effect(rows: dict[str, Any], label: str, feedback: str) -> str:
    if _delta(rows, label, feedback) is None:
        return "—"
    row = rows[label][feedback]
    spread = f" ± {row['spread']:.2g}" if row["spread"] is not None else ""
    interval = f" [{row['interval'][0]:+.4f}, {row['interval'][1]:+.4f}]" if row["interval"] else ""
    mark = "" if row["outcome"] == "DEPENDENT" else f" {row['outcome'].lower()}"
    return f"{row['delta']:+.4f}{spread}{interval}{mark}"


def _spread(found: dict[str, Any] | None, scale: float = 1.0) -> str:
    if found is None:
        return "—"
    mean, low, high = (scale * found[key] for key in ("mean", "min", "max"))
    digits = ".4f" if scale == 1 else ".3g"
    sd = f" ± {scale * found['sd']:.2g}" if found["sd"] is not None else ""
    return f"{mean:{digits}}{sd} ({low:{digits}} to {high:{digits}})"


def _range(flops: list[int]) -> str:
    low, high = flops
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _cost(stage: dict[str, Any]) -> str:
    """Seconds and memory of a stage, or of a whole audit, whose memory is that of both processes."""
    child = f" + {stage['child_peak_bytes'] / 2**30:.1f}" if stage.get("child_peak_bytes") else ""
    return f"{stage['seconds']:,.0f} s, {stage['peak_bytes'] / 2**30:.1f}{child}"


if __name__ == "__main__":
    write()

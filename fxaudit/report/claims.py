"""One sentence of evidence for each claim, made from the JSON of an audit."""

from __future__ import annotations

from typing import Any

QUESTIONS = {
    "variation": "Do the coefficients vary, and along what?",
    "dependence": "Does the function need these coefficients on this input and token?",
    "execution": "Does the compute that runs depend on the input?",
}


def claims(audit: dict[str, Any]) -> dict[str, str]:
    """The evidence behind the verdict on each claim, as a sentence with numbers."""
    return {
        "variation": _variation(audit["variation"]),
        "dependence": _dependence(audit["dependence"]),
        "execution": _execution(audit["execution"]),
    }


def _variation(found: dict[str, Any]) -> str:
    parts = []
    for pattern in found["layer_identity"]:
        shares = [f"{level} {_percent(share)}" for level, share in pattern["share"].items() if share is not None]
        if shares:
            parts.append(f"layer identity of {pattern['controllers']} {pattern['pattern']}: {', '.join(shares)}")
    moving = [c["shares"] for c in found["controllers"] if c["shares"]]
    if moving:
        means = {name: sum(shares[name] for shares in moving) / len(moving) for name in moving[0]}
        parts.append("within a controller on average " + ", ".join(f"{n} {_percent(m)}" for n, m in means.items()))
    return "; ".join(parts) or "the coefficients take one value"


def _dependence(found: dict[str, Any]) -> str:
    base = found["baseline"]
    effects = []
    for row in found["interventions"]:
        if row["scope"] != "joint" or row["refused"] is not None or row["name"] == "identity":
            continue
        name = f"{row['name']}:{row['level']}" if row["level"] else row["name"]
        interval = row["interval"]
        span = f" [{interval[0]:+.4g}, {interval[1]:+.4g}]" if interval else " (not resolvable)"
        effects.append(f"{name} {row['delta']:+.4g}{span} {row['outcome'].lower()}")
    margin = f" against a margin of {found['margin']:g}" if found["margin"] is not None else ""
    inert = f"; {len(found['inert'])} controllers have no effect on any bit" if found["inert"] else ""
    return f"{base['metric']} {base['mean']:.4g}, changed by {', '.join(effects) or 'nothing'}{margin}{inert}"


def _execution(found: dict[str, Any]) -> str:
    if "forms" not in found:
        return str(found.get("error") or "not measured").splitlines()[0]
    live, bound = found["forms"]["live"], found["forms"]["bound"]
    nodes, parameters = (sum(row[key] for row in found["removed"]) for key in ("nodes", "parameters"))
    exact = "equal to the traced graph's" if found["exact"] else "different from the traced graph's"
    return (
        f"{_range(live['flops'])} FLOPs for each of {found['inputs']} inputs on onnxruntime, {exact};"
        f" freezing leaves {_range(bound['flops'])}, and removes {nodes} nodes and {parameters:,} parameters"
    )


def _range(values: list[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"

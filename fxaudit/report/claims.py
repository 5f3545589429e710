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


LEVELS = {
    "element": "single coefficients",
    "mean_input_position": "means over inputs and positions",
    "mean_unit": "means over units",
    "mean_unit_position": "means over units and positions",
}


def _variation(found: dict[str, Any]) -> str:
    parts = []
    for pattern in found["layer_identity"]:
        shares = {level: share for level, share in pattern["share"].items() if share is not None}
        if shares:
            first, last = next(iter(shares)), next(reversed(shares))
            text = f"layer identity of {pattern['controllers']} {pattern['pattern']} holds"
            text += f" {percent(shares[first])} of the variance of {LEVELS[first]}"
            parts.append(text + (f", {percent(shares[last])} of that of {LEVELS[last]}" if last != first else ""))
    moving = [c["shares"] for c in found["controllers"] if c["shares"]]
    if moving:
        means = {name: sum(shares.get(name, 0.0) for shares in moving) / len(moving) for name in moving[0]}
        parts.append(
            f"within a controller the unit explains on average {percent(means['unit'])},"
            f" the position {percent(means['position'])}, the input {percent(means['input'])}"
        )
    return "; ".join(parts) or "the coefficients take one value"


def _dependence(found: dict[str, Any]) -> str:
    base = found["baseline"]
    rows = [
        row
        for row in found["interventions"]
        if row["scope"] == "joint"
        and row["feedback"] == "frozen"
        and row["discrete"] not in ("weights", "indices")
        and row["refused"] is None
        and row["name"] in ("reassign", "shuffle-tokens", "static")
    ]
    static = [row for row in rows if row["name"] == "static"]
    # Of the static profiles the best one: it says what a fixed assignment can achieve.
    best = min(static, key=lambda row: row["delta"], default=None)
    shown = [row for row in rows if row["name"] != "static"] + ([best] if best is not None else [])
    effects = [f"{_label(row)} {_effect(row)}" for row in shown]
    margin = f" (margin {found['margin']:g})" if found["margin"] is not None else ""
    count = len(found["inert"])
    inert = (
        f"; {count} {'controller moves' if count == 1 else 'controllers move'} no bit of the output" if count else ""
    )
    return f"{base['metric']} {base['mean']:.4g}; {', '.join(effects) or 'nothing could be exchanged'}{margin}{inert}"


def _label(row: dict[str, Any]) -> str:
    if row["name"] == "static":
        return f"best static profile ({row['level']})"
    return str(row["name"])


def _effect(row: dict[str, Any]) -> str:
    if row["interval"] is None:
        return f"{row['delta']:+.4g}, not resolvable"
    low, high = row["interval"]
    return f"{row['delta']:+.4g} [{low:+.4g}, {high:+.4g}] {row['outcome'].lower()}"


def _execution(found: dict[str, Any]) -> str:
    if "forms" not in found:
        return str(found.get("error") or "not measured").splitlines()[0]
    live, bound = found["forms"]["live"], found["forms"]["bound"]
    nodes, parameters = (sum(row[key] for row in found["removed"]) for key in ("nodes", "parameters"))
    if found["exact"] is None:
        exact = "not compared with the traced graph's, as an op has no formula"
    else:
        exact = "equal to the traced graph's" if found["exact"] else "different from the traced graph's"
    roles = found.get("roles", {})
    counted = f" ({role_text('COUNT', roles['COUNT'])})" if "COUNT" in roles else ""
    text = (
        f"{_range(live['flops'])} FLOPs for each of {found['inputs']} inputs on onnxruntime{counted}, {exact};"
        f" freezing leaves {_range(bound['flops'])}, and removes {nodes} nodes and {parameters:,} parameters"
    )
    if found.get("time"):
        outcomes = ", ".join(f"{row['name']} {row['outcome']}" for row in found["time"])
        text += f"; in time ({role_text('TIME', roles['TIME'])}): {outcomes}"
    return text


def role_text(role: str, how: dict[str, str]) -> str:
    """Where a figure of a role comes from, in the words that stand beside it."""
    level = _LEVELS.get(how["level"], how["level"])
    return f"role {role}, {how['provider']}, {how['precision']}, {level}"


_LEVELS = {"ORT_DISABLE_ALL": "graph as exported", "ORT_ENABLE_ALL": "all optimisations"}


def _range(values: list[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def percent(share: float) -> str:
    """A share in percent with three significant digits."""
    return f"{100 * share:.3g} %" if abs(share) >= 1e-6 else "0 %"

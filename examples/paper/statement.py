"""What the numbers say about the published ones, in words that follow from the numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from examples.paper.results import LEVELS

WORDS = {
    "element": "single coefficients",
    "mean_input_position": "means over inputs and positions",
    "mean_unit": "means over units",
    "mean_unit_position": "means over units and positions",
}


def statement(found: dict[str, Any]) -> str:
    """One bullet for each published figure, then what could not be tested."""
    gated = [m for m in found["models"] if m["variation"]["pattern"] == "feature-gate"]
    mixed = [m for m in found["models"] if m["variation"]["pattern"] == "mudd-dense"]
    bullets = [_identity(found["models"]), *_layer_identity(found, gated), _dependence(gated), *_mudd(found, mixed)]
    return "\n".join(f"- {bullet}" for bullet in [*bullets, *_untested(found)] if bullet)


def _identity(models: list[dict[str, Any]]) -> str:
    exact = sum(m["identity_bitwise"] is True for m in models)
    return (
        f"**Identity replay is exact**: published so; here bit for bit, from disk, in {exact} of {len(models)} models."
    )


def _layer_identity(found: dict[str, Any], models: list[dict[str, Any]]) -> list[str]:
    if not models:
        return []
    low, high = found["published"]["layer_identity"]
    inside = {level: sum(low <= m["variation"]["layer_identity"][level] <= high for m in models) for level in LEVELS}
    shares = {level: [100 * m["variation"]["layer_identity"][level] for m in models] for level in LEVELS}
    spans = [
        f"{_span(shares[level])} % of {WORDS[level]} ({inside[level]} of {len(models)} models inside)"
        for level in LEVELS
    ]
    sizes = sorted({m["parameters"] for m in models})
    bullets = [
        f"**Layer identity explains {100 * low:.0f} to {100 * high:.0f} % of coefficient variance** (published for 76M "
        f"and 504M models, without the level). Here, on models of {_span(sizes, ',')} parameters, it depends on the "
        f"level: {'; '.join(spans)}."
    ]
    fitting = [WORDS[level] for level in LEVELS if inside[level] == len(models)]
    if len(fitting) == 1:
        verdict = f"Of the four levels only {fitting[0]} gives the published range in every model here"
    elif fitting:
        verdict = f"The levels {' and '.join(fitting)} both give the published range in every model here"
    else:
        verdict = "No level gives the published range in every model here"
        nearest = max(LEVELS, key=lambda level: inside[level])
        if inside[nearest]:
            verdict += f"; {WORDS[nearest]} come closest, with {inside[nearest]} of {len(models)} inside"
    reading = "that makes it the likeliest reading, no more" if len(models) > 2 else "a hint, no more"
    trend = _trend(models, sizes)
    bullets.append(
        f"**At which level the published share was taken** cannot be settled from this. {verdict}; {reading}: "
        f"{len(models)} of the trained models here {'is' if len(models) == 1 else 'are'} of this kind, none of more "
        f"than {sizes[-1]:,} parameters, and another level could reach the range at another size.{trend}"
        if fitting
        else f"**At which level the published share was taken** cannot be inferred. {verdict}.{trend}"
    )
    return bullets


def _trend(models: list[dict[str, Any]], sizes: list[int]) -> str:
    """How the shares go with size, where there is more than one."""
    if len(sizes) == 1:
        return ""
    said = []
    for level in LEVELS:
        by_size = [
            statistics.fmean(m["variation"]["layer_identity"][level] for m in models if m["parameters"] == size)
            for size in sizes
        ]
        said.append(f"{', '.join(f'{100 * share:.3g}' for share in by_size)} % of {WORDS[level]}")
    return f" From the smallest to the largest size ({', '.join(f'{size:,}' for size in sizes)}): {'; '.join(said)}."


def _span(values: Sequence[float], form: str = ".3g") -> str:
    """The least and the largest of some values."""
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"


def _dependence(models: list[dict[str, Any]]) -> str:
    if not models:
        return ""
    said = []
    for label in ("reassign", "shuffle-tokens"):
        deltas = [m["dependence"]["joint"][label]["frozen"]["delta"] for m in models]
        said.append(f"{label} adds {_span(deltas, '+.3f')}")
    best = [
        min(row["frozen"]["delta"] for label, row in m["dependence"]["joint"].items() if label.startswith("static"))
        for m in models
    ]
    dependent = sum(m["verdict"]["dependence"] == "DEPENDENT" for m in models)
    static = sum(m["verdict"]["execution"] == "PROVEN_STATIC" for m in models)
    return (
        f"**FeatureGate models depend on their coefficients and execute the same compute for every input** "
        f"({dependent} of {len(models)} DEPENDENT, {static} of {len(models)} PROVEN_STATIC): {', '.join(said)}, and "
        f"the best static profile {_span(best, '+.3f')} nats per byte. No published figure stands beside these."
    )


def _mudd(found: dict[str, Any], models: list[dict[str, Any]]) -> list[str]:
    published = found["published"]["muddpythia_1_4b"]
    figures = f"{published['reassign']:+.4f} and {published['shuffle-tokens']:+.4f} nats per token"
    if not models:
        return [
            f"**MUDDPythia-1.4B, reassignment and token shuffling ({figures})**: nothing here to set beside them yet."
        ]
    rows = models[0]["dependence"]["joint"]
    own = {label: rows[label]["frozen"] for label in published}
    shuffled, reassigned = own["shuffle-tokens"], own["reassign"]
    if _overlap(shuffled["interval"], reassigned["interval"]):
        order = "too close to say which is larger"
    elif (shuffled["delta"] > reassigned["delta"]) == (published["shuffle-tokens"] > published["reassign"]):
        order = "in the same order"
    else:
        order = "in the opposite order"
    return [
        f"**MUDDPythia-1.4B, reassignment and token shuffling add {figures}**: not reproduced, since the checkpoint is "
        f"not here. Our tiny model of the same architecture, {models[0]['parameters']:,} parameters over bytes, gives "
        f"{own['reassign']['delta']:+.4f} ({own['reassign']['outcome']}) and {own['shuffle-tokens']['delta']:+.4f} "
        f"({own['shuffle-tokens']['outcome']}) nats per byte: {order}, and of "
        "sizes that cannot be compared."
    ]


def _untested(found: dict[str, Any]) -> list[str]:
    missing = (
        f" Of the models planned here, these are not audited yet: {', '.join(found['missing'])}."
        if found["missing"]
        else ""
    )
    return [
        "**Not tested**: trained 76M and 504M models (no GPU; training them is documented in `examples/featuregate`), "
        "the public MUDDPythia checkpoint (no network; the command is in `examples/mudd`), the paper's own data, "
        f"tokenizer and training recipe (not public to us).{missing}"
    ]


def _overlap(a: list[float], b: list[float]) -> bool:
    return a[0] <= b[1] and b[0] <= a[1]

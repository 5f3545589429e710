"""The zoo's results as documents: docs/zoo.json, the table docs/zoo.md, and a section of README.md.

``python -m tests.zoo.render`` writes the last two from the first.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.zoo.models import ZOO

ROOT = Path(__file__).resolve().parents[2]
JSON, TABLE, README = ROOT / "docs" / "zoo.json", ROOT / "docs" / "zoo.md", ROOT / "README.md"
BEGIN, END = "<!-- begin: zoo -->", "<!-- end: zoo -->"

Row = Mapping[str, Any]


def write(rows: Sequence[Row]) -> None:
    """Write all three documents."""
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    JSON.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    TABLE.write_text(page(rows), encoding="utf-8")
    README.write_text(with_section(README.read_text(encoding="utf-8"), section(rows, not_run(rows))), encoding="utf-8")


def not_run(rows: Sequence[Row]) -> list[str]:
    """Models of the zoo that the results do not hold: a part of the zoo says nothing about the rest."""
    names = {row["name"] for row in rows}
    return [name for name in ZOO if name not in names]


def read() -> list[dict[str, Any]]:
    return json.loads(JSON.read_text(encoding="utf-8"))


def with_section(readme: str, text: str) -> str:
    """`readme` with what stands between the marks replaced by `text`."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}{END}{after}"


def section(rows: Sequence[Row], missing: Sequence[str] = ()) -> str:
    """The section "Which models work" of the README; `missing` are models without a result."""
    exact, inexact, others = _groups(rows)
    lines = [
        f"`make zoo` traced {len(rows)} third-party architectures in small random configurations and compared each",
        "graph with the model itself on different inputs, once by code that is not fxaudit's",
        "([the whole table](docs/zoo.md)).",
        "",
        "| library | models | bitwise | inexact | not traced |",
        "|---|---:|---:|---:|---:|",
    ]
    for library in dict.fromkeys(_library(row) for row in rows):
        own = [row for row in rows if _library(row) == library]
        counts = [len(own), *(sum(row in group for row in own) for group in (exact, inexact, others))]
        lines.append(f"| {library} | {' | '.join(map(str, counts))} |")
    lines += ["", f"Equal bit for bit: {_percent(len(exact), len(rows))}."]
    if missing:
        lines[-1] += (
            f" {len(missing)} further models of the zoo have not been run yet, slow and difficult ones among"
            " them; docs/zoo.md names them."
        )
    named = [f"- `{row['name']}`: {_why(row)}" for row in (*inexact, *others)]
    if named:
        lines += ["", "The others:", "", *named]
    return "\n".join(lines) + "\n"


def page(rows: Sequence[Row]) -> str:
    """docs/zoo.md."""
    head = (
        "# The zoo\n\n"
        "Third-party architectures in small random configurations, each traced without an edit of its source. Written"
        " by `make zoo`.\n\n"
        "*Fidelity* is the graph against the eager model on the example, on a resampled input and in another batch"
        " size, as fxaudit reports it; *second input* is the same comparison by the zoo's own code, on random inputs"
        " and a model built anew. A number is the largest absolute difference. *Identity* is the frozen model, fed its"
        " own coefficients, against the live one.\n\n"
    )
    missing = ", ".join(f"`{name}`" for name in not_run(rows))
    return head + table(rows) + "\n\n" + summary(rows) + "\n" + (f"\nNot run: {missing}.\n" if missing else "")


def table(rows: Sequence[Row]) -> str:
    """One line for each model; what was not measured for all traced models is left out."""
    columns = dict(_COLUMNS)
    if any("nodes" in row and "controllers" not in row for row in rows):
        columns = {name: cell for name, cell in columns.items() if name not in ("controllers", "identity")}
    lines = [_line(columns), _line("---:" if name in _NUMBERS else "---" for name in columns)]
    return "\n".join([*lines, *(_line(cell(row) for cell in columns.values()) for row in rows)])


def _line(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


_COLUMNS: dict[str, Callable[[Row], object]] = {
    "model": lambda row: f"`{row['name']}`",
    "outcome": lambda row: row["outcome"] + (f": {row['reason']}" if row.get("reason") else ""),
    "front end": lambda row: row.get("frontend", ""),
    "settings": lambda row: _pairs(row.get("settings", {})),
    "batch": lambda row: row.get("batch", ""),
    "nodes": lambda row: row.get("nodes", ""),
    "s": lambda row: row["seconds"],
    "fidelity": lambda row: _difference(row.get("fidelity")),
    "second input": lambda row: _difference(row.get("second")),
    "findings": lambda row: _pairs(row.get("findings", {})),
    "controllers": lambda row: _pairs(row.get("controllers", {})),
    "identity": lambda row: {True: "bitwise", False: "DIFFERS", None: ""}[row.get("identity")],
}
_NUMBERS = ("nodes", "s")


def summary(rows: Sequence[Row]) -> str:
    """How many models came to which outcome."""
    outcomes = Counter(row["outcome"] for row in rows)
    identities = Counter(row["identity"] for row in rows if row.get("identity") is not None)
    text = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    replayed = f" Identity replay is bitwise in {identities[True]} of {identities.total()}." if identities else ""
    return f"{len(rows)} models: {text}.{replayed}"


def _groups(rows: Sequence[Row]) -> tuple[list[Row], list[Row], list[Row]]:
    exact = [row for row in rows if row["outcome"] == "bitwise"]
    inexact = [row for row in rows if row["outcome"] == "inexact"]
    return exact, inexact, [row for row in rows if row not in exact and row not in inexact]


def _library(row: Row) -> str:
    return str(row["name"]).partition(":")[0]


def _percent(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.1f} %)" if whole else "none"


def _why(row: Row) -> str:
    if row["outcome"] == "inexact":
        return f"traced; differs from the model by at most {row['fidelity']['max_abs_diff']:.1g}, as the trace reports"
    return f"{row['outcome']}: {row.get('reason') or row.get('second', {}).get('reason', '')}"


def _difference(comparison: Row | None) -> str:
    if not comparison:
        return ""
    if comparison.get("refused"):
        return "refused"
    return "bitwise" if comparison["bitwise"] else f"{comparison['max_abs_diff']:.2g}"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


if __name__ == "__main__":
    write(read())

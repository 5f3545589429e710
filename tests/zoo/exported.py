"""``python -m tests.zoo.exported [NAME...]``: models of the zoo as ONNX, on onnxruntime against torch.

The first 40 models, by name, in which the zoo found a controller. Each is frozen and exported in a process of its own,
and its live and bound graphs run on onnxruntime: outputs within the tolerance that float64 referees, bound equal to
live bit for bit, FLOPs equal to those of the traced graph. The results are written to docs/onnx.json and docs/onnx.md.
Those that are there already in the folder of results are kept: a run that was stopped goes on where it was.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch

from fxaudit import stages
from fxaudit.errors import AuditError, ExportError, SelfCheckError
from fxaudit.execution.export import export_graphs
from fxaudit.execution.options import ExecutionOptions
from fxaudit.execution.verdict import execute, one_at_a_time
from fxaudit.model.load import subject
from tests.processes import GIBIBYTE, Lost, each
from tests.zoo import render
from tests.zoo.models import ZOO
from tests.zoo.run import path_of

COUNT = 40
MEMORY = 12 * GIBIBYTE
SECONDS = 900
JSON, TABLE = render.ROOT / "docs" / "onnx.json", render.ROOT / "docs" / "onnx.md"

Row = Mapping[str, Any]


def chosen() -> list[str]:
    """The first models by name with a controller."""
    return sorted(row["name"] for row in render.read() if row.get("controllers"))[:COUNT]


def examine(name: str) -> dict[str, Any]:
    """What the table holds about one model."""
    started = time.perf_counter()
    row: dict[str, Any] = {"name": name}
    try:
        row |= _executed(name)
    except SelfCheckError as error:
        row |= {"outcome": "differs", "reason": _reason(error)}
    except ExportError as error:
        row |= {"outcome": "not exported", "reason": _reason(error)}
    except AuditError as error:
        row |= {"outcome": "refused", "reason": _reason(error)}
    except MemoryError:
        row |= {"outcome": "out of memory", "reason": f"more than {MEMORY // GIBIBYTE} GiB"}
    except Exception as error:
        row |= {"outcome": "crashed", "reason": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    row["seconds"] = round(time.perf_counter() - started, 1)
    return row


def _executed(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module, inputs = ZOO[name]()
    traced = stages.trace(subject(module, inputs, source=name))
    frozen = stages.freeze(traced)
    leaves = traced.flatten(traced.subject.arguments)
    with tempfile.TemporaryDirectory() as folder:
        exported = export_graphs(frozen, Path(folder))
        options = ExecutionOptions(probing=False, evident=False)
        found = execute(frozen, exported, one_at_a_time(traced, leaves), options=options)
    return {
        "outcome": "agrees",
        "controllers": len(frozen.controllers),
        "nodes": exported.live_nodes,
        "removed": found.removed["nodes"],
        "inputs": found.inputs,
        "verdict": found.verdict["live"],
        "flops": [row["flops"]["live"] for row in found.per_input],
        "unknown": found.unknown,
        "fidelity": found.fidelity,
        "bitwise": found.identity["bitwise"],
    }


def _reason(error: AuditError) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [lines[0], *(line for line in lines[1:] if line.startswith(("where:", "found:", "first at")))]
    return "; ".join(line.replace(sys.prefix, "") for line in kept)[:500]


# --- documents ------------------------------------------------------------------------------------------------------


def page(rows: Sequence[Row]) -> str:
    """docs/onnx.md."""
    outcomes = Counter(row["outcome"] for row in rows)
    counted = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    head = (
        "# Exported graphs on onnxruntime\n\n"
        f"The first {COUNT} models of the [zoo](zoo.md), by name, that have a controller, frozen and written as ONNX."
        " Written by `make onnx`, which `make acceptance` runs.\n\n"
        "*agrees* means: on every example input live.onnx is at most 4 times as far from float64 as torch itself (and"
        " one unit in the last place of the largest element), bound.onnx repeats live.onnx bit for bit, and onnxruntime"
        " executes exactly the FLOPs of the traced graph. Role COUNT, CPUExecutionProvider, float32, no graph"
        " optimisation. *torch* and *onnxruntime* are the largest errors against float64 over all outputs;"
        " *relative* is the largest difference between the two, of the largest element. An op without a FLOP formula"
        " leaves the verdict INCOMPLETE and the counts uncompared. Errors are absolute; random weights make the outputs"
        " of some models large and ill-conditioned, so that torch itself is far from float64.\n\n"
    )
    columns = (
        "| model | outcome | verdict | controllers | nodes | removed | GFLOPs | torch | onnxruntime | relative | s |"
    )
    lines = [columns, "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|", *map(_line, rows)]
    return head + "\n".join(lines) + f"\n\n{len(rows)} models: {counted}.\n"


def _line(row: Row) -> str:
    if row["outcome"] != "agrees":
        reason = str(row["reason"]).replace("|", "\\|").replace("\n", " ")
        return f"| `{row['name']}` | {row['outcome']}: {reason} | | | | | | | | | {row['seconds']} |"
    referee = row["fidelity"]["referee"] or {}
    errors = [referee.get("torch_error"), referee.get("onnx_error"), row["fidelity"]["relative_max"]]
    verdict = row["verdict"] + (f": {', '.join(row['unknown'])}" if row["unknown"] else "")
    cells = [
        f"`{row['name']}`",
        row["outcome"] + ("" if referee.get("heard") else f" (no referee: {referee.get('unheard') or 'random'})"),
        verdict,
        *(row[key] for key in ("controllers", "nodes", "removed")),
        f"{max(row['flops']) / 1e9:.3g}",
        *("" if error is None else f"{error:.2g}" for error in errors),
        row["seconds"],
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def write(rows: Sequence[Row]) -> None:
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    JSON.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    TABLE.write_text(page(rows), encoding="utf-8")


def read() -> list[dict[str, Any]]:
    return json.loads(JSON.read_text(encoding="utf-8"))


@click.command()
@click.option("--results", type=click.Path(path_type=Path), default=Path("build/onnx"), show_default=True)
@click.option("--processes", type=int, default=2, show_default=True)
@click.argument("names", nargs=-1)
def main(results: Path, processes: int, names: tuple[str, ...]) -> None:
    results.mkdir(parents=True, exist_ok=True)
    wanted = list(names or chosen())
    for module in ("transformers", "torchvision", "timm"):
        importlib.import_module(module)  # once, not in each process
    left = [name for name in wanted if not path_of(results, name).exists()]
    for name, result in each(examine, left, seconds=SECONDS, memory=MEMORY, processes=processes):
        row = result
        if isinstance(result, Lost):
            outcome = "timed out" if result.timed_out else "crashed"
            row = {"name": name, "outcome": outcome, "seconds": SECONDS, "reason": result.reason}
        path = path_of(results, name)
        path.with_suffix(".part").write_text(json.dumps(row), encoding="utf-8")
        path.with_suffix(".part").rename(path)
        print(f"{name:50} {row['outcome']:12} {row['seconds']:6} s  {row.get('reason', '')[:160]}", flush=True)
    rows = [json.loads(path_of(results, name).read_text(encoding="utf-8")) for name in wanted]
    if names:
        print(page(rows))
    else:
        write(rows)
    sys.exit(any(row["outcome"] != "agrees" for row in rows))


if __name__ == "__main__":
    main()

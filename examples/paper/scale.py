"""What a whole audit of a large shape takes: random weights, few inputs, time and peak memory of every stage.

    python -m examples.paper.scale muddpythia-1.4b

Writes scale/NAME.json. Trace, record, all joint interventions, export and one input on onnxruntime; ONNX files go to a
temporary folder, which needs four times the size of the weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from examples.featuregate import model as featuregate
from examples.mudd import model as mudd
from examples.paper.models import HERE
from fxaudit.audit import AuditReport, ReplayOptions, audit
from fxaudit.model.load import subject

SCALE = HERE / "scale"


@dataclass(frozen=True)
class Shape:
    """A model to build with random weights, and how much it is run on."""

    title: str
    build: Callable[[], nn.Module]
    vocabulary: int
    inputs: int
    tokens: int
    batch: int


def mixing(preset: str) -> nn.Module:
    """A MUDDPythia whose controllers do something, as they would not at the start of training."""
    model = mudd.build(preset)
    for dense in model.dynamic_dense:
        nn.init.normal_(dense.w2.weight, std=mudd.INITIAL_STD)
    model.contraction = False
    return model


SHAPES = {
    "featuregate-76m": Shape("FeatureGate 76M", lambda: featuregate.build("76m"), 32_768, 4, 64, 4),
    "featuregate-504m": Shape("FeatureGate 504M", lambda: featuregate.build("504m"), 32_768, 2, 64, 2),
    "muddpythia-1.4b": Shape("MUDDPythia 1.4B", lambda: mixing("1.4b"), 50_432, 8, 128, 2),
}


@dataclass
class Costs:
    """Wall seconds and peak resident bytes by stage, in the form that `audit` takes as its watch."""

    stages: dict[str, dict[str, float]]

    @contextlib.contextmanager
    def watch(self, stage: str) -> Iterator[Callable[[int, int], None]]:
        started = time.perf_counter()
        reset_peak()
        with ChildPeak() as children:
            yield lambda done, total: None
        self.stages[stage] = {
            "seconds": round(time.perf_counter() - started, 1),
            "peak_bytes": peak(),
            "child_peak_bytes": children.bytes,
        }


def reset_peak() -> None:
    """Let the kernel (Linux) forget the highest resident size of this process so far."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak(process: int | str = "self") -> int:
    """The highest resident size of a process, of this one since `reset_peak`, bytes; mapped files that are in memory
    count. 0 where it has just ended."""
    kilobytes = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text(encoding="ascii"))
    return int(kilobytes[0]) * 1024 if kilobytes else 0


class ChildPeak:
    """The highest resident size of any child process (onnxruntime runs in one), looked at a few times a second.

    The kernel's own figure for children that have ended is no use: it starts from what the parent had.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> ChildPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        own = Path("/proc/self/cmdline").read_bytes()
        while not self._ended.wait(0.2):
            for children in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
                # Both a thread and a child may end at any time; a child that has not begun is still its parent.
                with contextlib.suppress(OSError):
                    for child in children.read_text(encoding="ascii").split():
                        if Path(f"/proc/{child}/cmdline").read_bytes() != own:
                            self.bytes = max(self.bytes, peak(int(child)))


def measure(shape: Shape, directory: Path) -> tuple[dict[str, Any], AuditReport]:
    """Audit random weights on random tokens, and what it took."""
    costs, started = Costs({}), time.perf_counter()
    with costs.watch("build"):
        torch.manual_seed(0)
        model = shape.build().eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        size = (2, shape.inputs, shape.tokens + 1)
        evaluation, calibration = torch.randint(shape.vocabulary, size, generator=generator)
    name = "tokens" if isinstance(model, mudd.MUDDPythia) else "input_ids"
    data, other = (
        {name: part[:, :-1].contiguous(), "targets": part[:, 1:].contiguous()} for part in (evaluation, calibration)
    )
    report = audit(
        subject(model, (data[name][: max(2, shape.batch)],), source=shape.title),
        data,
        other,
        directory,
        batch_size=shape.batch,
        replaying=ReplayOptions(scopes=("joint",)),
        executed=1,
        watch=costs.watch,
    )
    joint = [result for result in report.dependence.results if result.refused is None]
    found = {
        "title": shape.title,
        "parameters": report.matched.traced.subject.parameter_count,
        "controllers": len(report.frozen.controllers),
        "inputs": shape.inputs,
        "tokens": shape.tokens,
        "batch": shape.batch,
        "threads": torch.get_num_threads(),
        "identity_bitwise": report.identity.bitwise,
        "interventions": [result.label for result in joint],
        "execution": report.verdict["execution"],
        "seconds": round(time.perf_counter() - started, 1),
        "peak_bytes": max(int(stage["peak_bytes"] + stage["child_peak_bytes"]) for stage in costs.stages.values()),
        "stages": costs.stages,
    }
    return found, report


def main() -> None:
    parser = argparse.ArgumentParser(description="Audit a large shape with random weights and keep what it took.")
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as directory:
        found, _ = measure(SHAPES[arguments.name], Path(directory))
    SCALE.mkdir(exist_ok=True)
    (SCALE / f"{arguments.name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found["stages"], indent=1))


if __name__ == "__main__":
    main()

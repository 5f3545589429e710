"""What recording and replaying cost, beside forward hooks, in one run.

    make bench

Every row is the wall time of one pass over the same batch, as a ratio to a plain pass of the eager model in the same
round; rounds are interleaved in changing order. `plain again` is the A/A control: what lies inside its interval is not
resolvable. Memory is the process's own peak.
"""

from __future__ import annotations

import random
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fxaudit import stages
from fxaudit.model.settings import exact_numerics
from fxaudit.model.trace import run_flat

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "featuregate" / "model.py"
ROUNDS, BATCH = 40, 8


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    frozen = stages.freeze(stages.load(f"{EXAMPLE}:trained"))
    traced = frozen.traced
    module = traced.subject.module.eval()
    ids = stages.load_data(f"resampled:{BATCH}", traced).columns["input_ids"].rows(0, BATCH)
    with exact_numerics():
        _, values = frozen.run_tapped([ids])
        coefficients = list(values[: len(frozen.coefficients)])
        rows: dict[str, Callable[[], object]] = {
            "plain": lambda: module(ids),
            "plain again": lambda: module(ids),
            "record: forward hooks": lambda: hooked(module, ids),
            "record: tapped graph": lambda: frozen.run_tapped([ids]),
            "live graph": lambda: run_flat(traced.graph_module, [ids], traced.initial_state),
            "replay: frozen graph": lambda: frozen.run_frozen([ids], coefficients),
        }
        ratios = measure(rows)
    print(
        f"FeatureGate 1m, batch {BATCH} x {ids.shape[1]}, CPU, one thread, {ROUNDS} rounds, torch {torch.__version__}"
    )
    print(f"{'row':<24}{'median':>8}{'5 %':>8}{'95 %':>8}   times a plain pass")
    for name, found in ratios.items():
        low, *_, high = statistics.quantiles(found, n=20)
        print(f"{name:<24}{statistics.median(found):>8.3f}{low:>8.3f}{high:>8.3f}")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


def hooked(module: torch.nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    """The peer: gates recorded by forward hooks on the gates' linear layers."""
    recorded: list[torch.Tensor] = []
    handles = [
        layer.register_forward_hook(lambda _, __, output: recorded.append(torch.sigmoid(output)))
        for name, layer in module.named_modules()
        if name.endswith("_gate")
    ]
    module(ids)
    for handle in handles:
        handle.remove()
    return recorded


def measure(rows: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Ratios to the first row of the same round, by row; the first rounds only warm up."""
    ratios: dict[str, list[float]] = {name: [] for name in rows}
    order = list(rows)
    generator = random.Random(0)
    for turn in range(ROUNDS + 3):
        seconds = {}
        for name in generator.sample(order, len(order)):
            started = time.perf_counter()
            rows[name]()
            seconds[name] = time.perf_counter() - started
        if turn >= 3:
            for name in order:
                ratios[name].append(seconds[name] / seconds[order[0]])
    return ratios


if __name__ == "__main__":
    main()

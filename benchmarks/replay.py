"""What recording and replaying cost, beside forward hooks, in one run.

    make bench

Every row is the wall time of one pass over the same batch, as a ratio to a plain pass of the eager model in the same
round; rounds are interleaved in changing order. `plain again` is the A/A control: what lies inside its interval is not
resolvable. A sweep replays each controller alone, and is given as a ratio to as many plain passes; its floor is the
share of the graph that lies behind the controllers. Memory is the process's own peak.

FXAUDIT_BENCH names the models to run, separated by commas: demo, seresnet50, gated-100m. All of them by default.
"""

from __future__ import annotations

import importlib.util
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fxaudit import stages
from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.model.settings import exact_numerics
from fxaudit.model.trace import run_flat
from fxaudit.replay import store
from fxaudit.replay.segments import Explorer, frozen_chain

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "featuregate" / "model.py"


@dataclass(frozen=True)
class Case:
    """A model, a batch for it, and how often each row is run."""

    name: str
    build: Callable[[], tuple[nn.Module, Tensor]]
    rounds: int
    sweeps: int


@dataclass(frozen=True)
class Alone:
    """One controller's other value, or none: a replay of the sweep."""

    signature: tuple[bool, ...]


def featuregate() -> Any:
    spec = importlib.util.spec_from_file_location("featuregate", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def demo() -> tuple[nn.Module, Tensor]:
    model, example = featuregate().trained()
    return model, example[:1].repeat(8, 1)


def seresnet50() -> tuple[nn.Module, Tensor]:
    import timm

    # The default leaves every last norm at zero: then all gates multiply zeros, and any replay looks right.
    return timm.create_model("seresnet50", pretrained=False, zero_init_last=False), torch.randn(4, 3, 224, 224)


def gated_100m() -> tuple[nn.Module, Tensor]:
    source = featuregate()
    config = source.Config(layers=12, width=768, heads=12, vocabulary=8192)
    return source.FeatureGateTransformer(config), torch.randint(0, 8192, (2, 256))


CASES = (Case("demo", demo, 25, 5), Case("seresnet50", seresnet50, 8, 2), Case("gated-100m", gated_100m, 5, 1))


class Sigmoids(TorchFunctionMode):
    """The peer: forward hooks cannot see a functional sigmoid, so its calls are intercepted."""

    def __init__(self, given: list[Tensor] | None = None) -> None:
        super().__init__()
        self.recorded: list[Tensor] = []
        self.given = given

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.sigmoid, Tensor.sigmoid, Tensor.sigmoid_):
            self.recorded.append(result)
            if self.given is not None:
                return self.given[len(self.recorded) - 1]
        return result


def intercepted(module: nn.Module, batch: Tensor, given: list[Tensor] | None = None) -> list[Tensor]:
    with Sigmoids(given) as mode:
        module(batch)
    return mode.recorded


def main() -> None:
    """Print a table for each model."""
    torch.set_num_threads(1)
    asked = os.environ.get("FXAUDIT_BENCH", ",".join(case.name for case in CASES)).split(",")
    print(f"CPU, one thread, torch {torch.__version__}; times a plain pass: median, 5 % and 95 % of the rounds")
    for name in ("nnsight", "pyvene", "torchlens"):
        print(f"no row for {name}: it is not among the benchmark's dependencies")
    for case in CASES:
        if case.name in asked:
            report(case)
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


def report(case: Case) -> None:
    torch.manual_seed(0)
    module, batch = case.build()
    module.eval()
    frozen = stages.freeze(module, (batch,))
    count = len(frozen.controllers)
    with exact_numerics():
        _, values = frozen.run_tapped([batch])
        own = list(values[: len(frozen.coefficients)])
        gates = intercepted(module, batch)
        rows: dict[str, Callable[[], object]] = {
            "plain": lambda: module(batch),
            "plain again": lambda: module(batch),
            "live graph": lambda: run_flat(frozen.traced.graph_module, [batch], frozen.traced.initial_state),
            "record: interception": lambda: intercepted(module, batch),
            "record: tapped graph": lambda: frozen.run_tapped([batch]),
            "replay: interception": lambda: intercepted(module, batch, gates),
            "replay: frozen graph": lambda: frozen.run_frozen([batch], own),
        }
        compiled = torch.compile(frozen.frozen)
        compiled(batch, *own)
        rows["replay: compiled"] = lambda: compiled(batch, *own)
        print(
            f"\n{case.name}: {sum(p.numel() for p in module.parameters()):,} parameters, {count} controllers,"
            f" batch {list(batch.shape)}, {case.rounds} rounds"
        )
        show(measure(rows, case.rounds))
        sweep = {
            "plain": lambda: module(batch),
            "sweep, naive": lambda: [frozen.run_frozen([batch], own) for _ in range(count + 1)],
            "sweep, shared prefix": lambda: swept(frozen, batch, own),
        }
        show(
            {n: [r / (count + 1) for r in ratios] for n, ratios in measure(sweep, case.sweeps).items() if n != "plain"}
        )
        print(f"{'sweep, floor':<24}{floor(frozen):>8.3f}")
    writing(frozen, own, batch)


def swept(frozen: FrozenModel, batch: Tensor, own: list[Tensor]) -> None:
    """The baseline and each coefficient replaced by itself."""
    chain = frozen_chains.setdefault(id(frozen), frozen_chain(frozen))
    width = len(chain.order)
    replays = [Alone((False,) * width), *(Alone(tuple(i == k for i in range(width))) for k in range(width))]
    explorer: Explorer[Alone] = Explorer(chain, lambda i, other, _: own[i], lambda done, found: None)
    explorer.run([batch], replays)


frozen_chains: dict[int, Any] = {}


def floor(frozen: FrozenModel) -> float:
    """The share of a naive sweep's FLOPs that a sweep with shared prefixes cannot avoid, base pass included."""
    from fxaudit.execution.flops import count_flops

    nodes = list(frozen.frozen.graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    bound = [n for n in nodes if n.op == "placeholder"][-len(frozen.coefficients) :]
    size = {frozen.traced.sample: 1} if not isinstance(frozen.traced.sample, int) else {}
    single = [float(_number(count_flops([node], frozen.traced.sample).total, size)) for node in nodes]
    suffixes = [sum(single[min(order[user] for user in n.users) :]) for n in bound]
    return (sum(single) + sum(suffixes)) / (sum(single) * (1 + len(bound)))


def _number(total: Any, size: dict[Any, int]) -> Any:
    return total.subs(size) if hasattr(total, "subs") else total


def measure(rows: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Ratios to the first row of the same round, by row; the first round only warms up."""
    ratios: dict[str, list[float]] = {name: [] for name in rows}
    order = list(rows)
    generator = random.Random(0)
    for turn in range(rounds + 1):
        seconds = {}
        for name in generator.sample(order, len(order)):
            started = time.perf_counter()
            rows[name]()
            seconds[name] = time.perf_counter() - started
        if turn:
            for name in order:
                ratios[name].append(seconds[name] / seconds[order[0]])
    return ratios


def show(ratios: dict[str, list[float]]) -> None:
    for name, found in ratios.items():
        low, *_, high = statistics.quantiles(found, n=20) if len(found) > 1 else (found[0], found[0])
        print(f"{name:<24}{statistics.median(found):>8.3f}{low:>8.3f}{high:>8.3f}")


def writing(frozen: FrozenModel, own: list[Tensor], batch: Tensor) -> None:
    """Bytes per second of writing a shard: serialising, hashing and the disk together."""
    size = batch.shape[0]
    with tempfile.TemporaryDirectory() as place:
        names = frozen.coefficients
        writer = store.create(Path(place) / "store", {"count": size, "batch_size": size}, 0)
        tensors = {c.key: store.to_samples(v, c, size) for c, v in zip(names, own, strict=True)}
        started = time.perf_counter()
        writer.write(writer.store.batches[0], tensors, {c.key: v.stride() for c, v in zip(names, own, strict=True)}, "")
        seconds = time.perf_counter() - started
        written = writer.store.size_bytes
    print(f"{'writing and hashing':<24}{written / seconds / 1e6:>8.0f} MB/s, {written:,} bytes")


if __name__ == "__main__":
    main()

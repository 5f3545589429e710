"""What recording and replaying cost, beside other tools, in one run.

    make bench

Every row is the CPU time of one pass over the same batch, on one thread, as a ratio to a plain pass of the eager model
in the same round; rounds are interleaved in changing order. `plain again` is the A/A control: what lies inside its
interval is not resolvable. A sweep replays each controller alone, and is given as a ratio to as many plain passes; its
floor is the share of the graph that lies behind the controllers. Memory is the growth of a forked process in one pass.
What the tables must show is asked below each of them and answered yes or no.

FXAUDIT_BENCH names the models to run, separated by commas: demo, seresnet50, gated-100m. All of them by default.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import random
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

from benchmarks.peers import hooks, peers
from fxaudit import stages
from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.model.settings import exact_numerics
from fxaudit.model.trace import run_flat
from fxaudit.replay import store
from fxaudit.replay.segments import Chain, Explorer, frozen_chain

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "featuregate" / "model.py"


@dataclass(frozen=True)
class Case:
    """A model, a batch for it, how often each row is run, and how the paths of the modules that end its gates end."""

    name: str
    build: Callable[[], tuple[nn.Module, Tensor]]
    rounds: int
    sweeps: int
    gates: str


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


CASES = (
    Case("demo", demo, 25, 5, "_gate"),
    Case("seresnet50", seresnet50, 9, 3, ".se.gate"),
    Case("gated-100m", gated_100m, 7, 1, "_gate"),
)
COMPILED = "replay: fxaudit, compiled"
Row = Callable[[], object]


def main() -> None:
    """Print the tables of each model."""
    torch.set_num_threads(1)
    asked = os.environ.get("FXAUDIT_BENCH", ",".join(case.name for case in CASES)).split(",")
    print(f"CPU, one thread, torch {torch.__version__}; times a plain pass: median, 5 % and 95 % of the rounds")
    for case in CASES:
        if case.name in asked:
            report(case)


def report(case: Case) -> None:
    torch.manual_seed(0)
    module, batch = case.build()
    module.eval()
    frozen = stages.freeze(module, (batch,))
    count = len(frozen.controllers)
    gates = [name for name, _ in module.named_modules() if name.endswith(case.gates)]
    assert len(gates) == count, f"{len(gates)} gate modules, {count} controllers"
    with torch.no_grad(), exact_numerics():
        _, values = frozen.run_tapped([batch])
        own = list(values[: len(frozen.coefficients)])
        rows: dict[str, Row] = {
            "plain": lambda: module(batch),
            "plain again": lambda: module(batch),
            "live graph": lambda: run_flat(frozen.traced.graph_module, [batch], frozen.traced.initial_state),
            "record: fxaudit": lambda: frozen.run_tapped([batch]),
            "replay: fxaudit": lambda: frozen.run_frozen([batch], own),
        }
        compiled = torch.compile(frozen.frozen)
        compiled(batch, *own)
        rows["replay: fxaudit, compiled"] = lambda: compiled(batch, *own)
        for peer in peers(module, gates, batch):
            given = peer.given(hooks(module, gates, batch).record())
            if peer.record is not None:
                rows[f"record: {peer.name}"] = peer.record
            rows[f"replay: {peer.name}"] = lambda peer=peer, given=given: peer.replay(given)
        chain = frozen_chain(frozen)
        sweep: dict[str, Row] = {
            "plain": lambda: module(batch),
            "sweep, naive": lambda: [frozen.run_frozen([batch], own) for _ in range(count + 1)],
            "sweep, shared prefix": lambda: swept(chain, batch, own),
        }
        print(
            f"\n{case.name}: {sum(p.numel() for p in module.parameters()):,} parameters, {count} controllers,"
            f" batch {list(batch.shape)}, {case.rounds} rounds"
        )
        passes = measure(rows, case.rounds)
        show(passes, {name: growth(row) for name, row in rows.items()})
        sweeps = {name: [s / (count + 1) for s in taken] for name, taken in measure(sweep, case.sweeps).items()}
        sweeps["plain"] = [s * (count + 1) for s in sweeps["plain"]]
        show(sweeps, {name: growth(row) for name, row in sweep.items()})
    least = floor(frozen)
    print(f"{'sweep, floor':<28}{least * statistics.median(ratios(sweeps, 'sweep, naive')):>8.3f}")
    writing(frozen, own, batch)
    again = ratios(passes, "plain again")
    tap, replay = median(passes, "record: fxaudit", "live graph"), median(passes, "replay: fxaudit")
    swept_share = median(sweeps, "sweep, shared prefix", "sweep, naive")
    rivals = [median(passes, name) for name in rows if name.startswith("replay:") and "fxaudit" not in name]
    answer("the tap costs at most 1.05 passes of the same graph", tap, 1.05)
    answer("frozen replay costs at most a plain pass, within the control's interval", replay, limits(again)[1])
    answer("the fastest frozen replay is no slower than any peer's", min(replay, median(passes, COMPILED)), min(rivals))
    answer("a sweep takes at most 1.15 of its floor", swept_share, 1.15 * least)


def answer(claim: str, found: float, limit: float) -> None:
    print(f"{'yes' if found <= limit else 'NO':<4}{claim}: {found:.3f}, limit {limit:.3f}")


def swept(chain: Chain, batch: Tensor, own: list[Tensor]) -> None:
    """The baseline and each coefficient replaced by itself."""
    width = len(chain.order)
    replays = [Alone((False,) * width), *(Alone(tuple(i == k for i in range(width))) for k in range(width))]
    explorer: Explorer[Alone] = Explorer(chain, lambda i, other, _: own[i], lambda done, found: None)
    explorer.run([batch], replays)


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


def measure(rows: dict[str, Row], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each row in each round; a round before them only warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    generator = random.Random(0)
    for turn in range(rounds + 1):
        for name in generator.sample(list(rows), len(rows)):
            started = time.process_time()
            rows[name]()
            if turn:
                seconds[name].append(time.process_time() - started)
    return seconds


def growth(row: Row) -> float:
    """MiB that the peak of a forked process lies above its start, when it runs the row."""
    ctypes.CDLL(None).malloc_trim(0)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        before = _resident("VmRSS")
        row()
        os.write(writer, str(_resident("VmHWM") - before).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as found:
        return int(found.read() or 0) / 1024


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise LookupError(field)


def ratios(seconds: dict[str, list[float]], name: str, base: str = "plain") -> list[float]:
    return [a / b for a, b in zip(seconds[name], seconds[base], strict=True)]


def median(seconds: dict[str, list[float]], name: str, base: str = "plain") -> float:
    return statistics.median(ratios(seconds, name, base))


def limits(found: list[float]) -> tuple[float, float]:
    """The 5 % and the 95 % quantile; of few values the least and the greatest."""
    return (
        (min(found), max(found))
        if len(found) < 20
        else (statistics.quantiles(found, n=20)[0], statistics.quantiles(found, n=20)[-1])
    )


def show(seconds: dict[str, list[float]], memory: dict[str, float]) -> None:
    for name in seconds:
        found = ratios(seconds, name)
        low, high = limits(found)
        print(f"{name:<28}{statistics.median(found):>8.3f}{low:>8.3f}{high:>8.3f}{memory[name]:>8.0f} MiB")


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

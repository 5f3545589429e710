"""Training of the example models: one recipe, on any file of bytes or tokens, in one process or several.

`examples/featuregate/train.py` and `examples/mudd/train.py` are its commands. A run that is killed and started again
with the same options goes on from its last checkpoint and ends in the same bits as one that was never stopped. One
process repeats its bits on one machine; several (torchrun) repeat them for the same number of processes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from examples.featuregate import corpus

WARMUP_STEPS = 100
DECAY_SHARE = 0.3
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
LARGEST_GRADIENT = 1.0
STEPS_PER_RECORD = 50
VALIDATION_BATCH = 32
CHECKPOINT, WEIGHTS, RECORD = "checkpoint.pt", "weights.safetensors", "training.json"


@dataclass(frozen=True)
class Recipe:
    """What a run's numbers depend on, beside the model, the data and the number of processes.

    `batch` counts windows of `length` units over all processes; `precision` is that of the matrix products.
    """

    steps: int
    seed: int = 0
    batch: int = 8
    length: int = 256
    learning_rate: float = 3e-3
    precision: str = "bf16"

    def learning_rate_at(self, step: int) -> float:
        """Warmup, a plateau, then a linear decay to zero over the last share of the run."""
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        decay = min(1.0, (1.0 - step / self.steps) / DECAY_SHARE)
        return self.learning_rate * warmup * max(decay, 0.0)


# --- data -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """Units in a row: bytes (uint8 [unit]), or tokens of some vocabulary (integers [unit], mapped from their file)."""

    units: np.ndarray
    unit: str = "byte"

    @property
    def sha256(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.units).data).hexdigest()

    def windows(self, starts: Tensor, length: int) -> Tensor:
        """Token ids [window, length] from `starts` [window, 1] on."""
        places = (starts + torch.arange(length)).numpy()
        return torch.from_numpy(self.units[places].astype(np.int64))


def of_bytes(data: bytes) -> Text:
    return Text(np.frombuffer(data, dtype=np.uint8))


def read_text(path: Path) -> Text:
    """The tokens of a .npy file (one axis of integers), or the bytes of any other.

    Raises:
        ValueError: a .npy file that holds something else.
    """
    if path.suffix != ".npy":
        return of_bytes(path.read_bytes())
    units = np.load(path, mmap_mode="r", allow_pickle=False)
    if units.ndim != 1 or not np.issubdtype(units.dtype, np.integer):
        raise ValueError(f"{path}: expected one axis of integers, found {units.dtype} {list(units.shape)}")
    return Text(units, "token")


def require_fit(text: Text, length: int, vocabulary: int) -> None:
    """Raise unless the text is longer than one window and all its units are in the vocabulary.

    Raises:
        ValueError: it is not.
    """
    if len(text.units) <= length:
        raise ValueError(f"a text of {len(text.units)} {text.unit}s has no window of {length} and a target for each")
    low, high = int(text.units.min()), int(text.units.max())
    if low < 0 or high >= vocabulary:
        raise ValueError(f"{text.unit}s from {low} to {high} do not fit a vocabulary of {vocabulary}")


def batches(text: Text, recipe: Recipe, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets [batch, unit] from random places of the text, for ever."""
    while True:
        starts = torch.randint(len(text.units) - recipe.length, (recipe.batch, 1), generator=generator)
        windows = text.windows(starts, recipe.length + 1)
        yield windows[:, :-1], windows[:, 1:]


# --- one run --------------------------------------------------------------------------------------------------------


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Processes:
    """This process among those that torchrun started; without it, the only one."""

    rank: int = 0
    count: int = 1
    device: torch.device = CPU

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, rows: Tensor) -> Tensor:
        """The rows of this process, all of equal number, on its device."""
        return rows[self.rank :: self.count].to(self.device)

    def mean(self, value: Tensor) -> float:
        """The mean of a number over all processes."""
        value = value.detach()
        if self.count > 1:
            dist.all_reduce(value)
            value = value / self.count
        return float(value)


def joined(device: str) -> Processes:
    """Join the processes that torchrun started (nccl on GPUs, gloo on CPUs)."""
    count, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    place = torch.device(device, int(os.environ.get("LOCAL_RANK", 0))) if device == "cuda" else torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if count > 1:
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    return Processes(rank, count, place)


class Run:
    """A model in training, and everything that its next step depends on."""

    def __init__(self, model: nn.Module, text: Text, recipe: Recipe, processes: Processes | None = None) -> None:
        self.model, self.text, self.recipe = model, text, recipe
        self.processes = processes or Processes()
        self.model.to(self.processes.device)
        self.parallel = DistributedDataParallel(model) if self.processes.count > 1 else model
        self.optimizer = optimizer_for(model, recipe)
        self.generator = torch.Generator().manual_seed(recipe.seed)
        self.step = 0
        self.cpu_seconds = self.wall_seconds = 0.0
        self.recent: list[float] = []
        self.curve: list[tuple[int, float, float]] = []
        shapes = [(name, tuple(value.shape)) for name, value in model.state_dict().items()]
        self._facts = {
            **asdict(recipe),
            "processes": self.processes.count,
            "text": text.sha256,
            "model": hashlib.sha256(repr(shapes).encode()).hexdigest(),
        }

    def train(self, stop: int | None = None, checkpoint: Path | None = None, every: int = 0) -> None:
        """Train in place up to step `stop`, by default to the end, writing a checkpoint after `every` steps."""
        stop = self.recipe.steps if stop is None else min(stop, self.recipe.steps)
        cpu, wall = self.cpu_seconds - time.process_time(), self.wall_seconds - time.perf_counter()
        drawn = batches(self.text, self.recipe, self.generator)
        while self.step < stop:
            self.recent.append(self._one_step(*next(drawn)))
            self.step += 1
            self.cpu_seconds, self.wall_seconds = cpu + time.process_time(), wall + time.perf_counter()
            if self.step % STEPS_PER_RECORD == 0 or self.step == self.recipe.steps:
                self._write_down()
            if checkpoint is not None and every and self.step % every == 0 and self.step < self.recipe.steps:
                self.save(checkpoint)

    def _one_step(self, inputs: Tensor, targets: Tensor) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate_at(self.step)
        self.optimizer.zero_grad()
        share = self.processes.share
        value = loss(self.parallel, share(inputs), share(targets), mixed=self.recipe.precision == "bf16")
        value.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
        self.optimizer.step()
        return self.processes.mean(value)

    def _write_down(self) -> None:
        self.curve.append((self.step, round(self.cpu_seconds, 1), round(sum(self.recent) / len(self.recent), 4)))
        if self.processes.is_first:
            print(f"step {self.step}  CPU {self.cpu_seconds:.0f} s  loss {self.curve[-1][2]:.4f}", flush=True)
        self.recent.clear()

    def save(self, path: Path) -> None:
        """Write a checkpoint, whole or not at all."""
        if not self.processes.is_first:
            return
        aside = path.with_name(f".{path.name}")
        torch.save({"facts": self._facts, **self._state()}, aside)
        os.replace(aside, path)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint of the same run.

        Raises:
            ValueError: it is of another run.
        """
        state = torch.load(path, map_location=self.processes.device, weights_only=True)
        changed = {key for key in self._facts if state["facts"].get(key) != self._facts[key]}
        if changed:
            raise ValueError(f"{path} is of a run with another {', '.join(sorted(changed))}: finish or delete it")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
        self.step = state["step"]
        self.cpu_seconds, self.wall_seconds = state["cpu_seconds"], state["wall_seconds"]
        self.recent, self.curve = state["recent"], [tuple(point) for point in state["curve"]]

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "step": self.step,
            "cpu_seconds": self.cpu_seconds,
            "wall_seconds": self.wall_seconds,
            "recent": self.recent,
            "curve": self.curve,
        }


def loss(model: nn.Module, inputs: Tensor, targets: Tensor, *, mixed: bool) -> Tensor:
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=mixed):
        logits = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def optimizer_for(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    # Weight decay would pull norms and biases, the gates' among them, towards zero.
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=BETAS, fused=True)


@torch.inference_mode()
def mean_loss(model: nn.Module, text: Text, length: int, device: torch.device) -> float:
    """Mean negative log-likelihood in fp32, nats per unit, over consecutive windows; what is left after the last one is
    not counted."""
    count = (len(text.units) - 1) // length
    units = torch.from_numpy(text.units[: count * length + 1].astype(np.int64))
    inputs, targets = units[:-1].view(count, length), units[1:].view(count, length)
    total = 0.0
    for rows, wanted in zip(inputs.split(VALIDATION_BATCH), targets.split(VALIDATION_BATCH), strict=True):
        logits = model(rows.to(device)).flatten(0, 1)
        total += F.cross_entropy(logits, wanted.to(device).flatten(), reduction="none").double().sum().item()
    return total / targets.numel()


# --- the command ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """Models of one architecture: configurations by name, what builds one with random weights from torch's global
    generator, where records go by default, and the preset that is trained by default."""

    presets: Mapping[str, Any]
    build: Callable[[str], nn.Module]
    home: Path
    default: str


def main(family: Family) -> None:
    arguments = parsed_arguments(family)
    # A second thread makes matrices of the small sizes slower.
    torch.set_num_threads(1)
    recipe = Recipe(**{field.name: getattr(arguments, field.name) for field in fields(Recipe)})
    processes = joined(arguments.device)
    if recipe.batch % processes.count:
        raise SystemExit(f"a batch of {recipe.batch} windows does not divide among {processes.count} processes")
    torch.manual_seed(recipe.seed)
    model = family.build(arguments.preset)
    config = family.presets[arguments.preset]
    try:
        text = (
            read_text(arguments.data)
            if arguments.data
            else of_bytes(corpus.read("training", sources=arguments.sources))
        )
        require_fit(text, recipe.length, config.vocabulary)
        run = Run(model, text, recipe, processes)
        arguments.out.mkdir(parents=True, exist_ok=True)
        checkpoint = arguments.out / CHECKPOINT
        if checkpoint.exists():
            run.resume(checkpoint)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    run.train(checkpoint=checkpoint, every=arguments.checkpoint_every)
    if processes.is_first:
        finish(run, arguments, config)
        checkpoint.unlink(missing_ok=True)
    if processes.count > 1:
        dist.destroy_process_group()


def finish(run: Run, arguments: argparse.Namespace, config: Any) -> None:
    """Write the weights and the record of a finished run."""
    weights, recipe, unit = arguments.out / WEIGHTS, run.recipe, run.text.unit
    save_file({name: value.contiguous() for name, value in run.model.state_dict().items()}, weights)
    if arguments.data:
        held_out = {path.name: read_text(path) for path in arguments.validation}
    else:
        held_out = corpus_texts(arguments.sources)
    run.model.eval()
    losses = {name: mean_loss(run.model, text, recipe.length, run.processes.device) for name, text in held_out.items()}
    record = {
        "preset": arguments.preset,
        "config": asdict(config),
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "seed": recipe.seed,
        "steps": recipe.steps,
        "tokens": recipe.steps * recipe.batch * recipe.length,
        "batch": recipe.batch,
        "length": recipe.length,
        "learning_rate": recipe.learning_rate,
        "precision": recipe.precision,
        f"validation_nats_per_{unit}": losses,
        "wall_seconds": round(run.wall_seconds, 1),
        "cpu_seconds": round(run.cpu_seconds, 1),
        "processes": run.processes.count,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        f"training_{unit}s": len(run.text.units),
        "training_sha256": run.text.sha256,
        "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "curve": [
            {"step": step, "cpu_seconds": seconds, f"nats_per_{unit}": nats} for step, seconds, nats in run.curve
        ],
    }
    (arguments.out / RECORD).write_text(as_json(record), encoding="utf-8")
    print(json.dumps(losses))


def corpus_texts(sources: Path) -> dict[str, Text]:
    """All held-out files of the corpus, and the excerpts of them that are kept in the repository."""
    texts = {"all held-out files": corpus.read(*corpus.HELD_OUT, sources=sources)}
    texts |= {f"{split}.txt": corpus.excerpt(corpus.read(split, sources=sources)) for split in corpus.HELD_OUT}
    return {name: of_bytes(text) for name, text in texts.items()}


def as_json(record: Mapping[str, object]) -> str:
    """JSON with one line for each entry and for each point of the curve."""
    lines = []
    for key, value in record.items():
        if isinstance(value, list):
            written = "[\n    " + ",\n    ".join(json.dumps(item) for item in value) + "\n  ]"
        else:
            written = json.dumps(value)
        lines.append(f"  {json.dumps(key)}: {written}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def parsed_arguments(family: Family) -> argparse.Namespace:
    recipe = Recipe(steps=0)
    parser = argparse.ArgumentParser(
        description="Train a preset; a run that was killed goes on when it is started again with the same options.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--preset", default=family.default, choices=family.presets)
    parser.add_argument("--steps", type=int, required=True, help="length of the run in optimizer steps")
    parser.add_argument("--seed", type=int, default=recipe.seed)
    parser.add_argument("--batch", type=int, default=recipe.batch, help="windows in a step, over all processes")
    parser.add_argument("--length", type=int, default=recipe.length, help="bytes or tokens in a window")
    parser.add_argument("--learning-rate", type=float, default=recipe.learning_rate)
    # A CPU without bfloat16 instructions emulates them, three times slower than fp32.
    parser.add_argument(
        "--precision", default=recipe.precision, choices=["bf16", "fp32"], help="of the matrix products"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--data", type=Path, help="a .npy file of tokens, or a file of bytes; else Python's documentation"
    )
    parser.add_argument("--validation", type=Path, nargs="*", default=[], help="files of the same kind, with --data")
    parser.add_argument("--sources", type=Path, default=corpus.SOURCES, help="the folder _sources of the documentation")
    parser.add_argument("--checkpoint-every", type=int, default=500, metavar="STEPS")
    parser.add_argument("--out", type=Path, default=family.home, help="the folder for checkpoint, weights and record")
    return parser.parse_args()

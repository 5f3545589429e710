"""Trains a preset on bytes of Python's documentation and writes weights.safetensors and training.json.

    python -m examples.featuregate.train --steps 5000

A run is repeatable bit for bit on one machine when it is given by `--steps`; `--minutes` counts CPU time.
"""

import argparse
import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from examples.featuregate import corpus
from examples.featuregate.model import HERE, PRESETS, build

BATCH, LENGTH = 8, 256
LEARNING_RATE = 3e-3
WARMUP_STEPS = 100
DECAY_SHARE = 0.3
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
LARGEST_GRADIENT = 1.0
STEPS_PER_RECORD = 50
VALIDATION_BATCH = 32


def learning_rate(step: int, progress: float) -> float:
    """Warmup, a plateau, then a linear decay to zero over the last share of the run; `progress` runs from 0 to 1."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    decay = min(1.0, (1.0 - progress) / DECAY_SHARE)
    return LEARNING_RATE * warmup * max(decay, 0.0)


def batches(text: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets [batch, token] from random places of the text, for ever."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(LENGTH + 1)
    while True:
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
        windows = text[starts + offsets].long()
        yield windows[:, :-1], windows[:, 1:]


def loss(model: nn.Module, inputs: Tensor, targets: Tensor, *, mixed: bool) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        logits = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.inference_mode()
def nats_per_byte(model: nn.Module, text: bytes) -> float:
    """Mean negative log-likelihood in fp32 over consecutive windows; what is left after the last one is not counted."""
    data = as_tensor(text)
    count = (len(data) - 1) // LENGTH
    inputs = data[: count * LENGTH].view(count, LENGTH)
    targets = data[1 : count * LENGTH + 1].view(count, LENGTH)
    total = 0.0
    for rows, wanted in zip(inputs.split(VALIDATION_BATCH), targets.split(VALIDATION_BATCH), strict=True):
        losses = F.cross_entropy(model(rows.long()).flatten(0, 1), wanted.long().flatten(), reduction="none")
        total += losses.double().sum().item()
    return total / targets.numel()


def as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def optimizer_for(model: nn.Module) -> torch.optim.AdamW:
    # Weight decay would pull norms and biases, the gates' among them, towards zero.
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)


def train(
    model: nn.Module, text: bytes, *, seed: int, steps: int | None, minutes: float | None, mixed: bool
) -> list[tuple[int, float, float]]:
    """Trains in place.

    Returns:
        (steps so far, CPU seconds so far, mean training loss in nats per byte since the record before).
    """
    optimizer = optimizer_for(model)
    curve: list[tuple[int, float, float]] = []
    recent: list[float] = []
    started = time.process_time()
    for step, (inputs, targets) in enumerate(batches(as_tensor(text), seed)):
        cpu_seconds = time.process_time() - started
        progress = step / steps if steps else cpu_seconds / (60 * (minutes or math.inf))
        if recent and (step % STEPS_PER_RECORD == 0 or progress >= 1):
            curve.append((step, round(cpu_seconds, 1), round(sum(recent) / len(recent), 4)))
            print(f"step {step}  CPU {cpu_seconds:.0f} s  loss {curve[-1][2]:.4f}", flush=True)
            recent.clear()
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, progress)
        optimizer.zero_grad()
        value = loss(model, inputs, targets, mixed=mixed)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
        optimizer.step()
        recent.append(value.item())
    return curve


def main() -> None:
    arguments = parsed_arguments()
    # A second thread makes matrices of this size slower.
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    model = build(arguments.preset)
    wall, cpu = time.perf_counter(), time.process_time()
    text = corpus.read("training", sources=arguments.sources)
    mixed = arguments.precision == "bf16"
    curve = train(model, text, seed=arguments.seed, steps=arguments.steps, minutes=arguments.minutes, mixed=mixed)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu

    arguments.out.mkdir(parents=True, exist_ok=True)
    weights = arguments.out / "weights.safetensors"
    save_file(model.state_dict(), weights)
    steps = curve[-1][0]
    record = {
        "preset": arguments.preset,
        "config": asdict(PRESETS[arguments.preset]),
        "parameters": PRESETS[arguments.preset].parameter_count,
        "seed": arguments.seed,
        "steps": steps,
        "tokens": steps * BATCH * LENGTH,
        "batch": BATCH,
        "length": LENGTH,
        "learning_rate": LEARNING_RATE,
        "precision": arguments.precision,
        "validation_nats_per_byte": validation_losses(model, arguments.sources),
        "wall_seconds": round(wall, 1),
        "cpu_seconds": round(cpu, 1),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "training_bytes": len(text),
        "training_sha256": hashlib.sha256(text).hexdigest(),
        "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "curve": [{"step": step, "cpu_seconds": seconds, "nats_per_byte": nats} for step, seconds, nats in curve],
    }
    (arguments.out / "training.json").write_text(as_json(record), encoding="utf-8")
    print(json.dumps(record["validation_nats_per_byte"]))


def validation_losses(model: nn.Module, sources: Path) -> dict[str, float]:
    """The loss on all held-out files, and on the excerpts of them that are kept in the repository."""
    texts = {"all held-out files": corpus.read(*corpus.HELD_OUT, sources=sources)}
    texts |= {f"{split}.txt": corpus.excerpt(corpus.read(split, sources=sources)) for split in corpus.HELD_OUT}
    return {name: nats_per_byte(model.eval(), text) for name, text in texts.items()}


def as_json(record: dict[str, object]) -> str:
    """JSON with one line for each entry and for each point of the curve."""
    lines = []
    for key, value in record.items():
        if isinstance(value, list):
            written = "[\n    " + ",\n    ".join(json.dumps(item) for item in value) + "\n  ]"
        else:
            written = json.dumps(value)
        lines.append(f"  {json.dumps(key)}: {written}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a FeatureGate Transformer on Python's documentation.")
    duration = parser.add_mutually_exclusive_group(required=True)
    duration.add_argument("--steps", type=int, help="length of the run in optimizer steps (repeatable)")
    duration.add_argument("--minutes", type=float, help="length of the run in minutes of CPU time")
    parser.add_argument("--preset", default="1m", choices=PRESETS)
    parser.add_argument("--seed", type=int, default=0)
    # A CPU without bfloat16 instructions emulates them, three times slower than fp32.
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"], help="of the matrix products")
    parser.add_argument("--sources", type=Path, default=corpus.SOURCES, help="the folder _sources of the documentation")
    parser.add_argument("--out", type=Path, default=HERE, help="the folder for the weights and the record")
    return parser.parse_args()


if __name__ == "__main__":
    main()

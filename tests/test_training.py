"""Training of the examples: the recipe against a plain loop, kills and resumption, processes, tokens, sizes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from examples import training
from examples.featuregate import model as featuregate
from examples.mudd import model as mudd

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "examples" / "featuregate" / "calibration.txt"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def _command(out: Path, *options: str, family: str = "featuregate") -> list[str]:
    own = ["--data", str(TEXT), "--validation", str(TEXT), "--preset", "tiny", "--precision", "fp32", "--length", "32"]
    return ["-m", f"examples.{family}.train", *own, "--out", str(out), *options]


def _trained(out: Path, *options: str, family: str = "featuregate") -> dict[str, object]:
    subprocess.run([sys.executable, *_command(out, *options, family=family)], env=ENVIRONMENT, cwd=ROOT, check=True)
    return json.loads((out / "training.json").read_text())


def _run(steps: int = 20, batch: int = 4, **options: object) -> training.Run:
    recipe = training.Recipe(steps=steps, batch=batch, length=16, precision="fp32", **options)  # type: ignore[arg-type]
    torch.manual_seed(recipe.seed)
    return training.Run(featuregate.build("tiny"), training.read_text(TEXT), recipe)


@pytest.mark.parametrize(("preset", "count"), [("280k", 285_696), ("76m", 75_621_376), ("504m", 503_810_048)])
def test_the_presets_have_the_stated_numbers_of_parameters(preset: str, count: int) -> None:
    with torch.device("meta"):
        model = featuregate.build(preset)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert featuregate.PRESETS[preset].parameter_count == count


def test_steps_are_those_of_a_plain_loop() -> None:
    run = _run(steps=200, learning_rate=1e-2)
    run.train(stop=12)
    torch.manual_seed(0)
    model = featuregate.build("tiny")
    data = torch.tensor(list(TEXT.read_bytes()))
    generator = torch.Generator().manual_seed(0)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=False)
    expected = []
    for step in range(12):
        starts = torch.randint(len(data) - 16, (4, 1), generator=generator)
        rows = torch.stack([data[int(s) : int(s) + 17] for s in starts])
        value = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        value.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for p in model.parameters():
            p.grad *= min(1.0, 1.0 / float(norm))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (step + 1) / 100
        optimizer.step()
        expected.append(value.item())
    assert run.recent == pytest.approx(expected, abs=2e-5)
    assert run.recent[-1] < run.recent[0] - 0.1


def test_the_learning_rate_warms_up_stays_and_decays_to_zero() -> None:
    recipe = training.Recipe(steps=1000, learning_rate=2.0)
    found = [recipe.learning_rate_at(step) for step in (0, 49, 99, 500, 700, 850, 1000)]
    assert found == pytest.approx([0.02, 1.0, 2.0, 2.0, 2.0, 1.0, 0.0])


def test_a_run_in_two_parts_has_the_bits_of_one_in_one_part(tmp_path: Path) -> None:
    whole, first, second = _run(), _run(), _run()
    whole.train()
    first.train(stop=7)
    first.save(tmp_path / "checkpoint.pt")
    second.resume(tmp_path / "checkpoint.pt")
    second.train()
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True))
    assert second.cpu_seconds > first.cpu_seconds > 0
    assert second.wall_seconds > first.wall_seconds > 0
    assert [point[::2] for point in whole.curve] == [point[::2] for point in second.curve]


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    _run().save(tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="another learning_rate, seed"):
        _run(seed=1, learning_rate=1e-4).resume(tmp_path / "checkpoint.pt")


def test_a_killed_run_ends_in_the_weights_of_one_that_was_not_killed(tmp_path: Path) -> None:
    options = ("--steps", "400", "--checkpoint-every", "40")
    expected = _trained(tmp_path / "whole", *options)
    killed, checkpoint = tmp_path / "killed", tmp_path / "killed" / "checkpoint.pt"
    process = subprocess.Popen([sys.executable, *_command(killed, *options)], env=ENVIRONMENT, cwd=ROOT)
    while not checkpoint.exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it was killed"
    assert not (killed / "training.json").exists()
    found = _trained(killed, *options)
    assert found["weights_sha256"] == expected["weights_sha256"]
    assert found["weights_sha256"] == hashlib.sha256((killed / "weights.safetensors").read_bytes()).hexdigest()
    losses = [[point["nats_per_byte"] for point in record["curve"]] for record in (found, expected)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 8
    assert not checkpoint.exists()


def test_two_processes_train_on_the_batch_of_one(tmp_path: Path) -> None:
    out = tmp_path / "two"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = _command(out, "--steps", "6", "--batch", "4")
    subprocess.run([*launch, *command], env=ENVIRONMENT, cwd=ROOT, check=True)
    record = json.loads((out / "training.json").read_text())
    assert record["processes"] == 2
    recipe = training.Recipe(steps=6, batch=4, length=32, precision="fp32")
    torch.manual_seed(0)
    alone = training.Run(featuregate.build("tiny"), training.read_text(TEXT), recipe)
    alone.train()
    assert record["curve"][0]["nats_per_byte"] == pytest.approx(alone.curve[0][2], abs=2e-4)
    for name, value in load_file(out / "weights.safetensors").items():
        torch.testing.assert_close(value, alone.model.state_dict()[name], rtol=0, atol=1e-4, msg=name)


def test_tokens_come_from_a_file_of_numbers(tmp_path: Path) -> None:
    tokens = np.arange(4000, dtype=np.uint16) * 7 % 30_000
    np.save(tmp_path / "tokens.npy", tokens)
    text = training.read_text(tmp_path / "tokens.npy")
    assert text.unit == "token"
    inputs, targets = next(training.batches(text, training.Recipe(1, length=5, batch=3), torch.Generator()))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(targets, (inputs + 7) % 30_000)
    with pytest.raises(ValueError, match="do not fit a vocabulary of 256"):
        training.require_fit(text, 5, 256)
    np.save(tmp_path / "floats.npy", np.zeros(3))
    with pytest.raises(ValueError, match="expected one axis of integers"):
        training.read_text(tmp_path / "floats.npy")


def test_the_validation_loss_is_the_mean_over_all_targets_of_whole_windows() -> None:
    model = featuregate.build("tiny").eval()
    text = training.of_bytes(TEXT.read_bytes()[:1000])
    data = torch.tensor(list(TEXT.read_bytes()[:1000]))
    losses = []
    for start in range(0, 990, 30):
        logits = model(data[None, start : start + 30])[0].double()
        losses += [float(-logits[t].log_softmax(0)[data[start + t + 1]]) for t in range(30)]
    assert training.mean_loss(model, text, 30, torch.device("cpu")) == pytest.approx(np.mean(losses), abs=1e-6)


def test_a_mudd_model_starts_as_a_transformer_without_mixing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mudd.build("tiny")
    seen = []
    for dense in model.dynamic_dense:
        dense.register_forward_hook(lambda module, args, output: seen.append(output))
    tokens = torch.randint(256, (2, 7))
    logits = model(tokens)
    assert all(not bool(mixing.any()) for mixing in seen)
    x, (cos, sin) = model.tok_embeddings(tokens), mudd.rotary_tables(model.config, 7, tokens.device)
    for block in model.layers:
        x = block((x, x, x, x), cos, sin)
    torch.testing.assert_close(logits, model.output(model.norm(x)))
    record = _trained(tmp_path, "--steps", "2", family="mudd")
    assert record["parameters"] == sum(p.numel() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["76m", "504m"])
def test_the_commands_for_the_large_presets_train_on_a_cpu_with_a_small_batch(preset: str, tmp_path: Path) -> None:
    # The commands of README.md, shrunken; 504m takes 10 GB.
    held_out = tmp_path / "held-out.txt"
    held_out.write_bytes(TEXT.read_bytes()[:500])
    own = ["--preset", preset, "--steps", "3", "--batch", "1", "--length", "16", "--learning-rate", "1e-3"]
    record = _trained(tmp_path / "run", *own, "--validation", str(held_out))
    assert record["config"]["layers"] == featuregate.PRESETS[preset].layers
    assert 5 < record["curve"][0]["nats_per_byte"] < 12


@pytest.mark.slow
def test_the_stored_curve_recurs() -> None:
    records = sorted((ROOT / "examples" / "paper" / "audits").glob("featuregate-1m-seed*/training.json"))
    stored = [json.loads(path.read_text()) for path in records]
    # bfloat16 rounds otherwise where a processor emulates it.
    record = next((r for r in stored if r["precision"] == "fp32"), None)
    if record is None:
        pytest.skip("no model trained in fp32 is stored yet")
    torch.manual_seed(record["seed"])
    recipe = training.Recipe(steps=record["steps"], seed=record["seed"], precision="fp32")
    run = training.Run(featuregate.build("1m"), training.of_bytes(training.corpus.read("training")), recipe)
    run.train(stop=100)
    curve = [point["nats_per_byte"] for point in record["curve"][:2]]
    assert [point[2] for point in run.curve] == pytest.approx(curve, abs=2e-4)

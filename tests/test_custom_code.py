"""A Hugging Face folder with code of its own, of the form of the public MUDDPythia repositories, and the command line.

Its module must be given caches before its first call, writes into them, takes `idx`, and returns a named tuple whose
class is made anew by each call. What the audit says is compared with the plain model that the same weights make.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples.mudd import directory as directories
from examples.mudd.model import TINY, MUDDPythia, build
from fxaudit.cli import main
from tests.oracles.gates import nll

ROOT = Path(__file__).resolve().parents[1]
PREPARE = f"{ROOT / 'examples' / 'mudd' / 'prepare.py'}:caches"
TEXT = ROOT / "examples" / "featuregate" / "evaluation.txt"
INPUTS, LENGTH = 12, 128  # a batch of 8, and one of 4 that is filled up


pytestmark = pytest.mark.usefixtures("remote_code")


@pytest.fixture(scope="module")
def plain() -> MUDDPythia:
    torch.manual_seed(0)
    model = build("tiny").eval()
    with torch.no_grad():
        for dense in model.dynamic_dense:
            dense.w2.weight.normal_(std=0.1)
    return model


@pytest.fixture(scope="module")
def directory(plain: MUDDPythia, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("hub") / "muddpythia"
    directories.write(place, TINY, plain.state_dict())
    return place


@pytest.fixture(scope="module")
def data(directory: Path) -> tuple[Path, Path]:
    """Evaluation and calibration data under the name of the module's own argument, targets being the next byte."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    files = []
    for i, name in enumerate(("evaluation", "calibration")):
        windows = text[i * 20_000 :][: INPUTS * (LENGTH + 1)].view(INPUTS, LENGTH + 1)
        files.append(directory.parent / f"{name}.safetensors")
        save_file({"idx": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}, files[i])
    return files[0], files[1]


def _run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def audited(directory: Path, data: tuple[Path, Path]) -> dict[str, Any]:
    report = directory.parent / "report"
    options = ["--data", data[0], "--calibration", data[1], "--live", "--scope", "joint,controller"]
    rows = ["--interventions", "reassign,shuffle-tokens,static"]
    done = _run("audit", directory, "--trust-remote-code", "--prepare", PREPARE, *options, *rows, "-o", report)
    assert done.exit_code == 0, done.output
    found = json.loads((report / "audit.json").read_text())
    return {**found, "draws": load_file(report / found["dependence"]["permutations"]["file"])}


def test_the_module_of_the_directory_computes_what_the_plain_model_computes(
    plain: MUDDPythia, directory: Path, data: tuple[Path, Path]
) -> None:
    from fxaudit.model.load import load

    subject = load(str(directory), trust_remote_code=True, prepare=PREPARE)
    idx = subject.arguments[1]["idx"]
    assert list(idx.shape) == [8, LENGTH]
    with torch.no_grad():
        found, again = subject.module(idx), subject.module(idx)
        torch.testing.assert_close(found.logits, plain(idx), rtol=1e-5, atol=1e-5)
    assert type(found) is not type(again)
    assert bool(subject.module.layers[0].attention.kv_cache.k_cache.any())


def test_the_whole_audit_runs_in_batches_of_the_size_of_the_caches(audited: dict[str, Any]) -> None:
    assert audited["counts"]["mudd-dense"] == TINY.layers
    assert [c["module"] for c in audited["controllers"]] == [f"dynamic_dense.{layer}" for layer in range(TINY.layers)]
    assert audited["data"]["batch_size"] == 8
    assert audited["graph"]["batch"] == 8
    assert audited["fidelity"]["bitwise"] is True
    assert audited["identity"]["bitwise"] is True
    assert audited["execution"]["verdict"] == "PROVEN_STATIC"
    assert audited["execution"]["exact"] is True


def test_the_caches_are_findings(audited: dict[str, Any]) -> None:
    kinds = [finding["kind"] for finding in audited["findings"]]
    assert kinds.count("mutated-buffer") == 2 * TINY.layers
    (static,) = (finding["text"] for finding in audited["findings"] if finding["kind"] == "static-batch")
    assert "buffers" in static


def _coefficients(model: MUDDPythia, ids: Tensor) -> list[Tensor]:
    """Every coefficient, [way, input, position, source], of a call of the plain model."""
    seen: list[Tensor] = []
    own = model.mix

    def mix(coefficients: Tensor, states: list[Tensor]) -> list[Tensor]:
        seen.append(coefficients)
        return own(coefficients, states)

    model.mix = mix  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            model(ids)
    finally:
        del model.mix
    return seen


def _replayed(model: MUDDPythia, ids: Tensor, given: dict[int, Tensor]) -> Tensor:
    """The logits with the coefficients of some layers given, all others recomputed."""
    own, layer = model.mix, iter(range(TINY.layers))

    def mix(coefficients: Tensor, states: list[Tensor]) -> list[Tensor]:
        return own(given.get(next(layer), coefficients), states)

    model.mix = mix  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            return model(ids)
    finally:
        del model.mix


def test_every_row_is_what_the_plain_model_does_with_exchanged_coefficients(
    audited: dict[str, Any], plain: MUDDPythia, data: tuple[Path, Path]
) -> None:
    evaluation, calibration = (load_file(file) for file in data)
    ids, targets = evaluation["idx"], evaluation["targets"]
    own, other = _coefficients(plain, ids), _coefficients(plain, calibration["idx"])
    donors, positions = audited["draws"]["donors"], audited["draws"]["positions"]

    def exchanged(row: dict[str, Any], layer: int) -> Tensor:
        value = own[layer]
        if row["name"] == "reassign":
            return value[:, donors]
        if row["name"] == "shuffle-tokens":
            return value.gather(2, positions[None, :, :, None].expand_as(value))
        kept = {"controller": (0, 1, 2, 3), "unit": (1, 2), "unit-position": (1,)}[row["level"]]
        return other[layer].double().mean(kept, keepdim=True).float().expand_as(value)

    checked = 0
    for row in audited["dependence"]["interventions"]:
        if row["refused"] or row["feedback"] == "in-flight":
            continue
        chosen = [int(identifier.split(".")[1].split("#")[0]) for identifier in row["controllers"]]
        given = dict(enumerate(own)) if row["feedback"] == "frozen" else {}
        given |= {layer: exchanged(row, layer) for layer in chosen}
        expected = nll(_replayed(plain, ids, given), targets)
        found = torch.tensor(row["per_input"], dtype=torch.float64)
        assert float((found - expected).abs().max()) < 1e-6, (row["label"], row["scope"], row["feedback"])
        checked += 1
    assert checked == 5 * (1 + 2 * TINY.layers)


def test_code_caches_and_their_batch_are_asked_for(directory: Path, data: tuple[Path, Path]) -> None:
    untrusted = _run("trace", directory, "--prepare", PREPARE)
    assert untrusted.exit_code == 3
    assert "--trust-remote-code" in untrusted.output
    unprepared = _run("trace", directory, "--trust-remote-code")
    assert unprepared.exit_code == 3
    assert "Caches must be initialized first" in unprepared.output
    other = ["--data", data[0], "--batch-size", "4", "-o", directory.parent / "other"]
    refused = _run("record", directory, "--trust-remote-code", "--prepare", PREPARE, *other)
    assert refused.exit_code == 6
    assert "a batch of 8" in refused.output

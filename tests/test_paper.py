"""The paper's table: what it says is what the stored audits say, and what those say can be had by hand."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from examples.featuregate import model as featuregate
from examples.paper import results, run, table
from examples.paper.models import AUDITS, MODELS, ROOT, Model
from examples.paper.statement import statement

STORED = [model for model in MODELS if model.audit.exists()]
EMBEDDED = MODELS[0]


def _audit(model: Model) -> dict[str, Any]:
    return json.loads(model.audit.read_text(encoding="utf-8"))


def test_the_table_is_what_the_stored_audits_render_to() -> None:
    found = results.read()
    assert table.MARKDOWN.read_text(encoding="utf-8") == table.render(found)
    assert json.loads(table.JSON.read_text(encoding="utf-8")) == found


@pytest.mark.parametrize("model", STORED, ids=lambda model: model.name)
def test_a_stored_audit_is_of_the_stored_record_and_by_the_common_command(model: Model) -> None:
    audit, record = _audit(model), json.loads(model.record.read_text(encoding="utf-8"))
    assert audit["identity"]["bitwise"] is True
    assert audit["model"]["source"] == model.factory
    assert audit["model"]["parameters"] == record["parameters"]
    options = audit["provenance"]["options"]
    assert (options["limit"], options["batch_size"], options["seeds"]) == (64, 8, [0, 1, 2])
    assert "--seed" not in model.training or str(record["seed"]) == model.training[model.training.index("--seed") + 1]
    if model.kept:
        weights = ROOT / model.kept / "weights.safetensors"
        assert hashlib.sha256(weights.read_bytes()).hexdigest() == record["weights_sha256"]
    assert '"/' not in model.audit.read_text(encoding="utf-8"), "a path of the machine that made it"


@pytest.mark.parametrize("model", STORED, ids=lambda model: model.name)
def test_a_models_effects_are_the_paired_means_of_its_audit(model: Model) -> None:
    audit = _audit(model)
    (shown,) = (m for m in results.read()["models"] if m["name"] == model.name)
    base = np.array(audit["dependence"]["baseline"]["per_input"])
    assert shown["dependence"]["baseline"] == pytest.approx(base.mean(), abs=1e-12)
    checked = 0
    for row in audit["dependence"]["interventions"]:
        place = shown["dependence"]["joint"]
        if row["scope"] == "controller":
            place = shown["dependence"]["controllers"][row["controllers"][0]]
        found = place[row["label"]][row["feedback"]]
        if row["refused"]:
            assert found["delta"] is None
            continue
        differences = np.array(row["per_input"]) - base
        assert found["delta"] == pytest.approx(differences.mean(), abs=1e-12)
        assert found["interval"][0] <= found["delta"] <= found["interval"][1]
        checked += 1
    controllers = len(audit["controllers"])
    assert checked == 5 * (1 + 2 * controllers) + 2


def test_every_number_of_the_published_row_is_the_papers() -> None:
    text = table.render(results.read())
    assert "87 to 96 %" in text
    (row,) = (line for line in text.splitlines() if line.startswith("| published: MUDDPythia-1.4B"))
    assert "+1.9067 | +2.9637" in row


def _made_up(share: float, seeds: int) -> dict[str, Any]:
    """Results in which every seed's model is the embedded one with another layer identity."""
    found = results.read()
    (own,) = (m for m in found["models"] if m["name"] == EMBEDDED.name)
    copies = []
    for seed in range(seeds):
        copy = json.loads(json.dumps(own)) | {"group": "FeatureGate 1M", "title": f"seed {seed}"}
        copy["variation"]["layer_identity"] = dict.fromkeys(results.LEVELS, 0.1) | {"mean_unit": share + 0.01 * seed}
        copies.append(copy)
    groups = {"FeatureGate 1M": {"planned": 7, "models": seeds, **results._over_seeds(copies)}}
    return found | {"models": copies, "groups": groups}


def test_the_statement_follows_the_numbers() -> None:
    inside, outside = statement(_made_up(0.9, 3)), statement(_made_up(0.5, 3))
    assert "only means over units gives the published range in every model" in inside
    assert "90 to 92 % of means over units (3 of 3 models inside)" in inside
    assert "likeliest reading" in inside
    assert "No level gives the published range in every model" in outside
    assert "cannot be inferred" in outside
    assert "a hint, no more" in statement(_made_up(0.9, 1))
    mixed = statement(_made_up(0.945, 3))  # 94.5, 95.5 and 96.5 %
    assert "in every model here; means over units come closest, with 2 of 3 inside" in mixed
    assert "come closest" not in outside


def test_the_statement_says_how_the_share_goes_with_size() -> None:
    found = _made_up(0.9, 3)
    found["models"][0]["parameters"] = 1_000
    said = statement(found)
    assert "models of 1,000 to 958,208 parameters" in said
    assert "(1,000, 958,208): 10, 10 % of single coefficients; " in said
    assert "; 90, 91.5 % of means over units; " in said
    assert "From the smallest" not in statement(_made_up(0.9, 3))


@pytest.mark.parametrize(
    ("reassign", "shuffle", "words"),
    [(1.0, 2.0, "in the same order"), (2.0, 1.0, "in the opposite order"), (1.0, 1.05, "too close to say")],
)
def test_the_order_of_two_effects_is_told_from_their_intervals(reassign: float, shuffle: float, words: str) -> None:
    found = results.read()
    (own,) = (m for m in found["models"] if m["name"] == "mudd-tiny")
    for label, delta in (("reassign", reassign), ("shuffle-tokens", shuffle)):
        own["dependence"]["joint"][label]["frozen"] |= {"delta": delta, "interval": [delta - 0.1, delta + 0.1]}
    assert words in statement(found)


def test_seeds_are_summed_up_by_mean_deviation_and_range() -> None:
    group = _made_up(0.5, 3)["groups"]["FeatureGate 1M"]
    expected = {"n": 3, "mean": 0.51, "sd": 0.01, "min": 0.5, "max": 0.52}
    assert group["layer_identity"]["mean_unit"] == pytest.approx(expected)
    assert "51 ± 1 (50 to 52)" in table.render(_made_up(0.5, 3))


def test_what_has_its_audit_is_not_done_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(run, "call", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(table, "write", lambda: None)
    monkeypatch.setattr("sys.argv", ["run", EMBEDDED.name])
    run.main()
    assert calls == []
    monkeypatch.setattr("sys.argv", ["run", "nothing"])
    with pytest.raises(SystemExit):
        run.main()


# --- by hand --------------------------------------------------------------------------------------------------------


class _Gates(TorchFunctionMode):
    """Lets `change` (gate number, gate) stand in for the result of every torch.sigmoid."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change, self.count = change, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.sigmoid, Tensor.sigmoid):
            self.count += 1
            return self.change(self.count - 1, result)
        return result


# Weights of the other seeds are there where `make paper` trained them.
WEIGHTS = {model: ROOT / model.home / "weights.safetensors" for model in STORED if model.factory == EMBEDDED.factory}


@pytest.mark.slow
@pytest.mark.parametrize("trained", [m for m in WEIGHTS if WEIGHTS[m].exists()], ids=lambda model: model.name)
def test_three_random_entries_recur_with_intercepted_gates(trained: Model) -> None:
    audit, record = _audit(trained), json.loads(trained.record.read_text(encoding="utf-8"))
    assert hashlib.sha256(WEIGHTS[trained].read_bytes()).hexdigest() == record["weights_sha256"]
    model = featuregate.load("1m", WEIGHTS[trained]).eval()
    windows = {}
    for split in ("evaluation", "calibration"):
        text = torch.tensor(list((ROOT / "examples" / "featuregate" / f"{split}.txt").read_bytes()))
        windows[split] = text[: 64 * 128].view(64, 128), text[1 : 64 * 128 + 1].view(64, 128)
    ids, targets = windows["evaluation"]
    own: dict[str, list[Tensor]] = {"evaluation": [], "calibration": []}
    with torch.no_grad():
        for split, kept in own.items():
            with _Gates(lambda k, gate, kept=kept: (kept.append(gate), gate)[1]):
                model(windows[split][0])
    # All models of the kind are audited with the same seeds, and so with the same permutations.
    arrays = np.load(AUDITS / EMBEDDED.name / "permutations.npz").items()
    draws = {name: torch.from_numpy(value.astype(np.int64)) for name, value in arrays}
    names = [controller["id"] for controller in audit["controllers"]]
    rows = [row for row in audit["dependence"]["interventions"] if not row["refused"]]

    def exchanged(row: dict[str, Any], k: int, gate: Tensor, prefix: str) -> Tensor:
        match row["name"]:
            case "reassign":
                return gate[draws[f"{prefix}donors"]]
            case "shuffle-tokens":
                return torch.stack([gate[i][draws[f"{prefix}positions"][i]] for i in range(len(gate))])
        axes = {"controller": (0, 1, 2), "unit": (0, 1), "unit-position": (0,)}[row["level"]]
        return own["calibration"][k].double().mean(axes, keepdim=True).float().expand_as(gate)

    for row in random.Random(trained.name).sample(rows, 3):
        chosen = {names.index(identifier) for identifier in row["controllers"]}

        def change(k: int, gate: Tensor, row=row, chosen=chosen, prefix="") -> Tensor:
            if k in chosen:
                return exchanged(row, k, gate if row["feedback"] == "in-flight" else own["evaluation"][k], prefix)
            return own["evaluation"][k] if row["feedback"] == "frozen" else gate

        by_seed = []
        for prefix in ("", "seed-1/", "seed-2/") if row["seeds"] else ("",):
            with torch.no_grad(), _Gates(lambda k, gate, p=prefix: change(k, gate, prefix=p)):
                log_p = model(ids).double().log_softmax(-1)
            by_seed.append(-log_p.gather(-1, targets[..., None]).squeeze(-1).mean(1))
        expected = torch.stack(by_seed).mean(0)
        found = torch.tensor(row["per_input"], dtype=torch.float64)
        assert float((found - expected).abs().max()) < 1e-6, (row["label"], row["scope"], row["feedback"])
        base = torch.tensor(audit["dependence"]["baseline"]["per_input"], dtype=torch.float64)
        assert row["delta"] == pytest.approx(float((expected - base).mean()), abs=1e-6)

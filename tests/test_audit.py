"""`fxaudit audit`, `export` and `report` end to end, on a small model over tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from fxaudit.cli import main
from fxaudit.errors import UsageError

TOKENS, WIDTH, CLASSES = 6, 16, 11
CODE = f"""
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm({WIDTH}), nn.Linear({WIDTH}, {WIDTH})
        self.value = nn.Linear({WIDTH}, {WIDTH})
    def forward(self, x):
        y = self.norm(x)
        return x + torch.sigmoid(self.gate(y)) * self.value(y)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding({CLASSES}, {WIDTH}), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear({WIDTH}, {CLASSES})
    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def build():
    torch.manual_seed(1)
    model = Model()
    with torch.no_grad():
        for block in model.blocks:
            block.gate.weight.mul_(8)
            block.value.weight.mul_(8)
    return model, torch.randint(0, {CLASSES}, (2, {TOKENS}))

def plain():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
"""


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit")
    (folder / "model.py").write_text(CODE)
    generator = torch.Generator().manual_seed(0)
    for name, count in (("evaluation", 9), ("calibration", 7)):
        ids = torch.randint(0, CLASSES, (count, TOKENS + 1), generator=generator)
        save_file({"ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}, folder / f"{name}.safetensors")
    return folder


@pytest.fixture(scope="module")
def found(place: Path) -> dict[str, Any]:
    result = run(
        "audit", f"{place}/model.py:build", "--data", place / "evaluation.safetensors",
        "--calibration", place / "calibration.safetensors", "--batch-size", 4, "-o", place / "report", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_an_audit_finds_both_gates_and_replays_them_bit_for_bit(found: dict[str, Any]) -> None:
    assert found["counts"]["feature-gate"] == 2
    assert found["identity"]["bitwise"] is True


def test_an_audit_gives_one_verdict_for_each_claim(found: dict[str, Any]) -> None:
    assert found["verdict"]["variation"] == "VARYING"
    assert found["verdict"]["execution"] == "PROVEN_STATIC"
    assert set(found["verdict"]) == {"variation", "dependence", "execution"}


def test_counted_flops_are_those_of_the_layers(found: dict[str, Any]) -> None:
    # Per token: two linear maps of WIDTH in each of two blocks, and the head; freezing saves one map in each block.
    block, head = 2 * WIDTH * WIDTH, 2 * WIDTH * CLASSES
    forms = found["execution"]["forms"]
    assert set(forms["live"]["flops"]) == {TOKENS * (4 * block + head)}
    assert set(forms["bound"]["flops"]) == {TOKENS * (2 * block + head)}
    assert found["execution"]["exact"] is True


def test_freezing_removes_the_parameters_of_the_gates(found: dict[str, Any]) -> None:
    removed = {row["module"]: row["parameters"] for row in found["execution"]["removed"]}
    assert {module: n for module, n in removed.items() if n} == {
        f"blocks.{i}.gate": WIDTH * WIDTH + WIDTH for i in range(2)
    }


def test_the_report_and_the_json_are_written(place: Path, found: dict[str, Any]) -> None:
    assert json.loads((place / "report" / "audit.json").read_text()) == found
    assert "<html" in (place / "report" / "report.html").read_text()


def test_report_renders_the_same_page_again(place: Path, found: dict[str, Any]) -> None:
    path = place / "report" / "report.html"
    before = path.read_text()
    path.unlink()
    assert run("report", place / "report").exit_code == 0
    assert path.read_text() == before


def test_report_on_a_folder_without_an_audit_is_a_data_error(tmp_path: Path) -> None:
    result = run("report", tmp_path)
    assert result.exit_code == 6
    assert "holds no audit" in result.stderr


def test_every_figure_about_execution_says_where_it_comes_from(found: dict[str, Any]) -> None:
    execution = found["execution"]
    count = {"provider": "CPUExecutionProvider", "level": "ORT_DISABLE_ALL", "precision": "float32"}
    assert execution["roles"] == {"COUNT": count, "EVIDENCE": {**count, "level": "ORT_ENABLE_ALL"}}
    assert execution["time"] == []
    assert execution["agreement"]["referee"]["heard"] == execution["inputs"] == 8
    for form in execution["forms"].values():
        assert form["evidence"]["providers"] == {"CPUExecutionProvider": form["evidence"]["executed_nodes"]}
    assert {probe["name"] for probe in execution["probes"]} == {"constant", "repeated"}
    gates = [row for row in execution["modules"] if row["module"].endswith(".gate")]
    assert [row["live"]["flops"][0] for row in gates] == [2 * TOKENS * WIDTH**2] * 2
    assert found["provenance"]["options"]["provider"] == "CPUExecutionProvider"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine on which onnxruntime falls back")
def test_a_provider_that_would_silently_fall_back_is_refused_before_anything_is_recorded(place: Path) -> None:
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime is built without CUDA and says so itself")
    result = run(
        "audit", f"{place}/model.py:build", "--data", place / "evaluation.safetensors",
        "--calibration", place / "calibration.safetensors", "--provider", "cuda", "-o", place / "refused",
    )  # fmt: skip
    assert result.exit_code == 7
    assert "a silent fallback to CPUExecutionProvider" in result.stderr
    assert not (place / "refused").exists()


def test_a_death_of_onnxruntime_leaves_the_execution_claim_open_and_the_others_standing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxaudit.execution.runtime.sys.executable", "/bin/false")
    result = run(
        "audit", f"{place}/model.py:build", "--data", place / "evaluation.safetensors", "--interventions", "reassign",
        "--calibration", place / "calibration.safetensors", "--scope", "joint", "-o", place / "died", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    died = json.loads(result.stdout)
    assert died["verdict"]["execution"] == "INCOMPLETE"
    assert "onnxruntime died" in died["execution"]["error"]
    assert died["verdict"]["dependence"] in ("DEPENDENT", "INCONCLUSIVE")
    assert "onnxruntime died" in (place / "died" / "report.html").read_text(encoding="utf-8")


def test_times_and_another_provider_are_asked_for_by_option(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(*_: Any, executing: Any, **__: Any) -> None:
        asked.append((executing.provider, executing.timed))
        raise UsageError("enough")

    monkeypatch.setattr("fxaudit.cli.auditing.run_audit", noted)
    for options in ([], ["--time"], ["--provider", "cuda", "--time"]):
        run("audit", f"{place}/model.py:build", "--data", "example", "--calibration", "example", "-o", place, *options)
    assert asked == [("CPUExecutionProvider", False), ("CPUExecutionProvider", True), ("CUDAExecutionProvider", True)]


def test_a_second_audit_reuses_the_recorded_coefficients(place: Path, found: dict[str, Any]) -> None:
    stores = sorted((place / "report" / "coefficients").rglob("*.safetensors"))
    before = [path.stat().st_mtime_ns for path in stores]
    result = run(
        "audit", f"{place}/model.py:build", "--data", place / "evaluation.safetensors",
        "--calibration", place / "calibration.safetensors", "--batch-size", 4, "-o", place / "report", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert [path.stat().st_mtime_ns for path in stores] == before
    assert json.loads(result.stdout)["dependence"] == found["dependence"]


def test_calibration_equal_to_evaluation_data_is_refused_before_anything_is_recorded(place: Path) -> None:
    data = place / "evaluation.safetensors"
    result = run(
        "audit", f"{place}/model.py:build", "--data", data, "--calibration", data, "-o", place / "overlap"
    )  # fmt: skip
    assert result.exit_code == 6
    assert "9 inputs that are in both" in result.stderr
    assert not (place / "overlap").exists()


def test_a_model_without_controllers_ends_with_the_nearest_misses(place: Path) -> None:
    result = run(
        "audit", f"{place}/model.py:plain", "--data", "resampled:4", "--calibration", "resampled:5", "-o", place / "no"
    )  # fmt: skip
    assert result.exit_code == 4
    assert "no controller found" in result.stderr
    assert "nearest misses" in result.stderr


def test_an_unknown_intervention_is_a_usage_error_with_a_suggestion(place: Path) -> None:
    result = run(
        "replay", f"{place}/model.py:build", "--data", "resampled:4", "--interventions", "reasign"
    )  # fmt: skip
    assert result.exit_code == 2
    assert "did you mean `reassign`?" in result.stderr


def test_replay_reports_every_intervention_with_its_effect_on_each_input(place: Path) -> None:
    result = run(
        "replay", f"{place}/model.py:build", "--data", place / "evaluation.safetensors",
        "--calibration", place / "calibration.safetensors", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    replayed = json.loads(result.stdout)
    joint = [row for row in replayed["interventions"] if row["scope"] == "joint"]
    names = ["reassign", "shuffle-tokens", "static", "static", "static", "neutral", "resample", "permute-units"]
    assert [row["name"] for row in joint] == [*names, "swap-controllers"]
    assert all(len(row["per_input"]) == 9 for row in joint)


def test_exported_graphs_run_on_plain_onnxruntime_and_bound_follows_its_coefficients(place: Path) -> None:
    result = run("export", f"{place}/model.py:build", "-o", place / "onnx", "--json")
    assert result.exit_code == 0, result.output
    described = json.loads(result.stdout)
    assert set(described["files"]) == {"live", "tapped", "bound"}
    ids = torch.randint(0, CLASSES, (3, TOKENS)).numpy()
    session = onnxruntime.InferenceSession(described["files"]["bound"], providers=["CPUExecutionProvider"])
    feeds = {name: torch.rand(3, TOKENS, WIDTH).numpy() for name in described["coefficients"].values()}
    first = session.run(None, {"ids": ids, **feeds})[0]
    second = session.run(None, {"ids": ids, **{name: 1 - value for name, value in feeds.items()}})[0]
    assert first.shape == (3, TOKENS, CLASSES)
    assert abs(first - second).max() > 0


def test_the_report_of_an_audit_holds_a_bundle_that_verifies(place: Path, found: dict[str, Any]) -> None:
    assert found["verdict"]["execution"] == "PROVEN_STATIC"
    result = run("verify", place / "report", "--json")
    assert result.exit_code == 0, result.output
    verified = json.loads(result.stdout)
    assert verified["verdict"] == {"live": "PROVEN_STATIC", "baked": "PROVEN_STATIC"}
    manifest = json.loads((place / "report" / "onnx" / "manifest.json").read_text())
    recorded = [run["flops"]["live"] for run in manifest["samples"]["runs"]]
    assert recorded == found["execution"]["forms"]["live"]["flops"][: len(recorded)]


def test_a_baked_export_without_a_profile_is_a_usage_error(place: Path) -> None:
    result = run("export", f"{place}/model.py:build", "--form", "baked", "-o", place / "baked")
    assert result.exit_code == 2
    assert "needs a profile" in result.stderr


def test_a_model_that_cannot_be_exported_keeps_its_other_two_claims(place: Path) -> None:
    (place / "svd.py").write_text(
        "import torch\nfrom torch import nn\nimport model\n\n"
        "class Svd(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.inner = model.build()[0]\n"
        "    def forward(self, ids):\n"
        "        x = self.inner(ids)\n        return x + torch.linalg.svdvals(x).sum(-1)[:, None, None]\n\n"
        "def build():\n    return Svd(), model.build()[1]\n"
    )
    result = run(
        "audit", f"{place}/svd.py:build", "--data", place / "evaluation.safetensors",
        "--calibration", place / "calibration.safetensors", "-o", place / "svd", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["verdict"]["execution"] == "INCOMPLETE(export)"
    assert "cannot be written as ONNX" in found["execution"]["error"]
    assert found["verdict"]["variation"] == "VARYING"
    assert len(found["dependence"]["baseline"]["per_input"]) == 9

"""The two trained examples: gates that matter, and gates that a fixed vector replaces. Run by `make slow`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import onnxruntime
import pytest
import torch
from torch import nn

from fxaudit import audit, stages

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
OCR = EXAMPLES / "ocr_direction" / "model.py"
FEATUREGATE = EXAMPLES / "featuregate"
MARGIN = 0.05


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.parent.name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example() -> ModuleType:
    if importlib.util.find_spec("rapidocr") is None:
        pytest.fail("rapidocr is not importable; `make slow` installs it beside the environment")
    return _module(OCR)


@pytest.fixture(scope="module")
def ocr(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> audit.AuditReport:
    place = tmp_path_factory.mktemp("ocr")
    return audit.audit(
        stages.load(f"{OCR}:trained"), f"{OCR}:evaluation", f"{OCR}:calibration", place, margin=MARGIN
    )  # fmt: skip


def _joint(report: audit.AuditReport, name: str, level: str | None = None) -> tuple[str, torch.Tensor]:
    (row,) = (
        r for r in report.dependence.results if (r.scope, r.intervention, r.level) == ("joint", name, level)
    )  # fmt: skip
    return report.dependence.outcome(row), torch.tensor(row.per_input, dtype=torch.float64)


def test_the_classifier_computes_what_its_onnx_file_computes(example: ModuleType) -> None:
    module, _ = example.trained()
    x = example.evaluation()["x"]
    path = example._package() / "models" / "ch_ppocr_mobile_v2.0_cls_mobile.onnx"
    expected = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"x": x.numpy()})[
        0
    ]
    with torch.no_grad():
        assert float((module(x) - torch.from_numpy(expected)).abs().max()) < 1e-6


def test_all_nine_handwritten_gates_are_found(ocr: audit.AuditReport) -> None:
    assert ocr.matched.counts == {"feature-gate": 0, "moe-topk": 0, "se-gate": 9}


def test_static_gates_equal_forward_hooks_that_replace_them(example: ModuleType, ocr: audit.AuditReport) -> None:
    module, _ = example.trained()
    gates = [m.hard_sigmoid for m in module.modules() if hasattr(m, "hard_sigmoid")]
    recorded: dict[nn.Module, list[torch.Tensor]] = {gate: [] for gate in gates}
    handles = [g.register_forward_hook(lambda m, _, output: recorded[m].append(output.clone())) for g in gates]
    evaluation, calibration = example.evaluation(), example.calibration()
    with torch.no_grad():
        module(calibration["x"])
    for handle in handles:
        handle.remove()
    means = {gate: outputs[0].double().mean(0, keepdim=True).float() for gate, outputs in recorded.items()}
    for gate in gates:
        gate.register_forward_hook(lambda m, _, output: means[m].expand_as(output))
    with torch.no_grad():
        probability = module(evaluation["x"]).double()
    expected = -probability.gather(1, evaluation["targets"][:, None]).squeeze(1).log()
    _, found = _joint(ocr, "static", "unit")
    assert float((found - expected).abs().max()) < 1e-6


def test_a_fixed_vector_replaces_the_classifiers_gates_but_not_the_language_models(
    ocr: audit.AuditReport, tmp_path: Path
) -> None:
    embedded = audit.audit(
        stages.load(f"{FEATUREGATE / 'model.py'}:trained"),
        FEATUREGATE / "evaluation.txt",
        FEATUREGATE / "calibration.txt",
        tmp_path,
        limit=16,
        margin=MARGIN,
    )
    assert _joint(ocr, "static", "unit")[0] == "EQUIVALENT"
    assert _joint(embedded, "static", "unit")[0] == "DEPENDENT"
    assert float(_joint(embedded, "static", "unit")[1].mean()) > 2 * embedded.dependence.baseline.mean


def test_both_execute_the_same_compute_for_every_input(ocr: audit.AuditReport) -> None:
    assert ocr.verdict["execution"] == "PROVEN_STATIC"
    assert ocr.execution is not None
    assert ocr.execution.exact is True

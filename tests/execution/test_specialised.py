"""Frozen and baked, a gated network is the network without gates."""

import json

import onnxruntime
import pytest
import torch

import fxaudit
from fxaudit.execution.export import export_graphs, files
from fxaudit.execution.export.names import dimension_names
from fxaudit.execution.translation import tidy, to_onnx
from fxaudit.model.settings import exact_numerics, quiet_torch
from tests.third_party import timm

LEVELS = onnxruntime.GraphOptimizationLevel


def executed(path, level, image, folder):
    """The ops that onnxruntime runs for an image, in order."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads = 1
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    session.run(None, {session.get_inputs()[0].name: image})
    with open(session.end_profiling()) as file:
        events = [event for event in json.load(file) if event["name"].endswith("_kernel_time")]
    return [event["args"]["op_name"] for event in sorted(events, key=lambda event: event["ts"])]


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """seresnet18 baked with the mean of each gate, as it is and folded; and resnet18."""
    folder = tmp_path_factory.mktemp("specialised")
    torch.manual_seed(0)
    model = fxaudit.freeze(*timm("seresnet18")())
    assert len(model.controllers) == 8
    _, values = model.run_tapped(model.traced.flatten(model.traced.subject.arguments))
    profile = {c.key: v.mean(0, keepdim=True) for c, v in zip(model.coefficients, values, strict=True)}
    plain = export_graphs(model, folder / "plain", profile, graphs=("baked",))
    folded = export_graphs(model, folder / "folded", profile, graphs=("baked",), fold=True)
    traced = fxaudit.trace(*timm("resnet18")())
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    with exact_numerics(), quiet_torch():
        leaves = traced.flatten(traced.subject.arguments)
        direct = to_onnx(traced, traced.graph_module, leaves, dimension_names(placeholders, traced.sample))
        tidy(direct, set(traced.graph_module.state_dict()))
    files.write_graphs({"resnet18": direct}, folder, external=False)
    return {"baked": plain.baked, "folded": folded.baked, "resnet18": folder / "resnet18.onnx", "folding": folded}


@pytest.mark.parametrize("form", ["baked", "folded"])
def test_baked_seresnet18_executes_exactly_the_ops_of_resnet18(graphs, form, tmp_path):
    image = torch.randn(2, 3, 64, 64).numpy()
    found, expected = (executed(graphs[g], LEVELS.ORT_ENABLE_ALL, image, tmp_path) for g in (form, "resnet18"))
    assert found == expected
    assert expected.count("Conv") == 20


def test_folded_seresnet18_is_resnet18_before_any_optimisation(graphs, tmp_path):
    image = torch.randn(2, 3, 64, 64).numpy()
    level = LEVELS.ORT_DISABLE_ALL
    found, expected = (executed(graphs[g], level, image, tmp_path) for g in ("folded", "resnet18"))
    assert found == expected
    assert len(executed(graphs["baked"], level, image, tmp_path)) == len(expected) + 8
    folds = graphs["folding"].folding.folds
    assert [(fold.folded, fold.direction) for fold in folds] == [(True, "before")] * 8
    assert all(fold.into[0].endswith("bn2.weight") for fold in folds)

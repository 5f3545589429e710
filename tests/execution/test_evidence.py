"""Optimised graphs: padding, providers, and the way back to modules."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import fxaudit
from fxaudit.errors import ProviderError
from fxaudit.execution.evidence import Kernel, gather_evidence, require_work_on
from fxaudit.execution.export import export_graphs
from fxaudit.execution.options import CPU, CUDA
from fxaudit.execution.runtime import Runtime
from tests.execution.suite import SQUEEZE_NET, SqueezeNet, normal


@pytest.fixture(scope="module")
def squeeze(tmp_path_factory):
    torch.manual_seed(0)
    frozen = fxaudit.freeze(SqueezeNet().eval(), (normal(2, 3, 8, 8),))
    exported = export_graphs(frozen, tmp_path_factory.mktemp("squeeze"))
    feeds = [{"x": normal(1, 3, 8, 8, seed=seed).numpy()} for seed in (1, 2)]
    with Runtime() as runtime:
        yield frozen, gather_evidence(exported.live, feeds, runtime), feeds


def test_every_kernel_is_traced_back_to_modules_of_the_model(squeeze):
    frozen, evidence, _ = squeeze
    known = {name for name, _ in frozen.traced.subject.module.named_modules()}
    assert all(kernel.mapped in ("name", "value", "region") for kernel in evidence.kernels)
    assert {module for kernel in evidence.kernels for module in kernel.modules} <= known
    convolutions = [set(kernel.modules) for kernel in evidence.kernels if kernel.op == "Conv"]
    # Norms are folded into their convolutions, activations fused with them.
    for wanted in ({"conv1", "norm1"}, {"conv2", "norm2"}, {"se1.fc1"}, {"se1.fc2"}, {"se2.fc1"}, {"se2.fc2"}):
        assert any(wanted <= found for found in convolutions)
    (head,) = (kernel for kernel in evidence.kernels if kernel.op == "Gemm")
    assert (head.modules, head.flops) == (("head",), 2 * 16 * 5)


def test_padding_of_channels_counts_as_executed(squeeze):
    _, evidence, _ = squeeze
    # The blocked layout of this processor pads the 8 and 2 channels of the first stages, never removes one.
    assert evidence.to_json(evidence.outputs)["flops_padded"] >= SQUEEZE_NET
    assert evidence.to_json(evidence.outputs)["flops_unknown"] == []


def test_a_static_model_has_one_sequence_of_kernels_on_one_provider(squeeze):
    _, evidence, _ = squeeze
    found = evidence.to_json(evidence.outputs)
    assert found["sequences"] == 1
    assert found["providers"] == {CPU: found["executed_nodes"]}
    assert set(found["claimed"]) == {CPU}
    assert sum(row["count"] for row in found["kernels"]) == found["executed_nodes"] == len(evidence.kernels)


def test_optimised_outputs_are_those_of_the_model(squeeze):
    frozen, evidence, feeds = squeeze
    with torch.no_grad():
        for feed, outputs in zip(feeds, evidence.outputs, strict=True):
            expected = frozen.traced.subject.module(torch.from_numpy(feed["x"]))
            np.testing.assert_allclose(next(iter(outputs.values())), expected, rtol=1e-4, atol=1e-6)


def test_how_far_optimising_moves_the_outputs_is_told(squeeze):
    _, evidence, _ = squeeze
    name = next(iter(evidence.outputs[0]))
    moved = [evidence.outputs[0], {name: evidence.outputs[1][name] + np.float32(0.5)}]
    assert evidence.to_json(evidence.outputs)["difference"] == 0.0
    assert evidence.to_json(moved)["difference"] == pytest.approx(0.5 / np.abs(moved[1][name]).max(), rel=1e-3)


def test_weights_that_prepacking_hides_from_the_profile_are_taken_from_the_graph(tmp_path):
    rng = np.random.default_rng(0)
    weights = {"w": (2, 24, 5), "r": (2, 24, 6), "v": (12, 7), "b": (7,)}
    kind = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node(
                "LSTM", ["x", "w", "r"], ["h"], name="lstm", hidden_size=6, direction="bidirectional"
            ),
            onnx.helper.make_node("Reshape", ["h", "rows"], ["flat"], name="rows"),
            onnx.helper.make_node("Gemm", ["flat", "v", "b"], ["y"], name="gemm"),
        ],
        "g",
        [onnx.helper.make_tensor_value_info("x", kind, (3, 2, 5))],
        [onnx.helper.make_tensor_value_info("y", kind, None)],
        initializer=[
            *(onnx.numpy_helper.from_array(rng.random(s, np.float32), name) for name, s in weights.items()),
            onnx.numpy_helper.from_array(np.array([-1, 12], np.int64), "rows"),
        ],
    )
    opset = onnx.helper.make_opsetid("", 20)
    path = tmp_path / "m.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10), path)
    with Runtime() as runtime:
        evidence = gather_evidence(path, [{"x": rng.random((3, 2, 5), np.float32)}], runtime)
    flops = {kernel.op: kernel.flops for kernel in evidence.kernels}
    assert flops["LSTM"] == 2 * 3 * 2 * 2 * 24 * (5 + 6)
    assert flops["Gemm"] == 2 * 6 * 12 * 7


def kernel(op, provider, flops):
    return Kernel(f"n_{op}", op, provider, "name", ("layer",), flops)


def test_work_on_another_provider_than_asked_for_is_refused_and_size_arithmetic_is_not():
    sizes = [kernel("Shape", CPU, 0), kernel("MemcpyToHost", CUDA, 0)]
    require_work_on(Path("m.onnx"), CUDA, [*sizes, kernel("Conv", CUDA, 100)])
    with pytest.raises(ProviderError, match="does not run all work") as raised:
        require_work_on(Path("m.onnx"), CUDA, [*sizes, kernel("Conv", CUDA, 100), kernel("LSTM", CPU, 7)])
    assert "`n_LSTM` of layer" in raised.value.where


def test_work_of_unknown_size_on_another_provider_is_refused():
    with pytest.raises(ProviderError):
        require_work_on(Path("m.onnx"), CUDA, [kernel("Mystery", CPU, None)])

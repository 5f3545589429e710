"""onnxruntime in a child process: what its failures become, and that a fallback is never silent."""

import ast
import os
import signal
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from fxaudit.errors import ProviderError, RunError, UsageError
from fxaudit.execution import worker
from fxaudit.execution.evidence import require_usable
from fxaudit.execution.options import CPU, CUDA
from fxaudit.execution.providers import provider_named, require_claim, require_providers
from fxaudit.execution.runtime import COUNT, EVIDENCE, TIME, Runtime


def save(path, nodes, shape, initializers=()):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        initializer=[numpy_helper.from_array(np.asarray(value), name) for name, value in initializers],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


@pytest.fixture
def relu(tmp_path):
    return save(tmp_path / "relu.onnx", [helper.make_node("Relu", ["x"], ["y"], name="relu")], (3,))


X = np.array([-1.0, 0.0, 2.0], np.float32)


@pytest.fixture(scope="module")
def runtime():
    with Runtime() as found:
        yield found


@pytest.mark.parametrize("role", [COUNT, EVIDENCE, TIME], ids=lambda role: role.name)
def test_every_role_returns_what_the_model_computes(runtime, relu, role):
    session = runtime.run(relu, [{"x": X}, {"x": -X}], role)
    np.testing.assert_array_equal([out["y"] for out in session.outputs], [[0, 0, 2], [1, 0, 0]])
    assert bool(session.events) is role.profiled


def test_counts_are_taken_without_optimisation_and_times_with_all_of_it():
    assert (COUNT.level, COUNT.prepacked, COUNT.profiled) == ("ORT_DISABLE_ALL", False, True)
    assert (EVIDENCE.level, EVIDENCE.prepacked, EVIDENCE.profiled) == ("ORT_ENABLE_ALL", True, True)
    assert (TIME.level, TIME.prepacked, TIME.profiled) == ("ORT_ENABLE_ALL", True, False)


def test_the_options_of_a_session_are_those_of_its_role(tmp_path):
    options = worker.options_of({"level": "ORT_DISABLE_ALL", "prepacked": False, "profile": str(tmp_path / "p")})
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert options.execution_mode == onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (1, 1)
    assert options.get_session_config_entry("session.disable_prepacking") == "1"
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert options.enable_profiling
    options = worker.options_of({"level": "ORT_ENABLE_ALL", "prepacked": True})
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    assert not options.enable_profiling
    with pytest.raises(RuntimeError):  # never set
        options.get_session_config_entry("session.disable_prepacking")


def test_a_file_that_is_no_model_is_an_error_of_exit_code_7(runtime, tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"nothing")
    with pytest.raises(RunError, match=r"cannot load m\.onnx") as raised:
        runtime.run(tmp_path / "m.onnx", [{"x": X}], COUNT)
    assert raised.value.exit_code == 7


def test_an_input_that_does_not_fit_is_an_error_and_the_process_goes_on(runtime, relu):
    with pytest.raises(RunError, match=r"cannot run relu\.onnx"):
        runtime.run(relu, [{"x": np.zeros(4, np.float32)}], COUNT)
    assert runtime.run(relu, [{"x": X}], COUNT).outputs[0]["y"].tolist() == [0, 0, 2]


def test_a_size_that_no_memory_holds_is_an_error(runtime, tmp_path):
    nodes = [
        helper.make_node("ConstantOfShape", ["sizes"], ["huge"], name="huge"),
        helper.make_node("ReduceMax", ["huge"], ["m"], name="m", keepdims=0),
        helper.make_node("Add", ["x", "m"], ["y"], name="y"),
    ]
    path = save(tmp_path / "huge.onnx", nodes, (3,), [("sizes", np.array([1 << 20, 1 << 22], np.int64))])
    with pytest.raises(RunError, match=r"huge\.onnx"):
        runtime.run(path, [{"x": X}], COUNT)
    assert runtime.run(path.parent / "huge.onnx", [], COUNT).outputs == ()


@pytest.mark.skipif(sys.platform == "win32", reason="kills by signal")
def test_a_process_that_dies_is_an_error_with_its_signal_and_the_next_run_has_another(relu):
    with Runtime() as runtime:
        runtime.run(relu, [{"x": X}], COUNT)
        os.kill(runtime.pid, signal.SIGKILL)
        with pytest.raises(RunError, match=r"died on relu\.onnx") as raised:
            runtime.run(relu, [{"x": X}], COUNT)
        assert raised.value.signal == "SIGKILL"
        assert "memory" in raised.value.remedy
        assert runtime.run(relu, [{"x": X}], COUNT).outputs[0]["y"].tolist() == [0, 0, 2]


def test_the_process_imports_nothing_of_fxaudit():
    tree = ast.parse(Path(worker.__file__).read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) == {"numpy", "onnxruntime"}


def test_the_process_ends_with_its_runtime(relu):
    with Runtime() as runtime:
        runtime.run(relu, [{"x": X}], COUNT)
        pid = runtime.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_times_of_a_pair_are_taken_in_both_orders(runtime, relu):
    design = {"warm_up": 1, "rounds": 3, "least_rounds": 1, "budget": 10**12}
    for swapped in (False, True):
        first, second = runtime.time((relu, {"x": X}), (relu, {"x": X}), swapped=swapped, **design)
        assert len(first) == len(second) == 2 * 3
        assert min(*first, *second) >= 0
    first, _ = runtime.time((relu, {"x": X}), (relu, {"x": X}), swapped=False, **{**design, "budget": 0})
    assert len(first) == 2


# --- providers ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine on which onnxruntime falls back")
def test_falling_back_from_a_requested_provider_is_an_error(runtime, relu):
    if CUDA not in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime is built without CUDA and says so itself")
    with pytest.raises(ProviderError, match=r"does not run relu\.onnx on CUDAExecutionProvider") as raised:
        runtime.run(relu, [{"x": X}], COUNT, CUDA)
    assert raised.value.used == (CPU,)
    assert raised.value.exit_code == 7


def test_a_session_with_the_requested_provider_passes_also_where_the_cpu_helps_out():
    require_providers(Path("m.onnx"), CUDA, [CUDA, CPU])
    require_providers(Path("m.onnx"), CPU, [CPU])


def test_a_provider_that_takes_no_node_is_refused():
    require_claim(Path("m.onnx"), CUDA, {CUDA: 3, CPU: 1})
    require_claim(Path("m.onnx"), CUDA, {})  # not recorded
    with pytest.raises(ProviderError, match="takes no node") as raised:
        require_claim(Path("m.onnx"), CUDA, {CPU: 4})
    assert "4 on CPUExecutionProvider" in raised.value.found


def test_the_cpu_is_usable_and_a_gpu_only_where_there_is_one():
    require_usable(CPU)
    if not torch.cuda.is_available() and CUDA in onnxruntime.get_available_providers():
        with pytest.raises(ProviderError):
            require_usable(CUDA)


def test_a_provider_has_one_of_two_names():
    assert (provider_named("cpu"), provider_named("cuda")) == (CPU, CUDA)
    with pytest.raises(UsageError, match="tpu"):
        provider_named("tpu")

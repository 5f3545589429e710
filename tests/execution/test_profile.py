from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from fxaudit.errors import SelfCheckError
from fxaudit.execution.formulas import FREE_OPS
from fxaudit.execution.profile import Work, count_runs, split_runs
from fxaudit.execution.runtime import Runtime

RNG = np.random.default_rng(0)


def save(path, nodes, inputs, outputs, initializers):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        initializer=[numpy_helper.from_array(value, name) for name, value in initializers.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(proto, path)
    return path


@pytest.fixture(scope="module")
def runtime():
    with Runtime() as found:
        yield found


def node(op, inputs, outputs, **attributes):
    return helper.make_node(op, inputs.split(), outputs.split(), name=f"n_{outputs.split()[0]}", **attributes)


def floats(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("made", "x", "weights", "flops"),
    [
        (node("MatMul", "x w", "y"), (2, 3, 5), {"w": (5, 7)}, 2 * 2 * 3 * 5 * 7),
        (node("MatMul", "x w", "y"), (5,), {"w": (5,)}, 2 * 5),
        (node("Gemm", "x w", "y"), (3, 5), {"w": (5, 7)}, 2 * 3 * 5 * 7),
        (node("Gemm", "x w b", "y", transA=1, transB=1), (5, 3), {"w": (7, 5), "b": (7,)}, 2 * 3 * 5 * 7),
        (node("Conv", "x w", "y", group=2), (1, 4, 8, 8), {"w": (6, 2, 3, 3)}, 2 * 6 * 6 * 6 * 2 * 9),
        (node("ConvTranspose", "x w", "y", group=2), (1, 4, 5), {"w": (4, 3, 3)}, 2 * 4 * 5 * 3 * 3),
        (node("Einsum", "x w", "y", equation="bij,kj->bik"), (2, 3, 5), {"w": (7, 5)}, 2 * 2 * 3 * 5 * 7),
        (node("Einsum", "x w", "y", equation="...ij,jk->...ik"), (4, 2, 3, 5), {"w": (5, 7)}, 2 * 8 * 3 * 5 * 7),
        (
            node("LSTM", "x w r", "y", hidden_size=6, direction="bidirectional"),
            (7, 2, 5),
            {"w": (2, 24, 5), "r": (2, 24, 6)},
            2 * 7 * 2 * 2 * 24 * (5 + 6),
        ),
        (
            node("GRU", "x w r", "y", hidden_size=6),
            (7, 2, 5),
            {"w": (1, 18, 5), "r": (1, 18, 6)},
            2 * 7 * 2 * 18 * (5 + 6),
        ),
    ],
    ids=lambda value: value.op_type if isinstance(value, onnx.NodeProto) else "",
)
def test_flops_follow_the_profiled_shapes(tmp_path, runtime, made, x, weights, flops):
    path = save(tmp_path / "m.onnx", [made], {"x": x}, ["y"], {n: floats(*s) for n, s in weights.items()})
    run = count_runs(path, [{"x": floats(*x)}], runtime=runtime).runs[0]
    assert (run.flops, run.setup, run.unknown, run.nodes) == (flops, 0, (), 1)


def test_work_that_no_input_reaches_is_setup(tmp_path, runtime):
    nodes = [node("MatMul", "u v", "w"), node("MatMul", "x w", "h"), node("Relu", "h", "y")]
    path = save(tmp_path / "m.onnx", nodes, {"x": ("n", 5)}, ["y"], {"u": floats(5, 2), "v": floats(2, 3)})
    run = count_runs(path, [{"x": floats(4, 5)}], runtime=runtime).runs[0]
    assert (run.flops, run.setup) == (2 * 4 * 5 * 3, 2 * 5 * 2 * 3)
    assert run.elementwise == 4 * 3
    assert run.ops == {"MatMul": 2, "Relu": 1}


def test_an_op_without_a_formula_is_unknown_and_counts_nothing(tmp_path, runtime):
    nodes = [node("MatMul", "x w", "h"), node("Det", "h", "y")]
    path = save(tmp_path / "m.onnx", nodes, {"x": (2, 4)}, ["y"], {"w": floats(4, 2)})
    run = count_runs(path, [{"x": floats(2, 4)}], runtime=runtime).runs[0]
    assert (run.unknown, run.flops) == (("Det",), 2 * 2 * 4 * 2)
    assert "Det" not in FREE_OPS


def test_only_the_branch_that_ran_is_counted_and_the_branch_node_itself_is_not(tmp_path, runtime):
    def branch(name, inner):
        result = helper.make_tensor_value_info(name, TensorProto.FLOAT, (2, 4))
        return helper.make_graph(inner, name, [], [result])

    nodes = [
        node("ReduceMean", "x", "m", keepdims=0),
        node("Greater", "m zero", "c"),
        node(
            "If",
            "c",
            "y",
            then_branch=branch("t", [node("MatMul", "x w", "t")]),
            else_branch=branch("e", [node("Abs", "x", "e")]),
        ),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"x": (2, 4)}, ["y"], {"w": floats(4, 4), "zero": np.float32(0)})
    counted = count_runs(path, [{"x": np.full((2, 4), v, np.float32)} for v in (1, -1, 2)], runtime=runtime)
    assert [run.flops for run in counted.runs] == [2 * 2 * 4 * 4, 0, 2 * 2 * 4 * 4]
    assert counted.runs[0].elementwise == 2
    assert counted.runs[0].op_sequence == counted.runs[2].op_sequence != counted.runs[1].op_sequence
    np.testing.assert_array_equal(counted.outputs[1]["y"], np.ones((2, 4), np.float32))


def test_shapes_tell_runs_apart_that_execute_the_same_ops(tmp_path, runtime):
    path = save(tmp_path / "m.onnx", [node("Relu", "x", "y")], {"x": ("n",)}, ["y"], {})
    first, second = count_runs(path, [{"x": floats(2)}, {"x": floats(3)}], runtime=runtime).runs
    assert first.op_sequence == second.op_sequence
    assert first.shape_sequence != second.shape_sequence


def test_a_profile_that_lost_a_run_or_an_event_is_refused():
    run = {"name": "model_run", "ts": 0, "dur": 10}
    inside = {"cat": "Node", "name": "a_kernel_time", "ts": 1, "dur": 2}
    assert split_runs([run, inside], 1, Path("m.onnx")) == [[inside]]
    with pytest.raises(SelfCheckError, match="not a complete record"):
        split_runs([run, inside], 2, Path("m.onnx"))
    with pytest.raises(SelfCheckError, match="not a complete record"):
        split_runs([run, inside | {"ts": 11}], 1, Path("m.onnx"))


def test_bytes_are_those_of_operands_and_results_and_work_belongs_to_modules(tmp_path, runtime):
    product, bent = node("MatMul", "x w", "h"), node("Relu", "h", "y")
    product.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'layer', 'matmul']")
    path = save(tmp_path / "m.onnx", [product, bent], {"x": (2, 5)}, ["y"], {"w": floats(5, 3)})
    run = count_runs(path, [{"x": floats(2, 5)}], runtime=runtime).runs[0]
    assert run.modules == {
        "layer": Work(flops=2 * 2 * 5 * 3, read=4 * (2 * 5 + 5 * 3), written=4 * 2 * 3),
        "": Work(elements=2 * 3, read=4 * 2 * 3, written=4 * 2 * 3),
    }
    assert (run.bytes_read, run.bytes_written) == (4 * (10 + 15 + 6), 4 * 12)


def test_a_branch_without_a_module_of_its_own_belongs_to_that_of_its_node_and_is_counted_as_taken(tmp_path, runtime):
    def branch(name, inner):
        return helper.make_graph(inner, name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, (2,))])

    chosen = node(
        "If",
        "c",
        "y",
        then_branch=branch("t", [node("Abs", "x", "t")]),
        else_branch=branch("e", [node("Neg", "x", "e")]),
    )
    chosen.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'router', 'cond']")
    nodes = [node("ReduceMean", "x", "m", keepdims=0), node("Greater", "m zero", "c"), chosen]
    path = save(tmp_path / "m.onnx", nodes, {"x": (2,)}, ["y"], {"zero": np.float32(0)})
    counted = count_runs(path, [{"x": np.full(2, v, np.float32)} for v in (1, -1, 2)], runtime=runtime)
    assert [run.branches["n_y"] for run in counted.runs] == [(1, 0), (0, 1), (1, 0)]
    assert counted.controls[0].bodies == ("then_branch", "else_branch")
    assert {run.modules["router"].elements for run in counted.runs} == {2}

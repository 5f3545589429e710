import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from fxaudit.execution.proof import prove, scope_path

FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def value(name, kind=FLOAT, shape=("n", 4)):
    return helper.make_tensor_value_info(name, kind, shape)


def constant(name, array):
    return numpy_helper.from_array(np.asarray(array), name)


def model(nodes, inputs=None, outputs=None, initializers=(), functions=()):
    graph = helper.make_graph(
        nodes, "g", inputs or [value("x")], outputs or [value("y", shape=None)], initializer=list(initializers)
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("other", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=list(functions))


def node(op, inputs, outputs, **attributes):
    return helper.make_node(op, inputs, outputs, name=f"{op}_{outputs[0]}", **attributes)


def branch(op, source="x", shape=("n", 4)):
    inner = f"{op}_out"
    return helper.make_graph([node(op, [source], [inner])], op, [], [value(inner, shape=shape)])


def condition(source):
    zero = constant("zero", np.float32(0))
    return [node("ReduceMean", [source], ["m"], keepdims=0), node("Greater", ["m", "zero"], ["c"])], [zero]


def test_a_chain_of_elementwise_ops_is_static():
    proof = prove(model([node("Relu", ["x"], ["a"]), node("Sigmoid", ["a"], ["y"])]))
    assert proof.static
    assert proof.roots == proof.random == proof.opaque == ()
    assert proof.dependent == {"Relu_a", "Sigmoid_y"}


def test_a_branch_on_data_is_not_static_and_is_the_root():
    nodes, zero = condition("x")
    nodes.append(node("If", ["c"], ["y"], then_branch=branch("Relu"), else_branch=branch("Abs")))
    proof = prove(model(nodes, initializers=zero))
    assert not proof.static
    assert [(r.node, r.op) for r in proof.roots] == [("If_y", "If")]
    assert {"Relu_Relu_out", "Abs_Abs_out"} <= proof.dependent


def test_a_branch_on_another_input_is_static_given_that_input():
    nodes, zero = condition("gate")
    nodes.append(node("If", ["c"], ["y"], then_branch=branch("Relu"), else_branch=branch("Abs")))
    proto = model(nodes, [value("x"), value("gate")], initializers=zero)
    assert not prove(proto).static
    assert prove(proto, {"x"}).static
    assert not prove(proto, {"gate"}).static


def test_branches_of_different_sizes_taint_what_follows():
    nodes, zero = condition("x")
    nodes.append(node("If", ["c"], ["h"], then_branch=branch("Relu"), else_branch=branch("NonZero", shape=("a", "b"))))
    nodes.append(node("Shape", ["h"], ["s"]))
    nodes.append(node("ConstantOfShape", ["s"], ["y"]))
    roots = prove(model(nodes, initializers=zero)).roots
    assert {"If_h", "ConstantOfShape_y"} <= {root.node for root in roots}


@pytest.mark.parametrize(
    "nodes",
    [
        [node("NonZero", ["x"], ["y"])],
        [node("Unique", ["x"], ["y"])],
        [node("Cast", ["x"], ["b"], to=BOOL), node("Compress", ["x", "b"], ["y"])],
        [node("ReduceMax", ["x"], ["m"], keepdims=0), node("Cast", ["m"], ["k"], to=INT), node("Range", "zko", ["y"])],
        [node("Cast", ["x"], ["k"], to=INT), node("Reshape", ["x", "k"], ["y"])],
        [node("Cast", ["x"], ["k"], to=INT), node("Slice", ["x", "zero", "k"], ["y"])],
        [node("Cast", ["x"], ["k"], to=INT), node("TopK", ["x", "k"], ["y", "i"])],
    ],
    ids=lambda nodes: nodes[-1].op_type,
)
def test_a_shape_computed_from_data_is_not_static(nodes):
    proto = model(nodes, initializers=[constant("zero", [0]), constant("z", 0), constant("o", 1)])
    proof = prove(proto)
    assert not proof.static
    assert [root.node for root in proof.roots] == [nodes[-1].name]


def test_a_shape_computed_from_the_shape_of_an_input_is_static():
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("ConstantOfShape", ["s"], ["z"]),
        node("Reshape", ["x", "s"], ["r"]),
        node("Add", ["r", "z"], ["y"]),
    ]
    proof = prove(model(nodes))
    assert proof.static
    assert proof.dependent == {"Reshape_r", "Add_y"}


def test_the_second_operand_of_cast_like_gives_only_its_type():
    proof = prove(model([node("CastLike", ["w", "x"], ["y"])], initializers=[constant("w", [1.0])]))
    assert proof.dependent == frozenset()


def loop_body(decides):
    """One step: halves the state; goes on while `decides` says so."""
    nodes = [
        node("Mul", ["state", "half"], ["next"]),
        node("ReduceMax", ["next" if decides == "state" else "half"], ["top"], keepdims=0),
        node("Greater", ["top", "half"], ["go_on"]),
    ]
    inputs = [value("step", INT, ()), value("go", BOOL, ()), value("state")]
    return helper.make_graph(
        nodes,
        "body",
        inputs,
        [value("go_on", BOOL, ()), value("next")],
        initializer=[constant("half", [np.float32(0.5)])],
    )


@pytest.mark.parametrize(
    ("trips", "decides", "static"), [("count", "half", True), ("x_count", "half", False), ("count", "state", False)]
)
def test_a_loop_is_static_when_neither_its_count_nor_its_condition_depends_on_data(trips, decides, static):
    nodes = [
        node("ReduceMax", ["x"], ["m"], keepdims=0),
        node("Cast", ["m"], ["x_count"], to=INT),
        node("Loop", [trips, "true", "x"], ["y"], body=loop_body(decides)),
    ]
    proof = prove(model(nodes, initializers=[constant("count", np.int64(3)), constant("true", np.bool_(True))]))
    assert proof.static is static
    assert [root.op for root in proof.roots] == ([] if static else ["Loop"])


def test_taint_that_arrives_step_by_step_is_found():
    """State 0 is constant at first and takes the value of state 1, then of the input, two steps later."""
    nodes = [
        node("Identity", ["b"], ["a_next"]),
        node("Identity", ["x"], ["b_next"]),
        node("Greater", ["a", "half"], ["go_on"]),
        node("Identity", ["a"], ["seen"]),
    ]
    inputs = [value("step", INT, ()), value("go", BOOL, ()), value("a", shape=()), value("b", shape=())]
    outputs = [value("go_on", BOOL, ()), *(value(n, shape=()) for n in ("a_next", "b_next", "seen"))]
    body = helper.make_graph(nodes, "body", inputs, outputs, initializer=[constant("half", np.float32(0.5))])
    loop = node("Loop", ["count", "true", "one", "one"], ["p", "q", "y"], body=body)
    start = [constant("count", np.int64(5)), constant("true", np.bool_(True)), constant("one", np.float32(1))]
    proof = prove(model([loop], [value("x", shape=())], initializers=start))
    assert [root.op for root in proof.roots] == ["Loop"]


def test_a_scan_is_static():
    body = helper.make_graph(
        [node("Add", ["s", "row"], ["s_next"]), node("Identity", ["s_next"], ["out"])],
        "body",
        [value("s", shape=(4,)), value("row", shape=(4,))],
        [value("s_next", shape=(4,)), value("out", shape=(4,))],
    )
    scan = node("Scan", ["start", "x"], ["last", "y"], body=body, num_scan_inputs=1)
    assert prove(model([scan], initializers=[constant("start", np.zeros(4, np.float32))])).static


def test_a_shape_decided_inside_a_scan_is_not_static():
    body = helper.make_graph(
        [node("Add", ["s", "row"], ["s_next"]), node("NonZero", ["s_next"], ["out"])],
        "body",
        [value("s", shape=(4,)), value("row", shape=(4,))],
        [value("s_next", shape=(4,)), value("out", INT, (1, "k"))],
    )
    scan = node("Scan", ["start", "x"], ["last", "y"], body=body, num_scan_inputs=1)
    proof = prove(model([scan], initializers=[constant("start", np.zeros(4, np.float32))]))
    assert [root.op for root in proof.roots] == ["NonZero"]


def test_a_function_is_followed_into_its_body():
    body = [node("NonZero", ["a"], ["b"])]
    function = helper.make_function("other", "F", ["a"], ["b"], body, [helper.make_opsetid("", 20)])
    call = helper.make_node("F", ["x"], ["y"], name="call", domain="other")
    proof = prove(model([call], functions=[function]))
    assert not proof.static
    assert [root.op for root in proof.roots] == ["NonZero"]


def test_an_op_of_another_domain_is_opaque_once_data_reaches_it():
    inner = helper.make_node("Mystery", ["x"], ["y"], name="m", domain="other")
    assert prove(model([inner])).opaque == ("m (other::Mystery)",)
    assert not prove(model([inner])).static
    assert prove(model([inner]), tainted=()).static


def test_random_numbers_are_named_and_do_not_change_the_work():
    proof = prove(model([node("RandomUniformLike", ["x"], ["r"]), node("Add", ["x", "r"], ["y"])]))
    assert proof.static
    assert proof.random == ("RandomUniformLike_r",)


def test_a_root_names_its_module():
    found = node("NonZero", ["x"], ["y"])
    found.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'layers.0', 'layers.0.router', 'nonzero']")
    assert prove(model([found])).roots[0].module == "layers.0.router"
    assert scope_path("['_empty_nn_module_stack_from_metadata_hook', 'sym_size']") == ""
    assert scope_path("not a list (") == ""


def test_a_model_is_read_from_a_file(tmp_path):
    onnx.save(model([node("NonZero", ["x"], ["y"])]), tmp_path / "m.onnx")
    assert not prove(tmp_path / "m.onnx").static

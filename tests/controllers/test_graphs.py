import random

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxaudit.controllers.graphs import (
    Dataflow,
    count_parameters,
    exclusive_cone,
    parameter_names,
)

from .build import Build


def random_graph(seed, inputs=2, size=14):
    """A random graph of adds; what nothing reads is a model output, as in every traced graph."""
    generator = random.Random(seed)
    build = Build()
    nodes = [build.input(1) for _ in range(inputs)]
    for _ in range(size):
        # Mostly recent operands: deep graphs with cones of more than one node.
        recent = nodes[-5:]
        nodes.append(build.add(generator.choice(recent), generator.choice(recent)))
    unread = [node for node in nodes if not node.users and node.op == "call_function"]
    extra = generator.sample([n for n in nodes if n.op == "call_function"], k=generator.randint(0, 1))
    return build.module(*dict.fromkeys([*unread, *extra]))


def computed(module):
    return [node for node in module.graph.nodes if node.op == "call_function"]


def as_networkx(module):
    graph = nx.DiGraph()
    graph.add_nodes_from(module.graph.nodes)
    graph.add_edges_from((node, user) for node in module.graph.nodes for user in node.users)
    return graph


def cone_by_reachability(module, replaced):
    """What can't reach the output once nothing reads the replaced nodes any more."""
    graph = as_networkx(module)
    graph.remove_edges_from([edge for node in replaced for edge in list(graph.out_edges(node))])
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    alive = nx.ancestors(graph, output) | {output}
    return {node for node in computed(module) if node not in alive}


def cone_by_post_dominators(module, node):
    """What `node` post-dominates: every way from there to the output leads through it."""
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    parents = nx.immediate_dominators(as_networkx(module).reverse(), output)
    cone = set()
    for candidate in computed(module):
        walk = candidate
        while walk is not None and walk is not node:
            walk = parents[walk] if walk is not output and parents.get(walk) is not walk else None
        if walk is node:
            cone.add(candidate)
    return cone


@pytest.mark.parametrize("block", range(5))
def test_the_joint_cone_is_what_cannot_reach_the_output_once_its_nodes_are_cut(block):
    for seed in range(block * 50, block * 50 + 50):
        module = random_graph(seed)
        generator = random.Random(seed)
        replaced = generator.sample(computed(module), k=generator.randint(1, 4))
        assert exclusive_cone(replaced) == cone_by_reachability(module, replaced), f"graph {seed}"


@pytest.mark.parametrize("block", range(4))
def test_the_cone_of_one_node_is_what_it_post_dominates(block):
    for seed in range(block * 15, block * 15 + 15):
        module = random_graph(seed)
        for node in computed(module):
            assert exclusive_cone([node]) == cone_by_post_dominators(module, node), f"graph {seed}, {node}"


@given(st.integers(0, 10_000), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_a_joint_cone_holds_the_cone_of_each_of_its_nodes(seed, count):
    module = random_graph(seed)
    replaced = random.Random(seed).sample(computed(module), k=count)
    assert set().union(*(exclusive_cone([node]) for node in replaced)) <= exclusive_cone(replaced)


def test_a_joint_cone_can_hold_more_than_the_cones_of_its_nodes():
    build = Build()
    scores = build("sigmoid", build.input(2, 4))
    weights, indices = build("relu", scores), build("tanh", scores)
    build.module(weights, indices)
    assert exclusive_cone([weights, indices]) - exclusive_cone([weights]) - exclusive_cone([indices]) == {scores}


def test_a_placeholder_is_in_no_cone():
    build = Build()
    gate = build("sigmoid", build.input(2, 4))
    build.module(gate)
    assert exclusive_cone([gate]) == {gate}


def test_the_parameters_that_only_a_cone_reads_are_in_it():
    build = Build()
    x = build.input(2, 4)
    shared, own = build.parameter(4, 4), build.parameter(4, 4)
    gate = build("sigmoid", build("linear", build("linear", x, shared), own))
    build.module(gate, build("linear", x, shared))
    assert parameter_names(exclusive_cone([gate])) == {own.target}


def test_the_parameters_of_a_cone_are_counted_by_element():
    build = Build()
    gate = build("linear", build.input(2, 3), build.parameter(5, 3), build.parameter(5))
    module = build.module(gate)
    assert count_parameters(module, exclusive_cone([gate])) == 5 * 3 + 5


def test_a_parameter_that_is_read_under_two_names_counts_once():
    build = Build()
    first, second = build.parameter(4, 4), build.parameter(4, 4)
    build.root.register_parameter(second.target, build.root.get_parameter(first.target))
    gate = build("linear", build("linear", build.input(2, 4), first), second)
    module = build.module(gate)
    assert count_parameters(module, exclusive_cone([gate])) == 16


def test_a_buffer_is_not_counted_as_a_parameter():
    build = Build()
    gate = build("linear", build.input(2, 4), build.buffer(4, 4))
    module = build.module(gate)
    assert count_parameters(module, exclusive_cone([gate])) == 0


@pytest.mark.parametrize("seed", range(8))
def test_a_node_depends_on_another_exactly_when_networkx_has_a_path(seed):
    module = random_graph(seed)
    graph, dataflow = as_networkx(module), Dataflow(module)
    for node in computed(module):
        for other in module.graph.nodes:
            assert dataflow.depends(node, other) == nx.has_path(graph, other, node), f"{node} on {other}"


def test_a_node_does_not_depend_on_one_whose_shape_alone_it_reads():
    build = Build()
    x, y = build.input(2, 4), build.input(2, 4)
    like = build("expand_as", x, y)
    assert not build.dataflow(like).depends(like, y)


def test_walking_back_stops_at_the_nodes_it_is_told_to_but_includes_them():
    build = Build()
    x = build.input(2, 4)
    first = build("relu", x)
    second = build("tanh", first)
    assert build.dataflow(second).walk_back([second], lambda node: node is first) == [second, first]


# --- dynamic and learned --------------------------------------------------------------------------------------------


def kinds():
    """Nodes by name, each with whether it is dynamic and whether it is learned-static, by construction."""
    build = Build()
    x, w, buffer = build.input(2, 4), build.parameter(4, 4), build.buffer(4, 4)
    nodes = {
        "an input": (x, True, False),
        "a parameter": (w, False, True),
        "a buffer": (buffer, False, False),
        "a function of an input": (build("relu", x), True, False),
        "a function of a parameter": (build("relu", w), False, True),
        "a function of a buffer": (build("relu", buffer), False, False),
        "a parameter plus a buffer": (build.add(w, buffer), False, True),
        "a parameter applied to an input": (build("linear", x, w), True, False),
        "a parameter, then what reads that": (build("tanh", build("relu", w)), False, True),
        "zeros like an input": (build("zeros_like", x), False, False),
        "a parameter expanded like an input": (build("expand_as", build.parameter(4), x), False, True),
        "an input expanded like a parameter": (build("expand_as", x, build.parameter(2, 4)), True, False),
        "positions": (build("arange", 4, device="meta"), False, False),
    }
    return build.dataflow(*(node for node, _, _ in nodes.values())), nodes


DATAFLOW, KINDS = kinds()


@pytest.mark.parametrize(("node", "dynamic", "learned"), KINDS.values(), ids=KINDS)
def test_a_node_is_dynamic_when_its_values_depend_on_those_of_an_input(node, dynamic, learned):
    assert DATAFLOW.is_dynamic(node) is dynamic


@pytest.mark.parametrize(("node", "dynamic", "learned"), KINDS.values(), ids=KINDS)
def test_a_node_is_learned_static_when_it_is_computed_from_parameters_alone(node, dynamic, learned):
    assert DATAFLOW.is_learned_static(node) is learned


def learned_ops():
    build = Build()
    x, w, buffer = build.input(2, 4), build.parameter(4, 4), build.buffer(4, 4)
    ids = build.input(2, dtype=torch.int64)
    nodes = {
        "a linear with a parameter": (build("linear", x, w), True),
        "a linear with a function of a parameter": (build("linear", x, build("relu", w)), True),
        "a product of an input and a parameter": (build("matmul", x, w), True),
        "a table of parameters looked up": (build("embedding", w, ids), True),
        "rows of a parameter chosen by an input": (build("index_select", w, 0, ids), True),
        "a linear with a buffer": (build("linear", x, buffer), False),
        "a product of two inputs": (build("matmul", x, build("t", x)), False),
        "a product of two parameters": (build("matmul", w, w), False),
        "a parameter that scales an input": (build.mul(x, build.parameter(4)), False),
        "a norm with weights": (build("layer_norm", x, [4], build.parameter(4)), False),
    }
    return build.dataflow(*(node for node, _ in nodes.values())), nodes


LEARNED_FLOW, LEARNED = learned_ops()


@pytest.mark.parametrize(("node", "learned"), LEARNED.values(), ids=LEARNED)
def test_an_op_is_learned_when_it_applies_weights_to_data(node, learned):
    assert LEARNED_FLOW.is_learned_op(node) is learned


def test_a_product_without_weights_is_not_in_the_class_linear():
    assert not LEARNED_FLOW.is_a(LEARNED["a product of two inputs"][0], "linear")


def test_a_product_without_weights_is_still_in_the_class_matmul():
    assert LEARNED_FLOW.is_a(LEARNED["a product of two inputs"][0], "matmul")


def test_data_operands_leave_parameters_and_what_is_computed_from_them_out():
    build = Build()
    x = build.input(2, 4)
    node = build("linear", x, build("relu", build.parameter(4, 4)), build.parameter(4))
    assert build.dataflow(node).data_operands(node) == [x]


def test_the_parameters_of_a_node_are_those_that_only_it_needs():
    build = Build()
    shared, own = build.parameter(4, 4), build.parameter(4, 4)
    x = build.input(2, 4)
    hidden = build("linear", x, shared)
    gate = build("linear", hidden, own)
    assert build.dataflow(gate, hidden).exclusive_parameters(gate) == 16

import itertools
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxaudit import ops
from fxaudit.model.load import subject
from fxaudit.model.trace import trace


class Zoo(nn.Module):
    """One small graph with most kinds of node."""

    def __init__(self):
        super().__init__()
        self.fc, self.conv = nn.Linear(6, 6), nn.Conv2d(3, 3, 1)
        self.batch_norm, self.layer_norm = nn.BatchNorm2d(3), nn.LayerNorm(6)
        self.table = nn.Embedding(8, 6)

    def forward(self, x):
        x = self.layer_norm(self.batch_norm(self.conv(x)))
        a, b = self.fc(x).chunk(2, -1)
        values, indices = torch.topk(a, 2, dim=-1)
        y = torch.softmax(b, -1) * F.hardswish(b) + x[..., 0:3].clone()
        y = y + x.select(-1, 0).unsqueeze(-1) + torch.zeros_like(y) + a.expand_as(y)
        y = (
            y / y.sum(-1, keepdim=True)
            + self.table(indices).mean((-2, -1)).unsqueeze(-1)
            + values.mean(-1, keepdim=True)
        )
        return y.to(torch.float64), F.adaptive_avg_pool2d(x, 1), torch.einsum("bchw,bcvw->bchv", x, x)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):
        return self.block(self.block(x))


@pytest.fixture(scope="module")
def zoo():
    return trace(subject(Zoo().eval(), torch.randn(2, 3, 4, 6)))


@pytest.fixture(scope="module")
def twice():
    return trace(subject(Twice().eval(), torch.randn(2, 4)))


def named(traced, name):
    """The first node whose op has this name."""
    return next(node for node in traced.graph.nodes if ops.op_name(node) == name)


# --- names ----------------------------------------------------------------------------------------------------------


def test_every_op_in_a_class_is_one_that_a_graph_can_hold():
    known = set(dir(torch.ops.aten)) | ops.NAMED
    missing = [
        name
        for name in itertools.chain.from_iterable(ops.CLASSES.values())
        if name not in known and not hasattr(torch.ops.aten, name)
    ]
    assert missing == []


def test_the_class_names_are_those_of_the_design():
    words = "linear pointwise norm pool reduce activation squash layout gather matmul pieces"
    assert frozenset(words.split()) == ops.CLASS_NAMES


@pytest.mark.parametrize(("kind", "name"), [("placeholder", "input"), ("get_attr", "parameter"), ("output", "output")])
def test_nodes_that_compute_nothing_are_named_by_what_they_are(zoo, kind, name):
    assert {ops.op_name(node) for node in zoo.graph.nodes if node.op == kind} == {name}


def test_an_op_name_has_no_overload(zoo):
    names = {ops.op_name(node) for node in zoo.graph.nodes if node.op == "call_function"}
    assert not [name for name in names if "." in name]


@pytest.mark.parametrize("function", [torch.nn.functional.softmax, torch._softmax], ids=["public", "private"])
def test_softmax_has_one_name_in_both_spellings(function):
    arguments = (-1, False) if function is torch._softmax else (-1,)

    class M(nn.Module):
        def forward(self, x):
            return function(x, *arguments)

    assert named(trace(subject(M(), torch.randn(2, 3))), "softmax").op == "call_function"


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (torch.ops.aten._unsafe_view.default, "view"),
        (torch.ops.aten._to_copy.default, "to"),
        (torch.ops.aten.special_expit.default, "sigmoid"),
        (torch.ops.aten.concat.default, "cat"),
        (torch.ops.fxaudit.unseen.default, "unseen"),
        (torch.ops.aten.concatenate.default, "cat"),
        (torch.ops.aten.multiply.Tensor, "mul"),
        (torch.ops.aten.true_divide.Tensor, "div"),
        (torch.ops.aten._adaptive_avg_pool2d.default, "adaptive_avg_pool2d"),
    ],
    ids=str,
)
def test_private_and_second_spellings_share_the_public_name(target, name):
    graph = torch.fx.Graph()
    assert ops.op_name(graph.call_function(target, (graph.placeholder("x"),))) == name


def test_arithmetic_on_sizes_is_not_a_tensor_op():
    graph = torch.fx.Graph()
    assert ops.op_name(graph.call_function(operator.mul, (graph.placeholder("n"), 2))) == "python::mul"


def test_an_op_of_another_library_keeps_its_namespace():
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.prims.sin.default, (graph.placeholder("x"),))
    assert ops.op_name(node) == "prims::sin"


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (torch.ops.aten.native_layer_norm.default, "layer_norm"),
        (torch.ops.aten.native_group_norm.default, "group_norm"),
        (torch.ops.aten._native_batch_norm_legit_no_training.default, "batch_norm"),
    ],
    ids=str,
)
def test_the_first_output_of_a_multi_output_norm_is_the_norm(target, name):
    graph = torch.fx.Graph()
    norm = graph.call_function(target, (graph.placeholder("x"),))
    first = graph.call_function(operator.getitem, (norm, 0))
    assert ops.op_name(first) == name


def test_the_second_output_of_a_multi_output_norm_is_not_the_norm():
    graph = torch.fx.Graph()
    norm = graph.call_function(torch.ops.aten.native_layer_norm.default, (graph.placeholder("x"),))
    assert ops.op_name(graph.call_function(operator.getitem, (norm, 1))) == "getitem"


def test_the_first_output_of_a_multi_output_norm_reads_what_the_norm_reads():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    norm = graph.call_function(torch.ops.aten.native_layer_norm.default, (x, [4], None, None, 1e-5))
    assert ops.operands(graph.call_function(operator.getitem, (norm, 0))) == [x]


# --- classes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("linear", "linear"),
        ("conv2d", "linear"),
        ("batch_norm", "norm"),
        ("layer_norm", "norm"),
        ("softmax", "squash"),
        ("hardswish", "activation"),
        ("hardswish", "pointwise"),
        ("add", "pointwise"),
        ("mul", "pointwise"),
        ("sum", "reduce"),
        ("mean", "reduce"),
        ("mean", "pool"),
        ("adaptive_avg_pool2d", "reduce"),
        ("clone", "layout"),
        ("select", "layout"),
        ("embedding", "gather"),
        ("einsum", "matmul"),
    ],
)
def test_an_op_is_in_its_class(zoo, op, name):
    assert ops.in_class(named(zoo, op), name)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("clone", "pointwise"),
        ("to", "pointwise"),
        ("linear", "pointwise"),
        ("softmax", "reduce"),
        ("batch_norm", "layout"),
        ("sum", "pointwise"),
        ("embedding", "linear"),
    ],
)
def test_an_op_is_not_in_a_class_that_looks_like_its_own(zoo, op, name):
    assert not ops.in_class(named(zoo, op), name)


def test_a_name_that_is_no_class_is_the_op_itself(zoo):
    assert ops.in_class(named(zoo, "topk"), "topk")


@pytest.mark.parametrize("name", ["linear", "pointwise", "layout", "parameter"])
def test_a_parameter_is_in_no_class(zoo, name):
    assert not ops.in_class(named(zoo, "parameter"), name)


# --- selections, operands, attributes -------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["select", "slice"])
def test_slices_select(zoo, op):
    assert ops.is_selection(named(zoo, op))


def test_one_piece_of_a_split_is_a_selection(zoo):
    pieces = [n for n in zoo.graph.nodes if ops.op_name(n) == "getitem" and "split" in str(n.args[0])]
    assert [ops.is_selection(node) for node in pieces] == [True, True]


def test_one_output_of_topk_is_no_selection(zoo):
    outputs = [n for n in zoo.graph.nodes if ops.op_name(n) == "getitem" and "topk" in str(n.args[0])]
    assert [ops.is_selection(node) for node in outputs] == [False, False]


def test_operands_stand_in_argument_order(zoo):
    node = named(zoo, "linear")
    assert ops.operands(node) == list(node.args)


def test_a_node_that_is_read_twice_is_two_operands(zoo):
    assert len(ops.operands(named(zoo, "einsum"))) == 2


def test_an_op_that_reads_only_a_shape_has_no_operand(zoo):
    assert ops.operands(named(zoo, "full_like" if _has(zoo, "full_like") else "zeros_like")) == []


def _has(traced, name):
    return any(ops.op_name(node) == name for node in traced.graph.nodes)


@pytest.mark.parametrize("op", ["expand_as", "view_as", "type_as"])
def test_an_operand_that_only_lends_its_shape_is_not_read(op):
    graph = torch.fx.Graph()
    x, like = graph.placeholder("x"), graph.placeholder("like")
    assert ops.operands(graph.call_function(getattr(torch.ops.aten, op).default, (x, like))) == [x]


def test_a_symbolic_size_is_no_operand():
    class M(nn.Module):
        def forward(self, x):
            return x.view(x.shape[0] * 3)

    graph = trace(subject(M(), torch.randn(2, 3)))
    assert [ops.op_name(n) for n in ops.operands(named(graph, "view"))] == ["input"]


def test_tensors_in_a_list_are_operands():
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    assert ops.operands(graph.call_function(torch.ops.aten.cat.default, ([a, b, a], 1))) == [a, b, a]


def test_a_keyword_tensor_is_an_operand():
    graph = torch.fx.Graph()
    x, w, b = (graph.placeholder(n) for n in "xwb")
    assert ops.operands(graph.call_function(torch.ops.aten.linear.default, (x, w), {"bias": b})) == [x, w, b]


def test_attributes_are_named_by_the_schema(zoo):
    assert ops.attributes(named(zoo, "topk"))["k"] == 2


def test_attributes_that_were_not_given_have_their_defaults(zoo):
    assert ops.attributes(named(zoo, "topk"))["largest"] is True


def test_the_output_that_getitem_takes_is_an_attribute(zoo):
    outputs = [n for n in zoo.graph.nodes if ops.op_name(n) == "getitem" and "topk" in str(n.args[0])]
    assert [ops.attributes(node) for node in outputs] == [{"index": 0}, {"index": 1}]


# --- sizes, places --------------------------------------------------------------------------------------------------


def test_sizes_hold_the_symbol_of_the_batch(zoo):
    assert ops.sizes(named(zoo, "conv2d")) == (zoo.sample, 3, 4, 6)


def test_a_node_with_several_tensors_has_no_sizes(zoo):
    assert ops.sizes(named(zoo, "topk")) is None


def test_a_node_with_several_tensors_has_no_dtype(zoo):
    assert ops.dtype(named(zoo, "topk")) is None


def test_the_dtype_is_that_of_the_tensor(zoo):
    assert ops.dtype(named(zoo, "to")) is torch.float64


def test_the_root_module_has_no_path(zoo):
    assert ops.module_path(named(zoo, "topk")) == ()


def test_a_module_path_is_outermost_first(twice):
    assert ops.module_path(named(twice, "linear")) == ("block", "block.0")


def test_the_second_call_of_a_module_is_numbered(twice):
    second = [n for n in twice.graph.nodes if ops.op_name(n) == "linear"][1]
    assert ops.module_path(second) == ("block@1", "block.0@1")


def test_the_source_line_is_the_users_own(zoo):
    assert ops.source_line(named(zoo, "einsum")).endswith('torch.einsum("bchw,bcvw->bchv", x, x)')


def test_the_source_line_of_a_module_call_is_where_the_user_called_it(zoo):
    assert ops.source_line(named(zoo, "linear")).endswith("a, b = self.fc(x).chunk(2, -1)")


def test_the_source_line_names_file_and_line(zoo):
    place = ops.source_line(named(zoo, "einsum")).split("   ")[0]
    path, line = place.rsplit(":", 1)
    assert "torch.einsum" in open(path, encoding="utf-8").read().splitlines()[int(line) - 1]  # noqa: SIM115


def test_a_node_without_a_recorded_place_has_no_source_line():
    assert ops.source_line(torch.fx.Graph().placeholder("x")) == ""


def test_a_cast_to_the_dtype_of_another_tensor_changes_no_value():
    graph = torch.fx.Graph()
    x, like = graph.placeholder("x"), graph.placeholder("like")
    assert ops.in_class(graph.call_function(torch.ops.aten.type_as.default, (x, like)), "layout")

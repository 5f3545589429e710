import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fxaudit.execution.flops import count_flops
from fxaudit.model.load import subject
from fxaudit.model.trace import trace


def counted(module: nn.Module, *inputs: torch.Tensor):
    """The FLOPs of all nodes of a graph whose sizes are all fixed."""
    program = torch.export.export(module.eval(), inputs, strict=False).run_decompositions({})
    return count_flops(program.graph.nodes, None)


class Function(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


@settings(max_examples=8, deadline=None)
@given(rows=st.integers(2, 5), inputs=st.integers(1, 7), outputs=st.integers(1, 7), bias=st.booleans())
def test_a_linear_layer_costs_two_for_each_weight_and_row(rows, inputs, outputs, bias):
    assert counted(nn.Linear(inputs, outputs, bias=bias), torch.ones(rows, inputs)).total == 2 * rows * inputs * outputs


def test_a_linear_layer_costs_the_same_for_each_position():
    assert counted(nn.Linear(3, 4), torch.ones(2, 5, 3)).total == 2 * (2 * 5) * 3 * 4


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_costs_two_for_each_tap_and_output(groups, bias):
    layer = nn.Conv2d(4, 8, (3, 5), stride=2, padding=1, groups=groups, bias=bias)
    # Output sizes: (9 + 2 - 3) // 2 + 1 = 5 and (11 + 2 - 5) // 2 + 1 = 5.
    assert counted(layer, torch.ones(2, 4, 9, 11)).total == 2 * (2 * 8 * 5 * 5) * (4 // groups) * 3 * 5


def test_a_convolution_over_a_sequence_costs_two_for_each_tap_and_output():
    assert counted(nn.Conv1d(3, 4, 3), torch.ones(2, 3, 10)).total == 2 * (2 * 4 * 8) * 3 * 3


def test_a_batched_matrix_product_costs_two_for_each_multiply_add():
    assert counted(Function(torch.bmm), torch.ones(2, 3, 4), torch.ones(2, 4, 5)).total == 2 * 2 * 3 * 4 * 5


def test_a_matrix_product_costs_two_for_each_multiply_add():
    assert counted(Function(torch.mm), torch.ones(3, 4), torch.ones(4, 5)).total == 2 * 3 * 4 * 5


def test_a_contraction_costs_two_for_each_multiply_add():
    contract = Function(lambda x, w: torch.einsum("btd,edf->btef", x, w))
    assert counted(contract, torch.ones(2, 3, 4), torch.ones(5, 4, 6)).total == 2 * (2 * 3 * 4 * 5 * 6)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_costs_two_matrix_products_masked_entries_included(causal):
    batch, heads, length, width = 2, 3, 5, 8
    attend = Function(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal))
    q, k, v = (torch.ones(batch, heads, length, width) for _ in range(3))
    assert counted(attend, q, k, v).total == 2 * (2 * batch * heads * length * length * width)


def test_attention_over_another_length_costs_by_both_lengths():
    q, k, v = torch.ones(2, 3, 5, 8), torch.ones(2, 3, 7, 8), torch.ones(2, 3, 7, 4)
    expected = 2 * 2 * 3 * 5 * 7 * 8 + 2 * 2 * 3 * 5 * 7 * 4
    assert counted(Function(F.scaled_dot_product_attention), q, k, v).total == expected


def test_elementwise_ops_cost_nothing_by_convention():
    assert counted(Function(lambda x: torch.sigmoid(x) * x + x.mean()), torch.ones(4, 5)).total == 0


def test_elementwise_ops_are_not_unknown():
    assert counted(Function(lambda x: torch.sigmoid(x) * x + x.mean()), torch.ones(4, 5)).unknown == ()


def test_the_costs_of_layers_add_up():
    layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5))
    assert counted(layers, torch.ones(2, 3)).total == 2 * 2 * 3 * 4 + 2 * 2 * 4 * 5


def test_a_custom_op_is_unknown_and_never_counted_as_zero():
    @torch.library.custom_op("fxaudit_tests::product", mutates_args=())
    def product(x: torch.Tensor) -> torch.Tensor:
        return x @ x.T

    product.register_fake(lambda x: x.new_empty(x.shape[0], x.shape[0]))
    assert counted(Function(product), torch.ones(4, 5)).unknown == ("fxaudit_tests::product",)


def test_a_branch_is_unknown_and_never_counted_as_zero():
    branch = Function(lambda x: torch.cond(x.sum() > 0, lambda x: x @ x.T, lambda x: 2 * x @ x.T, (x,)))
    assert any("cond" in name for name in counted(branch, torch.ones(4, 5)).unknown)


def test_an_unknown_op_does_not_hide_what_is_known():
    def mixed(x):
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x @ torch.ones(5, 6),))

    assert counted(Function(mixed), torch.ones(4, 5)).total == 2 * 4 * 5 * 6


@pytest.fixture(scope="module")
def dynamic():
    return trace(subject(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)), torch.ones(2, 3)))


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_a_graph_for_any_batch_costs_by_the_number_of_inputs(dynamic, batch):
    assert count_flops(dynamic.graph.nodes, dynamic.sample, batch).total == batch * (2 * 3 * 4 + 2 * 4 * 5)


def test_only_the_nodes_that_are_given_are_counted(dynamic):
    first, _ = (node for node in dynamic.graph.nodes if node.op == "call_function")
    assert count_flops([first], dynamic.sample).total == 2 * 3 * 4

"""Floating-point operations of graph nodes, by one formula for each op over the shapes of its operands.

Not `torch.utils.flop_counter`: on CPU it counts fused attention and LSTM as zero.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from fxaudit import ops
from fxaudit.axes import Size, plain_size
from fxaudit.execution.following import Following, is_followed

PRODUCT, CONVOLUTION, RECURRENT = "matrix product", "convolution", "recurrent network"


@dataclass(frozen=True, slots=True)
class FlopCount:
    """Floating-point operations (a multiply-add is two) of matrix products, convolutions, attention, recurrent layers.

    Elementwise ops, reductions and data movement count zero by convention, as in every published FLOP figure. An op
    that is none of these and has no formula is in `unknown`, never counted as zero. `setup` is the part of `total` in
    nodes that no runtime input reaches; `by_class` splits the rest.
    """

    total: int
    unknown: tuple[str, ...]
    setup: int = 0
    by_class: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}), compare=False)

    @property
    def per_input(self) -> int:
        """The FLOPs of nodes that depend on a runtime input."""
        return self.total - self.setup


@dataclass(frozen=True, slots=True)
class NodeFlops:
    """The FLOPs of one execution of a node, None when its op has no formula.

    `outer` is the node of the whole graph that ran it: itself, or the branch or loop whose body it stands in.
    """

    node: Node
    flops: int | None
    outer: Node


def count_flops(nodes: Iterable[Node], sample: Size | None, batch: int = 1) -> FlopCount:
    """The FLOPs of `nodes` for `batch` inputs, from the shapes of the trace; none of them is told apart as setup."""
    values = {sample: batch} if isinstance(sample, sympy.Expr) else {}
    return summed(NodeFlops(node, _static_flops(node, values), node) for node in nodes if _computes(node))


def executed_nodes(module: GraphModule, leaves: Sequence[Any]) -> list[NodeFlops]:
    """The FLOPs of each node in one run of `module` on its input leaves."""
    counter = _Counter(module)
    with torch.no_grad():
        counter.run(*leaves)
    return counter.counted


def summed(counted: Iterable[NodeFlops], dynamic: Collection[Node] | None = None) -> FlopCount:
    """The sum of `counted`, with nodes outside `dynamic`, where it is given, as setup."""
    total, setup, unknown = 0, 0, set()
    by_class: Counter[str] = Counter()
    for item in counted:
        if item.flops is None:
            unknown.add(ops.op_name(item.node))
            continue
        total += item.flops
        if dynamic is not None and item.outer not in dynamic:
            setup += item.flops
        elif item.flops:
            by_class[_class_of(item.node)] += item.flops
    return FlopCount(total, tuple(sorted(unknown)), setup, dict(by_class))


def input_dependent(graph: Graph, inputs: Collection[str] | None = None) -> set[Node]:
    """The nodes whose values depend on the values of the placeholders named `inputs` (all of them by default)."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if inputs is None or node.name in inputs:
                found.add(node)
        elif any(source in found for source in ops.operands(node)):
            found.add(node)
    return found


class _Counter(Following):
    """Runs a graph and keeps the FLOPs of every node, following the branches taken and the steps of loops."""

    def __init__(self, module: nn.Module, outer: Node | None = None, counted: list[NodeFlops] | None = None) -> None:
        super().__init__(module, outer)
        self.counted: list[NodeFlops] = [] if counted is None else counted

    def inside(self, module: nn.Module, outer: Node) -> _Counter:
        return _Counter(module, outer, self.counted)

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if _computes(n) and not is_followed(n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            self.counted.append(NodeFlops(n, _flops(n, args, kwargs, result), self.outer or n))
        return result


def _computes(node: Node) -> bool:
    return node.op.startswith("call_")


def _static_flops(node: Node, values: Mapping[Any, int]) -> int | None:
    if ops.op_name(node) not in _FORMULAS:
        return 0 if costs_nothing(node) else None
    try:
        result = _sized(node.meta.get("val"), values)
        return _flops(node, _sized(node.args, values), _sized(node.kwargs, values), result)
    except (TypeError, ValueError, AttributeError):
        # A size that only a real run knows.
        return None


def _flops(node: Node, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int | None:
    name = ops.op_name(node)
    if name not in _FORMULAS:
        return 0 if costs_nothing(node) else None
    assert isinstance(node.target, torch._ops.OpOverload)  # names of other targets carry a prefix
    given = {a.name: v for a, v in zip(node.target._schema.arguments, args, strict=False)} | dict(kwargs)
    return _FORMULAS[name][1](given, result)


def _class_of(node: Node) -> str:
    return _FORMULAS[ops.op_name(node)][0]


def _sized(value: Any, values: Mapping[Any, int]) -> Any:
    """`value` with every node and symbolic tensor replaced by a meta tensor, or a number, of its concrete size."""
    if isinstance(value, Node):
        return _sized(value.meta.get("val"), values)
    if isinstance(value, Tensor):
        return torch.empty([_concrete(size, values) for size in value.shape], device="meta")
    if isinstance(value, torch.SymInt):
        return _concrete(value, values)
    if isinstance(value, list | tuple):
        return [_sized(item, values) for item in value]
    if isinstance(value, dict):
        return {key: _sized(item, values) for key, item in value.items()}
    return value


def _concrete(size: Any, values: Mapping[Any, int]) -> int:
    plain = plain_size(size)
    return plain if isinstance(plain, int) else int(plain.subs(values))


# --- formulas -------------------------------------------------------------------------------------------------------

Formula = Callable[[Mapping[str, Any], Any], int | None]


def _matrix(left: str) -> Formula:
    """A product that sums over the last axis of operand `left`."""
    return lambda given, result: 2 * result.numel() * given[left].shape[-1]


def _summed_batches(given: Mapping[str, Any], _: Any) -> int:
    return 2 * given["batch1"].numel() * given["batch2"].shape[-1]


def _convolution(given: Mapping[str, Any], result: Any) -> int:
    weight = given["weight"]
    if given.get("transposed"):
        return _transposed_convolution(given, result)
    return 2 * result.numel() * math.prod(weight.shape[1:])


def _transposed_convolution(given: Mapping[str, Any], _: Any) -> int:
    return 2 * given["input"].numel() * math.prod(given["weight"].shape[1:])


def _einsum(given: Mapping[str, Any], _: Any) -> int | None:
    return einsum_flops(str(given["equation"]), [tuple(t.shape) for t in given["tensors"]])


def einsum_flops(equation: str, shapes: Sequence[Sequence[int]]) -> int | None:
    """The FLOPs of a contraction of two operands; 0 for one operand; None for more, whose order decides the count."""
    terms = equation.replace(" ", "").split("->")[0].split(",")
    if len(terms) != len(shapes) or len(shapes) > 2:
        return None
    if len(shapes) < 2:
        return 0
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        head, dots, tail = term.partition("...")
        hidden = len(shape) - len(head) - len(tail)
        # Axes under an ellipsis align at the right, so they are named from the right.
        names = [*head, *(f"...{hidden - i}" for i in range(hidden if dots else 0)), *tail]
        for name, size in zip(names, shape, strict=True):
            sizes[name] = max(size, sizes[name]) if name in sizes and size and sizes[name] else size
    return 2 * math.prod(sizes.values())


def attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """The FLOPs of query [..., s, d] against key [..., t, d] and value [..., t, dv], masked entries included."""
    *outer, rows, depth = query
    return 2 * math.prod(outer) * rows * key[-2] * (depth + value[-1])


def _attention(given: Mapping[str, Any], _: Any) -> int:
    return attention_flops(given["query"].shape, given["key"].shape, given["value"].shape)


def _recurrent(given: Mapping[str, Any], _: Any) -> int:
    # Each matrix among the parameters of all layers and directions is applied once to each step of each sequence.
    data = given["input"] if "input" in given else given["data"]
    steps = math.prod(data.shape[:-1])
    return sum(2 * steps * weight.numel() for weight in given["params"] if weight.ndim == 2)


_FORMULAS: dict[str, tuple[str, Formula]] = {
    "linear": (PRODUCT, _matrix("input")),
    "addmm": (PRODUCT, _matrix("mat1")),
    "mm": (PRODUCT, _matrix("self")),
    "matmul": (PRODUCT, _matrix("self")),
    "bmm": (PRODUCT, _matrix("self")),
    "baddbmm": (PRODUCT, _matrix("batch1")),
    "addbmm": (PRODUCT, _summed_batches),
    "mv": (PRODUCT, _matrix("self")),
    "addmv": (PRODUCT, _matrix("mat")),
    "dot": (PRODUCT, _matrix("self")),
    "einsum": (PRODUCT, _einsum),
    "conv1d": (CONVOLUTION, _convolution),
    "conv2d": (CONVOLUTION, _convolution),
    "conv3d": (CONVOLUTION, _convolution),
    "convolution": (CONVOLUTION, _convolution),
    "conv_transpose1d": (CONVOLUTION, _transposed_convolution),
    "conv_transpose2d": (CONVOLUTION, _transposed_convolution),
    "conv_transpose3d": (CONVOLUTION, _transposed_convolution),
    "scaled_dot_product_attention": (PRODUCT, _attention),
    "_scaled_dot_product_flash_attention_for_cpu": (PRODUCT, _attention),
    "_scaled_dot_product_flash_attention": (PRODUCT, _attention),
    "_scaled_dot_product_efficient_attention": (PRODUCT, _attention),
    "_scaled_dot_product_attention_math": (PRODUCT, _attention),
    "_grouped_mm": (PRODUCT, _matrix("self")),
    "transformers::grouped_mm_fallback": (PRODUCT, _matrix("input")),
    "lstm": (RECURRENT, _recurrent),
    "gru": (RECURRENT, _recurrent),
    "rnn_tanh": (RECURRENT, _recurrent),
    "rnn_relu": (RECURRENT, _recurrent),
}

_FREE_CLASSES = ("pointwise", "reduce", "norm", "pool", "squash", "activation", "layout", "gather")
_FREE_OPS = frozenset(
    [
        *("arange", "full", "zeros", "ones", "empty", "eye", "linspace", "scalar_tensor", "lift_fresh_copy", "copy_"),
        *("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"),
        *("empty_strided", "new_empty_strided", "empty_permuted", "fill", "copy", "item", "_local_scalar_dense"),
        *("cat", "stack", "tile", "flip", "roll", "tril", "triu", "tril_indices", "triu_indices", "diagonal", "unfold"),
        *("as_strided", "im2col", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "broadcast_tensors"),
        *("select_scatter", "slice_scatter", "diagonal_scatter", "scatter_add", "scatter_reduce", "masked_scatter"),
        *("where", "masked_fill", "masked_select", "nonzero", "one_hot", "repeat_interleave", "bucketize", "diff"),
        *("topk", "sort", "argsort", "argmax", "argmin", "max", "min", "kthvalue", "median", "unique", "_unique2"),
        *("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "logsumexp", "log_softmax", "any", "all", "sum"),
        *("prod", "std", "var", "var_mean", "std_mean", "norm", "linalg_vector_norm", "count_nonzero", "bincount"),
        *("max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices"),
        *("avg_pool1d", "avg_pool2d", "avg_pool3d", "constant_pad_nd", "pad", "reflection_pad1d", "reflection_pad2d"),
        *("replication_pad1d", "replication_pad2d", "replication_pad3d", "grid_sampler_2d", "grid_sampler"),
        *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d"),
        *("upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
        *(
            "floor_divide",
            "histc",
            "glu",
            "isin",
            "__and__",
            "__or__",
            "__xor__",
            "bitwise_and",
            "bitwise_or",
            "bitwise_not",
            "logical_not",
        ),
        *("sym_size", "sym_numel", "sym_stride", "sym_storage_offset", "sym_constrain_range_for_size"),
        *("_assert_scalar", "_assert_async", "_assert_tensor_metadata", "fxaudit::barrier"),
        *(
            "native_layer_norm",
            "native_group_norm",
            "native_batch_norm",
            "_native_batch_norm_legit_no_training",
            "_native_batch_norm_legit",
        ),
        *(
            "_fused_rms_norm",
            "unsafe_split",
            "unsafe_split_with_sizes",
            "unsafe_chunk",
            "view_as_real",
            "view_as_complex",
        ),
    ]
)


def costs_nothing(node: Node) -> bool:
    """Whether the op of a node is known to do no work of the kind that is counted."""
    if node.op != "call_function" or isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    name = ops.op_name(node)
    if name in _FREE_OPS or name in ops.RANDOM:
        return True
    # Arithmetic on sizes; a Python function on tensors would not be in a graph of ATen.
    if name.startswith("python::"):
        return ops.is_symbolic_scalar(node)
    return any(ops.in_class(node, name) for name in _FREE_CLASSES)

"""What one fx node is: its op name, op classes, operands and attributes.

Nodes hold functional, undecomposed ATen (`run_decompositions({})`). An op name is the ATen base name without overload
and without the underscores of its private spellings, so a pattern says `softmax` whether the graph holds `softmax` or
`_softmax`. The first output of a multi-output norm stands for the norm: `getitem(_native_batch_norm(x), 0)` is
`batch_norm`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from fxaudit.axes import Size, plain_size

_MULTI_OUTPUT_NORMS = {
    "_native_batch_norm_legit_no_training": "batch_norm",
    "native_batch_norm": "batch_norm",
    "native_layer_norm": "layer_norm",
    "native_group_norm": "group_norm",
    "_fused_rms_norm": "rms_norm",
}
_ALIASES = {
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "_adaptive_avg_pool2d": "adaptive_avg_pool2d",
    "_adaptive_avg_pool3d": "adaptive_avg_pool3d",
    "_unsafe_view": "view",
    "_to_copy": "to",
    "special_expit": "sigmoid",
    "concat": "cat",
    "concatenate": "cat",
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
    # A part of the model that the trace keeps whole.
    "fxaudit::unseen": "unseen",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "subtract": "sub",
    # `1 - x` is traced as rsub(x, 1); `arithmetic_operands` gives its operands in the order in which they are written.
    "rsub": "sub",
}
_SPLITS = frozenset("split split_with_sizes chunk unbind tensor_split".split())
SELECTIONS = frozenset(["select", "slice", "narrow"])

# Written out because torch.Tag does not carry them.
CLASSES: dict[str, frozenset[str]] = {
    "linear": frozenset(
        (
            "linear addmm mm matmul bmm baddbmm conv1d conv2d conv3d convolution conv_transpose1d "
            "conv_transpose2d conv_transpose3d einsum"
        ).split()
    ),
    "norm": frozenset("layer_norm rms_norm batch_norm group_norm instance_norm".split()),
    "pool": frozenset(
        (
            "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d "
            "adaptive_max_pool2d adaptive_max_pool3d mean amax"
        ).split()
    ),
    "squash": frozenset("sigmoid hardsigmoid tanh softmax softplus".split()),
    "activation": frozenset("relu relu6 gelu silu hardswish leaky_relu elu celu selu mish hardtanh prelu".split()),
    "layout": frozenset(
        (
            "view reshape unsqueeze squeeze expand permute transpose t flatten unflatten repeat clone "
            "contiguous expand_as view_as reshape_as movedim swapaxes alias detach to type_as getitem"
        ).split()
    )
    | SELECTIONS
    | _SPLITS,
    "gather": frozenset("index index_select gather take_along_dim embedding scatter index_put index_add".split()),
    "matmul": frozenset(["matmul", "mm", "bmm", "einsum"]),
    "pieces": _SPLITS,
}
# Classes that torch.Tag decides, with what the tags get wrong: `hardswish` is not tagged pointwise, `clone` is, and
# `softmax` and adaptive pooling are not tagged as reductions.
TAGGED_CLASSES = ("pointwise", "reduce")
_NOT_POINTWISE = frozenset(["clone", "to", "alias", "detach"])
CLASS_NAMES = frozenset(CLASSES) | frozenset(TAGGED_CLASSES)

# Names that a pattern may use although ATen has no op of that name.
NAMED = frozenset(_ALIASES.values()) | frozenset(_MULTI_OUTPUT_NORMS.values()) | {"getitem"}

COMMUTATIVE = frozenset("add mul maximum minimum eq ne logical_and logical_or".split())
# Ops of which a pattern sees both sides, numbers and parameters included.
ARITHMETIC = COMMUTATIVE | frozenset(["sub", "div"])
# Operands of a contraction may stand in any order: the equation says which axis is which, not the position.
UNORDERED = COMMUTATIVE | frozenset(["einsum"])

# Ops that read the shape or dtype of an operand, never its values.
_SHAPE_ONLY = frozenset(
    (
        "zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full "
        "new_empty new_empty_strided sym_size sym_numel sym_stride"
    ).split()
)
_SHAPE_OF_SECOND = frozenset(["expand_as", "view_as", "reshape_as", "type_as"])
RANDOM = frozenset(
    (
        "rand randn randint randperm rand_like randn_like randint_like bernoulli multinomial normal normal_functional "
        "uniform exponential geometric cauchy log_normal poisson _standard_gamma dropout native_dropout alpha_dropout "
        "_fused_dropout rrelu_with_noise rrelu_with_noise_functional"
    ).split()
)


@functools.cache
def _base_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        if namespace == "aten":
            return _ALIASES.get(name, name)
        return _ALIASES.get(f"{namespace}::{name}", f"{namespace}::{name}")
    if target is operator.getitem:
        return "getitem"
    # Arithmetic on symbolic sizes: `operator.mul` must not pass for a tensor product.
    return f"python::{getattr(target, '__name__', target)}"


def op_name(node: Node) -> str:
    """The op name of a node; ``input``, ``parameter`` or ``output`` for nodes that compute nothing."""
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return "parameter"
    if node.op != "call_function":
        return node.op
    name = _base_name(node.target)
    if name == "getitem" and (norm := _norm_of(node)) is not None:
        return _MULTI_OUTPUT_NORMS[_base_name(norm.target)]
    return name


def _norm_of(node: Node) -> Node | None:
    """The multi-output norm of which `node` is the first output."""
    source, index = node.args[0], node.args[1]
    if isinstance(source, Node) and index == 0 and source.op == "call_function":
        return source if is_norm_of_several_outputs(source) else None
    return None


def is_norm_of_several_outputs(node: Node) -> bool:
    """Whether a node is a norm that returns more than the normalised tensor."""
    return node.op == "call_function" and _base_name(node.target) in _MULTI_OUTPUT_NORMS


def _computing(node: Node) -> Node:
    if node.op == "call_function" and _base_name(node.target) == "getitem":
        return _norm_of(node) or node
    return node


def in_class(node: Node, name: str) -> bool:
    """Whether a node is the op `name` or belongs to the op class `name`, by op alone.

    `linear` needs more than the op (a learned operand), which only the whole graph can tell: see `Dataflow.is_a`.
    """
    if node.op != "call_function":
        return False
    op = op_name(node)
    if name in CLASSES:
        return op in CLASSES[name]
    if name == "pointwise":
        return (_has_tag(node, torch.Tag.pointwise) or op in CLASSES["activation"]) and op not in _NOT_POINTWISE
    if name == "reduce":
        return _has_tag(node, torch.Tag.reduction) or op in CLASSES["pool"]
    return op == name


def _has_tag(node: Node, tag: torch.Tag) -> bool:
    return tag in getattr(node.target, "tags", ())


def is_selection(node: Node) -> bool:
    """Whether a node takes a part of its operand: a slice, or one piece of a split."""
    name = op_name(node)
    if name == "getitem":
        source = node.args[0]
        return isinstance(source, Node) and source.op == "call_function" and _base_name(source.target) in _SPLITS
    return name in SELECTIONS


def operands(node: Node) -> list[Node]:
    """The nodes whose values a node reads, in argument order, a node read twice twice."""
    node = _computing(node)
    name = op_name(node)
    if name in _SHAPE_ONLY:
        return []
    found = list(_nodes_in((node.args, node.kwargs)))
    return found[:1] if name in _SHAPE_OF_SECOND else [n for n in found if not is_symbolic_scalar(n)]


def arithmetic_operands(node: Node) -> list[Any]:
    """Both sides of an arithmetic op as they are written: nodes, parameters included, and numbers."""
    sides = [a for a in node.args if isinstance(a, Node | int | float) and not isinstance(a, bool)][:2]
    is_reversed = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name == "aten::rsub"
    return sides[::-1] if is_reversed else sides


def operand_rank(node: Node) -> int:
    """The number of axes of a node's first operand, or of the node itself where it has none."""
    found = [size for source in operands(node)[:1] if (size := sizes(source)) is not None]
    return len(found[0] if found else sizes(node) or ())


def _nodes_in(value: Any) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _nodes_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _nodes_in(item)


def attributes(node: Node) -> dict[str, Any]:
    """All arguments of a node by schema name, defaults filled in; the indices of a `getitem` as ``index``."""
    node = _computing(node)
    if not isinstance(node.target, torch._ops.OpOverload):
        return {"index": node.args[1]} if op_name(node) == "getitem" else dict(node.kwargs)
    schema = node.target._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, node.args, strict=False)}
    given.update(node.kwargs)
    for argument in schema:
        given.setdefault(argument.name, argument.default_value)
    return given


def is_symbolic_scalar(node: Node) -> bool:
    """Whether a node is a size or another symbolic number, not a tensor."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool)


def sizes(node: Node) -> tuple[Size, ...] | None:
    """The sizes of a node's tensor, symbolic ones as sympy expressions; None when it is not one tensor."""
    value = node.meta.get("val")
    return tuple(plain_size(size) for size in value.shape) if isinstance(value, torch.Tensor) else None


def dtype(node: Node) -> torch.dtype | None:
    """The dtype of a node's tensor; None when it is not one tensor."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def module_path(node: Node) -> tuple[str, ...]:
    """The module keys a node was called under, outermost first, the root left out; a repeated call ends in ``@N``."""
    stack = node.meta.get("nn_module_stack") or {}
    path = []
    for key, (name, _) in stack.items():
        if not name or str(key).startswith("_empty_nn_module_stack"):
            continue
        call = str(key).rpartition("@")[2] if "@" in str(key) else "0"
        path.append(f"{name}@{call}" if call.isdigit() and call != "0" else name)
    return tuple(path)


def source_line(node: Node) -> str:
    """Where the user's code made a node, as ``file:line   code``; the empty string when torch did not record it.

    The innermost frame outside torch itself: what a user can open and read.
    """
    return line_of_trace(node.meta.get("stack_trace") or "")


def line_of_trace(trace: str) -> str:
    """The innermost frame of a stack trace, as ``file:line   code``, that lies neither in torch nor in code that torch
    generated."""
    frames = []
    for line in trace.splitlines():
        line = line.strip()
        if line.startswith('File "'):
            path, _, rest = line[6:].partition('", line ')
            frames.append([path, rest.split(",")[0], ""])
        elif frames and line and not frames[-1][2]:
            frames[-1][2] = line
    outside = [f for f in frames if "/torch/" not in f[0].replace("\\", "/") and not f[0].startswith("<")]
    if not (chosen := (outside or frames)[-1:]):
        return ""
    path, number, code = chosen[0]
    return f"{path}:{number}   {code}".rstrip()

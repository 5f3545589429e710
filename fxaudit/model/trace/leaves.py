"""A submodule that defeats tracing becomes an opaque leaf: one node of the graph that runs the real submodule.

What happens inside is unseen. How its output sizes follow from its input sizes is inferred from eager calls at two
batch sizes; where that is not possible there is no leaf.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxaudit.errors import TraceError
from fxaudit.model.compare import same_bits

# How one output size follows from the input sizes: a number, or a multiple of a product of sizes (input, axis).
SizeRule = tuple[int, tuple[tuple[int, int], ...]]
Sizes = tuple[tuple[int, ...], ...]
_TENSOR = "<tensor>"


@dataclass(frozen=True, slots=True)
class _Output:
    """What a tensor that a leaf returns looks like: sizes, order of its axes in memory, dtype."""

    sizes: tuple[SizeRule, ...]
    order: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Call:
    """One eager call of a leaf: structure of its inputs, their sizes, and what it returned.

    `arguments` and `returned` hold what is no tensor, and `_TENSOR` where there is one.
    """

    arguments: tuple[Any, ...]
    in_spec: pytree.TreeSpec
    inputs: Sizes
    returned: tuple[Any, ...]
    out_spec: pytree.TreeSpec
    outputs: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]

    def is_like(self, in_spec: pytree.TreeSpec, arguments: tuple[Any, ...], ranks: tuple[int, ...]) -> bool:
        return (self.in_spec, self.arguments, tuple(map(len, self.inputs))) == (in_spec, arguments, ranks)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Leaf:
    """An opaque submodule of a traced model. `graph` calls it by `key`; it lives as long as the model that was traced
    with it."""

    path: str
    module: nn.Module
    forward: Callable[..., Any]
    key: str
    calls: list[_Call] = field(default_factory=list)

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())


_LEAVES: weakref.WeakValueDictionary[str, Leaf] = weakref.WeakValueDictionary()
_KEYS = itertools.count()


@torch.library.custom_op("fxaudit::unseen", mutates_args=())
def unseen(inputs: Sequence[Tensor], key: str, call: int) -> list[Tensor]:
    """The tensors that the leaf `key` returns for the tensors that it is given; `call` tells forms of call apart."""
    leaf = _LEAVES[key]
    form = leaf.calls[call]
    args, kwargs = pytree.tree_unflatten(_filled(form.arguments, inputs), form.in_spec)
    outputs = pytree.tree_leaves(leaf.forward(*args, **kwargs))
    # An op may not return its own inputs, nor views of them.
    return [_dense(output) for output in outputs if isinstance(output, Tensor)]


@unseen.register_fake
def _(inputs: Sequence[Tensor], key: str, call: int) -> list[Tensor]:
    leaf = _LEAVES[key]
    made = []
    for output in _outputs(leaf, leaf.calls[call]):
        sizes = [_size(rule, inputs) for rule in output.sizes]
        ordered = torch.empty([sizes[axis] for axis in output.order], dtype=output.dtype, device=inputs[0].device)
        made.append(ordered.permute(_inverse(output.order)))
    return made


def leaf_of(path: str, module: nn.Module) -> Leaf:
    """A leaf for the submodule at `path`."""
    leaf = Leaf(path, module, module.forward, f"{path}#{next(_KEYS)}")
    _LEAVES[leaf.key] = leaf
    return leaf


@contextlib.contextmanager
def observed(leaves: Sequence[Leaf]) -> Iterator[None]:
    """Eager calls inside are observed: what each leaf takes and returns.

    Raises:
        TraceError: on a leaf that writes to its inputs, or takes no tensor.
    """
    with contextlib.ExitStack() as stack:
        for leaf in leaves:
            _replace_forward(stack, leaf.module, _observing(leaf))
        yield


@contextlib.contextmanager
def opaque(leaves: Sequence[Leaf]) -> Iterator[None]:
    """Leaves are called as one op each."""
    with contextlib.ExitStack() as stack:
        for leaf in leaves:
            _replace_forward(stack, leaf.module, _calling(leaf))
        yield


def _replace_forward(stack: contextlib.ExitStack, module: nn.Module, forward: Callable[..., Any]) -> None:
    own = vars(module).get("forward")
    if own is None:
        stack.callback(vars(module).pop, "forward", None)
    else:
        stack.callback(vars(module).__setitem__, "forward", own)
    vars(module)["forward"] = forward


def _observing(leaf: Leaf) -> Callable[..., Any]:
    def observe(*args: Any, **kwargs: Any) -> Any:
        values, in_spec = pytree.tree_flatten((args, kwargs))
        tensors = [value for value in values if isinstance(value, Tensor)]
        before = [tensor.clone() for tensor in tensors]
        result = leaf.forward(*args, **kwargs)
        if not tensors or not all(map(same_bits, before, tensors)):
            fault = "it writes to its inputs" if tensors else "it takes no tensor"
            raise TraceError(f"`{leaf.path}` can neither be traced nor be left whole: {fault}")
        outputs, out_spec = pytree.tree_flatten(result)
        returned = [value for value in outputs if isinstance(value, Tensor)]
        leaf.calls.append(
            _Call(
                arguments=_constants(values),
                in_spec=in_spec,
                inputs=tuple(tuple(tensor.shape) for tensor in before),
                returned=_constants(outputs),
                out_spec=out_spec,
                outputs=tuple((tuple(value.shape), _memory_order(value), value.dtype) for value in returned),
            )
        )
        return result

    return observe


def _constants(values: list[Any]) -> tuple[Any, ...]:
    return tuple(_TENSOR if isinstance(value, Tensor) else value for value in values)


def _filled(constants: tuple[Any, ...], tensors: Sequence[Tensor]) -> list[Any]:
    left = iter(tensors)
    return [next(left) if isinstance(value, str) and value == _TENSOR else value for value in constants]


def _calling(leaf: Leaf) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        values, in_spec = pytree.tree_flatten((args, kwargs))
        tensors = [value for value in values if isinstance(value, Tensor)]
        ranks = tuple(tensor.ndim for tensor in tensors)
        for index, form in enumerate(leaf.calls):
            if form.is_like(in_spec, _constants(values), ranks):
                outputs = unseen(tensors, leaf.key, index)
                return pytree.tree_unflatten(_filled(form.returned, outputs), form.out_spec)
        raise TraceError(f"`{leaf.path}` cannot be left whole: it is called in another way under trace than in eager")

    return call


def _outputs(leaf: Leaf, form: _Call) -> list[_Output]:
    """The tensors that a call of this form returns, inferred from all observed calls of the same form.

    Raises:
        TraceError: the sizes do not follow from the input sizes.
    """
    ranks = tuple(map(len, form.inputs))
    alike = [c for c in leaf.calls if c.is_like(form.in_spec, form.arguments, ranks)]
    if any(len(c.outputs) != len(form.outputs) for c in alike):
        raise TraceError(f"`{leaf.path}` cannot be left whole: it returns now more, now fewer tensors")
    found = []
    for i, (sizes, order, dtype) in enumerate(form.outputs):
        seen = [c.outputs[i][0] for c in alike]
        rules = tuple(
            _rule(leaf, [c.inputs for c in alike], [shape[axis] for shape in seen]) for axis in range(len(sizes))
        )
        found.append(_Output(rules, order, dtype))
    return found


def _rule(leaf: Leaf, inputs: list[Sizes], sizes: list[int]) -> SizeRule:
    if len(set(sizes)) == 1:
        return sizes[0], ()
    axes = [(i, axis) for i, shape in enumerate(inputs[0]) for axis in range(len(shape))]
    # Axes that are the same in every call explain nothing.
    axes = [(i, axis) for i, axis in axes if len({shapes[i][axis] for shapes in inputs}) > 1]
    for product in [*itertools.combinations(axes, 1), *itertools.combinations(axes, 2)]:
        factors = {size / _product(product, shapes) for size, shapes in zip(sizes, inputs, strict=True)}
        if len(factors) == 1 and (factor := factors.pop()) == int(factor):
            return int(factor), tuple(product)
    raise TraceError(
        f"`{leaf.path}` cannot be traced, nor be left whole: the sizes of its outputs do not follow from its inputs'",
        found=", ".join(f"{size} for {list(shapes)}" for size, shapes in zip(sizes, inputs, strict=True)),
    )


def _product(axes: Sequence[tuple[int, int]], shapes: Sizes) -> int:
    product = 1
    for i, axis in axes:
        product *= shapes[i][axis]
    return product


def _size(rule: SizeRule, inputs: Sequence[Tensor]) -> Any:
    size: Any = rule[0]
    for i, axis in rule[1]:
        size = size * inputs[i].shape[axis]
    return size


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The axes of a tensor from the outermost in memory to the innermost; as they stand where memory has gaps."""
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda axis: (-strides[axis], axis))
    is_dense = tensor.permute(order).is_contiguous()
    return tuple(order) if is_dense else tuple(range(tensor.ndim))


def _dense(tensor: Tensor) -> Tensor:
    order = _memory_order(tensor)
    return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(_inverse(order))


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]

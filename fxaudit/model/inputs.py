"""Example inputs: one form for all spellings, the batch they share, and other inputs made from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxaudit.errors import LoadError, UsageError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Inputs that are positional and keyword arguments at once."""

    positional: tuple[Any, ...]
    keywords: dict[str, Any]


# A tensor with at most this many distinct values is taken for a mask or a flag: other inputs repeat its rows and never
# mix its elements, since a mask with holes is another kind of input.
_MASK_VALUES = 2


def as_arguments(inputs: Any) -> Arguments:
    """Positional and keyword arguments: a tensor is one argument, a tuple several, a dict keyword arguments.

    Inputs that are one dict come in a tuple.

    Raises:
        LoadError: anything else.
    """
    if isinstance(inputs, CallArguments):
        return inputs.positional, inputs.keywords
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    raise LoadError(
        "the example inputs have a form that cannot be passed to a model",
        expected="a tensor, a tuple of positional arguments, or a dict of keyword arguments",
        found=f"{type(inputs).__module__}.{type(inputs).__name__}",
        remedy="return (module, (argument,)) or (module, {'name': argument})",
    )


def map_tensors(function: Callable[[Tensor], Tensor], arguments: Arguments) -> Arguments:
    """`arguments` with `function` applied to each tensor in them."""
    return pytree.tree_map_only(Tensor, function, arguments)


def tensors_of(arguments: Arguments) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]


def batch_of(arguments: Arguments) -> int | None:
    """The size of the first axis that all tensors with an axis share, or None when they differ or have none."""
    leading = {tensor.shape[0] for tensor in tensors_of(arguments) if tensor.ndim}
    return leading.pop() if len(leading) == 1 else None


def resampled(arguments: Arguments, seed: int, batch: int | None = None) -> Arguments:
    """Other inputs of the same kind: each tensor's elements drawn anew, with replacement, from its own elements.

    So token ids stay in the vocabulary and pixels in their range, while sums, maxima and order all change. With
    `batch`, rows are first repeated or dropped to that many.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor: Tensor) -> Tensor:
        if batch is not None and tensor.ndim:
            tensor = tensor[torch.arange(batch, device=tensor.device) % tensor.shape[0]]
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if not tensor.numel() or values.unique().numel() <= _MASK_VALUES:
            return tensor.clone()
        choice = torch.randint(tensor.numel(), (tensor.numel(),), generator=generator).to(tensor.device)
        return tensor.reshape(-1)[choice].reshape(tensor.shape)

    return map_tensors(draw, arguments)


def with_batch_of_two(arguments: Arguments, seed: int) -> Arguments:
    """`arguments` with at least two inputs: torch.export takes an axis of size 1 for a constant."""
    if batch_of(arguments) != 1:
        return arguments
    other = iter(tensors_of(resampled(arguments, seed)))

    def join(tensor: Tensor) -> Tensor:
        second = next(other)
        return torch.cat([tensor, second]) if tensor.ndim else tensor

    return map_tensors(join, arguments)


def with_window(arguments: Arguments, window: int, seed: int) -> Arguments:
    """`arguments` with every tensor of whole numbers [inputs, tokens] cut or filled up to `window` tokens.

    Raises:
        UsageError: there is no such tensor.
    """
    generator = torch.Generator().manual_seed(seed)

    def is_tokens(tensor: Tensor) -> bool:
        return tensor.ndim == 2 and tensor.shape[1] > 0 and not tensor.is_floating_point()

    if not any(map(is_tokens, tensors := tensors_of(arguments))):
        raise UsageError(
            "a window has no meaning for these inputs",
            expected="an input of whole numbers, [inputs, tokens]",
            found=", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors) or "no tensor",
            remedy="leave --window out",
        )

    def resize(tensor: Tensor) -> Tensor:
        if not is_tokens(tensor) or tensor.shape[1] == window:
            return tensor
        if tensor.shape[1] > window:
            return tensor[:, :window].contiguous()
        choice = torch.randint(tensor.shape[1], (window - tensor.shape[1],), generator=generator)
        return torch.cat([tensor, tensor[:, choice]], 1)

    return map_tensors(resize, arguments)


def cloned(arguments: Arguments) -> Arguments:
    """A copy that a model may write to."""
    return map_tensors(lambda tensor: tensor.detach().clone(memory_format=torch.preserve_format), arguments)

"""Inputs made to provoke other paths than real ones take: a few real inputs rarely flip a gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxaudit.errors import DataError
from fxaudit.model.trace import TracedModel

Leaves = Sequence[Any]


def probes(traced: TracedModel, leaves: Leaves) -> dict[str, list[Any]]:
    """Variations of one real input, by name; those that the trace does not cover, or that change nothing, are left out.

    Floating-point inputs: ``constant`` (their mean everywhere), ``repeated`` (the first position everywhere),
    ``scaled 0.01`` and ``scaled 5``, ``sign-flipped``. Whole numbers only take values that the input has, so that they
    still name tokens: the first one everywhere, and the first half twice. Masks and other constant tensors stay.
    """
    found = {}
    for name, change in _CHANGES.items():
        varied = [change(leaf) if _is_data(leaf) else leaf for leaf in leaves]
        same = all(not isinstance(a, Tensor) or torch.equal(a, b) for a, b in zip(leaves, varied, strict=True))
        if same or not _is_covered(traced, varied):
            continue
        found[name] = varied
    return found


def _is_data(leaf: Any) -> bool:
    return (
        isinstance(leaf, Tensor)
        and leaf.ndim > 0
        and not leaf.is_complex()
        and leaf.dtype != torch.bool
        and bool((leaf != leaf.reshape(-1)[:1]).any() if leaf.numel() else False)
    )


def _is_covered(traced: TracedModel, leaves: list[Any]) -> bool:
    try:
        traced.check(leaves)
    except DataError:
        return False
    return True


def _constant(leaf: Tensor) -> Tensor:
    value = leaf.double().mean().to(leaf.dtype) if leaf.is_floating_point() else leaf.reshape(-1)[0]
    return value.expand_as(leaf).clone()


def _repeated(leaf: Tensor) -> Tensor:
    if leaf.ndim < 2:
        return leaf
    if leaf.is_floating_point():
        return leaf[:, :1].expand_as(leaf).clone()
    half = (leaf.shape[1] + 1) // 2
    return torch.cat([leaf[:, :half], leaf[:, : leaf.shape[1] - half]], 1)


def _float_only(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda leaf: change(leaf) if leaf.is_floating_point() else leaf


_CHANGES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "constant": _constant,
    "repeated": _repeated,
    "scaled 0.01": _float_only(lambda leaf: 0.01 * leaf),
    "scaled 5": _float_only(lambda leaf: 5 * leaf),
    "sign-flipped": _float_only(torch.neg),
}

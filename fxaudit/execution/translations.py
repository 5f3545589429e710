"""ONNX for ops that torch's exporter has no translation of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import opset18

# Its stubs know tensors only by their element type.
op: Any = opset18


def further_translations() -> dict[Any, Callable[..., Any]]:
    """A function in onnxscript for each such op that this process knows."""
    table: dict[Any, Callable[..., Any]] = {torch.ops.aten._grouped_mm.default: grouped_product}
    # Registered by transformers, where it is loaded.
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        table[torch.ops.transformers.grouped_mm_fallback.default] = grouped_product
    return table


def grouped_product(rows: Any, weights: Any, ends: Any, bias: Any = None, dtype: Any = None) -> Any:
    """`rows` [row, k], sorted by group and up to `ends` [group], each by its group's matrix of `weights` [group, k, n].

    One product for each group, over as many rows as the group has: what a kernel for grouped products does.
    """
    if bias is not None or dtype is not None or not isinstance(weights.shape[0], int):
        raise ValueError("a grouped product with a bias, another dtype, or a number of groups that is not fixed")
    ends = op.Cast(ends, to=7)
    start = op.Constant(value_ints=[0])
    products = []
    for group in range(weights.shape[0]):
        end = op.Slice(ends, [group], [group + 1])
        weight = op.Gather(weights, op.Constant(value_int=group), axis=0)
        products.append(op.MatMul(op.Slice(rows, start, end), weight))
        start = end
    return op.Concat(*products, axis=0)

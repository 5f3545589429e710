"""A static profile in the place of a coefficient: broadcast where the reader broadcasts, otherwise expanded."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import sympy
import torch
from torch import Tensor

from fxaudit.axes import Size, divide
from fxaudit.controllers.controller import Coefficient
from fxaudit.controllers.rewrite import concrete_shape
from fxaudit.errors import DataError, ExportError
from fxaudit.execution.translation import BATCH

_BROADCASTING = frozenset(["Add", "Sub", "Mul", "Div"])


def expanded(profile: Tensor, coefficient: Coefficient, sample: Size | None, batch: int | None) -> Tensor:
    """A static profile at the full shape of its coefficient for `batch` inputs.

    Raises:
        DataError: the profile does not fit.
    """
    factors = profile_factors(profile, coefficient)
    full = [concrete_shape(coefficient_sizes(coefficient, axis), sample, batch) for axis in coefficient.axes]
    flat = [size for axis in full for size in axis]
    value = profile.reshape([size for axis in factors for size in axis]).expand(flat)
    return value.reshape([math.prod(axis) for axis in full]).contiguous()


def coefficient_sizes(coefficient: Coefficient, axis: Sequence[str]) -> tuple[Size, ...]:
    return tuple(int(name) if name.isdigit() else coefficient.sizes[name] for name in axis)


def profile_factors(profile: Tensor, coefficient: Coefficient) -> list[tuple[int, ...]]:
    """The size of a profile along each factor of each dimension: 1 for samples, 1 or full for positions, else full.

    Raises:
        DataError: the profile has another shape or dtype.
    """
    found = []
    for axis, size in zip(coefficient.axes, profile.shape, strict=False):
        for whole in (False, True):
            sizes = tuple(_profile_size(coefficient, name, whole) for name in axis)
            if math.prod(sizes) == size:
                found.append(sizes)
                break
    if len(found) != len(coefficient.axes) or profile.ndim != len(found) or profile.dtype != coefficient.dtype:
        wanted = " ".join(
            "*".join(str(_profile_size(coefficient, name, False)) for name in axis) for axis in coefficient.axes
        )
        raise DataError(
            f"the profile of `{coefficient.key}` does not fit",
            expected=f"[{wanted}] ({' '.join('*'.join(a) for a in coefficient.axes)}), {coefficient.dtype}",
            found=f"{list(profile.shape)}, {profile.dtype}",
            remedy="give one value for each unit, with size 1 along samples and positions",
        )
    return found


def _profile_size(coefficient: Coefficient, name: str, whole: bool) -> int:
    role = None if name.isdigit() else coefficient.roles[name]
    size = int(name) if name.isdigit() else coefficient.sizes[name]
    if role == "sample" or (role == "position" and not whole) or not isinstance(size, int):
        return 1
    return size


def bake(
    model: ir.Model, barrier: ir.Node, coefficient: Coefficient, name: str, profile: Tensor, sample: Size | None
) -> tuple[ir.Value, bool]:
    """Put `profile` in front of the readers of `barrier` that broadcast it; the value that all others must read, and
    whether that one is expanded.

    A reader broadcasts when its other operand has the full size already, so that its result does not shrink.

    Raises:
        ExportError: the expanded size cannot be computed from the size of the input.
        DataError: the profile does not fit.
    """
    factors = profile_factors(profile, coefficient)
    output = barrier.outputs[0]
    constant = ir.Value(name=name, type=output.type, shape=ir.Shape(profile.shape))
    constant.const_value = ir.tensor(profile.detach().cpu().contiguous().numpy(), name=name)
    model.graph.register_initializer(constant)
    if all(not isinstance(size, sympy.Expr) for size in coefficient.shape) and tuple(profile.shape) == tuple(
        coefficient.shape
    ):
        return constant, False
    for node, index in list(output.uses()):
        if node.op_type in _BROADCASTING and node.domain == "" and _keeps_size(node, index):
            node.replace_input_with(index, constant)
    if not output.uses() and not output.is_graph_output():
        return constant, False
    build = _Builder(model, barrier, f"baked/{name}")
    return build.expanded(constant, factors, coefficient, sample), True


def _keeps_size(node: ir.Node, index: int) -> bool:
    other, result = node.inputs[1 - index], node.outputs[0]
    if other is None or other.shape is None or result.shape is None or other is node.inputs[index]:
        return False
    sizes = [str(size) for size in other.shape], [str(size) for size in result.shape]
    return sizes[0] == sizes[1] and "None" not in sizes[0] and "?" not in sizes[0]


class _Builder:
    """Adds the nodes that expand one constant, in front of the barrier that it replaces."""

    def __init__(self, model: ir.Model, barrier: ir.Node, prefix: str) -> None:
        self.model, self.barrier, self.prefix = model, barrier, prefix
        self.count = 0

    def expanded(
        self, constant: ir.Value, factors: Sequence[tuple[int, ...]], coefficient: Coefficient, sample: Size | None
    ) -> ir.Value:
        full = [coefficient_sizes(coefficient, axis) for axis in coefficient.axes]
        products = [size_product(axis) for axis in full]
        if all(math.prod(p) in (1, s) for p, s in zip(factors, products, strict=True)):
            return self._node("Expand", [constant, self._shape(products, sample)], constant)
        apart = self._shape([size for axis in factors for size in axis], sample)
        value = self._node("Reshape", [constant, apart], constant)
        value = self._node("Expand", [value, self._shape([s for axis in full for s in axis], sample)], constant)
        return self._node("Reshape", [value, self._shape(products, sample)], constant)

    def _shape(self, sizes: Sequence[Size], sample: Size | None) -> ir.Value:
        """A one-dimensional tensor of sizes, those of the sample axis read from the model's own input."""
        if all(isinstance(size, int) for size in sizes):
            return self._constant([int(size) for size in sizes])
        parts = []
        batch: ir.Value | None = None
        for size in sizes:
            if isinstance(size, int):
                parts.append(self._constant([size]))
                continue
            factor = divide(size, sample) if sample is not None else None
            if not isinstance(factor, int):
                raise ExportError(
                    f"a static profile cannot be expanded to the size {size}",
                    where=self.prefix.removeprefix("baked/"),
                    expected=f"a multiple of the number of inputs, {sample}",
                    found=str(size),
                    remedy="export without a profile: live.onnx and bound.onnx do not need this size",
                )
            batch = batch if batch is not None else self._batch()
            parts.append(batch if factor == 1 else self._node("Mul", [batch, self._constant([factor])], None))
        return parts[0] if len(parts) == 1 else self._node("Concat", parts, None, axis=0)

    def _batch(self) -> ir.Value:
        source = next(v for v in self.model.graph.inputs if v.shape and str(v.shape[0]) == BATCH)
        return self._node("Shape", [source], None, start=0, end=1)

    def _constant(self, values: list[int]) -> ir.Value:
        self.count += 1
        value = ir.Value(
            name=f"{self.prefix}/constant_{self.count}",
            type=ir.TensorType(ir.DataType.INT64),
            shape=ir.Shape([len(values)]),
        )
        value.const_value = ir.tensor(np.asarray(values, dtype=np.int64), name=value.name)
        self.model.graph.register_initializer(value)
        return value

    def _node(self, op: str, inputs: Sequence[ir.Value], like: ir.Value | None, **attributes: int) -> ir.Value:
        self.count += 1
        kind = like.type if like is not None else ir.TensorType(ir.DataType.INT64)
        result = ir.Value(name=f"{self.prefix}/{op.lower()}_{self.count}", type=kind)
        node = ir.node(op, list(inputs), attributes=attributes or None, outputs=[result])
        node.name = result.name
        self.model.graph.insert_before(self.barrier, node)
        return result


def size_product(sizes: Sequence[Size]) -> Size:
    product: Size = 1
    for size in sizes:
        product = product * size
    return product


def expanded_all(
    profile: dict[str, Tensor], coefficients: Sequence[Coefficient], sample: Size | None, batch: int | None
) -> list[Tensor]:
    """Every profile at the full shape of its coefficient, in the order of `coefficients`."""
    with torch.no_grad():
        return [expanded(profile[c.key], c, sample, batch) for c in coefficients]

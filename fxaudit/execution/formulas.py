"""FLOPs of ONNX nodes, by one formula for each op over the shapes that its operands had when it ran."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx

from fxaudit.execution.flops import CONVOLUTION, PRODUCT, RECURRENT, attention_flops, einsum_flops

Shape = Sequence[int]


def node_flops(op: str, inputs: Sequence[Shape], outputs: Sequence[Shape], node: onnx.NodeProto) -> int | None:
    """The FLOPs of one execution of a node, from its profiled shapes; None when there is no formula for it."""
    if op not in _FORMULAS or len(inputs) != sum(bool(name) for name in node.input):
        return None
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return _FORMULAS[op][1](inputs, outputs, attributes)


def _matmul(inputs: Sequence[Shape], outputs: Sequence[Shape], _: Mapping[str, Any]) -> int:
    return 2 * math.prod(outputs[0]) * inputs[0][-1]


def _fused_matmul(inputs: Sequence[Shape], outputs: Sequence[Shape], attributes: Mapping[str, Any]) -> int:
    return 2 * math.prod(outputs[0]) * inputs[0][-2 if attributes.get("transA") else -1]


def _gemm(inputs: Sequence[Shape], outputs: Sequence[Shape], attributes: Mapping[str, Any]) -> int:
    return 2 * math.prod(outputs[0]) * inputs[0][0 if attributes.get("transA") else 1]


def _conv(inputs: Sequence[Shape], outputs: Sequence[Shape], _: Mapping[str, Any]) -> int:
    return 2 * math.prod(outputs[0]) * math.prod(inputs[1][1:])


def _conv_transpose(inputs: Sequence[Shape], _: Sequence[Shape], __: Mapping[str, Any]) -> int:
    return 2 * math.prod(inputs[0]) * math.prod(inputs[1][1:])


def _einsum(inputs: Sequence[Shape], _: Sequence[Shape], attributes: Mapping[str, Any]) -> int | None:
    return einsum_flops(attributes["equation"].decode(), inputs)


def _recurrent(inputs: Sequence[Shape], _: Sequence[Shape], __: Mapping[str, Any]) -> int:
    data, weight, recurrence = inputs[:3]
    directions, gates, features = weight
    return 2 * data[0] * data[1] * directions * gates * (features + recurrence[2])


def _attention(inputs: Sequence[Shape], _: Sequence[Shape], __: Mapping[str, Any]) -> int | None:
    # Packed heads and key-value caches have other formulas.
    if len(inputs[0]) != 4 or len(inputs) > 4:
        return None
    return attention_flops(*inputs[:3])


Formula = Callable[[Sequence[Shape], Sequence[Shape], Mapping[str, Any]], int | None]
_FORMULAS: dict[str, tuple[str, Formula]] = {
    "MatMul": (PRODUCT, _matmul),
    "Gemm": (PRODUCT, _gemm),
    "Einsum": (PRODUCT, _einsum),
    "Attention": (PRODUCT, _attention),
    "Conv": (CONVOLUTION, _conv),
    "ConvTranspose": (CONVOLUTION, _conv_transpose),
    **dict.fromkeys(["LSTM", "GRU", "RNN"], (RECURRENT, _recurrent)),
}
# What onnxruntime's own optimiser puts in the place of the ops above.
_FUSED: dict[str, Formula] = {
    "FusedMatMul": _fused_matmul,
    "FusedGemm": _gemm,
    "FusedConv": _conv,
}
FUSED_FREE_OPS = frozenset(
    [
        *("BiasGelu", "FastGelu", "BiasSoftmax", "BiasAdd", "SkipSimplifiedLayerNormalization", "ReorderInput"),
        *("ReorderOutput", "MemcpyToHost", "MemcpyFromHost", "NhwcMaxPool", "QuickGelu", "BiasSplitGelu"),
    ]
)


def fused_flops(op: str, inputs: Sequence[Shape], outputs: Sequence[Shape], node: onnx.NodeProto) -> int | None:
    """As `node_flops`, also for ops that onnxruntime's optimiser makes; padding that it adds is counted."""
    if op not in _FUSED:
        return node_flops(op, inputs, outputs, node)
    if not inputs or not all(inputs[:2]) or len(inputs) < 2:
        return None
    return _FUSED[op](inputs, outputs, {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute})


CLASSES = {op: kind for op, (kind, _) in _FORMULAS.items()}

# Ops that multiply no matrices: elementwise, reductions, data movement.
FREE_OPS = frozenset(
    [
        *(
            "Abs",
            "Acos",
            "Acosh",
            "Add",
            "And",
            "Asin",
            "Asinh",
            "Atan",
            "Atanh",
            "BitShift",
            "BitwiseAnd",
            "BitwiseNot",
        ),
        *("BitwiseOr", "BitwiseXor", "Cast", "CastLike", "Ceil", "Celu", "Clip", "Cos", "Cosh", "Div", "Elu", "Equal"),
        *("Erf", "Exp", "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "IsInf", "IsNaN"),
        *("LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or"),
        *("PRelu", "Pow", "QuickGelu", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin"),
        *("Sinh", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tan", "Tanh", "ThresholdedRelu", "Where"),
        *(
            "Xor",
            "Softmax",
            "LogSoftmax",
            "Hardmax",
            "CumSum",
            "CumProd",
            "ArgMax",
            "ArgMin",
            "TopK",
            "Unique",
            "NonZero",
        ),
        *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin"),
        *("ReduceProd", "ReduceSum", "ReduceSumSquare", "BatchNormalization", "GroupNormalization"),
        *("InstanceNormalization", "LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization"),
        *("SkipLayerNormalization", "LpNormalization", "MeanVarianceNormalization", "LRN", "AveragePool", "MaxPool"),
        *(
            "GlobalAveragePool",
            "GlobalMaxPool",
            "LpPool",
            "GlobalLpPool",
            "MaxUnpool",
            "Resize",
            "Upsample",
            "GridSample",
        ),
        *("Concat", "Constant", "ConstantOfShape", "DepthToSpace", "Dropout", "Expand", "EyeLike", "Flatten", "Gather"),
        *("GatherElements", "GatherND", "Identity", "OneHot", "Pad", "Range", "Reshape", "ReverseSequence", "Scatter"),
        *("ScatterElements", "ScatterND", "Shape", "Size", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile"),
        *("Transpose", "Trilu", "Unsqueeze", "Compress", "Col2Im", "CenterCropPad", "RotaryEmbedding"),
        *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"),
        *("SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength"),
        *("SplitToSequence", "ConcatFromSequence", "Optional", "OptionalGetElement", "OptionalHasElement"),
    ]
)

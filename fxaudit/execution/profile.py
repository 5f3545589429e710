"""Counting runs: what onnxruntime executed for each input, read from its own profile.

The COUNT role runs a model as it stands: no graph optimisation, weights not prepacked (a prepacked weight vanishes from
the profiled shapes), one thread. Times in such a profile mean nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from fxaudit.errors import ExportError, SelfCheckError
from fxaudit.execution.flops import CONVOLUTION, PRODUCT, RECURRENT, attention_flops, einsum_flops
from fxaudit.execution.proof import all_nodes, prove

Feed = Mapping[str, np.ndarray]
Shape = list[int]

CPU = "CPUExecutionProvider"
# onnxruntime stops recording at a million events, with no more than a line on stderr.
_MAX_EVENTS = 800_000
_CONTROL_FLOW = frozenset(["If", "Loop", "Scan"])
_EVENT_SUFFIX = "_kernel_time"


@dataclass(frozen=True, slots=True)
class CountedRun:
    """What one run executed.

    `flops` are those of nodes that input data reaches, `setup` of all others; `elementwise` is the number of elements
    that nodes without FLOPs wrote. Ops with neither a formula nor a place among those that cost nothing are in
    `unknown`. The two sequences are digests of the executed nodes, without and with the shapes they had.
    """

    flops: int
    setup: int
    by_class: Mapping[str, int]
    elementwise: int
    nodes: int
    ops: Mapping[str, int]
    unknown: tuple[str, ...]
    op_sequence: str
    shape_sequence: str


@dataclass(frozen=True, slots=True)
class CountedRuns:
    """The runs of one model, one for each feed, and its outputs by name."""

    runs: tuple[CountedRun, ...]
    outputs: tuple[dict[str, np.ndarray], ...]


def count_runs(
    path: Path, feeds: Sequence[Feed], tainted: Collection[str] | None = None, provider: str = CPU
) -> CountedRuns:
    """What `path` executes for each of `feeds`; inputs not named in `tainted` (default: all) count as constants.

    Raises:
        ExportError: onnxruntime cannot load or run the model, or runs it on another provider than `provider`.
        SelfCheckError: the profile is not a complete record of the runs.
    """
    model = onnx.load(str(path), load_external_data=False)
    nodes = {node.name: node for node in all_nodes(model.graph)}
    dependent = prove(model, tainted).dependent
    runs: list[CountedRun] = []
    outputs: list[dict[str, np.ndarray]] = []
    # A loop may run a node many times, so this is a guess; the number of recorded runs is checked below.
    chunk = max(1, _MAX_EVENTS // max(1, len(nodes)))
    for start in range(0, len(feeds), chunk):
        events, results = _profiled(path, feeds[start : start + chunk], provider)
        outputs.extend(results)
        runs.extend(_counted(events, nodes, dependent) for events in split_runs(events, len(results), path))
    return CountedRuns(tuple(runs), tuple(outputs))


def _profiled(path: Path, feeds: Sequence[Feed], provider: str) -> tuple[list[dict[str, Any]], list[Any]]:
    with tempfile.TemporaryDirectory(prefix="fxaudit-profile-") as directory:
        session = open_session(path, count_options(directory), provider)
        names = [output.name for output in session.get_outputs()]
        results = []
        for feed in feeds:
            try:
                results.append(dict(zip(names, session.run(names, dict(feed)), strict=True)))
            except Exception as error:
                raise ExportError(
                    f"onnxruntime cannot run {path.name}",
                    where=str(path),
                    expected="outputs for the inputs that the torch model takes",
                    found=_first_line(error),
                    remedy="report this model: the export and the torch model disagree about their inputs",
                ) from error
        return json.loads(Path(session.end_profiling()).read_text(encoding="utf-8")), results


def count_options(directory: str) -> onnxruntime.SessionOptions:
    """The options of the COUNT role; the profile is written to `directory`."""
    options = onnxruntime.SessionOptions()
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    # Errors are raised; what is logged besides would only repeat them.
    options.log_severity_level = 4
    options.enable_profiling = True
    options.profile_file_prefix = str(Path(directory) / "run")
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def open_session(path: Path, options: onnxruntime.SessionOptions, provider: str = CPU) -> onnxruntime.InferenceSession:
    """A session of `path` on `provider`, with the CPU for what `provider` does not support.

    Raises:
        ExportError: the model cannot be loaded, or onnxruntime fell back to another provider without saying so.
    """
    requested = [provider] if provider == CPU else [provider, CPU]
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=requested)
    except Exception as error:
        raise ExportError(
            f"onnxruntime cannot load {path.name}",
            where=str(path),
            expected=f"a model that onnxruntime {onnxruntime.__version__} can run",
            found=_first_line(error),
            remedy="float32 models run everywhere; other dtypes lack CPU kernels for some ops",
        ) from error
    if missing := [name for name in requested if name not in session.get_providers()]:
        raise ExportError(
            f"onnxruntime does not run {path.name} on {missing[0]}",
            expected=", ".join(requested),
            found=", ".join(session.get_providers()),
            remedy="check the driver and that exactly one of onnxruntime and onnxruntime-gpu is installed",
        )
    return session


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def split_runs(events: Sequence[dict[str, Any]], count: int, path: Path) -> list[list[dict[str, Any]]]:
    """The node events of each run, by the time window of the run.

    Raises:
        SelfCheckError: there are not `count` runs, or a node event lies in none of them.
    """
    windows = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") == "model_run")
    nodes = [e for e in events if e.get("cat") == "Node" and e["name"].endswith(_EVENT_SUFFIX)]
    nodes.sort(key=lambda e: (e["ts"], -e["dur"]))
    split = [[e for e in nodes if low <= e["ts"] <= high] for low, high in windows]
    if len(windows) != count or sum(map(len, split)) != len(nodes):
        raise SelfCheckError(
            f"the profile of {path.name} is not a complete record",
            where=str(path),
            expected=f"{count} runs and each node event in one of them",
            found=f"{len(windows)} runs; {sum(map(len, split))} of {len(nodes)} events in them",
            remedy="report this model",
        )
    return split


def _counted(
    events: Sequence[dict[str, Any]], nodes: Mapping[str, onnx.NodeProto], dependent: Collection[str]
) -> CountedRun:
    by_class: Counter[str] = Counter()
    unknown: set[str] = set()
    setup = elementwise = 0
    plain, shaped = hashlib.sha256(), hashlib.sha256()
    for event in events:
        arguments = event["args"]
        op, name = arguments["op_name"], event["name"].removesuffix(_EVENT_SUFFIX)
        inputs, outputs = _shapes(arguments, "input_type_shape"), _shapes(arguments, "output_type_shape")
        plain.update(f"{name} {op}\n".encode())
        shaped.update(f"{name} {op} {inputs} {outputs}\n".encode())
        if op in _CONTROL_FLOW:
            continue
        if op in FREE_OPS:
            elementwise += sum(map(math.prod, outputs))
            continue
        node = nodes.get(name)
        flops = node_flops(op, inputs, outputs, node) if node is not None else None
        if flops is None:
            unknown.add(op)
        elif name in dependent:
            by_class[_CLASSES[op]] += flops
        else:
            setup += flops
    return CountedRun(
        flops=sum(by_class.values()),
        setup=setup,
        by_class={name: flops for name, flops in by_class.items() if flops},
        elementwise=elementwise,
        nodes=len(events),
        ops=dict(sorted(Counter(e["args"]["op_name"] for e in events).items())),
        unknown=tuple(sorted(unknown)),
        op_sequence=plain.hexdigest(),
        shape_sequence=shaped.hexdigest(),
    )


def _shapes(arguments: Mapping[str, Any], key: str) -> list[Shape]:
    return [next(iter(entry.values())) for entry in arguments.get(key, [])]


# --- formulas -------------------------------------------------------------------------------------------------------


def node_flops(op: str, inputs: Sequence[Shape], outputs: Sequence[Shape], node: onnx.NodeProto) -> int | None:
    """The FLOPs of one execution of a node, from its profiled shapes; None when there is no formula for it."""
    if op not in _FORMULAS or len(inputs) != sum(bool(name) for name in node.input):
        return None
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return _FORMULAS[op][1](inputs, outputs, attributes)


def _matmul(inputs: Sequence[Shape], outputs: Sequence[Shape], _: Mapping[str, Any]) -> int:
    return 2 * math.prod(outputs[0]) * inputs[0][-1]


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
_CLASSES = {op: kind for op, (kind, _) in _FORMULAS.items()}

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

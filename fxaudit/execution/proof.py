"""Proof from the graph alone that an ONNX model does the same work for every input of one size.

Two taints travel through the graph: the *values* of a tensor may depend on the data of an input, and its *shape* may.
Work is static when no shape is tainted and no branch or loop is decided by tainted values. What happens inside one
kernel (sorting, denormals, sparsity) is outside the proof.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from fxaudit.ops import line_of_trace

# Inputs, by position, whose values decide the shape of the output.
_SHAPE_OPERANDS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(["Reshape", "Expand", "Tile", "TopK", "Split", "OneHot", "Squeeze", "Unsqueeze"], (1,)),
    **dict.fromkeys(["Compress", "CenterCropPad", "AffineGrid", "SequenceAt", "SplitToSequence", "Upsample"], (1,)),
    **dict.fromkeys(["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2"], (1,)),
    **dict.fromkeys(["ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare", "SequenceErase"], (1,)),
    **dict.fromkeys(["ConstantOfShape", "NonZero", "Unique", "BlackmanWindow", "HannWindow", "HammingWindow"], (0,)),
    **dict.fromkeys(["StringSplit", "ImageDecoder", "TfIdfVectorizer"], (0,)),
    "Slice": (1, 2, 3, 4),
    "Pad": (1, 3),
    "Resize": (1, 2, 3),
    "Range": (0, 1, 2),
    "NonMaxSuppression": (0, 1, 2, 3, 4),
    "MaxUnpool": (2,),
    "STFT": (1, 3),
    "DFT": (1, 2),
    "MelWeightMatrix": (0, 1),
    "Col2Im": (1, 2),
    "SequenceInsert": (2,),
}
_RANDOM = frozenset(
    ["RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"]
)
_READS_SHAPE = frozenset(["Shape", "Size"])
# Values independent of the operand's values, with the operand's shape.
_KEEPS_SHAPE_ONLY = frozenset(["EyeLike", "RandomNormalLike", "RandomUniformLike"])
_STANDARD = ("", "ai.onnx")


@dataclass(frozen=True, slots=True)
class Root:
    """A node at which work begins to depend on data; `source` is the user's line that made it, where it is known."""

    node: str
    op: str
    reason: str
    module: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Proof:
    """Whether the work of a model is the same for all data.

    `random` names nodes that draw random numbers; `opaque` names ops that tainted values reach and about which nothing
    is known; `dependent` holds the nodes whose work or values depend on tainted data.
    """

    static: bool
    roots: tuple[Root, ...]
    random: tuple[str, ...]
    opaque: tuple[str, ...]
    dependent: frozenset[str]


@dataclass(slots=True)
class _Taint:
    """The tainted names of one graph scope."""

    values: set[str] = field(default_factory=set)
    shapes: set[str] = field(default_factory=set)

    def copy(self) -> _Taint:
        return _Taint(set(self.values), set(self.shapes))

    def of(self, name: str) -> tuple[bool, bool]:
        return name in self.values, name in self.shapes

    def mark(self, name: str, values: bool, shape: bool) -> bool:
        """Add taint to a name; whether that was new."""
        before = len(self.values) + len(self.shapes)
        if values and name:
            self.values.add(name)
        if shape and name:
            self.shapes.add(name)
        return len(self.values) + len(self.shapes) > before


def prove(model: onnx.ModelProto | str | Path, tainted: Collection[str] | None = None) -> Proof:
    """The proof for `model` when the graph inputs named `tainted` (all of them by default) carry data.

    With only the model's own inputs tainted, the proof for a bound graph reads: static given its coefficients.
    """
    if not isinstance(model, onnx.ModelProto):
        model = onnx.load(str(model), load_external_data=False)
    walk = _Walk({(f.domain, f.name): f for f in model.functions})
    constants = {initializer.name for initializer in model.graph.initializer}
    taint = _Taint()
    for value in model.graph.input:
        if value.name not in constants and (tainted is None or value.name in tainted):
            taint.values.add(value.name)
    walk.nodes(model.graph.node, taint, controlled=False)
    return Proof(
        static=not walk.roots and not walk.opaque,
        roots=tuple(walk.roots.values()),
        random=tuple(walk.random),
        opaque=tuple(walk.opaque),
        dependent=frozenset(walk.dependent),
    )


def module_scope(node: onnx.NodeProto) -> str:
    """The module path that the exporter recorded for a node; the empty string for the root or when it is lost."""
    return scope_path(_metadata(node, "name_scopes"))


def source_line(node: onnx.NodeProto) -> str:
    """The user's line that made a node, as ``file:line   code``; the empty string where the exporter lost it."""
    return line_of_trace(_metadata(node, "stack_trace"))


def _metadata(node: onnx.NodeProto, key: str) -> str:
    return next((p.value for p in node.metadata_props if p.key == f"pkg.torch.onnx.{key}"), "")


def scope_path(text: str) -> str:
    """The innermost module path in the exporter's `name_scopes`: module paths, outermost first, then the fx node."""
    try:
        scopes = ast.literal_eval(text) if text else []
    except (SyntaxError, ValueError):
        return ""
    modules = [scope for scope in scopes[:-1] if isinstance(scope, str) and not scope.startswith("_empty_nn_module")]
    return modules[-1] if modules else ""


class _Walk:
    """One pass over a model; findings are kept in order, by node."""

    def __init__(self, functions: Mapping[tuple[str, str], onnx.FunctionProto]) -> None:
        self.functions = functions
        self.roots: dict[str, Root] = {}
        self.random: dict[str, None] = {}
        self.opaque: dict[str, None] = {}
        self.dependent: set[str] = set()

    def nodes(self, nodes: Iterable[onnx.NodeProto], taint: _Taint, controlled: bool) -> None:
        for node in nodes:
            if node.domain in _STANDARD and node.op_type == "If":
                self._branch(node, taint, controlled)
            elif node.domain in _STANDARD and node.op_type in ("Loop", "Scan"):
                self._loop(node, taint, controlled)
            elif (node.domain, node.op_type) in self.functions:
                self._function(node, taint, controlled)
            else:
                self._plain(node, taint, controlled)
            if controlled or any(name in taint.values for name in node.output):
                self.dependent.add(_label(node))

    def _root(self, node: onnx.NodeProto, reason: str) -> None:
        found = Root(_label(node), node.op_type, reason, module_scope(node), source_line(node))
        self.roots.setdefault(_label(node), found)

    def _plain(self, node: onnx.NodeProto, taint: _Taint, controlled: bool) -> None:
        operands = [taint.of(name) for name in node.input]
        values, shape = any(v for v, _ in operands), any(s for _, s in operands)
        if node.domain not in _STANDARD or not onnx.defs.has(node.op_type):
            if values or shape or controlled:
                self.opaque[f"{_label(node)} ({node.domain}::{node.op_type})"] = None
            shape = values = values or shape
        elif any(operands[i][0] for i in _SHAPE_OPERANDS.get(node.op_type, ()) if i < len(operands)):
            self._root(node, "the shape of its output is computed from input data")
            shape = True
        if node.op_type in _READS_SHAPE:
            values, shape = shape, False
        elif node.op_type in _KEEPS_SHAPE_ONLY:
            values = shape
        elif node.op_type == "CastLike":
            # Of its second operand it reads the type.
            values, shape = operands[0]
        if node.op_type in _RANDOM:
            self.random[_label(node)] = None
            values = True
        for name in node.output:
            taint.mark(name, values, shape)

    def _function(self, node: onnx.NodeProto, taint: _Taint, controlled: bool) -> None:
        function = self.functions[node.domain, node.op_type]
        inner = _Taint()
        for own, given in zip(function.input, node.input, strict=False):
            inner.mark(own, *taint.of(given))
        self.nodes(function.node, inner, controlled)
        for own, given in zip(function.output, node.output, strict=False):
            taint.mark(given, *inner.of(own))

    def _branch(self, node: onnx.NodeProto, taint: _Taint, controlled: bool) -> None:
        decided = node.input[0] in taint.values
        branches = [graph for _, graph in subgraphs(node)]
        if decided:
            self._root(node, "which branch runs depends on input data")
        for graph in branches:
            inner = taint.copy()
            self.nodes(graph.node, inner, controlled or decided)
            for own, given in zip(graph.output, node.output, strict=True):
                values, shape = inner.of(own.name)
                taint.mark(given, values or decided, shape)
        if decided and len(branches) == 2:
            for first, second, given in zip(branches[0].output, branches[1].output, node.output, strict=True):
                if _declared(first) is None or _declared(first) != _declared(second):
                    taint.mark(given, True, True)

    def _loop(self, node: onnx.NodeProto, taint: _Taint, controlled: bool) -> None:
        """A body to its fixpoint: what is carried from one step to the next may become tainted step by step."""
        body = subgraphs(node)[0][1]
        is_loop = node.op_type == "Loop"
        inner = taint.copy()
        # A Loop gives its body a step number, the same whatever the data, where its own first input is the trip count.
        skipped = 1 if is_loop else 0
        for source, own in zip(list(node.input)[skipped:], list(body.input)[skipped:], strict=False):
            inner.mark(own.name, *taint.of(source))
        scanned = next((a.i for a in node.attribute if a.name == "num_scan_inputs"), 0)
        states = len(node.input) - 2 if is_loop else len(node.input) - scanned
        first_in, first_out = (2, 1) if is_loop else (0, 0)
        trip = is_loop and any(name in taint.values for name in node.input[:2])
        changed = True
        while changed:
            changed = False
            decided = trip or (is_loop and body.output[0].name in inner.values)
            self.nodes(body.node, inner, controlled or decided)
            for i in range(states):
                values, shape = inner.of(body.output[first_out + i].name)
                changed |= inner.mark(body.input[first_in + i].name, values or decided, shape)
            if is_loop:
                changed |= not decided and body.output[0].name in inner.values
        if decided:
            self._root(node, "the number of steps depends on input data")
        for i, name in enumerate(node.output):
            values, shape = inner.of(body.output[first_out + i].name)
            # A scanned output has one row for each step.
            taint.mark(name, values or decided, shape or (decided and i >= states))


def _label(node: onnx.NodeProto) -> str:
    return node.name or f"{node.op_type}:{next((name for name in node.output if name), '')}"


def subgraphs(node: onnx.NodeProto) -> list[tuple[str, onnx.GraphProto]]:
    """The bodies of a control-flow node with the names of their attributes, an ``If``'s then branch first."""
    found = [(a.name, a.g) for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    return sorted(found, key=lambda body: body[0] != "then_branch")


def modules_of(graph: onnx.GraphProto, inherited: str = "") -> dict[str, str]:
    """The module path of each node by its name; a node inside a body without one of its own has that of the outer
    node."""
    found: dict[str, str] = {}
    for node in graph.node:
        found[node.name] = module = module_scope(node) or inherited
        for _, body in subgraphs(node):
            found |= modules_of(body, module)
    return found


def _declared(value: onnx.ValueInfoProto) -> Sequence[int | str] | None:
    """The declared dimensions of a value; None when one of them is unknown."""
    kind = value.type.tensor_type
    if not kind.HasField("shape"):
        return None
    dimensions = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in kind.shape.dim]
    return None if "" in dimensions else dimensions


def all_nodes(graph: onnx.GraphProto) -> Iterable[onnx.NodeProto]:
    """All nodes of a graph and of its subgraphs."""
    for node in graph.node:
        yield node
        for _, body in subgraphs(node):
            yield from all_nodes(body)

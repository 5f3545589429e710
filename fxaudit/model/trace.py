"""A `Subject` becomes a `TracedModel`: one flat graph of functional, undecomposed ATen that computes what eager
computes.

Front end: `torch.export.export(strict=False)` after one eager call, then `run_decompositions({})`, which makes
in-place ops functional and leaves `linear`, `conv2d`, `softplus` and `einsum` whole. Full
core-ATen decomposition would destroy what patterns look for.
"""

from __future__ import annotations

import dataclasses
import operator
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from fxaudit import ops
from fxaudit.axes import Size, plain_size
from fxaudit.errors import DataError, TraceError
from fxaudit.model.compare import Comparisons, compare
from fxaudit.model.frames import user_frame
from fxaudit.model.inputs import Arguments, batch_of, cloned, resampled, tensors_of
from fxaudit.model.load import Subject
from fxaudit.model.settings import exact_numerics, quiet_torch, traceable
from fxaudit.model.state import remember, set_back, set_back_buffers
from fxaudit.provenance import json_digest, state_fingerprint, tensor_digest

# An inexact trace is accepted, and said to be inexact, up to this error relative to the largest output.
INEXACT_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a model or its trace that a reader of the numbers must know."""

    kind: str
    text: str
    where: str = ""


class Fidelity(Comparisons):
    """How the trace differs from the eager model, over all comparisons."""


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A model as one flat graph: placeholders for its input leaves, a tuple of its output leaves.

    `sample` is the size of the input axis: a sympy symbol when any number of inputs may be passed, otherwise the
    number that the graph was specialised to, or None when the inputs share no first axis. Parameters are the model's
    own tensors, not copies; buffers that the graph writes to are copies, and `initial_state` holds their values after
    warm-up.
    """

    subject: Subject
    graph_module: GraphModule
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    sample: Size | None
    settings: dict[str, str]
    guards: Callable[..., object] | None
    initial_state: dict[str, Tensor]
    fidelity: Fidelity
    findings: tuple[Finding, ...]
    fingerprint: str
    seconds: float
    frontend: str = "torch.export"

    @property
    def graph(self) -> Graph:
        return self.graph_module.graph

    @property
    def sample_count(self) -> int | None:
        """The number of inputs in the example."""
        return batch_of(self.subject.arguments)

    @property
    def is_batch_dynamic(self) -> bool:
        return self.sample is not None and not isinstance(self.sample, int)

    def graph_digest(self) -> str:
        """SHA-256 of the graph: ops, edges, arguments, parameter names, and the values of tensors that are neither
        parameters nor buffers; free of symbol names."""
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        rows = [
            [node.op, str(node.target), str(torch.fx.map_arg((node.args, node.kwargs), lambda n: f"%{order[n]}"))]
            for node in self.graph.nodes
        ]
        return json_digest([rows, tensor_digest(self._plain_tensors())])

    def _plain_tensors(self) -> list[Tensor]:
        """Constants of the graph: tensors that the model holds as plain attributes, or that tracing lifted."""
        module = self.subject.module
        stateful = {*dict(module.named_parameters()), *dict(module.named_buffers())}
        names = sorted({str(n.target) for n in self.graph.nodes if n.op == "get_attr"} - stateful)
        values = [operator.attrgetter(name)(self.graph_module) for name in names]
        return [value for value in values if isinstance(value, Tensor)]

    def flatten(self, arguments: Arguments) -> list[Any]:
        """The input leaves of `arguments`, in the order of the graph's placeholders.

        Raises:
            DataError: the structure differs from the example inputs', or a guard of the trace does not hold.
        """
        args, kwargs = arguments
        names = list(self.in_spec.child(1).context)
        if set(kwargs) == set(names):
            kwargs = {name: kwargs[name] for name in names}
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if spec != self.in_spec:
            raise DataError(
                "the inputs have another structure than the inputs that the model was traced with",
                expected=f"{self.in_spec}",
                found=f"{spec}",
                remedy="pass the same arguments, positional ones as positional, keyword ones by keyword",
            )
        self.check(leaves)
        return leaves

    def check(self, leaves: list[Any]) -> None:
        """Raise unless the trace covers these input leaves: their shapes, dtypes, and the guards of the trace.

        Raises:
            DataError: with the input that does not fit, or the assumption that it breaks.
        """
        for node, leaf in zip(self.placeholders(), leaves, strict=True):
            expected = ops.sizes(node)
            if expected is None or not isinstance(leaf, Tensor):
                continue
            if leaf.dtype != ops.dtype(node):
                raise DataError(
                    f"input `{node.name}` has a dtype that the trace does not cover",
                    expected=str(ops.dtype(node)),
                    found=str(leaf.dtype),
                    remedy="convert the input, or trace the model with an example of this dtype",
                )
            fixed = [e if isinstance(e, int) else None for e in expected]
            if len(fixed) != leaf.ndim or any(e is not None and e != s for e, s in zip(fixed, leaf.shape, strict=True)):
                raise DataError(
                    f"input `{node.name}` has a shape that the trace does not cover",
                    expected=f"[{', '.join(map(str, expected))}]",
                    found=f"[{', '.join(map(str, leaf.shape))}]",
                    remedy="trace the model with an example of this shape",
                )
        if self.guards is not None:
            try:
                self.guards(*leaves)
            except AssertionError as error:
                raise DataError(
                    "the inputs break an assumption that the trace was made under",
                    expected="inputs for which the model takes the traced path",
                    found=str(error),
                    remedy="trace the model with an example like these inputs",
                ) from error

    def unflatten(self, leaves: list[Any] | tuple[Any, ...]) -> Any:
        """The model's own output structure around output leaves."""
        return pytree.tree_unflatten(list(leaves), self.out_spec)

    def placeholders(self) -> list[Node]:
        """The nodes of the input leaves, in order."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    def output_leaves(self) -> list[Any]:
        """The output leaves in order: nodes, and constants such as None."""
        (node,) = (node for node in self.graph.nodes if node.op == "output")
        return list(node.args[0])


def trace(subject: Subject, *, seed: int = 0) -> TracedModel:
    """The traced form of `subject`, compared with the eager model on two inputs and, where it can be, two batch sizes.

    Raises:
        TraceError: the model cannot be traced, or the trace computes something else.
    """
    started = time.perf_counter()
    before = state_fingerprint(subject.module)
    with exact_numerics(), traceable(subject.module) as settings:
        state = remember(subject.module)
        with quiet_torch():
            _run_eager(subject, subject.arguments)
            program, how = _export(subject)
            program = program.run_decompositions({})
        traced = _flat(subject, program, settings)
        fidelity = _fidelity(traced, seed)
        changed = set_back(subject.module, state)
    findings = [*how, *_graph_findings(traced, how), *_fidelity_findings(fidelity, traced)]
    if changed:
        text = f"a forward call changes {', '.join(changed[:4])}{' and more' if len(changed) > 4 else ''}; set back"
        findings.append(Finding("mutated-attribute", text))
    if state_fingerprint(subject.module) != before:
        findings.append(Finding("mutates-parameters", "a forward call changes the model's own parameters"))
    return dataclasses.replace(
        traced,
        fidelity=fidelity,
        findings=tuple(findings),
        fingerprint=before,
        seconds=time.perf_counter() - started,
    )


# --- export ---------------------------------------------------------------------------------------------------------


def _run_eager(subject: Subject, arguments: Arguments) -> Any:
    args, kwargs = cloned(arguments)
    try:
        return subject.module(*args, **kwargs)
    except Exception as error:
        raise TraceError(
            f"{subject.source} fails on its example inputs before any tracing",
            where=user_frame(error),
            found=f"{type(error).__name__}: {_first_line(error)}",
            expected="a model that runs on its example inputs",
            remedy="check the inputs: " + _describe(arguments),
        ) from error


def _export(subject: Subject) -> tuple[ExportedProgram, list[Finding]]:
    """The exported program with a dynamic input axis, or with fixed sizes where the model allows no other.

    First with one symbol that all inputs share: two towers that meet late, or never, then still have one input axis.
    Where the model relates their sizes in another way that is refused, and each input gets a symbol of its own.
    """
    failure: Exception | None = None
    if batch_of(subject.arguments) is not None:
        for dimension in (Dim("batch"), Dim.AUTO):
            args, kwargs = cloned(subject.arguments)
            try:
                shapes = _dynamic_shapes(subject.module, args, kwargs, dimension)
                return torch.export.export(subject.module, args, kwargs, dynamic_shapes=shapes, strict=False), []
            except Exception as error:
                failure = error
    try:
        args, kwargs = cloned(subject.arguments)
        program = torch.export.export(subject.module, args, kwargs, strict=False)
    except Exception as error:
        raise _untraceable(subject, error) from error
    text = (
        "the inputs share no first axis"
        if failure is None
        else f"tracing with any batch failed: {_first_line(failure)}"
    )
    return program, [Finding("static-batch", f"the graph takes only the traced batch size; {text}")]


def _dynamic_shapes(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dimension: Any) -> Any:
    """The `dynamic_shapes` of torch.export: positional arguments by the names of the signature, then keyword ones."""
    positional, keyword = pytree.tree_map(
        lambda leaf: {0: dimension} if isinstance(leaf, Tensor) and leaf.ndim else None, (args, kwargs)
    )
    names = _parameter_names(module, len(args))
    # A `*args` signature names no argument; then there is nothing but the position to go by.
    return {**dict(zip(names, positional, strict=True)), **keyword} if len(names) == len(args) else positional


def _parameter_names(module: nn.Module, count: int) -> list[str]:
    import inspect

    parameters = inspect.signature(module.forward).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [p.name for p in positional[:count]]


_REASONS = {
    "GuardOnDataDependentSymNode": "Python control flow depends on the value of a tensor",
    "DynamicOutputShapeException": "an op has an output whose shape depends on the values of its input",
    "DataDependentOutputException": "a tensor is turned into a Python number",
    "UnsupportedOperatorException": "an op has no description of its output shapes",
}


def _untraceable(subject: Subject, error: Exception) -> TraceError:
    kind = next((c.__name__ for c in type(error).__mro__ if c.__name__ in _REASONS), "")
    reason = _REASONS.get(kind, f"{type(error).__name__}: {_first_line(error)}")
    return TraceError(
        f"{subject.source} cannot be traced: {reason}",
        where=user_frame(error),
        expected="a forward pass that is the same sequence of tensor ops for every input",
        found=_first_line(error),
        remedy=(
            "write the branch with torch.where or torch.cond, or name a part of the model that has no such branch"
            if kind
            else "run torch.export.export(model, args, strict=False) on the model by itself to see the whole message"
        ),
        reason=kind,
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _describe(arguments: Arguments) -> str:
    return ", ".join(f"{tensor.dtype} {list(tensor.shape)}".replace("torch.", "") for tensor in tensors_of(arguments))


# --- one flat graph -------------------------------------------------------------------------------------------------


def _flat(subject: Subject, program: ExportedProgram, settings: dict[str, str]) -> TracedModel:
    """The exported program as a flat graph over the model's own parameters, guards taken out and kept."""
    unlifted = program.module()
    guards = None
    for node in list(unlifted.graph.nodes):
        if node.op == "call_module" and node.target == "_guards_fn":
            guards = unlifted.get_submodule("_guards_fn").forward
            unlifted.graph.erase_node(node)
        elif node.op == "call_function" and "_assert_tensor_metadata" in str(node.target):
            unlifted.graph.erase_node(node)
    graph = Graph()
    outputs = graph.graph_copy(unlifted.graph, {})
    outputs = tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)
    graph.output(outputs)
    graph.eliminate_dead_code()
    module = GraphModule(unlifted, graph, class_name="Traced")
    module.eval()
    state = _own_written_buffers(module)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    out_spec = program.call_spec.out_spec
    return TracedModel(
        subject=subject,
        graph_module=module,
        input_names=tuple(node.name for node in placeholders),
        output_names=_output_names(out_spec, len(outputs)),
        in_spec=program.call_spec.in_spec,
        out_spec=out_spec,
        sample=_sample_size(placeholders, batch_of(subject.arguments)),
        settings=dict(settings),
        guards=guards,
        initial_state=state,
        fidelity=Fidelity(()),
        findings=(),
        fingerprint="",
        seconds=0.0,
    )


def _sample_size(placeholders: list[Node], batch: int | None) -> Size | None:
    if batch is None:
        return None
    for node in placeholders:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.ndim:
            return plain_size(value.shape[0])
    return None


def _output_names(spec: pytree.TreeSpec, count: int) -> tuple[str, ...]:
    """A name for each output leaf: its path in the output, or ``output`` when the model returns one tensor."""
    leaves = pytree.tree_unflatten(list(range(count)), spec)
    paths, _ = pytree.tree_flatten_with_path(leaves)
    names = [".".join(re.findall(r"[\w-]+", pytree.keystr(path))) or "output" for path, _ in paths]
    return tuple(names) if len(names) == count else tuple(f"output_{i}" for i in range(count))


def _own_written_buffers(module: GraphModule) -> dict[str, Tensor]:
    """Give the graph its own copies of the buffers that it writes to, and return their present values."""
    state = {}
    for name in written_buffers(module.graph):
        owner_path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(owner_path)
        copy = getattr(owner, leaf).detach().clone()
        owner.register_buffer(leaf, copy)
        state[name] = copy.clone()
    return state


def written_buffers(graph: Graph) -> list[str]:
    """The names of the buffers that a graph writes back to."""
    return [str(node.args[0].target) for node in _writes(graph) if node.args[0].op == "get_attr"]


def _writes(graph: Graph) -> Iterator[Any]:
    for node in graph.nodes:
        if node.op == "call_function" and ops.op_name(node) == "copy_" and isinstance(node.args[0], Node):
            yield node


def restore_state(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Set buffers back to the values in `state`, so that every batch starts from the same point."""
    with torch.no_grad():
        for name, value in state.items():
            module.get_buffer(name).copy_(value)


# --- fidelity -------------------------------------------------------------------------------------------------------


def _fidelity(traced: TracedModel, seed: int) -> Fidelity:
    """The trace against the eager model: the example, another input, another batch size, each twice."""
    subject = traced.subject
    cases = [("example", subject.arguments), ("resampled", resampled(subject.arguments, seed + 1))]
    cases += other_batches(traced, seed + 2)[:1]
    state = remember(subject.module)
    comparisons = []
    scale = 0.0
    for name, arguments in cases:
        leaves = traced.flatten(arguments)
        for attempt in ("", ", again"):
            # Buffers start every run from one state; a Python attribute that changes the output must be seen to do so.
            set_back_buffers(subject.module, state)
            with quiet_torch():
                expected = pytree.tree_leaves(_run_eager(subject, arguments))
                found = run_flat(traced.graph_module, leaves, traced.initial_state)
            comparisons.append(compare(name + attempt, expected, found))
            scale = max(scale, *(_largest_finite(leaf) for leaf in expected), 0.0)
    fidelity = Fidelity(tuple(comparisons))
    if not fidelity.bitwise and not fidelity.max_abs_diff <= INEXACT_TOLERANCE * max(scale, 1e-30):
        worst = max(comparisons, key=lambda comparison: comparison.max_abs_diff)
        raise TraceError(
            f"the trace of {subject.source} does not compute what the model computes",
            expected=f"equal outputs, or a difference of at most {INEXACT_TOLERANCE:g} of the largest ({scale:.3g})",
            found=f"a difference of {worst.max_abs_diff:.3g} on the {worst.inputs} input",
            remedy="look for code that depends on values, on randomness, on state kept between calls,"
            " or on whether it is being exported",
            fidelity=fidelity,
        )
    return fidelity


def run_flat(module: nn.Module, leaves: list[Any], state: dict[str, Tensor]) -> tuple[Any, ...]:
    """The output leaves of a flat graph on input leaves, its written buffers first set to `state`."""
    restore_state(module, state)
    if state or written_inputs(module):
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return module(*leaves)


def written_inputs(module: nn.Module) -> bool:
    """Whether a graph writes to one of its inputs, as the model that it was traced from does."""
    return isinstance(module, GraphModule) and any(node.args[0].op == "placeholder" for node in _writes(module.graph))


def _largest_finite(value: Any) -> float:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return 0.0
    finite = value[value.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def other_batches(traced: TracedModel, seed: int) -> list[tuple[str, Arguments]]:
    """Inputs in other batch sizes than the example's, of those that the trace covers: one more, twice as many, one."""
    count = traced.sample_count
    if not traced.is_batch_dynamic or count is None:
        return []
    cases = []
    for batch in (count + 1, 2 * count, 1):
        arguments = resampled(traced.subject.arguments, seed + batch, batch)
        try:
            run_flat(traced.graph_module, traced.flatten(arguments), traced.initial_state)
        except (DataError, RuntimeError):
            continue  # a batch that the guards refuse, or that the model itself cannot split up
        cases.append((f"batch of {batch}", arguments))
    return cases


# --- findings -------------------------------------------------------------------------------------------------------


def _graph_findings(traced: TracedModel, found: list[Finding]) -> list[Finding]:
    """What the graph shows, beside what was `found` before."""
    findings = []
    if isinstance(traced.sample, int) and not any(f.kind == "static-batch" for f in found):
        text = f"the graph takes only batches of {traced.sample}: the model's code fixes the input axis"
        findings.append(Finding("static-batch", text))
    for name in traced.initial_state:
        findings.append(
            Finding("mutated-buffer", f"a forward call writes to `{name}`; every batch starts from its first value")
        )
    if written_inputs(traced.graph_module):
        findings.append(Finding("mutated-input", "a forward call writes to its own inputs; each run gets a copy"))
    for node in traced.graph.nodes:
        name = ops.op_name(node)
        if name in ops.RANDOM:
            findings.append(Finding("random-op", f"`{name}` draws random numbers in eval mode", ops.source_line(node)))
        elif name.split("::")[0] not in (name, "python", "sym"):
            findings.append(
                Finding(
                    "opaque-op", f"`{name}` is a custom op: controllers inside it are unseen", ops.source_line(node)
                )
            )
    return findings


def _fidelity_findings(fidelity: Fidelity, traced: TracedModel) -> list[Finding]:
    findings = []
    if not fidelity.bitwise:
        text = f"the trace differs from the eager model by up to {fidelity.max_abs_diff:.3g}"
        findings.append(Finding("inexact-trace", text))
    return findings

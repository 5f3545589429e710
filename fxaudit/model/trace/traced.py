"""A traced model: one flat graph of functional, undecomposed ATen, and how it is run."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from fxaudit import ops
from fxaudit.axes import Size
from fxaudit.errors import DataError
from fxaudit.model.compare import Comparisons
from fxaudit.model.inputs import Arguments, batch_of, resampled
from fxaudit.model.load import Subject
from fxaudit.model.settings import TraceOptions
from fxaudit.model.trace.leaves import Leaf
from fxaudit.provenance import json_digest, tensor_digest


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
    warm-up. `decisions` are the Python values that the trace holds for, with the lines that read them; `unseen` are the
    submodules that run as one opaque op each.
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
    decisions: tuple[str, ...] = ()
    unseen: tuple[Leaf, ...] = ()
    options: TraceOptions = field(default_factory=TraceOptions)

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
        rows = [[node.op, str(node.target), self._arguments_text(node, order)] for node in self.graph.nodes]
        return json_digest([rows, tensor_digest(self._plain_tensors())])

    def _arguments_text(self, node: Node, order: dict[Node, int]) -> str:
        text = str(torch.fx.map_arg((node.args, node.kwargs), lambda n: f"%{order[n]}"))
        for leaf in self.unseen:  # their keys are of this process
            text = text.replace(leaf.key, leaf.path)
        return text

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


def run_flat(module: nn.Module, leaves: list[Any], state: dict[str, Tensor]) -> tuple[Any, ...]:
    """The output leaves of a flat graph on input leaves, its written buffers first set to `state`.

    A graph that draws random numbers draws the same ones in every run.
    """
    leaves = fresh_inputs(module, leaves, state)
    if not random_ops(module):
        return module(*leaves)
    with same_draws(leaves):
        return module(*leaves)


# Of the CPU's generator, and of every GPU's.
RandomStates = dict[str, tuple[Tensor, list[Tensor]]]


def random_states(traced: TracedModel, leaves: list[Any]) -> RandomStates:
    """The state of the random generator before each random op of a run on these input leaves, by the op's node.

    A graph without the controllers has fewer random ops, and a part of a graph starts later: set to these states, they
    draw the numbers of the live run (DESIGN, section 7).
    """
    module = traced.graph_module
    if not random_ops(module):
        return {}
    found: RandomStates = {}

    class Recorder(Interpreter):
        def run_node(self, n: Node) -> Any:
            if is_random(n):
                found[n.name] = torch.get_rng_state(), _gpu_states()
            return super().run_node(n)

    with same_draws(leaves):
        Recorder(module).run(*fresh_inputs(module, leaves, traced.initial_state))
    return found


def run_from(module: GraphModule, leaves: Sequence[Any], states: RandomStates) -> tuple[Any, ...]:
    """The output leaves of a graph whose random ops draw from the given states of the random generator."""

    class Seeded(Interpreter):
        def run_node(self, n: Node) -> Any:
            if n.name in states:
                cpu, gpus = states[n.name]
                torch.set_rng_state(cpu)
                torch.cuda.set_rng_state_all(gpus)
            return super().run_node(n)

    with torch.random.fork_rng(devices=range(len(_gpu_states()))):
        return tuple(Seeded(module).run(*leaves))


def _gpu_states() -> list[Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def fresh_inputs(module: nn.Module, leaves: list[Any], state: dict[str, Tensor]) -> list[Any]:
    """Set written buffers to `state`; the input leaves, copied where the graph may write to them."""
    restore_state(module, state)
    if not state and not written_inputs(module):
        return leaves
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


@contextlib.contextmanager
def same_draws(inputs: Any) -> Iterator[None]:
    """Random draws inside start from one seed; those outside go on as if nothing had been drawn."""
    tensors = (leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(0)
        yield


def random_ops(module: nn.Module) -> list[Node]:
    """The nodes of a graph that draw random numbers."""
    return [n for n in module.graph.nodes if is_random(n)] if isinstance(module, GraphModule) else []


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers."""
    return node.op == "call_function" and ops.op_name(node) in ops.RANDOM


def written_inputs(module: nn.Module) -> bool:
    """Whether a graph writes to one of its inputs, as the model that it was traced from does."""
    return isinstance(module, GraphModule) and any(node.args[0].op == "placeholder" for node in _writes(module.graph))


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

"""An exported program as one flat graph over the model's own parameters."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from fxaudit import ops
from fxaudit.axes import Size, plain_size
from fxaudit.errors import TraceError
from fxaudit.model.inputs import batch_of
from fxaudit.model.load import Subject
from fxaudit.model.trace.patches import DECISION
from fxaudit.model.trace.traced import Fidelity, TracedModel, written_buffers

Guards = Callable[..., object]


def flat(subject: Subject, program: ExportedProgram, frontend: str, settings: dict[str, str]) -> TracedModel:
    """The traced model of an exported program, not yet compared with eager; guards are taken out of the graph and
    kept."""
    unlifted = program.module()
    guards: list[Guards] = []
    for node in list(unlifted.graph.nodes):
        if node.op == "call_module" and node.target == "_guards_fn":
            guards.append(unlifted.get_submodule("_guards_fn").forward)
            unlifted.graph.erase_node(node)
        elif node.op == "call_function" and "_assert_tensor_metadata" in str(node.target):
            unlifted.graph.erase_node(node)
    decision_guard, decisions = _decisions(subject, unlifted)
    if decision_guard is not None:
        guards.append(decision_guard)
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
        guards=_all_of(guards) if guards else None,
        initial_state=state,
        fidelity=Fidelity(()),
        findings=(),
        fingerprint="",
        seconds=0.0,
        frontend=frontend,
        decisions=decisions,
    )


def _all_of(guards: list[Guards]) -> Guards:
    def check(*leaves: Any) -> None:
        for guard in guards:
            guard(*leaves)

    return check


def _decisions(subject: Subject, unlifted: GraphModule) -> tuple[Guards | None, tuple[str, ...]]:
    """A check that inputs make the model read the Python values that the trace was made with, and what those are.

    The checks leave the graph of `unlifted` for one of their own. Those that no input reaches always hold.

    Raises:
        TraceError: a value is read from activations: then the model branches on its data.
    """
    checks = [node for node in unlifted.graph.nodes if _is_decision(node)]
    kept = [node for node in checks if _depends_on_inputs(subject, node)]
    guard = _guard(unlifted, kept) if kept else None
    for node in checks:
        unlifted.graph.erase_node(node)
    return guard, tuple(_text(node) for node in kept)


def _guard(unlifted: GraphModule, checks: list[Node]) -> Guards:
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.graph_copy(unlifted.graph, copies)
    graph.output(tuple(copies[node.args[0]] for node in checks))  # type: ignore[index]
    for node in reversed(graph.nodes):
        if _is_decision(node) or (ops.op_name(node) == "copy_" and not node.users):
            graph.erase_node(node)
    graph.eliminate_dead_code()
    module = GraphModule(unlifted, graph, class_name="Decisions").eval()

    def check(*leaves: Any) -> None:
        with torch.no_grad():
            for held, node in zip(module(*leaves), checks, strict=True):
                if not held:
                    raise AssertionError(f"the trace holds where the model reads {_text(node)}; here it reads another")

    return check


_SIZES = frozenset(["sym_size", "sym_numel", "sym_stride"])


def _depends_on_inputs(subject: Subject, check: Node) -> bool:
    """Whether the values of inputs decide what is read, not their sizes alone.

    Raises:
        TraceError: floating-point inputs or parameters do, not token ids or masks alone.
    """
    parameters = {name for name, _ in subject.module.named_parameters(remove_duplicate=False)}
    seen, open_nodes = {check}, [check]
    found = False
    while open_nodes:
        for source in open_nodes.pop().all_input_nodes:
            if source in seen or ops.op_name(source) in _SIZES:
                continue
            seen.add(source)
            open_nodes.append(source)
            value = source.meta.get("val")
            is_input = source.op == "placeholder"
            if str(source.target) in parameters or (
                is_input and isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
            ):
                raise TraceError(
                    f"{subject.source} cannot be traced: Python control flow depends on the value of a tensor",
                    where=_text(check).partition(" at ")[2],
                    reason="data-dependent-branch",
                )
            found = found or is_input
    return found


def _text(check: Node) -> str:
    return str(check.args[1]).removeprefix(DECISION)


def _is_decision(node: Node) -> bool:
    return (
        node.op == "call_function"
        and "_assert_async" in str(node.target)
        and len(node.args) > 1
        and str(node.args[1]).startswith(DECISION)
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

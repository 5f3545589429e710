"""A torch graph with barriers becomes an ONNX model with barriers, node for node.

A *barrier* is a custom op that copies its input. No pass of torch.export, of the exporter or of the folding here sees
through it, and its index keeps two of them apart even where they copy equal values.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import onnxscript
import onnxscript.optimizer
import torch
from onnx_ir.passes import common as passes
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, GraphModule, Node

from fxaudit import ops
from fxaudit.controllers.controller import ROOT
from fxaudit.errors import ExportError
from fxaudit.execution.indices import widen_indices
from fxaudit.execution.translations import further_translations
from fxaudit.model.trace import TracedModel

BATCH, SEQUENCE = "batch", "sequence"
OPSET = 20
DOMAIN = "fxaudit"


@functools.cache
def barrier_op() -> Any:
    """The torch op ``fxaudit::barrier(x, index)``: a copy of `x` that no compiler pass sees through."""

    @torch.library.custom_op("fxaudit::barrier", mutates_args=())
    def barrier(x: Tensor, index: int) -> Tensor:
        return x.clone()

    @barrier.register_fake
    def _(x: Tensor, index: int) -> Tensor:
        return torch.empty_like(x)

    return torch.ops.fxaudit.barrier.default


def dynamic_axes(module: GraphModule) -> tuple[dict[int, Any], ...] | None:
    """For torch.export, the axes of each placeholder that have no fixed size; None when all have one."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    axes = tuple(
        {i: Dim.AUTO for i, size in enumerate(ops.sizes(node) or ()) if not isinstance(size, int)}
        for node in placeholders
    )
    return axes if any(axes) else None


def to_onnx(
    traced: TracedModel,
    module: GraphModule,
    leaves: Sequence[Tensor],
    dimensions: Sequence[Mapping[int, str]] | None,
    opset: int = OPSET,
) -> ir.Model:
    """A graph as an ONNX model, its barriers kept, not optimised.

    Args:
        leaves: example inputs, of the sizes that are fixed.
        dimensions: the names of the dynamic axes of each input; None fixes every size.

    Raises:
        ExportError: torch or onnxscript cannot express it.
    """
    dynamic = dynamic_axes(module) if dimensions is not None else None
    named = tuple(dict(axes) or None for axes in dimensions or ()) if dynamic is not None else None
    program: ExportedProgram | None = None
    translation = {barrier_op(): _onnx_barrier(), **further_translations()}
    try:
        program = torch.export.export(module, tuple(leaves), dynamic_shapes=dynamic, strict=False)
        exported = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            optimize=False,
            opset_version=opset,
            dynamic_shapes=named,
            custom_translation_table=translation,
        )
    except Exception as error:
        raise _inexpressible(traced, program, error) from error
    assert exported is not None
    return exported.model


@functools.cache
def _onnx_barrier() -> Any:
    schema = onnx.defs.OpSchema
    tensors = list(onnx.defs.get_schema("Identity", 13).type_constraints[0].allowed_type_strs)
    op = onnxscript.values.Op(
        onnxscript.values.Opset(DOMAIN, 1),
        "Barrier",
        schema(
            "Barrier",
            DOMAIN,
            1,
            inputs=[schema.FormalParameter("x", "T")],
            outputs=[schema.FormalParameter("y", "T")],
            type_constraints=[("T", tensors, "any tensor")],
            attributes=[schema.Attribute("index", schema.AttrType.INT, "which coefficient", required=True)],
        ),
    )

    def barrier(x: Any, index: int) -> Any:
        return op(x, index=index)

    return barrier


def _inexpressible(traced: TracedModel, program: ExportedProgram | None, error: Exception) -> ExportError:
    """What the exporter could not do: the op, the module and the user's source line, where its message names a node."""
    chain: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        chain.append(str(cause))
        cause = cause.__cause__
    text = "\n".join(chain)
    named = re.search(r"node %(\w+) .*?target=torch\.ops\.(?:aten\.)?([\w.]+)\.\w+\]", text)
    where, op, follows = "", "", named is None
    if named is not None:
        op = named[2]
        node = _node_behind(program.graph if program is not None else traced.graph, named[1], op)
        if node is not None:
            follows = any(ops.is_symbolic_scalar(n) for n in node.all_input_nodes)
            path = ops.module_path(node)
            place = f"`{node.name}` in {path[-1] if path else ROOT}"
            where = "\n".join(part for part in (place, ops.source_line(node)) if part)
    innermost = next((line.strip() for line in chain[-1].splitlines() if line.strip()), type(error).__name__)
    return ExportError(
        f"{traced.subject.source} cannot be written as ONNX" + (f": no translation of `{op}`" if op else ""),
        where=where,
        expected=f"ops that torch {torch.__version__} and onnxscript can translate",
        found=innermost,
        remedy="every claim except execution still stands; writing the op with others makes the model exportable",
        op=op,
        follows_batch=follows,
    )


def _node_behind(graph: Graph, name: str, op: str) -> Node | None:
    """The node of that name; where the exporter decomposed it, the first whose op begins like `op`."""
    nodes = {node.name: node for node in graph.nodes}
    stem = op.strip("_")
    alike = (
        node for node in graph.nodes if node.op == "call_function" and ops.op_name(node).strip("_").startswith(stem)
    )
    return nodes.get(name) or next(alike, None)


def tidy(model: ir.Model, parameters: Collection[str]) -> None:
    """Fold what is computed from constants alone, except from parameters, and give every node a name of its own.

    Common sub-expressions stay apart and equal initializers too: merging them would remove work that torch does.
    """

    def may_fold(node: ir.Node) -> bool | None:
        return False if any(value is not None and value.name in parameters for value in node.inputs) else None

    onnxscript.optimizer.inline(model)
    onnxscript.optimizer.fold_constants(model, onnx_shape_inference=True, should_fold=may_fold)
    widen_indices(model)
    for step in (
        passes.RemoveUnusedNodesPass(),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.RemoveUnusedOpsetsPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
    ):
        step(model)

"""Indices of 32 bits, which torch takes everywhere, made the 64 bits that some ONNX ops ask for."""

from __future__ import annotations

import onnx_ir as ir

# Ops whose second input is int64 by the ONNX standard; the exporter hands on what torch was given.
_WIDE = frozenset(["GatherND", "ScatterND"])


def widen_indices(model: ir.Model) -> None:
    """Put a cast before every index of 32 bits that its reader does not take."""
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.op_type not in _WIDE or node.domain:
            continue
        indices = node.inputs[1]
        assert indices is not None
        if indices.dtype != ir.DataType.INT32:
            continue
        wide = ir.Value(type=ir.TensorType(ir.DataType.INT64), shape=indices.shape)
        cast = ir.node("Cast", [indices], attributes={"to": ir.DataType.INT64}, outputs=[wide])
        cast.metadata_props.update(node.metadata_props)
        assert node.graph is not None
        node.graph.insert_before(node, cast)
        node.replace_input_with(1, wide)

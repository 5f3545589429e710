"""Graphs become files; large ones share one file for their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
import onnx_ir as ir

from fxaudit.errors import ExportError

# Larger weights go to a file of their own: a protobuf message ends at 2 GiB.
INLINE_BYTES = 1 << 30
# Small tensors stay in the graph: runtimes read sizes and axes from them before they load any weight.
_SMALL_BYTES = 1024
WEIGHTS = "weights.data"


def write_graphs(models: Mapping[str, ir.Model], directory: Path, *, external: bool | None) -> Path | None:
    """Write each model as ``<name>.onnx``, and check what was written; the file that holds the tensors of all of them.

    Args:
        external: whether tensors go to a file that all graphs share; by default where the weights of one are too large
            for its own file.

    Raises:
        ExportError: a file is not a valid ONNX model.
    """
    directory.mkdir(parents=True, exist_ok=True)
    largest = max(initializer_bytes(model) for model in models.values())
    shared = largest > INLINE_BYTES if external is None else external
    if shared:
        _share_tensors(models, directory)
    for name, model in models.items():
        path = directory / f"{name}.onnx"
        ir.save(model, path)
        check_file(path)
    return directory / WEIGHTS if shared else None


def _share_tensors(models: Mapping[str, ir.Model], directory: Path) -> None:
    """Let every larger initializer of `models` point into one file, in which each tensor lies once."""
    readers: dict[int, list[ir.Value]] = {}
    tensors: dict[int, ir.TensorProtocol] = {}
    for model in models.values():
        for graph in model.graphs():
            for value in graph.initializers.values():
                tensor = value.const_value
                if tensor is not None and tensor.nbytes >= _SMALL_BYTES:
                    tensors[id(tensor)] = tensor
                    readers.setdefault(id(tensor), []).append(value)
    moved = ir.external_data.convert_tensors_to_external(list(tensors.values()), directory, WEIGHTS, alignment=65536)
    for key, tensor in zip(tensors, moved, strict=True):
        for value in readers[key]:
            value.const_value = tensor


def initializer_bytes(model: ir.Model) -> int:
    """The size of all initializers of a graph and its subgraphs."""
    values = (value for graph in model.graphs() for value in graph.initializers.values())
    return sum(value.const_value.nbytes for value in values if value.const_value is not None)


def check_file(path: Path) -> None:
    """Raise unless a file is a valid ONNX model.

    Raises:
        ExportError: with what onnx.checker says.
    """
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise ExportError(
            f"{path.name} is not a valid ONNX model",
            where=str(path),
            expected="a model that onnx.checker accepts",
            found=str(error).splitlines()[0],
            remedy="report this model",
        ) from error

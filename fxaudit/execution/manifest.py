"""A bundle as it is found on disk: hostile until its manifest, its files and the inside of its graphs are what a bundle
has."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError, Message

from fxaudit.errors import DataError
from fxaudit.execution.bundle import FILES, MANIFEST, SCHEMA, file_digest
from fxaudit.execution.export.files import WEIGHTS
from fxaudit.execution.proof import all_nodes
from fxaudit.execution.samples import SAMPLES, Sample
from fxaudit.model.files import printable

_LONGEST_MANIFEST = 100_000_000
_STANDARD = ("", "ai.onnx")
# What `verify` reads, with the type that it must have.
_SHAPE: Mapping[str, type] = {
    "model": dict,
    "options": dict,
    "files": dict,
    "graphs": dict,
    "programs": dict,
    "coefficients": list,
    "removed": dict,
    "samples": dict,
    "findings": list,
}


def open_bundle(directory: Path) -> dict[str, Any]:
    """The manifest of a bundle whose files are all there, unchanged, and refer to nothing outside of it.

    Raises:
        DataError: it is no bundle, a file differs from what was written, or a graph reads or does what none may.
    """
    manifest = _read(directory)
    for name, described in manifest["files"].items():
        _check_file(directory, name, described)
    for form, graph in manifest["graphs"].items():
        if graph["file"] != f"{form}.onnx" or graph["file"] not in manifest["files"]:
            raise _damaged(directory, f"a graph `{form}` in a listed file", printable(str(graph["file"])))
        check_graph(directory / graph["file"], manifest["files"])
    for form, program in manifest["programs"].items():
        if program["file"] is not None and (
            program["file"] != f"{form}.pt2" or program["file"] not in manifest["files"]
        ):
            raise _damaged(directory, f"a program `{form}` in a listed file", printable(str(program["file"])))
    if not manifest["graphs"] or SAMPLES not in manifest["files"]:
        raise _damaged(
            directory, f"at least one graph, and {SAMPLES}", ", ".join(sorted(manifest["files"])) or "nothing"
        )
    return manifest


def require_fitting(samples: Sequence[Sample], manifest: Mapping[str, Any], path: Path) -> None:
    """Raise unless every sample has what each graph of the manifest takes and gives, and there is one for each run.

    Raises:
        DataError: with what is missing.
    """
    bound = {c["name"] for c in manifest["coefficients"] if c["bound"]}
    inputs = {v["name"] for g in manifest["graphs"].values() for v in g["inputs"]} - bound
    outputs = {v["name"] for f, g in manifest["graphs"].items() if f != "tapped" for v in g["outputs"]}
    runs = len(manifest["samples"]["runs"])
    missing = [] if len(samples) == runs else [f"{runs - len(samples)} of {runs} samples"]
    for i, sample in enumerate(samples):
        wanted = {"inputs": inputs, "outputs": outputs, "exchanged_outputs": outputs}
        if "baked" in manifest["graphs"]:
            wanted["baked_outputs"] = outputs
        if bound:
            wanted |= {"coefficients": bound, "exchanged": bound}
        missing += [
            f"{i}/{g}/{name}" for g, names in wanted.items() for name in sorted(names - getattr(sample, g).keys())
        ]
    if missing:
        raise DataError(
            f"{path.name} does not fit the manifest beside it",
            where=str(path),
            expected="for every sample what each graph takes and gives",
            found=f"no {printable(', '.join(missing[:3]))}",
            remedy="export the model again",
        )


def _read(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        if path.is_symlink() or path.stat().st_size > _LONGEST_MANIFEST:
            raise ValueError("a link, or too long")
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{directory} is no bundle",
            where=str(path),
            expected="a manifest written by `fxaudit export`",
            found=printable(str(error)),
            remedy="export first: fxaudit export MODEL -o DIR",
        ) from error
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if schema != SCHEMA:
        raise _damaged(directory, f"the schema {SCHEMA}", printable(str(schema)))
    for key, kind in _SHAPE.items():
        if not isinstance(manifest.get(key), kind):
            raise _damaged(directory, f"`{key}` as a {kind.__name__}", type(manifest.get(key)).__name__)
    _check_shape(manifest, directory)
    return manifest


def _check_shape(manifest: dict[str, Any], directory: Path) -> None:
    """Raise unless everything that is read later is there and has its type."""
    try:
        for described in manifest["files"].values():
            assert isinstance(described["sha256"], str)
            assert isinstance(described["bytes"], int)
        for graph in manifest["graphs"].values():
            assert isinstance(graph["static"], bool)
            for value in (*graph["inputs"], *graph["outputs"]):
                assert isinstance(value["name"], str)
        for program in manifest["programs"].values():
            assert isinstance(program["file"], str | None)
            assert isinstance(program["reason"], str)
        for coefficient in manifest["coefficients"]:
            assert isinstance(coefficient["name"], str)
            assert isinstance(coefficient["bound"], bool)
        for group in ("nodes", "parameters"):
            assert all(isinstance(entry["name"], str) for entry in manifest["removed"][group])
        for run in manifest["samples"]["runs"]:
            assert isinstance(run["flops"], dict)
            assert all(isinstance(flops, int | None) for flops in run["flops"].values())
        assert isinstance(manifest["options"]["precision"], str)
    except (AssertionError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(directory, "a manifest with every field", f"{type(error).__name__} {error}".strip()) from error


def _check_file(directory: Path, name: str, described: Mapping[str, Any]) -> None:
    path = directory / name
    if name not in FILES:
        raise _damaged(directory, f"files of a bundle: {', '.join(sorted(FILES))}", f"`{printable(name)}`")
    if path.is_symlink() or not path.is_file():
        raise _changed(path, "a file", "a link" if path.is_symlink() else "none")
    if path.stat().st_size != described["bytes"]:
        raise _changed(path, f"{described['bytes']:,} bytes", f"{path.stat().st_size:,} bytes")
    if (found := file_digest(path)) != described["sha256"]:
        raise _changed(path, f"sha256 {printable(described['sha256'])}", f"sha256 {found}")


def check_graph(path: Path, files: Mapping[str, Any]) -> None:
    """Raise unless a graph has standard ops alone, and every tensor that it does not hold lies in the bundle's file.

    Raises:
        DataError: with what it has instead.
    """
    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, ValueError, OSError) as error:
        raise _refused(path, "an ONNX model", printable(str(error))) from error
    domains = {opset.domain for opset in model.opset_import} | {node.domain for node in all_nodes(model.graph)}
    if (odd := sorted(domains - set(_STANDARD))) or model.functions or model.training_info:
        found = f"the domain `{printable(odd[0])}`" if odd else "functions or training of its own"
        raise _refused(path, "standard ONNX operators alone", found)
    for tensor in _tensors(model):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        if location != WEIGHTS or WEIGHTS not in files:
            raise _refused(path, f"tensors in {WEIGHTS}, a file of the manifest", f"one in `{printable(location)}`")
        try:
            end = int(entries.get("offset", 0)) + int(entries["length"])
            inside = min(int(entries.get("offset", 0)), int(entries["length"])) >= 0
        except (KeyError, ValueError) as error:
            raise _refused(path, "tensors with an offset and a length", printable(str(entries))) from error
        if not inside or end > files[WEIGHTS]["bytes"]:
            raise _refused(path, f"tensors inside the {files[WEIGHTS]['bytes']:,} bytes of {WEIGHTS}", f"byte {end:,}")


def _tensors(message: Message) -> Iterator[onnx.TensorProto]:
    """Every tensor anywhere inside a message."""
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None:
            continue
        for inner in [value] if isinstance(value, Message) else value:
            if isinstance(inner, onnx.TensorProto):
                yield inner
            else:
                yield from _tensors(inner)


def _damaged(directory: Path, expected: str, found: str) -> DataError:
    return DataError(
        f"{directory} has a damaged manifest",
        where=str(directory / MANIFEST),
        expected=expected,
        found=found,
        remedy="export the model again",
    )


def _changed(path: Path, expected: str, found: str) -> DataError:
    return DataError(
        f"{path} is not what was exported",
        where=str(path),
        expected=expected,
        found=found,
        remedy="restore the file, or export the model again",
    )


def _refused(path: Path, expected: str, found: str) -> DataError:
    return DataError(
        f"{path} is refused: it could read or run what is no part of the bundle",
        where=str(path),
        expected=expected,
        found=found,
        remedy="export the model again; nothing of this file was loaded",
    )

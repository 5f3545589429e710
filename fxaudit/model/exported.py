"""A .pt2 archive as MODEL: scanned in full before `torch.export.load` may see it.

`torch.export.load` unpickles sample inputs, weights and constants, hands symbolic sizes to `sympify`, compiles guards,
and puts names of the file into Python code that it executes. So every member of the archive must be of a known kind,
every pickle must pass the restricted unpickler, and every text of the program must be in its closed grammar. What is
not understood is refused.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import os
import re
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

from fxaudit.errors import LoadError
from fxaudit.model import expressions
from fxaudit.model.archives import Archive, FileKind, open_archive, plain_names, read_json, read_torch_pickle
from fxaudit.model.expressions import NotUnderstood
from fxaudit.model.files import printable
from fxaudit.model.frames import user_frame
from fxaudit.model.inputs import CallArguments

_LONGEST_PROGRAM = 500_000_000
_MODEL = "models/model.json"
_SAMPLES = "data/sample_inputs/model.pt"
_WEIGHTS, _CONSTANTS = "data/weights", "data/constants"
_CONFIGS = {_WEIGHTS: f"{_WEIGHTS}/model_weights_config.json", _CONSTANTS: f"{_CONSTANTS}/model_constants_config.json"}
_PAYLOAD = {_WEIGHTS: re.compile(r"weight_\d+"), _CONSTANTS: re.compile(r"tensor_\d+")}
_KNOWN_MEMBERS = re.compile(
    "|".join(
        [
            *map(re.escape, (_MODEL, _SAMPLES, *_CONFIGS.values())),
            rf"{_WEIGHTS}/weight_\d+",
            rf"{_CONSTANTS}/tensor_\d+",
            r"archive_format|archive_version|byteorder|version|\.data/version|\.data/serialization_id",
            r"\.format_version|\.storage_alignment",
        ]
    )
)


def load_exported(path: Path, *, trust: bool) -> tuple[nn.Module, CallArguments | None]:
    """The program of an archive as a module, and the inputs that it was exported with, if it has them.

    Raises:
        LoadError: the scan refuses it, or it is damaged or of another version of torch.
    """
    if not trust:
        _scan(path)
    try:
        # Opened here, so that neither the name of the file nor a fallback for older formats decides what is read.
        with path.open("rb") as file, _restricted(not trust):
            if trust:
                program = torch.export.load(file)
            else:
                from torch.export.pt2_archive._package import load_pt2

                program = load_pt2(file).exported_programs["model"]
            module = program.module()
    except Exception as error:  # a file that torch itself does not accept fails in as many ways as it has fields
        raise LoadError(
            f"{path} could not be loaded",
            where=(user_frame(error) if trust else "") or str(path),
            expected=f"an archive that torch {torch.__version__} reads",
            found=printable(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"),
            remedy="export the model again with this version of torch, or name a function that builds it",
        ) from error
    # What `eval()` would switch is part of the graph; torch lets the call fail, nn.Module's own sets a flag.
    for name in ("train", "eval"):
        vars(module).pop(name, None)
    inputs = program.example_inputs
    return module, CallArguments(tuple(inputs[0]), dict(inputs[1])) if inputs else None


@contextmanager
def _restricted(on: bool) -> Iterator[None]:
    """Every `torch.load` inside is `weights_only`, whatever its caller asks for."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    if on:
        os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


# --- the scan -------------------------------------------------------------------------------------------------------


def _scan(path: Path) -> None:
    """Raise unless everything in the archive is understood, and harmless to load."""
    archive = open_archive(path)
    if odd := sorted(name for name in archive.sizes if not _KNOWN_MEMBERS.fullmatch(name)):
        raise _refused(path, f"`{printable(odd[0])}`", "a member that a plain exported program does not have")
    from torch._export.serde import schema

    place = _MODEL
    try:
        program = _decode(archive, _MODEL, schema.ExportedProgram)
        _check(program, schema.ExportedProgram, _TEXTS, "program")
        for folder, config in _CONFIGS.items():
            place = config
            _check_payload(archive, folder, _decode(archive, config, schema.PayloadConfig))
        place = _SAMPLES
        _check_pickle(archive, _SAMPLES)
    except NotUnderstood as error:
        raise _refused(path, place, str(error)) from error
    except LoadError as error:
        raise _refused(path, place, error.found) from error
    except Exception as error:  # hostile content fails in as many ways as the schema has fields
        raise _refused(path, place, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}") from error


def _refused(path: Path, member: str, found: str) -> LoadError:
    return LoadError(
        f"{path} is refused: loading it could run code that it carries",
        where=f"{path}: {member}",
        expected="tensors, plain values and expressions of sizes only, as torch.export.save writes them",
        found=printable(found),
        remedy=f"where you trust the file: fxaudit trace {path} --trust-pickle\n"
        "otherwise name the function that builds the model: fxaudit trace file.py:function",
    )


def _decode(archive: Archive, name: str, kind: type) -> Any:
    """A member of JSON as torch itself decodes it: what is checked is what torch will use."""
    from torch._export.serde.serialize import _dict_to_dataclass

    return _dict_to_dataclass(kind, read_json(archive.read(name, _LONGEST_PROGRAM), archive.path))


def _check_pickle(archive: Archive, name: str) -> None:
    data = archive.read(name, _LONGEST_PROGRAM)
    if not data:
        return
    followed = read_torch_pickle(archive.path, FileKind.TORCH, data)
    if odd := sorted({found.path for found in followed.globals} - plain_names()):
        raise NotUnderstood(f"a pickle that would call {', '.join(odd[:5])}")
    torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _check_payload(archive: Archive, folder: str, config: Any) -> None:
    from torch._export.serde import schema
    from torch._export.serde.serialize import _SERIALIZE_TO_TORCH_DTYPE

    _check(config, schema.PayloadConfig, _PAYLOAD_TEXTS, folder)
    for meta in config.config.values():
        if not _PAYLOAD[folder].fullmatch(meta.path_name):
            raise NotUnderstood(f"an object that is no tensor, in `{meta.path_name}`")
        member = f"{folder}/{meta.path_name}"
        if meta.use_pickle:
            _check_pickle(archive, member)
            continue
        tensor = meta.tensor_meta
        sizes, strides = [s.as_int for s in tensor.sizes], [s.as_int for s in tensor.strides]
        width = _SERIALIZE_TO_TORCH_DTYPE[tensor.dtype].itemsize
        if len(sizes) != len(strides) or min([0, *sizes, *strides, tensor.storage_offset.as_int]) < 0:
            raise NotUnderstood(f"the sizes of `{meta.path_name}`")
        steps = [(size - 1) * stride for size, stride in zip(sizes, strides, strict=True)]
        last = tensor.storage_offset.as_int + sum(steps) + 1 if 0 not in sizes else 0
        if last * width > archive.sizes.get(member, 0):
            raise NotUnderstood(f"a tensor of {last * width:,} bytes in `{member}`, which has fewer")


# --- every field in its type, every text in its grammar -------------------------------------------------------------

Texts = dict[tuple[str, str], Callable[[str], None]]


def _no_custom_object(text: str) -> None:
    raise NotUnderstood(f"a custom object `{text[:60]}`")


# By class and field of torch's schema; a text in any other field is a name.
_TEXTS: Texts = {
    ("SymExpr", "expr_str"): expressions.check_symbolic,
    ("Node", "target"): expressions.check_operator,
    ("Node", "metadata"): expressions.check_note,
    ("NamedArgument", "name"): expressions.check_argument_name,
    ("Argument", "as_operator"): expressions.check_operator,
    ("Argument", "as_string"): expressions.check_text,
    ("Argument", "as_strings"): expressions.check_text,
    ("ConstantValue", "as_string"): expressions.check_text,
    ("CustomObjArgument", "name"): _no_custom_object,
    ("InputToParameterSpec", "parameter_name"): expressions.check_path,
    ("InputToBufferSpec", "buffer_name"): expressions.check_path,
    ("InputToTensorConstantSpec", "tensor_constant_name"): expressions.check_path,
    ("BufferMutationSpec", "buffer_name"): expressions.check_path,
    ("ParameterMutationSpec", "parameter_name"): expressions.check_path,
    ("GradientToParameterSpec", "parameter_name"): expressions.check_path,
    ("ModuleCallEntry", "fqn"): expressions.check_path,
    ("ModuleCallSignature", "in_spec"): expressions.check_structure,
    ("ModuleCallSignature", "out_spec"): expressions.check_structure,
    ("GraphModule", "metadata"): expressions.check_note,
    ("ExportedProgram", "guards_code"): expressions.check_guard,
    ("ExportedProgram", "torch_version"): expressions.check_note,
}
# Keys of dicts that are no names: parameters.
_PAYLOAD_TEXTS: Texts = {("PayloadMeta", "path_name"): expressions.check_path}
_KEYS: Texts = {
    ("PayloadConfig", "config"): expressions.check_path,
    ("ExportedProgram", "range_constraints"): expressions.check_symbolic,  # `5*s77`, too
    ("GraphModule", "treespec_namedtuple_fields"): expressions.check_path,
}


def _check(value: Any, hint: Any, texts: Texts, place: str, owner: tuple[str, str] = ("", "")) -> None:
    """Raise unless `value` has exactly the form that torch's schema declares, and every text in it is in its grammar.

    Raises:
        NotUnderstood: with the place in the program.
    """
    from torch._export.serde.union import _Union

    hint = _plain_hint(hint)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is not None:
            (inner,) = (argument for argument in typing.get_args(hint) if argument is not type(None))
            _check(value, inner, texts, place, owner)
    elif origin is list:
        _expect(type(value) is list, place)
        for item in value:
            _check(item, typing.get_args(hint)[0], texts, place, owner)
    elif origin is dict:
        _expect(type(value) is dict, place)
        for key, item in value.items():
            _expect(type(key) is str, place)
            _located(_KEYS.get(owner, expressions.check_name), key, place)
            _check(item, typing.get_args(hint)[1], texts, place, owner)
    elif isinstance(hint, type) and issubclass(hint, _Union):
        _expect(type(value) is hint, place)
        name = value.type
        _check(value.value, _hints(hint)[name], texts, f"{place}.{name}", (hint.__name__, name))
    elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
        _expect(type(value) is hint, place)
        for name, inner in _hints(hint).items():
            _check(getattr(value, name), inner, texts, f"{place}.{name}", (str(hint.__name__), name))
    elif isinstance(hint, type) and issubclass(hint, enum.IntEnum):
        _expect(type(value) in (int, hint) and value in set(hint), place)
    elif hint is str:
        _expect(type(value) is str, place)
        _located(texts.get(owner, expressions.check_name), value, place)
    elif hint is float:
        _expect(type(value) in (int, float), place)
    else:
        _expect(hint in (int, bool) and type(value) is hint, place)


def _hints(kind: Any) -> dict[str, Any]:
    from torch._export.serde import schema

    return typing.get_type_hints(kind, globalns=vars(schema))


def _plain_hint(hint: Any) -> Any:
    while typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    return hint


def _expect(holds: bool, place: str) -> None:
    if not holds:
        raise NotUnderstood(f"another type than the schema's in {place}")


def _located(check: Callable[[str], None], text: str, place: str) -> None:
    try:
        check(text)
    except NotUnderstood as error:
        raise NotUnderstood(f"{error}, in {place}") from None

"""DATA becomes a `DataSet`: named inputs, read a batch at a time where the file allows it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxaudit import ops
from fxaudit.errors import DataError, nearest
from fxaudit.model import folders
from fxaudit.model.columns import Column, Head, Loaded, Mapped, Tokens
from fxaudit.model.frames import user_frame
from fxaudit.model.functions import Purpose, call_function
from fxaudit.model.inputs import resampled
from fxaudit.model.trace import TracedModel
from fxaudit.provenance import tensor_bytes, tensor_digest

FORMS = (
    "a .safetensors or .npz file with one array for each model input (and `targets`), a .txt file (tokens or bytes, cut"
    " into windows), a folder of images or of a saved Hugging Face data set, file.py:function returning a dict of"
    " arrays or yielding one for each batch, `example`, or `resampled:N[:SEED]` (N inputs drawn from the example's own"
    " elements)"
)
TARGETS, VALID = "targets", "valid"
_PURPOSE = Purpose(DataError, "data set", "a dict of arrays by input name, or yields such dicts", FORMS)
_DIGEST_ROWS = 64
_RESAMPLED = re.compile(r"resampled:(\d+)(?::(\d+))?")
MASK = "attention_mask"


@dataclass(frozen=True, slots=True)
class DataSet:
    """Inputs for one traced model: `count` of them, by the names of its input leaves, and their content hash.

    `targets` are aligned with the outputs: a class for each input, or for each position the token that follows, -100
    where none counts. `valid` is nonzero at positions that are no padding ([inputs, positions]); an input called
    `attention_mask` says the same.
    """

    source: str
    count: int
    columns: Mapping[str, Column]
    digest: str
    targets: Column | None = None
    valid: Column | None = None

    def valid_positions(self) -> Tensor | None:
        """Whether each position counts, [inputs, positions]; None when all do."""
        column = self.valid or self.columns.get(MASK)
        if column is None or column.rows(0, 1).ndim != 2:
            return None
        starts = range(0, self.count, _DIGEST_ROWS)
        valid = torch.cat([column.rows(s, min(s + _DIGEST_ROWS, self.count)) != 0 for s in starts])
        if not bool(valid.any(1).all()):
            raise DataError(
                f"an input in {self.source} has no valid position",
                expected="at least one position that is no padding in each input",
                found=f"input {int((~valid.any(1)).nonzero()[0])}",
                remedy="leave the input out",
            )
        return None if bool(valid.all()) else valid

    def targets_of(self, start: int, stop: int) -> Tensor | None:
        """The targets of inputs `start` to `stop`, or None when the data has none."""
        return None if self.targets is None else self.targets.rows(start, stop)

    def limited(self, count: int | None) -> DataSet:
        """The first `count` inputs, or all of them."""
        if count is None or count >= self.count:
            return self
        if count < 1:
            raise DataError(
                "a limit must leave some inputs", expected="at least 1", found=str(count), remedy="raise it"
            )
        columns = {name: Head(column, count) for name, column in self.columns.items()}
        beside = {TARGETS: self.targets, VALID: self.valid}
        extras = {name: Head(column, count) for name, column in beside.items() if column is not None}
        digest = _digest({**columns, **extras})
        return DataSet(self.source, count, columns, digest, extras.get(TARGETS), extras.get(VALID))

    def row_digests(self) -> list[str]:
        """SHA-256 of each input's own values, by which overlapping data sets are recognised."""
        digests = []
        for start in range(0, self.count, _DIGEST_ROWS):
            stop = min(start + _DIGEST_ROWS, self.count)
            rows = {name: column.rows(start, stop) for name, column in sorted(self.columns.items())}
            for i in range(stop - start):
                digests.append(tensor_digest(row[i] for row in rows.values()))
        return digests

    def leaves(self, traced: TracedModel, start: int, size: int) -> tuple[list[Any], int]:
        """The input leaves of `size` inputs from `start` on, and how many of them are real.

        Past the end the last batch is filled by repeating its inputs from the first on, so that every batch has one
        size.
        """
        real = min(size, self.count - start)
        # What has no input axis comes from the example, which is flattened only where there is such an input.
        whole = all(name in self.columns for name in traced.input_names)
        leaves = [None] * len(traced.input_names) if whole else traced.flatten(traced.subject.arguments)
        for i, name in enumerate(traced.input_names):
            if name in self.columns:
                rows = self.columns[name].rows(start, start + real)
                leaves[i] = rows if real == size else rows[torch.arange(size) % real]
        return leaves, real


def load_data(place: str | Path | Mapping[str, Any], traced: TracedModel) -> DataSet:
    """The data set that `place` names, checked against the inputs of `traced`.

    Raises:
        DataError: no such file, an unknown form, a user's function that fails, arrays that do not fit the model's
            inputs, or a model whose inputs share no first axis.
    """
    if traced.sample is None:
        inputs = zip(traced.input_names, traced.placeholders(), strict=True)
        raise DataError(
            f"{traced.subject.source} has no input axis to give data along",
            expected="inputs that share their first axis",
            found=", ".join(f"{name} {_axes(ops.sizes(node) or ())}" for name, node in inputs) or "no input",
            remedy="wrap the model so that every input has the inputs along its first axis",
        )
    if isinstance(place, Mapping):
        return _checked("given arrays", _loaded("given arrays", place), traced)
    text = str(place)
    if text == "example" or _RESAMPLED.fullmatch(text):
        return _checked(text, _from_example(text, traced), traced)
    path = Path(text)
    if re.search(r"\.py:[\w.]+$", text):
        return _checked(text, _from_function(text), traced)
    if not path.exists():
        raise DataError(
            f"{path} does not exist",
            expected=FORMS,
            found="no such file",
            remedy="check --data and the working directory",
        )
    if path.suffix == ".txt":
        return _checked(text, _text(path, traced), traced)
    if path.is_dir():
        return _checked(text, _folder(path, traced), traced)
    readers = {".safetensors": _safetensors, ".npz": _npz}
    if path.suffix not in readers:
        raise DataError(
            f"{path} is not data that fxaudit can read",
            expected=FORMS,
            found=path.suffix or "a file without an ending",
            remedy="save it with safetensors.torch.save_file",
        )
    return _checked(text, readers[path.suffix](path), traced)


def _from_function(place: str) -> dict[str, Column]:
    """Columns of what a user's function returns; batches that it yields are joined in memory."""
    made = call_function(place, _PURPOSE)
    if isinstance(made, Mapping):
        return _loaded(place, made)
    batches: list[dict[str, Column]] = []
    if isinstance(made, Iterable) and not isinstance(made, str | bytes | Tensor):
        try:
            given = list(made)
        except Exception as error:
            raise DataError(
                f"{place} failed while it yielded batches",
                where=user_frame(error) or place,
                expected=_PURPOSE.function,
                found=f"{type(error).__name__}: {error}",
                remedy="run the function in Python by itself; it must yield without an error",
            ) from error
        if given and all(isinstance(batch, Mapping) and set(batch) == set(given[0]) for batch in given):
            batches = [_loaded(place, batch) for batch in given]
    if not batches:
        raise DataError(
            f"{place} did not return data",
            expected="a dict of arrays by input name, or such dicts of one set of names, one for each batch",
            found=type(made).__name__,
            remedy="return or yield {'input name': tensor}",
        )
    try:
        whole = {name: torch.cat([b[name].rows(0, len(b[name])) for b in batches]) for name in batches[0]}
    except (RuntimeError, TypeError) as error:
        raise DataError(
            f"the batches of {place} do not go together",
            expected="arrays that agree in everything but their number of inputs",
            found=str(error),
            remedy="yield batches of one shape",
        ) from error
    return _loaded(place, whole)


def _loaded(source: str, arrays: Mapping[Any, Any]) -> dict[str, Column]:
    """Columns of arrays that are in memory: tensors, numpy arrays, or nested lists of numbers."""
    columns: dict[str, Column] = {}
    for name, value in arrays.items():
        try:
            tensor = torch.as_tensor(value).detach()
        except Exception as error:  # TypeError, ValueError or RuntimeError, by what the value is
            raise DataError(
                f"`{name}` in {source} is not an array of numbers",
                expected="a tensor, or what torch.as_tensor takes",
                found=f"{type(value).__name__}: {error}",
                remedy="convert it; text goes through the model's tokenizer first",
            ) from error
        columns[str(name)] = Loaded(_with_input_axis(source, str(name), tensor))
    return columns


def _with_input_axis(source: str, name: str, array: Any) -> Any:
    """`array` itself (a tensor or a slice of a file) when it has an axis."""
    shape = array.shape if isinstance(array, Tensor) else array.get_shape()
    if not len(shape):
        raise DataError(
            f"`{name}` in {source} is a single number",
            expected="the inputs along the first axis of every array",
            found="an array without an axis",
            remedy="leave it out: a number that all inputs share keeps the value of the model's example",
        )
    return array


def _from_example(text: str, traced: TracedModel) -> dict[str, Column]:
    arguments = traced.subject.arguments
    if asked := _RESAMPLED.fullmatch(text):
        count, seed = int(asked[1]), int(asked[2] or 1)
        if count < 1:
            raise DataError(
                f"`{text}` asks for no input",
                expected="resampled:N with N of at least 1",
                found=text,
                remedy="ask for some",
            )
        # As many rows as asked for, whatever batch the graph takes at once.
        arguments = resampled(arguments, seed, batch=count)
    import torch.utils._pytree as pytree

    leaves = dict(zip(traced.input_names, pytree.tree_leaves(arguments), strict=True))
    return {name: Loaded(leaves[name]) for name in batched_inputs(traced)}


def _safetensors(path: Path) -> dict[str, Column]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="pt")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"{path} is not a safetensors file",
            expected="named arrays in safetensors form",
            found=str(error),
            remedy="write it again with safetensors.torch.save_file",
        ) from error
    return {name: Mapped(_with_input_axis(str(path), name, rows)) for name, rows in slices.items()}


def _npz(path: Path) -> dict[str, Column]:
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        kinds = {name: getattr(array, "dtype", None) for name, array in arrays.items()}
        if odd := [name for name, kind in kinds.items() if kind is None or kind.kind not in "biufc"]:
            raise ValueError(f"`{odd[0]}` holds no numbers ({kinds[odd[0]] or 'not an array'})")
    except Exception as error:  # damaged bytes fail in as many ways as the zip format has fields
        raise DataError(
            f"{path} is not an .npz file of plain arrays",
            expected="arrays of numbers, saved with numpy.savez",
            found=str(error) or type(error).__name__,
            remedy="write it again with numpy.savez; object arrays are pickles and are refused",
        ) from error
    return _loaded(str(path), arrays)


def _folder(path: Path, traced: TracedModel) -> dict[str, Column]:
    """The columns of a saved data set or of a folder of images."""
    names = batched_inputs(traced)
    if folders.is_dataset(path):
        columns, text = folders.dataset_columns(path, traced, names)
        return columns if text is None else _text(path, traced, text.encode())
    if len(names) != 1:
        raise DataError(
            f"{path} holds images, which {traced.subject.source} does not take",
            expected="a model with one input",
            found=", ".join(names),
            remedy="give the arrays in a .safetensors file, one for each input",
        )
    return folders.image_columns(path, traced, names[0])


def _text(path: Path, traced: TracedModel, content: bytes | None = None) -> dict[str, Column]:
    """A text (the file's, or its `content`) in windows of the traced length, each with the tokens that follow as its
    targets.

    Tokens are those of the model's own tokenizer, or bytes for a model with 256 classes. Windows do not overlap; what
    is left at the end is shorter than a window and is not used.
    """
    names = [name for name in batched_inputs(traced) if _is_token_input(traced, name)]
    if len(names) != 1 or len(batched_inputs(traced)) != 1:
        raise DataError(
            f"{path} is text, which {traced.subject.source} does not take",
            expected="a model with one input of token ids, [inputs, tokens]",
            found=", ".join(batched_inputs(traced)) or "no batched input",
            remedy="give the arrays in a .safetensors file, one for each input",
        )
    window = _window(traced, names[0])
    data = _tokens(path, traced, content)
    count = (len(data) - 1) // window
    if count < 1:
        raise DataError(
            f"{path} is too short",
            expected=f"more than {window} tokens, one window of the traced length",
            found=f"{len(data)} tokens",
            remedy="name a longer text, or a shorter --window",
        )
    ids = data[: count * window].view(count, window)
    following = data[1 : count * window + 1].view(count, window)
    return {names[0]: Tokens(ids), TARGETS: Tokens(following)}


def _tokens(path: Path, traced: TracedModel, content: bytes | None) -> Tensor:
    try:
        content = path.read_bytes() if content is None else content
        directory = traced.subject.tokenizer
        if directory is not None:
            return _tokenized(content.decode("utf-8"), directory)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} is no text that can be read",
            expected="a file in UTF-8",
            found=str(error),
            remedy="convert it to UTF-8, or give token ids and `targets` in a .safetensors file",
        ) from error
    classes = {size[-1] for node in traced.output_leaves() if isinstance(node, Node) and (size := ops.sizes(node))}
    if 256 not in classes:
        raise DataError(
            f"{path} is text, and {traced.subject.source} comes without a tokenizer",
            expected="a directory with the model's tokenizer, or a model over bytes (256 classes)",
            found=f"outputs with {', '.join(map(str, sorted(classes, key=str)))} classes",
            remedy="give token ids and `targets` in a .safetensors file",
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _tokenized(text: str, directory: Path) -> Tensor:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)
    except Exception as error:
        raise DataError(
            f"the tokenizer in {directory} could not be used",
            where=str(directory),
            expected="a tokenizer that transformers loads without code of the directory's own",
            found=f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}",
            remedy="give token ids and `targets` in a .safetensors file",
        ) from error


def _is_token_input(traced: TracedModel, name: str) -> bool:
    node = traced.placeholders()[traced.input_names.index(name)]
    return ops.dtype(node) == torch.int64 and len(ops.sizes(node) or ()) == 2


def _window(traced: TracedModel, name: str) -> int:
    size = (ops.sizes(traced.placeholders()[traced.input_names.index(name)]) or ())[1]
    if not isinstance(size, int):
        raise DataError("the traced length is not fixed", expected="a number", found=str(size), remedy="trace with one")
    return size


def special_positions(data: DataSet, traced: TracedModel) -> Tensor | None:
    """Where the inputs hold special tokens (begin, end, padding and the like), [inputs, positions].

    Special are the ids that the model's configuration names ``..._token_id``. None when there are no token ids, no such
    id, or none of them in the data.
    """
    config = getattr(traced.subject.module, "config", None)
    named = (
        {key: value for key, value in vars(config).items() if key.endswith("_token_id")} if config is not None else {}
    )
    ids = {i for value in named.values() for i in (value if isinstance(value, list) else [value]) if type(i) is int}
    names = [name for name in data.columns if _is_token_input(traced, name) and name != MASK]
    if len(names) != 1 or not ids:
        return None
    known = torch.tensor(sorted(ids))
    column = data.columns[names[0]]
    starts = range(0, data.count, _DIGEST_ROWS)
    found = torch.cat([torch.isin(column.rows(s, min(s + _DIGEST_ROWS, data.count)), known) for s in starts])
    return found if bool(found.any()) else None


def require_disjoint(evaluation: DataSet, calibration: DataSet) -> None:
    """Raise when an input is in both data sets: a profile must come from inputs that it is not tested on.

    Raises:
        DataError: with the number of common inputs.
    """
    common = set(evaluation.row_digests()) & set(calibration.row_digests())
    if common:
        raise DataError(
            "calibration and evaluation data overlap",
            where=f"{calibration.source}\n{evaluation.source}",
            expected="no common input",
            found=f"{len(common)} inputs that are in both",
            remedy="split the data, by file where inputs of one file resemble each other; `resampled:N:2` draws others"
            " than `resampled:N`",
        )


def batched_inputs(traced: TracedModel) -> list[str]:
    """The names of the input leaves that have an input axis."""
    names = []
    for node, name in zip(traced.placeholders(), traced.input_names, strict=True):
        shape = ops.sizes(node)
        if shape and traced.sample is not None and shape[0] == traced.sample:
            names.append(name)
    return names


def _checked(source: str, columns: dict[str, Column], traced: TracedModel) -> DataSet:
    wanted = batched_inputs(traced)
    given = [name for name in columns if name not in (TARGETS, VALID)]
    missing = [name for name in wanted if name not in columns]
    unknown = [name for name in given if name not in wanted]
    if missing or unknown:
        hint = nearest(unknown[0], wanted) if unknown else ""
        raise DataError(
            f"{source} does not hold the inputs of {traced.subject.source}{hint}",
            expected=", ".join(wanted),
            found=", ".join(columns) or "no array",
            remedy="name the arrays as the model's forward names its arguments",
            missing=missing,
        )
    counts = {name: len(column) for name, column in columns.items()}
    if len(set(counts.values())) != 1 or not all(counts.values()):
        raise DataError(
            f"the arrays in {source} differ in their number of inputs, or have none",
            expected="one size of the first axis",
            found=", ".join(f"{n}: {c}" for n, c in counts.items()),
            remedy="cut them to the same inputs",
        )
    for node, name in zip(traced.placeholders(), traced.input_names, strict=True):
        if name in columns:
            _check_column(source, name, columns[name].rows(0, 1), node)
    count = next(iter(counts.values()))
    inputs = {name: columns[name] for name in wanted}
    return DataSet(source, count, inputs, _digest(columns), columns.get(TARGETS), columns.get(VALID))


def _axes(shape: Sequence[Any]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _check_column(source: str, name: str, row: Tensor, node: Any) -> None:
    shape, dtype = ops.sizes(node) or (), ops.dtype(node)
    fits = len(shape) == row.ndim and all(
        not isinstance(e, int) or e == s for e, s in zip(shape[1:], row.shape[1:], strict=True)
    )
    if not fits or row.dtype != dtype:
        raise DataError(
            f"`{name}` in {source} does not fit the model",
            expected=f"[inputs, {', '.join(map(str, shape[1:]))}] {dtype}",
            found=f"[inputs, {', '.join(map(str, row.shape[1:]))}] {row.dtype}",
            remedy="convert the array, or trace the model with an example of this shape and dtype",
        )


def _digest(columns: Mapping[str, Column]) -> str:
    """SHA-256 over names, dtypes, shapes and values, read a few rows at a time."""
    digest = hashlib.sha256()
    for name in sorted(columns):
        column = columns[name]
        first: Sequence[int] = column.rows(0, 1).shape[1:]
        digest.update(f"{name};{column.rows(0, 1).dtype};{(len(column), *first)};".encode())
        for start in range(0, len(column), _DIGEST_ROWS):
            digest.update(tensor_bytes(column.rows(start, min(start + _DIGEST_ROWS, len(column)))))
    return digest.hexdigest()

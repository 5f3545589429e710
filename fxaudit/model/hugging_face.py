"""A Hugging Face model directory, or repository of the hub, becomes a module with example inputs.

Code that the directory brings runs only on demand; without it, nothing that `config.json` says makes transformers fetch
or run anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxaudit.errors import LoadError, nearest
from fxaudit.model.archives import FileKind, kind_of, plain_names, read_json, read_torch_pickle
from fxaudit.model.files import printable
from fxaudit.model.frames import user_frame
from fxaudit.model.hugging_face_inputs import example_inputs
from fxaudit.model.placement import Placement
from fxaudit.model.weights import put_weights, read_weights

CONFIG = "config.json"
_LONGEST_CONFIG = 10_000_000
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?")
_SAFETENSORS, _PICKLED = "model.safetensors", "pytorch_model.bin"
# What is fetched of a repository; weights in torch files only where there are no others.
_FETCHED = ("*.json", "*.txt", "*.model", "model*.safetensors")
# transformers fetches and runs a kernel of the hub where a configuration names one: `owner/kernel`.
_KERNEL = re.compile(r"[/:]")


def is_hub_id(model: str) -> bool:
    """Whether MODEL has the form of a repository of the Hugging Face hub: owner/name, or owner/name@revision."""
    return _HUB_ID.fullmatch(model) is not None


def is_pretrained_model(module: nn.Module) -> bool:
    """Whether a module is a model of transformers; tells without importing transformers."""
    return any(base.__module__ == "transformers.modeling_utils" for base in type(module).__mro__)


def snapshot(model: str, *, code: bool) -> Path:
    """The directory of a repository in the local cache of the hub, fetched first where there is a network.

    Raises:
        LoadError: neither in the cache nor to be had.
    """
    import huggingface_hub

    repository, _, revision = model.partition("@")

    def fetch(*patterns: str) -> Path:
        kept: Any = list(patterns)
        return Path(huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=kept))

    try:
        directory = fetch(*_FETCHED, *(["*.py"] if code else []))
        if not any(directory.glob("model*.safetensors")):
            directory = fetch(*_FETCHED, "pytorch_model*.bin", *(["*.py"] if code else []))
    except Exception as error:  # the client's errors, and those of the network under it
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        raise LoadError(
            f"{model} is neither a directory here nor to be had from the Hugging Face hub",
            where=model,
            expected="a model directory, or a repository in the local cache of the hub or on the hub itself",
            found=f"{type(error).__name__}: {_first_line(error)}{offline}",
            remedy="check the spelling and the working directory; fetch the repository where there is a network:\n"
            f"hf download {repository}",
        ) from error
    return directory


def load_directory(
    path: Path,
    *,
    pretrained: bool,
    placement: Placement | None = None,
    trust_remote_code: bool = False,
    name: str = "",
) -> tuple[nn.Module, Callable[[], Any]]:
    """The model of a directory with `config.json` and weights, and a function that makes example inputs.

    The class is the one that the configuration names (`architectures`), so that heads are kept. Weights are safetensors
    or, read without running code, `pytorch_model.bin`; both may be sharded.

    Raises:
        LoadError: no configuration, an unknown class, code without `trust_remote_code`, or weights that do not load.
    """
    placement = placement or Placement()
    settings = _settings(path, name or str(path), trust_remote_code=trust_remote_code)
    architecture = str(settings["architectures"][0])
    custom = _custom_class(settings, architecture) if trust_remote_code else None
    if custom is None:
        model_class = _library_class(architecture, path)
    files = _weight_files(path) if pretrained else []
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
        if custom is not None:
            model_class = _import_custom(custom, path)
        if custom is not None or not pretrained:
            module = _build(model_class, config, placement, path)
        else:
            module = _from_pretrained(model_class, config, placement, path, architecture)
    except LoadError:
        raise
    except Exception as error:
        raise LoadError(
            f"{path} could not be loaded",
            where=user_frame(error) if custom is not None else str(path),
            expected="config.json with its weights beside it",
            found=f"{type(error).__name__}: {_first_line(error)}",
            remedy="check the directory against the one that save_pretrained wrote, or use --random-init for the\n"
            "architecture alone",
        ) from error
    if custom is not None and pretrained:
        put_weights(module, {key: value for file in files for key, value in read_weights(file).items()}, path)
    return module, lambda: example_inputs(module, str(path))


def _from_pretrained(model_class: Any, config: Any, placement: Placement, path: Path, architecture: str) -> nn.Module:
    options = {} if placement.dtype is None else {"dtype": placement.dtype}
    module, info = model_class.from_pretrained(
        path,
        local_files_only=True,
        use_safetensors=not _has_only_pickles(path),
        weights_only=True,
        trust_remote_code=False,
        config=config,
        output_loading_info=True,
        **options,
    )
    # transformers draws what it does not find at random, and goes on.
    if missing := sorted(info.get("missing_keys", ())):
        raise LoadError(
            f"the weights in {path} do not fit {architecture}",
            where=str(path),
            expected="every weight of the class that config.json names",
            found=f"missing {', '.join(missing[:4])}{f' and {len(missing) - 4} more' if len(missing) > 4 else ''}",
            remedy="name the class that the weights were saved from under `architectures` in config.json",
        )
    made: nn.Module = module
    return made


def _build(model_class: Any, config: Any, placement: Placement, path: Path) -> nn.Module:
    """The module with random weights; that they fit into memory is known from its sizes on the meta device."""
    if not placement.is_meta:
        _check_memory(lambda: model_class(config), placement, path)
    before = torch.get_default_dtype()
    try:
        if placement.dtype is not None:
            torch.set_default_dtype(placement.dtype)
        made: nn.Module = placement.build(lambda: model_class(config))
        return made
    finally:
        torch.set_default_dtype(before)


def _check_memory(make: Callable[[], nn.Module], placement: Placement, path: Path) -> None:
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            sizes = [p.numel() * (placement.dtype or p.dtype).itemsize for p in make().parameters()]
    except Exception:  # code that reads values while it builds; it is built for real then, and fails for real
        return
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if sum(sizes) > memory:
        raise LoadError(
            f"the model of {path} does not fit into memory",
            where=str(path / CONFIG),
            expected=f"at most {memory:,} bytes of weights",
            found=f"{sum(sizes):,} bytes",
            remedy="check the sizes in config.json, give --dtype bfloat16, or use --device meta",
        )


# --- configuration --------------------------------------------------------------------------------------------------


def _settings(path: Path, name: str, *, trust_remote_code: bool) -> dict[str, Any]:
    """`config.json`, as far as it is safe to hand to transformers."""
    file = path / CONFIG
    try:
        size = file.stat().st_size
        data = file.read_bytes() if size <= _LONGEST_CONFIG else b""
    except OSError as error:
        raise _no_directory(path, f"{type(error).__name__}: {error}") from error
    if size > _LONGEST_CONFIG:
        raise _no_directory(path, f"a file of {size:,} bytes")
    try:
        settings = read_json(data, file)
    except LoadError as error:
        raise _no_directory(path, error.found) from error
    architectures = settings.get("architectures") if isinstance(settings, dict) else None
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise _no_directory(path, f"architectures: {architectures!r}" if isinstance(settings, dict) else "no object")
    if not trust_remote_code and (code := _code_of(settings)):
        raise LoadError(
            f"{name} brings its own code, which is not run",
            where=str(file),
            expected="a class of transformers itself",
            found=f"auto_map: {printable(str(code))}",
            remedy="read the code; where you trust it, run it with\n"
            f"fxaudit trace {name} --trust-remote-code\n"
            "or name a function that builds the model, in a Python file of your own",
        )
    for key, value in _entries(settings):
        if key.strip("_").startswith(("attn_implementation", "experts_implementation")) and _KERNEL.search(str(value)):
            raise LoadError(
                f"{name} asks for a kernel of the hub, which is not fetched",
                where=str(file),
                expected="an implementation that transformers brings itself: eager, sdpa",
                found=f"{key}: {printable(str(value))}",
                remedy=f"remove `{key}` from config.json",
            )
    return settings


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key and value of nested JSON objects."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield from value.items()
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _code_of(settings: dict[str, Any]) -> Any:
    return next((value for key, value in _entries(settings) if key == "auto_map"), None)


def _no_directory(path: Path, found: str) -> LoadError:
    return LoadError(
        f"{path} is no model directory",
        where=str(path / CONFIG),
        expected="a config.json that names its class under `architectures`",
        found=printable(found),
        remedy="name the directory that save_pretrained wrote",
    )


# --- classes --------------------------------------------------------------------------------------------------------


def _library_class(architecture: str, path: Path) -> Any:
    import transformers

    try:
        found = getattr(transformers, architecture)
    except Exception:  # no such name, or one whose own imports fail
        found = None
    # The name comes from the directory: of all that transformers holds, only a model may be called.
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return found
    known = {name for name in dir(transformers) if "For" in name or name.endswith("Model")}
    raise LoadError(
        f"transformers has no model class `{printable(architecture)}`{nearest(architecture, known)}",
        where=str(path / CONFIG),
        expected=f"a model class of transformers {transformers.__version__}",
        found=printable(architecture),
        remedy="install the transformers version that the model was saved with, or name a function that builds it",
    )


def _custom_class(settings: dict[str, Any], architecture: str) -> str | None:
    """The ``module.Class`` of the model in `auto_map`: the class of `architectures`, else that of an AutoModel."""
    classes = settings.get("auto_map")
    if not isinstance(classes, dict):
        return None
    models = {key: value for key, value in classes.items() if key.startswith("AutoModel") and isinstance(value, str)}
    named = [value for value in models.values() if value.rpartition(".")[2] == architecture]
    return next(iter([*named, *models.values()]), None)


def _import_custom(reference: str, path: Path) -> Any:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    return get_class_from_dynamic_module(reference, path, local_files_only=True)


# --- weights --------------------------------------------------------------------------------------------------------


def _has_only_pickles(path: Path) -> bool:
    return not any((path / f"{_SAFETENSORS}{ending}").exists() for ending in ("", ".index.json"))


def _weight_files(path: Path) -> list[Path]:
    """The weight files of a directory, each where it should be and, if it is a torch file, without code.

    Raises:
        LoadError: none, one that is missing or lies elsewhere, or one that needs code.
    """
    for name in (_SAFETENSORS, _PICKLED):
        if (index := path / f"{name}.index.json").exists():
            files = _shards(index)
        elif (path / name).exists():
            files = [path / name]
        else:
            continue
        for file in files:
            _check_weight_file(file, path)
        return files
    raise LoadError(
        f"{path} holds no weights",
        where=str(path),
        expected=f"{_SAFETENSORS} or {_PICKLED}, whole or in shards with an index",
        found=", ".join(sorted(printable(file.name) for file in path.iterdir())[:8]) or "an empty directory",
        remedy="save the weights with save_pretrained, or use --random-init for the architecture alone",
    )


def _shards(index: Path) -> list[Path]:
    content = read_json(index.read_bytes() if index.stat().st_size <= _LONGEST_CONFIG * 10 else b"", index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise _misplaced(index, "a `weight_map` of names and files", "another form")
    files = list(dict.fromkeys(names.values()))
    for name in files:
        if Path(name).name != name or "\\" in name:
            raise _misplaced(index, "the names of files beside it", printable(name))
    return [index.parent / name for name in files]


def _check_weight_file(file: Path, path: Path) -> None:
    if not file.is_file():
        raise _misplaced(file, "a file of weights that the index names", "no such file")
    # In the cache of the hub the files of a snapshot are links to the blobs of the same repository.
    homes = [path.resolve()]
    if path.resolve().parent.name == "snapshots":
        homes.append(path.resolve().parent.parent / "blobs")
    if not any(file.resolve().is_relative_to(home) for home in homes):
        raise _misplaced(file, "a file inside the directory", f"a link to {file.resolve()}")
    kind = kind_of(file)
    if file.suffix == ".bin":
        if not kind.is_pickled:
            raise _misplaced(file, "a file that torch.save wrote", kind.value)
        # Not unpickled twice: whether torch itself refuses a name is known without calling it.
        followed = read_torch_pickle(file, kind)
        if odd := sorted({name.path for name in followed.globals} - plain_names()):
            raise LoadError(
                f"{file} is refused: unpickling it could run code that it carries",
                where=str(file),
                expected="tensors and plain values",
                found=f"a pickle that would call {', '.join(map(printable, odd[:5]))}",
                remedy="convert the weights to safetensors where you trust them, or use --random-init for the\n"
                "architecture alone",
            )
    elif kind is not FileKind.SAFETENSORS:
        raise _misplaced(file, "a safetensors file", kind.value)


def _misplaced(where: Path, expected: str, found: str) -> LoadError:
    return LoadError(
        f"the weights in {where.parent} are not what they should be",
        where=str(where),
        expected=expected,
        found=found,
        remedy="save the model again with save_pretrained",
    )


def tokenizer_directory(path: Path) -> Path | None:
    """The directory itself when it holds a tokenizer that transformers can load without running code."""
    names = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model")
    return path if path.is_dir() and any((path / name).exists() for name in names) else None


def _first_line(error: BaseException) -> str:
    return printable((str(error).splitlines() or [""])[0])

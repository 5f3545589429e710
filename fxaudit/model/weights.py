"""State dicts: read from safetensors or torch files without running code, and put into a module without a copy."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxaudit.errors import LoadError
from fxaudit.model.archives import FileKind, kind_of, plain_names, read_torch_pickle
from fxaudit.model.files import describe_file, printable

_SHOWN = 4
# Prefixes that wrappers put before every name: DataParallel and DistributedDataParallel, torch.compile.
_WRAPPERS = ("module.", "_orig_mod.")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state dict of a file; `key` is what it lies under in a training checkpoint, `beside` what lies beside it."""

    state: dict[str, Tensor]
    key: str = ""
    beside: tuple[str, ...] = ()

    def describe(self) -> str:
        shapes = [f"{name} {list(tensor.shape)}" for name, tensor in list(self.state.items())[:_SHOWN]]
        rest = len(self.state) - len(shapes)
        values = sum(tensor.numel() for tensor in self.state.values())
        text = f"{len(self.state)} tensors, {values:,} values: {', '.join(map(printable, shapes))}"
        text += f" and {rest} more" if rest > 0 else ""
        if self.key:
            text += f"\nunder `{printable(self.key)}`, beside {', '.join(map(printable, self.beside)) or 'nothing'}"
        return text


def load_plain(path: Path, kind: FileKind) -> Any:
    """What `torch.load(weights_only=True)` makes of a torch file, on the CPU; the archive is mapped, not copied.

    Raises:
        LoadError: the file needs code, is damaged, or declares storages that it does not have.
    """
    if not kind.is_pickled:
        raise LoadError(
            f"{path} is no torch file",
            where=str(path),
            expected="a file that torch.save wrote",
            found=describe_file(path),
            remedy="save it again with torch.save, or better with safetensors.torch.save_file",
        )
    # torch also allows what other libraries have registered in this process; here it is torch's own names only.
    followed = read_torch_pickle(path, kind)
    if not {name.path for name in followed.globals} <= plain_names():
        raise _needs_code(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=kind is FileKind.TORCH)
    except pickle.UnpicklingError as error:
        raise _needs_code(path) from error
    except Exception as error:  # hostile bytes fail in as many ways as the format has fields
        raise _needs_code(path, f"\n{type(error).__name__}: {_first_line(error)}") from error


def _needs_code(path: Path, why: str = "") -> LoadError:
    return LoadError(
        f"{path} is refused: reading it could run code that it carries",
        where=str(path),
        expected="tensors and plain values, saved with torch.save",
        found=describe_file(path) + why,
        remedy="where you trust it, convert it once in Python:\n"
        "safetensors.torch.save_file(torch.load(path).state_dict(), 'weights.safetensors')",
    )


def checkpoint_of(found: Any) -> Checkpoint | None:
    """The state dict in what a torch file holds: the object itself, or the only one in a dict of training state."""
    if (state := _as_state(found)) is not None:
        return Checkpoint(state)
    if not isinstance(found, Mapping):
        return None
    inner = {str(key): state for key, value in found.items() if (state := _as_state(value)) is not None}
    # A training checkpoint may hold averaged weights too; the model's own come first.
    named = [key for key in ("state_dict", "model_state_dict", "model", "net", "module") if key in inner]
    if not named and len(inner) != 1:
        return None
    key = named[0] if named else next(iter(inner))
    return Checkpoint(inner[key], key, tuple(str(other) for other in found if str(other) != key))


def _as_state(value: Any) -> dict[str, Tensor] | None:
    if not isinstance(value, Mapping) or not value:
        return None
    if not all(isinstance(name, str) and isinstance(item, Tensor) for name, item in value.items()):
        return None
    return dict(value)


def read_weights(path: Path) -> dict[str, Tensor]:
    """The state dict of a safetensors or torch file, told apart by content.

    Raises:
        LoadError: no such file, another kind of file, or one that needs code.
    """
    kind = kind_of(path)
    if kind is FileKind.MISSING:
        raise LoadError(
            f"{path} does not exist",
            expected="a file of weights",
            found="no such file",
            remedy="check --weights",
        )
    if kind is FileKind.SAFETENSORS or path.suffix == ".safetensors":
        return read_safetensors(path)
    found = load_plain(path, kind)
    checkpoint = checkpoint_of(found)
    if checkpoint is None:
        raise LoadError(
            f"{path} is no state dict",
            where=str(path),
            expected="a dict of names and tensors, by itself or as one entry of a training checkpoint",
            found=_outline(found),
            remedy="save the state dict alone: safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')",
        )
    return checkpoint.state


def read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise LoadError(
            f"{path} is not a whole safetensors file",
            where=str(path),
            expected="a state dict in safetensors form",
            found=f"{describe_file(path)}\n{type(error).__name__}: {_first_line(error)}",
            remedy="write it again with safetensors.torch.save_file",
        ) from error


def _outline(value: Any) -> str:
    if isinstance(value, Mapping):
        items = [f"{printable(str(key))}: {type(item).__name__}" for key, item in list(value.items())[:_SHOWN]]
        return f"a dict of {len(value)}: {', '.join(items)}" if items else "an empty dict"
    return f"a {type(value).__name__}"


# --- into the module ------------------------------------------------------------------------------------------------


def load_weights(module: nn.Module, path: Path) -> None:
    """Load the state dict of a file into `module`, every name and shape checked.

    The tensors of the file become those of the module, in the dtypes of the module; weights that are tied stay tied.

    Raises:
        LoadError: no such file, no state dict, or names and shapes that do not fit.
    """
    put_weights(module, read_weights(path), path)


def put_weights(module: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    """Load a state dict that was read from `path` into `module`, as `load_weights` does."""
    own = module.state_dict(keep_vars=True)
    state = _without_wrapper(own, state)
    tied = tied_names(module)
    _check_ties(tied, state, path)
    fitting = _as_own(own, state, path)
    try:
        missing, unexpected = module.load_state_dict(fitting, strict=False, assign=True)
    except RuntimeError as error:
        raise LoadError(
            f"the weights in {path} do not fit the model",
            where=str(path),
            expected="the shapes of the model's own parameters",
            found="\n".join(str(error).splitlines()[1:4]).strip() or _first_line(error),
            remedy="build the model with the configuration that the weights were saved from",
        ) from error
    # A tied weight is saved once, under any of its names; its other names are missing without being absent.
    saved = {name for names in tied if not names.isdisjoint(state) for name in names}
    missing = [name for name in missing if name not in saved]
    if missing or unexpected:
        raise LoadError(
            f"the weights in {path} do not fit the model",
            where=str(path),
            expected=f"{len(own)} tensors named as in the model's state dict",
            found=f"missing {_few(missing)}; unexpected {_few(unexpected)}",
            remedy="build the model with the configuration that the weights were saved from",
        )
    tie_again(module, tied, set(state))


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])


def tied_names(module: nn.Module) -> list[set[str]]:
    """The names of each tensor that has several."""
    names: dict[int, set[str]] = {}
    for name, tensor in _named_tensors(module).items():
        names.setdefault(id(tensor), set()).add(name)
    return [group for group in names.values() if len(group) > 1]


def _check_ties(tied: list[set[str]], state: dict[str, Tensor], path: Path) -> None:
    for group in tied:
        first, *others = [name for name in sorted(group) if name in state] or [""]
        for other in others:
            if state[first] is not state[other] and not torch.equal(state[first], state[other]):
                raise LoadError(
                    f"the weights in {path} do not fit the model",
                    where=str(path),
                    expected=f"one value for `{first}` and `{other}`, which are one tensor in the model",
                    found="two different values",
                    remedy="build the model with these weights untied",
                )


def _without_wrapper(own: Mapping[str, Any], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` without the prefix that a wrapper around the module had put before every name."""
    for prefix in _WRAPPERS:
        if all(name.startswith(prefix) for name in state) and not any(name.startswith(prefix) for name in own):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state


def _as_own(own: Mapping[str, Any], state: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """`state` as it may be assigned: in the dtypes of the module, contiguous, and no tensor under two names."""
    starts: set[int] = set()
    fitting = dict(state)
    for name, tensor in state.items():
        mine = own.get(name)
        if not isinstance(mine, Tensor) or mine.shape != tensor.shape:
            continue  # the module says so itself, and a size that only the file claims is never allocated
        tensor = _converted(name, tensor, mine.dtype, path).contiguous()
        if tensor.numel() and tensor.data_ptr() in starts:
            tensor = tensor.clone()
        starts.add(tensor.data_ptr())
        fitting[name] = tensor
    return fitting


def _converted(name: str, tensor: Tensor, dtype: torch.dtype, path: Path) -> Tensor:
    """`tensor` in another dtype; only floating point numbers may be rounded by it."""
    if tensor.dtype == dtype:
        return tensor
    if tensor.dtype.is_floating_point and dtype.is_floating_point:
        return tensor.to(dtype)
    both_discrete = not any(d.is_floating_point or d.is_complex for d in (tensor.dtype, dtype))
    if both_discrete and torch.equal((converted := tensor.to(dtype)).to(tensor.dtype), tensor):
        return converted
    raise LoadError(
        f"the weights in {path} do not fit the model",
        where=str(path),
        expected=f"`{name}` of {dtype}",
        found=f"{tensor.dtype}",
        remedy="save the weights in the dtypes of the model",
    )


def tie_again(module: nn.Module, tied: list[set[str]], assigned: Collection[str] = ()) -> None:
    """Make one tensor of each group of names in `tied` again: that of a name in `assigned`, else of the first name."""
    for group in tied:
        tensors = _named_tensors(module)
        source = tensors[next((name for name in sorted(group) if name in assigned), min(group))]
        for name in group:
            if tensors[name] is not source:
                owner, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(owner), leaf, source)


def _few(names: list[str]) -> str:
    return f"{', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}" if names else "none"


def _first_line(error: BaseException) -> str:
    return printable((str(error).splitlines() or [""])[0])

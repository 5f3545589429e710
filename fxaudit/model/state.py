"""What a forward call may leave behind in a module: buffers and Python attributes, remembered and set back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxaudit.model.compare import same_bits

# Torch's own bookkeeping: parameters, hooks, `training` and the like. Buffers are remembered apart.
_TORCHS = frozenset(vars(nn.Module()))


@dataclass(frozen=True, slots=True)
class _Kept:
    """An attribute: the object itself, and a copy of what it holds (containers by element, tensors by value)."""

    value: Any
    content: Any


@dataclass(frozen=True, slots=True)
class ModuleState:
    """A module's buffers by value and, by module path, its buffer objects and its Python attributes."""

    buffers: dict[str, Tensor]
    objects: dict[str, dict[str, Tensor | None]]
    attributes: dict[str, dict[str, _Kept]]


def remember(module: nn.Module) -> ModuleState:
    """The state of `module` now."""
    modules = dict(module.named_modules())
    return ModuleState(
        buffers={name: buffer.clone() for name, buffer in module.named_buffers()},
        objects={path: dict(inner._buffers) for path, inner in modules.items()},
        attributes={
            path: {name: _Kept(value, _content(value)) for name, value in _attributes(inner).items()}
            for path, inner in modules.items()
        },
    )


def set_back(module: nn.Module, state: ModuleState) -> list[str]:
    """Set `module` back to `state`; returns the names of the Python attributes that had changed."""
    changed = set_back_buffer_objects(module, state)
    for path, inner in module.named_modules():
        before, now = state.attributes.get(path, {}), _attributes(inner)
        for name in before.keys() | now.keys():
            if name not in before:
                del vars(inner)[name]
            elif name not in now or now[name] is not before[name].value or not _holds(before[name]):
                is_equal = name in now and _equal(_content(now[name]), before[name].content)
                vars(inner)[name] = _restored(before[name])
                if is_equal:
                    continue  # an equal value, made anew: nobody needs to know
            else:
                continue
            changed.append(f"{path}.{name}".lstrip("."))
    return sorted(changed)


def set_back_buffers(module: nn.Module, state: ModuleState) -> None:
    """Set the values of the buffers of `module` back to `state`."""
    own = dict(module.named_buffers())
    with torch.no_grad():
        for name, value in state.buffers.items():
            if name in own and own[name].shape == value.shape:
                own[name].copy_(value)


def set_back_buffer_objects(module: nn.Module, state: ModuleState) -> list[str]:
    """Set back the buffers of `module`, those that calls added or replaced as well as their values.

    Returns the names of what was added or has another shape; a buffer replaced by one like it is a written buffer,
    which the graph tells of.
    """
    changed = []
    for path, inner in module.named_modules():
        before = state.objects.get(path, {})
        for name in [*inner._buffers]:
            if name not in before:
                del inner._buffers[name]
                changed.append(f"{path}.{name}".lstrip("."))
        for name, buffer in before.items():
            now = inner._buffers.get(name)
            if now is not buffer:
                inner._buffers[name] = buffer
                if now is None or buffer is None or now.shape != buffer.shape:
                    changed.append(f"{path}.{name}".lstrip("."))
    set_back_buffers(module, state)
    return changed


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _TORCHS}


def _content(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _content(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_content(item) for item in value]
    if isinstance(value, set):
        return set(value)
    return value


def _holds(kept: _Kept) -> bool:
    return _equal(_content(kept.value), kept.content)


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return same_bits(a, b) if not a.is_meta else a.shape == b.shape
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, bool | int | float | complex | str | bytes | set | frozenset):
        return a == b or (a != a and b != b)
    return False  # another object: what it holds is not looked into


def _restored(kept: _Kept) -> Any:
    """The remembered object with what it held."""
    value, content = kept.value, kept.content
    with torch.no_grad():
        if isinstance(value, Tensor):
            if not _equal(value, content):
                value.copy_(content)
        elif isinstance(value, dict):
            _refill(value, content.items(), value.update)
        elif isinstance(value, list):
            _refill(value, content, value.extend)
        elif isinstance(value, set):
            _refill(value, content, value.update)
    return value


def _refill(container: Any, content: Iterable[Any], fill: Any) -> None:
    content = list(content)
    container.clear()
    fill(content)

"""What a forward call may leave behind in a module: buffers and plain Python attributes, remembered and set back."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, str, type(None), list, tuple, dict, set)


@dataclass(frozen=True, slots=True)
class ModuleState:
    """Copies of a module's buffers, and of its plain Python attributes by module path."""

    buffers: dict[str, Tensor]
    attributes: dict[str, dict[str, Any]]


def remember(module: nn.Module) -> ModuleState:
    """The state of `module` now."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return ModuleState(buffers, {path: copy.deepcopy(_plain(m)) for path, m in module.named_modules()})


def set_back(module: nn.Module, state: ModuleState) -> list[str]:
    """Set `module` back to `state`; returns the names of the Python attributes that had changed."""
    set_back_buffers(module, state)
    changed = []
    for path, inner in module.named_modules():
        before, now = state.attributes.get(path, {}), _plain(inner)
        for name in before.keys() | now.keys():
            if name not in before:
                delattr(inner, name)
            elif name not in now or not _same(now[name], before[name]):
                setattr(inner, name, copy.deepcopy(before[name]))
            else:
                continue
            changed.append(f"{path}.{name}".lstrip("."))
    return sorted(changed)


def set_back_buffers(module: nn.Module, state: ModuleState) -> None:
    """Set the buffers of `module` back to `state`."""
    own = dict(module.named_buffers())
    with torch.no_grad():
        for name, value in state.buffers.items():
            if name in own and own[name].shape == value.shape:
                own[name].copy_(value)


def _plain(module: nn.Module) -> dict[str, Any]:
    """The attributes that hold plain values; torch's own bookkeeping begins with an underscore or is `training`."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training" and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b or a is b or (a != a and b != b))

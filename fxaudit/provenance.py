"""Fingerprints of models, graphs and data, and the versions and settings that a number depends on."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

_PACKAGES = ("torch", "transformers", "timm", "torchvision", "numpy", "safetensors")


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The values of a tensor as bytes in row-major order, whatever its dtype, device and strides."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def tensor_digest(tensors: Iterable[Tensor | None]) -> str:
    """SHA-256 over dtype, shape and values of tensors in order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is None:
            digest.update(b"none;")
            continue
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)};".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def state_fingerprint(module: torch.nn.Module) -> str:
    """SHA-256 over the names and values of all parameters and buffers, non-persistent ones included.

    Tied tensors are read once: the names of the others are hashed with the first.
    """
    digest = hashlib.sha256()
    seen: dict[int, str] = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        first = seen.setdefault(id(tensor), name)
        digest.update(f"{name}={first};{tensor.dtype}{tuple(tensor.shape)};".encode())
        if first == name and tensor.device.type != "meta":
            digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def json_digest(value: Any) -> str:
    """SHA-256 of a JSON-like value in canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()).hexdigest()


def environment() -> dict[str, Any]:
    """Everything outside the model that can change a bit of its output, and the versions of what computed it."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def differences(expected: Mapping[str, Any], found: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What differs between two nested mappings, one line ``key: expected -> found`` for each leaf."""
    lines = []
    for key in sorted(expected.keys() | found.keys()):
        a, b = expected.get(key), found.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            lines.append(f"{prefix}{key}: {a} -> {b}")
    return lines


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

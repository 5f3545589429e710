"""Execution providers of onnxruntime, which falls back to another one without an error: three layers that see it.

The session's own list of providers and which provider claimed which node are looked at here, where each kernel of the
profile ran in `evidence`. What onnxruntime says is available is what it was built with, not what this machine has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fxaudit.errors import ProviderError, UsageError
from fxaudit.execution.options import CPU, CUDA

PROVIDERS = {"cpu": CPU, "cuda": CUDA}
_REMEDY = "`fxaudit doctor` says which driver and libraries it needs, and what is installed"


def provider_named(name: str) -> str:
    """onnxruntime's name of a provider as it is called on the command line.

    Raises:
        UsageError: it is none of `PROVIDERS`.
    """
    if name not in PROVIDERS:
        raise UsageError(
            f"`{name}` is no provider",
            expected=", ".join(PROVIDERS),
            found=name,
            remedy="counts always come from the cpu provider; cuda adds evidence and times from a GPU",
        )
    return PROVIDERS[name]


def require_providers(path: Path, requested: str, used: Sequence[str]) -> None:
    """Raise unless a session has the provider that was asked for.

    Raises:
        ProviderError: it has not.
    """
    if requested not in used:
        raise ProviderError(
            f"onnxruntime does not run {path.name} on {requested}",
            expected=requested,
            found=f"a silent fallback to {', '.join(used)}",
            remedy=_REMEDY,
            requested=requested,
            used=tuple(used),
        )


def require_claim(path: Path, requested: str, claimed: Mapping[str, int]) -> None:
    """Raise unless the provider that was asked for claimed a node of the graph.

    Raises:
        ProviderError: all nodes were claimed by others.
    """
    if claimed and not claimed.get(requested):
        raise ProviderError(
            f"{requested} takes no node of {path.name}",
            expected=f"nodes on {requested}",
            found=", ".join(f"{count} on {name}" for name, count in claimed.items()),
            remedy=_REMEDY,
            requested=requested,
            used=tuple(claimed),
        )

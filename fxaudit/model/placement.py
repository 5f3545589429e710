"""The dtype and the device that a model is loaded in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from fxaudit.errors import LoadError, UsageError, nearest
from fxaudit.model.weights import tie_again, tied_names

Made = TypeVar("Made")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_DEVICES = ("cpu", "cuda", "meta")


@dataclass(frozen=True, slots=True)
class Placement:
    """What a module and its example inputs are converted to; None leaves them as they are."""

    dtype: torch.dtype | None = None
    device: torch.device | None = None

    @property
    def is_meta(self) -> bool:
        return self.device is not None and self.device.type == "meta"

    def build(self, make: Callable[[], Made]) -> Made:
        """What `make` builds: on the meta device without allocating, where its code allows that."""
        if self.is_meta:
            try:
                with torch.device("meta"):
                    return make()
            except Exception:  # code that reads values while it builds; what is wrong with it shows below
                pass
        return make()

    def converted(self, tensor: Tensor) -> Tensor:
        """A tensor of floating point numbers in the dtype; any other is left alone, complex numbers too."""
        return tensor.to(self.dtype) if self.dtype is not None and tensor.is_floating_point() else tensor


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype of that name.

    Raises:
        UsageError: none of `DTYPES`.
    """
    if dtype is None or dtype in DTYPES.values():
        return dtype if isinstance(dtype, torch.dtype) else None
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UsageError(
            f"`{name}` is no dtype to load a model in{nearest(name, set(DTYPES))}",
            expected=", ".join(DTYPES),
            found=name,
            remedy="give one of them with --dtype, or leave it out to keep the model's own",
        )
    return DTYPES[name]


def parse_device(device: str | torch.device | None) -> torch.device | None:
    """The device of that name.

    Raises:
        UsageError: no device of a kind that fxaudit runs on.
        LoadError: one that this machine does not have.
    """
    if device is None:
        return None
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or found.type not in _DEVICES or (found.type != "cuda" and found.index):
        raise UsageError(
            f"`{device}` is no device to load a model on",
            expected="cpu, cuda, cuda:N or meta",
            found=str(device),
            remedy="give one of them with --device",
        )
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise LoadError(
            f"there is no device `{device}` here",
            expected="a CUDA device that this torch can use",
            found=f"torch {torch.__version__} sees {count} CUDA device{'' if count == 1 else 's'}",
            remedy="leave --device out to run on the CPU; `fxaudit doctor` shows what is installed",
        )
    return found


def place(module: nn.Module, placement: Placement) -> nn.Module:
    """`module` itself, converted in place; weights that are tied stay tied.

    Raises:
        LoadError: weights that are on the meta device cannot leave it.
    """
    if placement.dtype is not None:
        # Not `module.to(dtype)`, which would drop the imaginary parts of complex buffers.
        module._apply(placement.converted)
    if placement.device is not None:
        tied = tied_names(module)
        try:
            module.to(placement.device)
        except NotImplementedError as error:
            raise LoadError(
                f"the model has no values to move to `{placement.device}`",
                expected="weights",
                found="parameters on the meta device",
                remedy="give the weights with --weights FILE, or use --device meta",
            ) from error
        tie_again(module, tied)
    return module

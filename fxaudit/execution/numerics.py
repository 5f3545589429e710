"""How far onnxruntime may be from torch: as far as torch itself is from float64, give or take.

The referee is the traced graph in float64. Where it can't be asked, or where it takes other decisions than float32 (a
router's near tie), errors are judged relative to the whole output instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fxaudit.execution.following import Following
from fxaudit.model.settings import exact_numerics, quiet_torch
from fxaudit.model.trace.traced import same_draws

# Float32 on CPU: 6 to 40 times what eight models showed. For the L2 error and for the largest one.
TOLERANCE = 1e-5
# onnxruntime may be off from float64 by this many times what torch is off ...
FACTOR = 4.0
# ... and by this many units in the last place of the largest element.
SLACK = 1.0
# A referee that needs more memory than this is not asked.
BUDGET = 4 << 30
_NARROW = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Limit:
    """How far an output may be off.

    With a referee, by at most `largest` from its value `reference`; `torch_error` is how far torch itself is off.
    Without one `largest` is None: then relative errors against torch's own value are limited to `relative`.
    """

    reference: np.ndarray
    relative: float
    largest: float | None = None
    torch_error: float | None = None


@dataclass(frozen=True, slots=True)
class Referee:
    """Outputs in float64 for one input; or None and the reason why there are none."""

    outputs: tuple[Any, ...] | None
    skipped: str = ""


def ask(module: GraphModule, state: Mapping[str, Tensor], leaves: Sequence[Any], budget: int = BUDGET) -> Referee:
    """The outputs of a flat graph in float64 on input leaves, its written buffers first set to `state`.

    Above `budget` bytes for parameters, buffers and inputs it is not asked.
    """
    tensors = [*module.parameters(), *module.buffers(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
    needed = 8 * sum(tensor.numel() for tensor in tensors)
    if needed > budget:
        return Referee(None, f"float64 would take more than {needed / 2**30:.1f} GiB; {budget / 2**30:.1f} are allowed")
    try:
        with exact_numerics(), quiet_torch(), same_draws(leaves):
            found = _Wide(module, state=state).run(*(_widened(leaf) for leaf in leaves))
    except Exception as error:  # a kernel that float64 lacks, a dtype that the model insists on
        return Referee(None, f"the graph does not run in float64 ({type(error).__name__}: {_first_line(error)})")
    return Referee(tuple(found))


def limit_for(expected: Tensor, referee: Any = None) -> Limit:
    """How far onnxruntime's value of an output may be off, for torch's value `expected` and the referee's.

    The referee is not heard where it is so far from torch that the two took different decisions.
    """
    own = expected.detach().cpu().numpy()
    unit = float(torch.finfo(expected.dtype).eps) if expected.is_floating_point() else 0.0
    relative = TOLERANCE * max(1.0, unit / float(torch.finfo(torch.float32).eps))
    if not isinstance(referee, Tensor) or expected.dtype not in _NARROW or referee.shape != expected.shape:
        return Limit(own, relative)
    reference = referee.detach().cpu().numpy().astype(np.float64)
    scale, off = _largest(reference), largest_difference(reference, own)
    if not off <= 100 * relative * scale:
        return Limit(own, relative)
    return Limit(reference, relative, FACTOR * off + SLACK * unit * scale, off)


def relative_errors(expected: np.ndarray, found: np.ndarray) -> tuple[float, float]:
    """The L2 error relative to the L2 norm, and the largest error relative to the largest element."""
    if expected.shape != found.shape:
        return float("inf"), float("inf")
    difference = _difference(expected, found)
    if not difference.any():
        return 0.0, 0.0
    a = expected.astype(np.float64)
    norm, largest = float(np.linalg.norm(a[np.isfinite(a)])), _largest(a)
    errors = float(np.linalg.norm(difference)), float(difference.max())
    return (errors[0] / norm if norm else float("inf")), (errors[1] / largest if largest else float("inf"))


def largest_difference(expected: np.ndarray, found: np.ndarray) -> float:
    """The largest absolute difference; infinite where shapes differ or only one of the two is infinite or NaN."""
    if expected.shape != found.shape:
        return float("inf")
    return float(_difference(expected, found).max(initial=0.0))


def _difference(expected: np.ndarray, found: np.ndarray) -> np.ndarray:
    a, b = expected.astype(np.float64), found.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.nan_to_num(np.where(same, 0.0, np.abs(np.where(same, 0.0, a) - np.where(same, 0.0, b))), nan=np.inf)


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


# --- the graph in float64 -------------------------------------------------------------------------------------------


class _Wide(Following):
    """Interprets a graph in float64: parameters as they are read, and every narrower dtype that an op asks for."""

    def __init__(
        self, module: nn.Module, outer: Node | None = None, state: Mapping[str, Tensor] = MappingProxyType({})
    ) -> None:
        super().__init__(module, outer)
        self.state = state
        self.own: dict[str, Any] = {}

    def inside(self, module: nn.Module, outer: Node) -> _Wide:
        return _Wide(module, outer)

    def fetch_attr(self, target: str) -> Any:
        # One copy for the whole run: an op that writes to a buffer is followed by ops that read it.
        if target not in self.own:
            self.own[target] = _widened(self.state[target] if target in self.state else super().fetch_attr(target))
        return self.own[target]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(torch.dtype, _wide_dtype, (args, kwargs))
        return super().call_function(target, args, kwargs)


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in _NARROW else dtype


def _widened(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.double() if value.dtype in _NARROW else value.clone()


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")[:200]

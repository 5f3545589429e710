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

from fxaudit import ops
from fxaudit.execution.closeness import EPSILON, LIMITS, REFEREE_FACTOR, largest_difference, largest_finite
from fxaudit.execution.following import Following, is_followed
from fxaudit.model.settings import exact_numerics, quiet_torch
from fxaudit.model.trace.traced import same_draws

# A referee that needs more memory than this is not asked.
BUDGET = 4 << 30
_NARROW = (torch.float32, torch.float16, torch.bfloat16)
# Where a graph chooses, float64 beyond this many times the relative limit is taken to have chosen otherwise ...
_ANOTHER_CHOICE = 100
# ... and beyond this share of the largest element torch's own result means nothing.
_MEANINGLESS = 0.1
_CHOICES = frozenset(
    [
        *("topk", "argmax", "argmin", "max", "min", "sort", "argsort", "kthvalue", "nonzero", "multinomial"),
        *("bucketize", "masked_select", "unique", "_unique2", "floor", "round", "ceil", "trunc", "sign"),
    ]
)


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
    """Output leaves in float64 for one input; or None and the reason why there are none. `decides` says whether the
    graph takes decisions that a rounding can turn."""

    outputs: tuple[Any, ...] | None
    skipped: str = ""
    decides: bool = False


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
    return Referee(tuple(found), decides=_decides(module))


def limit_for(expected: Tensor, referee: Referee, position: int) -> Limit:
    """How far onnxruntime's value of an output may be off, for torch's value `expected` and output `position` of the
    referee.

    The referee is not heard where it is so far from torch that the two took different decisions.
    """
    own = expected.detach().cpu().numpy()
    dtype = str(expected.dtype).removeprefix("torch.")
    relative = LIMITS.get(dtype, 0.0)
    wide = referee.outputs[position] if referee.outputs is not None else None
    if not isinstance(wide, Tensor) or expected.dtype not in _NARROW or wide.shape != expected.shape:
        return Limit(own, relative)
    reference = wide.detach().cpu().numpy().astype(np.float64)
    scale, off = largest_finite(reference), largest_difference(own, reference)
    if not off <= scale * (_ANOTHER_CHOICE * relative if referee.decides else _MEANINGLESS):
        return Limit(own, relative)
    return Limit(reference, relative, REFEREE_FACTOR * off + EPSILON[dtype] * scale, off)


def _decides(module: GraphModule) -> bool:
    """Whether a graph chooses among values or paths, so that a rounding can change what it computes altogether."""
    return any(
        node.op == "call_function" and (ops.op_name(node) in _CHOICES or is_followed(node))
        for node in module.graph.nodes
    )


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

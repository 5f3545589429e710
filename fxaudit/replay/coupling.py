"""Whether what a model makes of one input depends on the other inputs of its batch.

A router with a capacity, a choice of tokens over the whole batch, or a norm over it couple inputs. Then padding the
last batch would change the others, and so no batch is padded (DESIGN, section 7).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.model.data import DataSet
from fxaudit.model.trace import random_ops, run_flat

# Products over another number of rows may round otherwise: experts see as many rows as there are tokens for them.
ROUNDING = 1e-4
COPIED = 4


def coupling(frozen: FrozenModel, data: DataSet, leaves: list[Any], size: int) -> float:
    """The largest change of an input's outputs when its batch is put in another order or filled with copies of it, as a
    share of the largest output. It is found on one batch, so it can be missed.

    0.0 where it cannot be told: for a batch of one, and for models that draw random numbers for each place.
    """
    if size < 2 or random_ops(frozen.traced.graph_module):
        return 0.0
    given = [name in data.columns for name in frozen.traced.input_names]

    def rows(chosen: Tensor) -> tuple[Any, ...]:
        moved = [leaf[chosen] if own else leaf for leaf, own in zip(leaves, given, strict=True)]
        return run_flat(frozen.traced.graph_module, moved, frozen.traced.initial_state)

    everyone = torch.arange(size)
    plain = rows(everyone)
    worst = 0.0
    # In another order, then each of the first few in every place: a full router drops the later ones.
    for chosen in (everyone.roll(1), *(torch.full((size,), i) for i in range(min(size, COPIED)))):
        for before, after in zip(plain, rows(chosen), strict=True):
            if _by_input(before, size) and _by_input(after, size):
                worst = max(worst, _change(before[chosen], after))
    return worst


def _by_input(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == size and value.is_floating_point()


def _change(before: Tensor, after: Tensor) -> float:
    scale = before.double().abs().max().item()
    return (before.double() - after.double()).abs().max().item() / scale if scale > 0 else 0.0

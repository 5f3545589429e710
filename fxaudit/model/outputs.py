"""Output types that torch cannot take apart by itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.utils import _pytree as pytree


def output_leaves(output: Any) -> list[Any]:
    """The leaves of a model's output, those of dataclasses included.

    A dataclass becomes known to torch as a container, as torch.export asks for, and stays so: a class cannot be made
    unknown again, and nothing else changes by it.
    """
    while unknown := {type(leaf) for leaf in pytree.tree_leaves(output) if dataclasses.is_dataclass(leaf)}:
        for kind in unknown:
            torch.export.register_dataclass(kind)
    return pytree.tree_leaves(output)

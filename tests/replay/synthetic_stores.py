"""Coefficients, controllers and stores made by hand, for code that reads recordings without any model."""

import math
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import Graph

from fxaudit.controllers.controller import Coefficient, Controller, Domain
from fxaudit.controllers.pattern import Intervene
from fxaudit.replay import store

NODE = Graph().placeholder("coefficient")
UNIT_INTERVAL = Domain("interval", 0.0, 1.0)
ROLES = {"batch": "sample", "token": "position", "row": "position", "column": "position", "k": "slot"}


def coefficient(
    axes: str, sizes: dict[str, int], key: str = "gate#0/coefficient", domain: Domain = UNIT_INTERVAL, **other
) -> Coefficient:
    """A coefficient whose dimensions read like those of a pattern: ``batch*token k``. Other axes are units."""
    layout = tuple(tuple(dimension.split("*")) for dimension in axes.split())
    names = [name for dimension in layout for name in dimension if not name.isdigit()]
    roles = {name: ROLES.get(name, "unit") for name in names}
    dtype = other.get("dtype", torch.float32)
    return Coefficient(key, key.rpartition("/")[2], NODE, dtype, layout, {n: sizes[n] for n in names}, roles, domain)


def controller(*coefficients: Coefficient, pattern: str = "gate", neutral: float | None = 1.0) -> Controller:
    identifier = coefficients[0].key.rpartition("/")[0]
    axes = {name: role for c in coefficients for name, role in c.roles.items()}
    intervene = Intervene(axes, "multiply", neutral, 0.0, 1.0, None, None, (), {})
    return Controller(identifier, pattern, "gate", 0, coefficients, (), (), frozenset(), 0, (), intervene)


def recorded(directory: Path, rows: dict[str, Tensor], batch_size: int) -> store.CoefficientStore:
    """A store of tensors with the input axis first; what fills up the last batch is NaN, so that it cannot count."""
    count = len(next(iter(rows.values())))
    writer = store.create(directory, {"count": count, "batch_size": batch_size}, 0)
    for batch in writer.store.batches:
        tensors = {}
        for key, values in rows.items():
            whole = values.new_full((batch.size, *values.shape[1:]), math.nan)
            whole[: batch.real] = values[batch.start : batch.start + batch.real]
            tensors[key] = whole
        writer.write(batch, tensors, {key: tensor.stride() for key, tensor in tensors.items()}, "")
    return writer.store

"""Samples: inputs with what torch computes for them, so that exported graphs can be checked without the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.fx import GraphModule

from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.errors import DataError
from fxaudit.execution.baking import expanded_all
from fxaudit.execution.export import ExportedGraphs
from fxaudit.execution.numerics import BUDGET, ask
from fxaudit.model.inputs import batch_of
from fxaudit.model.settings import exact_numerics

SAMPLES = "samples.safetensors"


@dataclass(frozen=True, slots=True)
class Sample:
    """One run: inputs, and what the torch graphs compute for them; every field by ONNX name.

    `coefficients` are what the live model computes. `exchanged` are the same values, those of each controller in an
    order of its own, and `exchanged_outputs` what the frozen model makes of them: a graph in which two coefficients
    were confused would show it. `baked_outputs` are those of the frozen model under the static profile. The fields in
    float64 are empty where the model does not run in float64 or does not fit into memory.
    """

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    coefficients: Mapping[str, Tensor]
    exchanged: Mapping[str, Tensor]
    exchanged_outputs: Mapping[str, Tensor]
    baked_outputs: Mapping[str, Tensor] = field(default_factory=dict)
    outputs_float64: Mapping[str, Tensor] = field(default_factory=dict)
    baked_outputs_float64: Mapping[str, Tensor] = field(default_factory=dict)


_GROUPS = tuple(entry.name for entry in fields(Sample))


def take_samples(frozen: FrozenModel, exported: ExportedGraphs, runs: Sequence[Sequence[Any]]) -> tuple[Sample, ...]:
    """What `frozen` computes for each list of input leaves."""
    names = [exported.coefficient_names[c.key] for c in frozen.coefficients]
    with exact_numerics():
        computed = [frozen.run_tapped(list(leaves)) for leaves in runs]
        values = [tuple(found[: len(names)]) for _, found in computed]
        samples = []
        for i, (leaves, (outputs, _)) in enumerate(zip(runs, computed, strict=True)):
            changed = exchanged(frozen, values, i)
            static: Sequence[Tensor] = ()
            if exported.profile is not None:
                batch = batch_of((tuple(leaves), {}))
                static = expanded_all(dict(exported.profile), frozen.coefficients, frozen.traced.sample, batch)
            samples.append(
                Sample(
                    inputs=_own_inputs(exported, leaves),
                    outputs=_own_outputs(exported, outputs),
                    coefficients=dict(zip(names, values[i], strict=True)),
                    exchanged=dict(zip(names, changed, strict=True)),
                    exchanged_outputs=_own_outputs(exported, frozen.run_frozen(list(leaves), changed)),
                    baked_outputs=_own_outputs(exported, frozen.run_frozen(list(leaves), static)) if static else {},
                )
            )
    return tuple(samples)


def _own_inputs(exported: ExportedGraphs, leaves: Sequence[Any]) -> dict[str, Tensor]:
    return {n: leaves[i] for n, i in zip(exported.input_names, exported.input_positions, strict=True)}


def _own_outputs(exported: ExportedGraphs, outputs: Sequence[Any]) -> dict[str, Tensor]:
    return {n: outputs[i] for n, i in zip(exported.output_names, exported.output_positions, strict=True)}


def exchanged(frozen: FrozenModel, values: Sequence[Sequence[Tensor]], run: int) -> list[Tensor]:
    """The coefficients of a run, the rows of each controller in a random order of its own.

    Where a coefficient has one row only, that of another run of equal shape.
    """
    found: list[Tensor] = []
    place = 0
    for number, controller in enumerate(frozen.controllers):
        generator = torch.Generator().manual_seed(1 + number)
        orders: dict[int, Tensor] = {}
        for _ in controller.coefficients:
            value = values[run][place]
            others = [v[place] for i, v in enumerate(values) if i != run and v[place].shape == value.shape]
            rows = value.shape[0] if value.ndim else 1
            if rows == 1:
                found.append(others[number % len(others)] if others else value)
            else:
                order = orders.setdefault(rows, torch.randperm(rows, generator=generator)).to(value.device)
                found.append(value[order].contiguous())
            place += 1
    return found


def with_referee(
    samples: Sequence[Sample], live: GraphModule, baked: GraphModule | None, budget: int = BUDGET
) -> tuple[tuple[Sample, ...], str]:
    """`samples` with what the torch graphs compute in float64, or as they are with the reason why that is unknown."""
    found = []
    for sample in samples:
        leaves = list(sample.inputs.values())
        wide: dict[str, Mapping[str, Tensor]] = {}
        for field_name, module in (("outputs_float64", live), ("baked_outputs_float64", baked)):
            if module is None:
                continue
            referee = ask(module, {}, leaves, budget)
            if referee.outputs is None:
                return tuple(samples), referee.skipped
            wide[field_name] = dict(zip(sample.outputs, referee.outputs, strict=True))
        found.append(replace(sample, **wide))
    return tuple(found), ""


# --- on disk --------------------------------------------------------------------------------------------------------


def write_samples(samples: Sequence[Sample], path: Path) -> None:
    """Write samples as tensors named ``<number>/<field>/<ONNX name>``."""
    tensors = {
        f"{i}/{group}/{name}": tensor.detach().cpu().contiguous().clone()
        for i, sample in enumerate(samples)
        for group in _GROUPS
        for name, tensor in getattr(sample, group).items()
    }
    save_file(tensors, path)


def read_samples(path: Path) -> tuple[Sample, ...]:
    """The samples in a file.

    Raises:
        DataError: it is no file of samples.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise _no_samples(path, str(error)) from error
    found: dict[int, dict[str, dict[str, Tensor]]] = {}
    for key, tensor in tensors.items():
        number, _, rest = key.partition("/")
        group, _, name = rest.partition("/")
        if not number.isdigit() or group not in _GROUPS or not name:
            raise _no_samples(path, f"a tensor called `{key[:80]}`")
        found.setdefault(int(number), {}).setdefault(group, {})[name] = tensor
    if sorted(found) != list(range(len(found))) or not found:
        raise _no_samples(path, f"samples {sorted(found)[:5]}")
    return tuple(Sample(**{group: found[i].get(group, {}) for group in _GROUPS}) for i in range(len(found)))


def _no_samples(path: Path, found: str) -> DataError:
    return DataError(
        f"{path.name} holds no samples",
        where=str(path),
        expected="tensors named <number>/<field>/<name>, as `fxaudit export` writes them",
        found=found,
        remedy="export the model again",
    )

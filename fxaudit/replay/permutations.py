"""Permutations: which recorded values take whose place, drawn from a seed or given in a file, and written out.

Arrays by name, in an .npz or .safetensors file; all hold whole numbers that name sources:

    donors                  [inputs]               reassign: replayed[i] = recorded[donors[i]]
    positions               [inputs, positions]    shuffle-tokens: replayed[i, t] = recorded[i, positions[i, t]]
    units                   [units]                permute-units: replayed[..., u] = recorded[..., units[u]]
    controllers             [controllers]          swap-controllers: controller k takes those of controllers[k]
    resample/donors/ID      [inputs, units]        resample: replayed[i, t, u] = recorded[donors[i, u], places[i, t], u]
    resample/positions/ID   [inputs, positions]    the places; absent for a coefficient without positions

`donors/ID`, `positions/ID` and `units/ID` are the draws of one controller, for ``reassign:each`` and the like; ID is
its id. Where controllers differ in their number of positions or units, `positions/N` and `units/N` hold the draws for
each number N. Draws of further seeds stand under ``seed-N/``. What a file leaves out is drawn.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fxaudit.controllers.controller import Controller
from fxaudit.errors import DataError, nearest
from fxaudit.replay.intervene import Intervention, position_count, shape_of, unit_count
from fxaudit.replay.store import stored_axes

# At most this many inputs are drawn from when resampling: they are held in memory.
POOL = 128
_NO_CONTROLLERS = torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Permutations:
    """The draws of one seed: `positions` and `units` by their number, those of single controllers by its id.

    `alone` marks inputs whose shape no other input has: they have no donor but themselves, and reassignment leaves
    them out.
    """

    donors: Tensor
    positions: Mapping[int, Tensor]
    units: Mapping[int, Tensor] = field(default_factory=dict)
    controllers: Tensor = _NO_CONTROLLERS
    own_donors: Mapping[str, Tensor] = field(default_factory=dict)
    own_positions: Mapping[str, Tensor] = field(default_factory=dict)
    own_units: Mapping[str, Tensor] = field(default_factory=dict)
    resample_donors: Mapping[str, Tensor] = field(default_factory=dict)
    resample_positions: Mapping[str, Tensor] = field(default_factory=dict)
    alone: Tensor | None = None

    @property
    def pool(self) -> list[int]:
        """The inputs that any resampled value comes from."""
        return sorted({int(i) for donors in self.resample_donors.values() for i in donors.unique()})

    def arrays(self) -> dict[str, Tensor]:
        """Every array by its name in a file."""
        found = {"donors": self.donors}
        for name, by_count in (("positions", self.positions), ("units", self.units)):
            for count, value in by_count.items():
                found[name if len(by_count) == 1 else f"{name}/{count}"] = value
        if len(self.controllers):
            found["controllers"] = self.controllers
        for name, by_controller in self._by_controller().items():
            found |= {f"{name}/{identifier}": value for identifier, value in by_controller.items()}
        return found

    def _by_controller(self) -> dict[str, Mapping[str, Tensor]]:
        return {
            "donors": self.own_donors,
            "positions": self.own_positions,
            "units": self.own_units,
            "resample/donors": self.resample_donors,
            "resample/positions": self.resample_positions,
        }


def draw_permutations(
    seed: int, inputs: int, position_counts: Sequence[int], valid: Tensor | None = None
) -> Permutations:
    """Donors without fixed points, uniform among such permutations, and for each number of positions one permutation
    of them for each input.

    With `valid` ([inputs, positions]) donors have the same valid positions, and only those are permuted.
    """
    generator = np.random.default_rng(seed)
    donors, alone = _donors(generator, inputs, valid)
    positions = {
        count: _positions(generator, inputs, count, valid if valid is not None and valid.shape[1] == count else None)
        for count in sorted(set(position_counts))
    }
    return Permutations(donors, positions, alone=alone)


def _donors(generator: np.random.Generator, inputs: int, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    donors = np.arange(inputs)
    for bucket in _buckets(inputs, valid):
        drawn = np.arange(len(bucket))
        if len(bucket) > 1:
            # Rejection is uniform over derangements; a random permutation is one with probability of about 1/e.
            while (drawn == np.arange(len(bucket))).any():
                drawn = generator.permutation(len(bucket))
        donors[bucket] = bucket[drawn]
    return torch.from_numpy(donors), torch.from_numpy(donors == np.arange(inputs))


def _buckets(inputs: int, valid: Tensor | None) -> list[np.ndarray]:
    """Inputs by their valid positions."""
    if valid is None:
        return [np.arange(inputs)]
    groups: dict[bytes, list[int]] = {}
    for i, row in enumerate(valid.numpy()):
        groups.setdefault(np.packbits(row).tobytes(), []).append(i)
    return [np.asarray(group) for group in groups.values()]


def _positions(generator: np.random.Generator, inputs: int, count: int, valid: Tensor | None) -> Tensor:
    if valid is None:
        return torch.from_numpy(np.stack([generator.permutation(count) for _ in range(inputs)]))
    drawn = np.tile(np.arange(count), (inputs, 1))
    for row, places in zip(drawn, (np.flatnonzero(v) for v in valid.numpy()), strict=True):
        row[places] = places[generator.permutation(len(places))]
    return torch.from_numpy(drawn)


def draw(
    seed: int,
    inputs: int,
    controllers: Sequence[Controller],
    interventions: Iterable[Intervention],
    valid: Tensor | None = None,
) -> Permutations:
    """Every draw that the interventions need. Each kind has a stream of its own, so none depends on what else is
    asked for."""
    interventions = tuple(interventions)
    names = {intervention.name for intervention in interventions}
    each = {intervention.name for intervention in interventions if intervention.each}
    counts = {k.id: position_count(k.coefficients[0]) for k in controllers}
    units = {k.id: unit_count(k) for k in controllers}
    every = [position_count(c) for k in controllers for c in k.coefficients]
    found = draw_permutations(seed, inputs, [count for count in every if count is not None], valid)

    def stream(*words: str) -> np.random.Generator:
        return np.random.default_rng([seed, *(zlib.crc32(word.encode()) for word in words)])

    def own_positions(identifier: str, count: int, word: str) -> Tensor:
        mask = valid if valid is not None and valid.shape[1] == count else None
        return _positions(stream(word, identifier), inputs, count, mask)

    if "reassign" in each:
        own = {k.id: _donors(stream("donors", k.id), inputs, valid)[0] for k in controllers}
        found = replace(found, own_donors=own)
    if "shuffle-tokens" in each:
        own = {key: own_positions(key, count, "positions") for key, count in counts.items() if count is not None}
        found = replace(found, own_positions=own)
    if "permute-units" in names:
        sizes = sorted({count for count in units.values() if count is not None})
        shared = {n: torch.from_numpy(stream("units", str(n)).permutation(n)) for n in sizes}
        found = replace(found, units=shared)
    if "permute-units" in each:
        own = {key: torch.from_numpy(stream("units", key).permutation(n)) for key, n in units.items() if n is not None}
        found = replace(found, own_units=own)
    if "swap-controllers" in names:
        found = replace(found, controllers=_swapped(stream("controllers"), controllers))
    if "resample" in names:
        pool = np.sort(stream("pool").permutation(inputs)[:POOL])
        widths = {k.id: _width(k) for k in controllers}
        donors = {
            key: torch.from_numpy(pool[stream("resample", key).integers(len(pool), size=(inputs, width))])
            for key, width in widths.items()
        }
        places = {key: own_positions(key, n, "resampled positions") for key, n in counts.items() if n is not None}
        found = replace(found, resample_donors=donors, resample_positions=places)
    return found


def _width(controller: Controller) -> int:
    """The number of values at one position, over all axes that are neither input nor position."""
    coefficient = controller.coefficients[0]
    width = 1
    for name in stored_axes(coefficient):
        if name != coefficient.sample_axis and coefficient.roles.get(name) != "position":
            size = int(name) if name.isdigit() else coefficient.sizes[name]
            width *= size if isinstance(size, int) else 1
    return width


def _swapped(generator: np.random.Generator, controllers: Sequence[Controller]) -> Tensor:
    groups: dict[object, list[int]] = {}
    for i, controller in enumerate(controllers):
        groups.setdefault(shape_of(controller), []).append(i)
    sources = np.arange(len(controllers))
    for group in groups.values():
        members = np.asarray(group)
        if len(members) > 1:
            drawn = np.arange(len(members))
            while (drawn == np.arange(len(members))).any():
                drawn = generator.permutation(len(members))
            sources[members] = members[drawn]
    return torch.from_numpy(sources)


# --- files ----------------------------------------------------------------------------------------------------------


def named_arrays(by_seed: Mapping[int, Permutations]) -> dict[str, Tensor]:
    """The arrays of every seed by their names in a file; those of the first seed have no prefix."""
    arrays: dict[str, Tensor] = {}
    for turn, (seed, permutations) in enumerate(by_seed.items()):
        prefix = f"seed-{seed}/" if turn else ""
        arrays |= {prefix + name: value for name, value in permutations.arrays().items()}
    return arrays


def write_permutations(path: Path, by_seed: Mapping[int, Permutations]) -> None:
    """Write the draws of every seed to an .npz or .safetensors file, from which they can be given again."""
    arrays = named_arrays(by_seed)
    if path.suffix == ".npz":
        np.savez(path, allow_pickle=False, **{name: value.numpy() for name, value in arrays.items()})
        return
    from safetensors.torch import save

    path.write_bytes(save({name: value.contiguous() for name, value in arrays.items()}))


def read_permutations(path: Path) -> dict[int | None, dict[str, Tensor]]:
    """The arrays of a file by seed; None stands for those without a prefix.

    Raises:
        DataError: no such file, another form, or arrays that are not whole numbers.
    """
    form = "an .npz or .safetensors file with `donors` [inputs] and `positions` [inputs, positions]"
    if path.suffix not in (".npz", ".safetensors") or not path.exists():
        raise DataError(
            f"{path} holds no permutations",
            expected=form,
            found="no such file" if not path.exists() else path.suffix or "a file without an ending",
            remedy="check --permutations",
        )
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: torch.from_numpy(np.ascontiguousarray(file[name])) for name in file.files}
        else:
            from safetensors.torch import load_file

            arrays = load_file(path)
    except Exception as error:  # damaged bytes fail in as many ways as the formats have fields
        raise DataError(f"{path} cannot be read", expected=form, found=str(error), remedy="write it again") from error
    found: dict[int | None, dict[str, Tensor]] = {}
    for name, value in arrays.items():
        if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
            raise DataError(
                f"`{name}` in {path} names no sources",
                expected="whole numbers",
                found=str(value.dtype),
                remedy="save the array as int64",
            )
        prefix = re.match(r"seed-(\d+)/", name)
        seed = int(prefix[1]) if prefix else None
        found.setdefault(seed, {})[name.removeprefix(prefix[0]) if prefix else name] = value.long()
    return found


def with_given(
    drawn: Permutations, given: Mapping[str, Tensor], controllers: Sequence[Controller], valid: Tensor | None = None
) -> Permutations:
    """`drawn`, with the arrays that are `given` in the place of its own.

    Raises:
        DataError: an array of another name or shape, or with sources that there are not.
    """
    inputs = len(drawn.donors)
    ids = {k.id for k in controllers}
    changed = {"positions": dict(drawn.positions), "units": dict(drawn.units)}
    own = {name: dict(values) for name, values in drawn._by_controller().items()}
    found = drawn
    for name, value in given.items():
        base, _, rest = name.rpartition("/") if name.count("/") and not name.startswith("resample") else (name, "", "")
        if name.startswith("resample/"):
            base, rest = "/".join(name.split("/")[:2]), "/".join(name.split("/")[2:])
        if name == "donors":
            _check(name, value, (inputs,), inputs)
            alone = value == torch.arange(inputs) if drawn.alone is None else drawn.alone & (value == drawn.donors)
            found = replace(found, donors=value, alone=alone)
        elif name == "controllers":
            _check(name, value, (len(controllers),), len(controllers))
            _check_shapes(value, controllers)
            found = replace(found, controllers=value)
        elif name in ("positions", "units") or (base in ("positions", "units") and rest.isdecimal()):
            kind = base if rest else name
            count = value.shape[-1] if value.ndim else 0
            _check(name, value, (inputs, count) if kind == "positions" else (count,), count)
            changed[kind][count] = value
        elif base in own and rest in ids:
            count = value.shape[-1] if value.ndim else 0
            shape = {"donors": (inputs,), "units": (count,)}.get(base, (inputs, count))
            _check(name, value, shape, inputs if base.endswith("donors") else count)
            own[base][rest] = value
        else:
            known = ["donors", "positions", "units", "controllers", *(f"{b}/{i}" for b in own for i in sorted(ids))]
            raise DataError(
                f"`{name}` is no permutation of this model{nearest(name, known)}",
                expected=", ".join(known[:8]),
                found=name,
                remedy="name the arrays as docs/statistics.md lists them",
            )
    _check_valid(found.donors, changed["positions"], valid)
    return replace(
        found,
        positions=changed["positions"],
        units=changed["units"],
        own_donors=own["donors"],
        own_positions=own["positions"],
        own_units=own["units"],
        resample_donors=own["resample/donors"],
        resample_positions=own["resample/positions"],
    )


def _check(name: str, value: Tensor, shape: tuple[int, ...], sources: int) -> None:
    if tuple(value.shape) != shape or (value.numel() and not 0 <= int(value.min()) <= int(value.max()) < sources):
        bounds = f"{int(value.min())} to {int(value.max())}" if value.numel() else "nothing"
        raise DataError(
            f"the permutation `{name}` does not fit the data",
            expected=f"{list(shape)}, of 0 to {sources - 1}",
            found=f"{list(value.shape)}, of {bounds}",
            remedy="draw it for the inputs that are replayed",
        )


def _check_shapes(sources: Tensor, controllers: Sequence[Controller]) -> None:
    for controller, source in zip(controllers, sources.tolist(), strict=True):
        if shape_of(controllers[source]) != shape_of(controller):
            raise DataError(
                f"{controller.id} cannot take the coefficients of {controllers[source].id}",
                expected="controllers of the same shape",
                found=f"controllers[{controllers.index(controller)}] = {source}",
                remedy="swap controllers of equal shape",
            )


def _check_valid(donors: Tensor, positions: Mapping[int, Tensor], valid: Tensor | None) -> None:
    if valid is None:
        return
    if not torch.equal(valid[donors], valid):
        i = int((valid[donors] != valid).any(1).nonzero()[0])
        raise DataError(
            "a donor has other valid positions than the input that it gives to",
            expected="donors of equal length",
            found=f"input {i} and donor {int(donors[i])}",
            remedy="reassign within inputs of equal length",
        )
    places = positions.get(valid.shape[1])
    if places is not None and not torch.equal(valid.gather(1, places), valid):
        raise DataError(
            "`positions` moves positions that are padding",
            expected="valid positions that take those of valid ones",
            found="a valid position that takes that of an invalid one, or the reverse",
            remedy="permute valid positions only",
        )

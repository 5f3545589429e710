"""Recording a frozen model's coefficients over a data set, and replaying them from disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.errors import DataError, SelfCheckError, StoreError
from fxaudit.model.compare import Comparison, Comparisons, compare
from fxaudit.model.data import DataSet
from fxaudit.model.settings import exact_numerics
from fxaudit.model.trace import Finding, run_flat
from fxaudit.provenance import environment, json_digest, tensor_digest
from fxaudit.replay import store
from fxaudit.replay.coupling import ROUNDING, coupling
from fxaudit.replay.store import CoefficientStore

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Recording:
    """A finished store, how many batches this run added to it, and what was found on the way.

    `predicted_bytes` is the need of the whole store, as told before recording.
    """

    store: CoefficientStore
    recorded: int
    findings: tuple[Finding, ...]
    predicted_bytes: int


class IdentityReplay(Comparisons):
    """The frozen model with its own recorded coefficients against the live model, batch by batch."""


def record(
    frozen: FrozenModel,
    data: DataSet,
    directory: Path,
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Recording:
    """Record every coefficient and tap of `frozen` on `data` into `directory`; goes on where a killed run stopped.

    Memory does not grow with the number of inputs: one batch is held at a time.

    Raises:
        StoreError: the directory holds another recording, or the disk is too small.
        DataError: the batch size is not one that the graph takes.
    """
    batch_size = _batch_size(frozen, batch_size)
    with store.locked(directory):
        return _record(frozen, data, directory, batch_size, progress)


def bytes_needed(frozen: FrozenModel, data: DataSet, batch_size: int | None = None) -> int:
    """What recording `data` needs on disk, in bytes, rounded up.

    Raises:
        DataError: the batch size is not one that the graph takes.
    """
    size = _batch_size(frozen, batch_size)
    recorded = [*frozen.coefficients, *frozen.taps]
    return store.bytes_needed(recorded, len(store.plan_batches(data.count, size)), size)


def _record(
    frozen: FrozenModel, data: DataSet, directory: Path, batch_size: int, progress: Progress | None
) -> Recording:
    recorded = [*frozen.coefficients, *frozen.taps]
    need = bytes_needed(frozen, data, batch_size)
    writer = store.create(directory, manifest(frozen, data, batch_size), need)
    missing = writer.missing()
    findings: list[Finding] = []
    with exact_numerics():
        for done, batch in enumerate(missing):
            leaves, _ = data.leaves(frozen.traced, batch.start, batch.size)
            frozen.traced.check(leaves)
            outputs, values = frozen.run_tapped(leaves)
            if done == 0:
                findings += _live_findings(frozen, leaves, outputs)
                findings += _coupling_findings(frozen, data, leaves, batch_size)
            tensors = {c.key: store.to_samples(v, c, batch.size) for c, v in zip(recorded, values, strict=True)}
            strides = {c.key: v.stride() for c, v in zip(recorded, values, strict=True)}
            writer.write(batch, tensors, strides, _digest(outputs))
            if progress is not None:
                progress(done + 1, len(missing))
    return Recording(writer.store, len(missing), tuple(findings), need)


def replay_identity(frozen: FrozenModel, data: DataSet, recording: CoefficientStore) -> IdentityReplay:
    """Feed the frozen model its own records, in the recorded batches, and compare with the live model's outputs.

    Raises:
        StoreError: the store is incomplete, damaged, or was recorded from something else.
    """
    store.check_manifest(recording, manifest(frozen, data, int(recording.manifest["batch_size"])))
    if not recording.is_complete:
        raise StoreError(
            f"{recording.directory} is incomplete",
            expected=f"{len(recording.batches)} batches",
            found=f"{len(recording.shards)}",
            remedy="run `fxaudit record` again; it goes on where it stopped",
        )
    comparisons = []
    with exact_numerics():
        for batch in recording.batches:
            leaves, _ = data.leaves(frozen.traced, batch.start, batch.size)
            frozen.traced.check(leaves)
            outputs = frozen.run_frozen(leaves, recording.bound(batch, frozen.coefficients))
            if _digest(outputs) == recording.outputs_digest(batch):
                comparisons.append(Comparison(f"batch {batch.index}", 0.0, True))
                continue
            live = run_flat(frozen.traced.graph_module, leaves, frozen.traced.initial_state)
            found = compare(f"batch {batch.index}", live, outputs)
            # Equal to today's live run but not to the recorded one: the live model itself has moved.
            comparisons.append(Comparison(found.inputs, found.max_abs_diff, False))
    return IdentityReplay(tuple(comparisons))


def require_identity(replayed: IdentityReplay, source: str) -> None:
    """Raise unless identity replay was bitwise: no other number would mean anything.

    Raises:
        SelfCheckError: with the worst batch.
    """
    if not replayed.bitwise:
        worst = max(replayed.comparisons, key=lambda c: (not c.bitwise, c.max_abs_diff))
        raise SelfCheckError(
            f"{source} does not reproduce its own output when fed its own coefficients",
            where=worst.inputs,
            expected="the same bits as the live model",
            found=f"a difference of {worst.max_abs_diff:.3g}",
            remedy="look for randomness or for state kept between calls: `fxaudit trace` lists both",
        )


def manifest(frozen: FrozenModel, data: DataSet, batch_size: int) -> dict[str, Any]:
    """Everything that a recording depends on."""
    traced = frozen.traced
    return {
        "model": {
            "source": traced.subject.source,
            "fingerprint": traced.fingerprint,
            "graph": traced.graph_digest(),
            "settings": traced.settings,
        },
        "patterns": {
            controller.id: {"name": controller.pattern, "intervene": json_digest(asdict(controller.intervene))}
            for controller in frozen.controllers
        },
        "data": {"digest": data.digest},
        "environment": environment(),
        "count": data.count,
        "batch_size": batch_size,
        "coefficients": {c.key: store.describe(c) for c in (*frozen.coefficients, *frozen.taps)},
    }


def _batch_size(frozen: FrozenModel, asked: int | None) -> int:
    traced = frozen.traced
    if traced.sample is None:
        raise DataError(
            f"{traced.subject.source} has no input axis to record along",
            expected="inputs that share their first axis",
            found="inputs that differ in it",
            remedy="wrap the model so that every input has the inputs along its first axis",
        )
    fixed = traced.sample if isinstance(traced.sample, int) else None
    size = asked if asked is not None else fixed or traced.sample_count or 1
    if size < 1 or (fixed is not None and size != fixed):
        raise DataError(
            f"a batch of {size} does not fit {traced.subject.source}",
            expected=f"a batch of {fixed}" if fixed else "a batch of at least 1",
            found=str(size),
            remedy="leave --batch-size out",
        )
    return size


def _live_findings(frozen: FrozenModel, leaves: list[Any], tapped: tuple[Any, ...]) -> list[Finding]:
    """The live graph, run twice, must agree with itself and with the tapped graph."""
    traced = frozen.traced
    first = run_flat(traced.graph_module, leaves, traced.initial_state)
    second = run_flat(traced.graph_module, leaves, traced.initial_state)
    findings = []
    if not (again := compare("live, again", first, second)).bitwise:
        text = f"the live model differs from itself by up to {again.max_abs_diff:.3g}; nothing is called bitwise"
        findings.append(Finding("nondeterministic", text))
    elif not (found := compare("tapped", first, tapped)).bitwise:
        raise SelfCheckError(
            "recording changes the model's output",
            expected="the same bits with and without taps",
            found=f"a difference of {found.max_abs_diff:.3g}",
            remedy="please report this model",
        )
    return findings


def _coupling_findings(frozen: FrozenModel, data: DataSet, leaves: list[Any], size: int) -> list[Finding]:
    """What a reader must know of a model that couples inputs.

    Raises:
        DataError: the last batch would have to be padded.
    """
    changed = coupling(frozen, data, leaves, size)
    if changed <= ROUNDING:
        return []
    if data.count % size:
        divisors = [n for n in range(size, 0, -1) if data.count % n == 0]
        raise DataError(
            f"{frozen.traced.subject.source} couples the inputs of a batch, and {data.count} inputs leave a batch of"
            f" {size} incomplete",
            expected=f"a number of inputs that {size} divides: padding would change the others",
            found=f"{data.count} inputs; other inputs in the batch change an output by {changed:.2g} of the largest",
            remedy=f"--batch-size {divisors[0]}, or --limit {data.count - data.count % size}",
        )
    text = (
        f"what one input gives depends on the others in its batch, by up to {changed:.2g} of the largest output;"
        f" effects hold for batches of {size} in this order"
    )
    return [Finding("coupled-inputs", text)]


def _digest(outputs: tuple[Any, ...]) -> str:
    import torch

    return tensor_digest(value if isinstance(value, torch.Tensor) else None for value in outputs)

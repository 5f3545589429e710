"""Recordings that are killed at any moment, watched, crowded, or not allowed to write."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from small_models import TOKENS, WIDTH, TransposedGate, sequence

from fxaudit import stages
from fxaudit.errors import StoreError
from fxaudit.model.data import DataSet
from fxaudit.replay import store
from fxaudit.replay.run import bytes_needed
from fxaudit.replay.store import open_store

# Forked children share the traced model, so that a recording takes milliseconds.
FORK = multiprocessing.get_context("fork")
INPUTS = 60


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return stages.freeze(TransposedGate().eval(), (sequence(2),))


def data(count: int = INPUTS) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(count, TOKENS, WIDTH, generator=torch.Generator().manual_seed(9))}


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """An uninterrupted recording, and the seconds that it took."""
    directory = tmp_path_factory.mktemp("whole") / "store"
    started = time.perf_counter()
    recording = stages.record(model, data(), directory, batch_size=1)
    return recording.store, time.perf_counter() - started


def shards(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix in (".safetensors", ".json")}


def begin(model, directory: Path) -> multiprocessing.process.BaseProcess:
    process = FORK.Process(target=stages.record, args=(model, data(), directory), kwargs={"batch_size": 1})
    process.start()
    return process


def killed_and_finished(model, whole, place: Path, kills: int) -> list[tuple[int, Path]]:
    """Stores whose recordings were killed, how often, until there were `kills` in all; each is finished at the end."""
    seconds, moments = whole[1], random.Random(kills)
    found: list[tuple[int, Path]] = []
    while sum(count for count, _ in found) < kills:
        directory, count = place / str(len(found)), 0
        while sum(n for n, _ in found) + count < kills:
            process = begin(model, directory)
            process.join(moments.uniform(0, seconds))
            process.kill()
            process.join()
            if process.exitcode != -signal.SIGKILL:
                break  # it was done before
            count += 1
        stages.record(model, data(), directory, batch_size=1)
        found.append((count, directory))
    return found


def check(model, whole, place: Path, kills: int) -> None:
    stores = killed_and_finished(model, whole, place, kills)
    assert sum(count for count, _ in stores) == kills
    for _, directory in stores:
        assert shards(directory) == shards(whole[0].directory)
        assert open_store(directory).shards == whole[0].shards
        assert not [path for path in directory.iterdir() if path.name.startswith(".")]
    last = stages.replay(model, data(), stores[-1][1])
    assert last.bitwise


def test_a_recording_killed_at_five_random_moments_ends_as_an_uninterrupted_one(model, whole, tmp_path):
    check(model, whole, tmp_path, 5)


@pytest.mark.acceptance
def test_a_recording_killed_at_twenty_random_moments_ends_as_an_uninterrupted_one(model, whole, tmp_path):
    check(model, whole, tmp_path, 20)


def test_two_processes_that_record_into_one_store_leave_it_whole(model, whole, tmp_path):
    directory = tmp_path / "store"
    both = [begin(model, directory) for _ in range(2)]
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert shards(directory) == shards(whole[0].directory)
    assert open_store(directory).shards == whole[0].shards


def test_a_store_is_locked_by_one_process_at_a_time(tmp_path):
    def hold(said) -> None:
        with store.locked(tmp_path):
            said.send("held")

    listening, saying = FORK.Pipe()
    with store.locked(tmp_path):
        process = FORK.Process(target=hold, args=(saying,))
        process.start()
        assert not listening.poll(0.3)
    assert listening.poll(10)
    process.join()


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    def hold(said) -> None:
        with store.locked(tmp_path):
            said.send("held")
            time.sleep(60)

    listening, saying = FORK.Pipe()
    process = FORK.Process(target=hold, args=(saying,))
    process.start()
    assert listening.poll(10)
    process.kill()
    process.join()
    with store.locked(tmp_path):
        pass


@pytest.fixture
def read_only(monkeypatch, whole, tmp_path) -> Path:
    """A complete store on a medium that nothing can be written to; the tests may run as root, whom no mode stops."""
    directory = Path(shutil.copytree(whole[0].directory, tmp_path / "store"))

    def refused(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    opened = Path.open

    def open_for_reading(self: Path, mode: str = "r", *args: object, **kwargs: object):
        return opened(self, mode, *args, **kwargs) if set(mode) <= set("rbt") else refused()

    monkeypatch.setattr(Path, "open", open_for_reading)
    for name in ("mkdir", "unlink"):
        monkeypatch.setattr(Path, name, refused)
    monkeypatch.setattr(os, "replace", refused)
    return directory


def test_a_complete_store_that_cannot_be_written_to_is_used_as_it_is(model, read_only):
    assert stages.record(model, data(), read_only, batch_size=1).recorded == 0
    assert stages.replay(model, data(), read_only).bitwise


def test_a_store_that_lacks_a_batch_and_cannot_be_written_to_says_so(model, whole, tmp_path, monkeypatch):
    directory = Path(shutil.copytree(whole[0].directory, tmp_path / "store"))
    (directory / "batch-000003.safetensors").unlink()

    def refused(*args: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(StoreError, match=r"batch-000003\.safetensors could not be written"):
        stages.record(model, data(), directory, batch_size=1)


def test_a_full_disk_is_told_and_recording_goes_on_when_there_is_room(model, whole, tmp_path, monkeypatch):
    written, replace = [], os.replace

    def full(source, target) -> None:
        written.append(target)
        if len(written) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StoreError, match="No space left"):
        stages.record(model, data(), tmp_path / "store", batch_size=1)
    stages.record(model, data(), tmp_path / "store", batch_size=1)
    assert shards(tmp_path / "store") == shards(whole[0].directory)


@pytest.mark.parametrize("batch_size", [1, 7])
def test_the_predicted_need_covers_the_shards_and_little_more(model, tmp_path, batch_size):
    loaded = stages.load_data(data(), model.traced)
    predicted = bytes_needed(model, loaded, batch_size)
    recording = stages.record(model, loaded, tmp_path / "store", batch_size=batch_size)
    assert recording.predicted_bytes == predicted
    assert recording.store.size_bytes <= predicted <= recording.store.size_bytes + 600 * len(recording.store.batches)


@dataclass(frozen=True)
class Made:
    """Inputs that are made when they are read, so that only what is recorded can take memory."""

    count: int

    def __len__(self) -> int:
        return self.count

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return torch.randn(stop - start, 256, 64, generator=torch.Generator().manual_seed(start))


def peak_of(model, count: int, directory: Path) -> int:
    """The kilobytes by which recording and reading so many inputs raises the peak of a process of its own."""

    def work(said) -> None:
        made = DataSet("made", count, {"x": Made(count)}, f"{count}")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        recording = stages.record(model, made, directory, batch_size=8)
        stages.replay(model, made, recording.store)
        recording.store.rows([c.key for c in model.coefficients], range(0, count, count // 8))
        said.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)

    listening, saying = FORK.Pipe()
    process = FORK.Process(target=work, args=(saying,))
    process.start()
    process.join()
    assert listening.poll(0)
    return int(listening.recv())


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(64, 64)

    def forward(self, x):
        return torch.sigmoid(self.gate(x)) * x.cos()


def test_memory_does_not_grow_with_the_number_of_inputs(tmp_path):
    wide = stages.freeze(Wide().eval(), (torch.randn(2, 256, 64),))
    peaks = [peak_of(wide, count, tmp_path / str(count)) for count in (128, 1024)]
    # 896 inputs more have 59 MB of coefficients.
    assert peaks[1] - peaks[0] < 10_000

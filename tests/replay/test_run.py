import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save
from small_models import (
    FILE,
    TOKENS,
    WIDTH,
    CountingGate,
    Plain,
    Router,
    ScaledGate,
    SqueezeExcite,
    TransposedGate,
    sequence,
)

from fxaudit import stages
from fxaudit.errors import DataError, SelfCheckError, StoreError
from fxaudit.model.data import load_data
from fxaudit.replay.run import replay_identity, require_identity
from fxaudit.replay.store import open_store

ROOT = FILE.parent.parent
COUNT, TRACED, BATCH = 7, 2, 3
GATE = "mix#0/coefficient"


def frozen(module, *inputs):
    torch.manual_seed(0)
    return stages.freeze(module.eval(), inputs)


def data(count: int = COUNT) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(count, TOKENS, WIDTH, generator=torch.Generator().manual_seed(9))}


def padded(x: torch.Tensor, start: int, size: int) -> torch.Tensor:
    rows = x[start : start + size]
    return rows[torch.arange(size) % len(rows)]


def captured(model, module, x) -> list[torch.Tensor]:
    """What `module` returns in each call while the eager `model` runs on `x`."""
    seen = []
    handle = module.register_forward_hook(lambda *call: seen.append(call[2]))
    try:
        with torch.no_grad():
            model(x)
    finally:
        handle.remove()
    return seen


@pytest.fixture(scope="module")
def gate():
    torch.manual_seed(1)
    return TransposedGate().eval()


@pytest.fixture(scope="module")
def model(gate):
    return frozen(gate, sequence(TRACED))


@pytest.fixture(scope="module")
def recording(model, tmp_path_factory):
    """Seven inputs in batches of three, of which the last is filled up from one."""
    return stages.record(model, data(), tmp_path_factory.mktemp("stores") / "store", batch_size=BATCH)


@pytest.fixture
def copy(recording, tmp_path) -> Path:
    return Path(shutil.copytree(recording.store.directory, tmp_path / "copy"))


@pytest.fixture(scope="module")
def router():
    torch.manual_seed(1)
    return Router().eval()


@pytest.fixture(scope="module")
def routed(router):
    return frozen(router, sequence(TRACED))


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if not path.name.startswith(".")}


def whole(store, key: str) -> torch.Tensor:
    return torch.cat([store.samples(batch)[key][: batch.real] for batch in store.batches])


# --- recording ------------------------------------------------------------------------------------------------------


def test_a_recording_covers_the_data(recording):
    assert recording.store.is_complete
    assert [batch.real for batch in recording.store.batches] == [3, 3, 1]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_recorded_coefficients_are_those_of_the_eager_model_bit_for_bit(gate, model, recording, index):
    batch = recording.store.batches[index]
    (expected,) = captured(gate, gate.squash, padded(data()["x"], batch.start, batch.size))
    assert torch.equal(recording.store.samples(batch)[GATE], expected)


def test_a_replayed_coefficient_has_the_strides_that_it_has_in_the_eager_model(gate, model, recording):
    batch = recording.store.batches[0]
    (expected,) = captured(gate, gate.squash, data()["x"][:BATCH])
    (bound,) = recording.store.bound(batch, model.coefficients)
    assert not expected.is_contiguous()
    assert bound.stride() == expected.stride()


def test_the_last_batch_repeats_its_inputs(recording):
    stored = recording.store.samples(recording.store.batches[-1])[GATE]
    assert torch.equal(stored[1], stored[0])


def test_shards_hold_nothing_but_the_coefficients(recording):
    with safe_open(recording.store.directory / "batch-000000.safetensors", framework="pt") as file:
        assert list(file.keys()) == [GATE]


def test_a_router_is_stored_with_its_tokens_apart_from_its_inputs(router, routed, tmp_path):
    store = stages.record(routed, data(), tmp_path / "store", batch_size=BATCH).store
    shapes = {key: tuple(value.shape) for key, value in store.samples(store.batches[0]).items()}
    assert shapes == {
        "router#0/coefficient": (BATCH, TOKENS, 2),
        "router#0/indices": (BATCH, TOKENS, 2),
        "router#0/scores": (BATCH, TOKENS, 4),
    }


def test_recorded_weights_of_a_router_are_those_of_the_eager_model(router, routed, tmp_path):
    store = stages.record(routed, data(), tmp_path / "store", batch_size=COUNT).store
    (expected,) = captured(router, router.softmax, data()["x"])
    assert torch.equal(whole(store, "router#0/coefficient").reshape(-1, 2), expected)


def test_recorded_indices_of_a_router_are_its_two_largest_scores(router, routed, tmp_path):
    store = stages.record(routed, data(), tmp_path / "store", batch_size=COUNT).store
    scores = captured(router, router.router, data()["x"])[0]
    expected = scores.argsort(-1, descending=True)[:, :2]
    assert torch.equal(whole(store, "router#0/indices").reshape(-1, 2), expected)


@pytest.mark.parametrize("size", [1, 2, 7, 10])
def test_the_batch_size_changes_neither_shapes_nor_values_of_a_store(model, recording, tmp_path, size):
    other = stages.record(model, data(), tmp_path / "store", batch_size=size).store
    torch.testing.assert_close(whole(other, GATE), whole(recording.store, GATE), rtol=0, atol=1e-6)


def test_without_a_batch_size_batches_are_as_large_as_the_example(model, tmp_path):
    store = stages.record(model, data(), tmp_path / "store").store
    assert {batch.size for batch in store.batches} == {TRACED}


def test_recording_never_holds_more_than_one_batch(model, tmp_path):
    loaded = load_data(data(40), model.traced)
    asked = []

    class Watched:
        def __init__(self, column) -> None:
            self.column = column

        def __len__(self) -> int:
            return len(self.column)

        def rows(self, start, stop):
            asked.append(stop - start)
            return self.column.rows(start, stop)

    columns = {name: Watched(column) for name, column in loaded.columns.items()}
    watched = type(loaded)(loaded.source, loaded.count, columns, loaded.digest)
    stages.record(model, watched, tmp_path / "store", batch_size=4)
    assert asked == [4] * 10


def test_the_hash_of_large_data_is_taken_a_few_rows_at_a_time(model, monkeypatch):
    from fxaudit.model.columns import Loaded

    asked = []
    read = Loaded.rows
    monkeypatch.setattr(Loaded, "rows", lambda s, a, b: asked.append(b - a) or read(s, a, b))
    load_data(data(500), model.traced)
    assert max(asked) <= 64


def test_recording_reports_its_progress(model, tmp_path):
    seen = []
    stages.record(model, data(), tmp_path / "store", batch_size=BATCH, progress=lambda *step: seen.append(step))
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.fixture(scope="module")
def counting():
    torch.manual_seed(0)
    module = CountingGate().eval()
    return module, frozen(module, sequence())


def test_every_batch_starts_from_the_state_after_one_call(counting, tmp_path):
    module, model = counting
    store = stages.record(model, data(4), tmp_path / "store", batch_size=2).store
    # The warm-up call counts to one, the recorded one to two, in every batch.
    with torch.no_grad():
        expected = torch.sigmoid(module.gate(data(4)["x"] + 2))
    torch.testing.assert_close(whole(store, "gate#0/coefficient"), expected, rtol=0, atol=1e-6)


def test_a_model_with_state_replays_bit_for_bit(counting, tmp_path):
    _, model = counting
    store = stages.record(model, data(5), tmp_path / "store", batch_size=2).store
    assert stages.replay(model, data(5), store).bitwise


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_of_no_input_is_refused(model, tmp_path, size):
    with pytest.raises(DataError, match=f"a batch of {size} "):
        stages.record(model, data(), tmp_path / "store", batch_size=size)


class FixedBatch(TransposedGate):
    def forward(self, x):
        return super().forward(x).view(2, TOKENS, 4)


def test_a_batch_that_a_fixed_graph_does_not_take_is_refused(tmp_path):
    with pytest.raises(DataError) as caught:
        stages.record(frozen(FixedBatch(), sequence()), data(), tmp_path / "store", batch_size=3)
    assert caught.value.expected == "a batch of 2"


def test_a_fixed_graph_records_in_batches_of_its_own_size(tmp_path):
    model = frozen(FixedBatch(), sequence())
    store = stages.record(model, data(), tmp_path / "store").store
    assert stages.replay(model, data(), store).bitwise


class BranchesOnBatch(TransposedGate):
    """Traced with two inputs, the graph holds what is computed for fewer than six."""

    def forward(self, x):
        return super().forward(x) * (2 if x.shape[0] < 6 else 3)


def test_a_batch_that_breaks_a_guard_of_the_trace_is_refused(tmp_path):
    model = frozen(BranchesOnBatch(), sequence())
    with pytest.raises(DataError):
        stages.record(model, data(), tmp_path / "store", batch_size=7)


def test_a_model_without_an_input_axis_cannot_be_recorded(tmp_path):
    class Shared(Plain):
        def forward(self, x, table):
            return torch.sigmoid(self.linear(x)) * (x @ table)

    model = frozen(Shared(), sequence(), torch.ones(WIDTH, WIDTH))
    with pytest.raises(DataError, match="input axis"):
        stages.record(model, "resampled:4", tmp_path / "store")


# --- replay ---------------------------------------------------------------------------------------------------------


def test_replay_from_disk_is_bitwise_in_every_batch(model, recording):
    replayed = stages.replay(model, data(), recording.store.directory)
    assert [comparison.bitwise for comparison in replayed.comparisons] == [True, True, True]


def test_replay_of_a_router_is_bitwise(routed, tmp_path):
    store = stages.record(routed, data(), tmp_path / "store", batch_size=BATCH).store
    assert stages.replay(routed, data(), store).bitwise


def test_replay_of_a_channels_last_image_is_bitwise(tmp_path):
    images = torch.randn(5, 3, 6, 6).to(memory_format=torch.channels_last)
    model = frozen(SqueezeExcite().to(memory_format=torch.channels_last), images[:2])
    store = stages.record(model, {"x": images}, tmp_path / "store", batch_size=3).store
    assert stages.replay(model, {"x": images}, store).bitwise


def rewritten(directory: Path, change) -> None:
    """Change the first shard and its hash in the log: damage that only replay itself can find."""
    path = directory / "batch-000000.safetensors"
    with safe_open(path, framework="pt") as file:
        tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    path.write_bytes(save({key: change(value) for key, value in tensors.items()}, metadata))
    log = directory / "shards.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[0]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_replay_of_other_coefficients_is_not_bitwise(model, copy):
    rewritten(copy, lambda value: value.roll(1, 0).contiguous())
    replayed = stages.replay(model, data(), copy)
    assert [comparison.bitwise for comparison in replayed.comparisons] == [False, True, True]


def test_replay_measures_how_far_other_coefficients_move_the_output(gate, model, copy):
    rewritten(copy, torch.zeros_like)
    replayed = stages.replay(model, data(), copy)
    with torch.no_grad():
        # With all gates at zero the head returns its bias.
        expected = (gate(data()["x"][:BATCH]) - gate.head.bias).abs().max().item()
    assert replayed.max_abs_diff == pytest.approx(expected, abs=1e-6)


def test_a_replay_that_is_not_bitwise_fails_the_self_check_at_its_batch(model, copy):
    rewritten(copy, torch.zeros_like)
    with pytest.raises(SelfCheckError) as caught:
        require_identity(stages.replay(model, data(), copy), "a model")
    assert (caught.value.where, caught.value.exit_code) == ("batch 0", 5)


def test_a_bitwise_replay_passes_the_self_check(model, recording):
    require_identity(stages.replay(model, data(), recording.store), "a model")


def store_refused(model, given, directory) -> StoreError:
    with pytest.raises(StoreError) as caught:
        stages.replay(model, given, directory)
    error = caught.value
    assert all([error.what, error.where or error.found, error.expected, error.remedy])
    assert error.exit_code == 6
    return error


def changes(error: StoreError) -> set[str]:
    return {line.partition(":")[0] for line in error.changed}


def test_changed_weights_are_refused_by_the_models_fingerprint(recording):
    torch.manual_seed(2)
    other = TransposedGate()
    assert changes(store_refused(frozen(other, sequence()), data(), recording.store)) == {"model.fingerprint"}


def test_changed_data_are_refused_by_their_digest(model, recording):
    changed = data()
    changed["x"][6, 0, 0] += 1
    assert changes(store_refused(model, changed, recording.store)) == {"data.digest"}


def test_fewer_inputs_are_refused_by_their_count(model, recording):
    given = {"x": data()["x"][:5]}
    assert changes(store_refused(model, given, recording.store)) == {"data.digest", "count"}


def test_another_batch_size_is_refused_by_its_name(model, copy):
    with pytest.raises(StoreError) as caught:
        stages.record(model, data(), copy, batch_size=2)
    assert caught.value.changed == ["batch_size: 3 -> 2"]


def test_another_computation_is_refused_by_its_graph(gate, recording):
    class Other(TransposedGate):
        def forward(self, x):
            return -super().forward(x)

    other = Other()
    other.load_state_dict(gate.state_dict())
    assert "model.graph" in changes(store_refused(frozen(other, sequence()), data(), recording.store))


def test_another_number_of_threads_is_refused_by_its_name(model, recording):
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert changes(store_refused(model, data(), recording.store)) == {"environment.threads"}
    finally:
        torch.set_num_threads(threads)


def test_a_changed_tensor_that_is_no_parameter_is_refused(tmp_path):
    torch.manual_seed(3)
    first, second = ScaledGate(2.0), ScaledGate(3.0)
    second.load_state_dict(first.state_dict())
    store = stages.record(frozen(first, sequence()), data(), tmp_path / "store").store
    store_refused(frozen(second, sequence()), data(), store)


def test_an_incomplete_store_cannot_be_replayed(model, copy):
    log = copy / "shards.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:2]))
    assert "incomplete" in store_refused(model, data(), copy).what


def test_a_corrupt_shard_cannot_be_replayed(model, copy):
    path = copy / "batch-000001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert "batch-000001" in store_refused(model, data(), copy).where


def test_a_folder_without_a_store_cannot_be_replayed(model, tmp_path):
    assert "no coefficient store" in store_refused(model, data(), tmp_path).what


def test_a_manifest_that_lacks_its_batch_size_is_refused(model, copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["batch_size"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    store_refused(model, data(), copy)


# --- going on after a kill ------------------------------------------------------------------------------------------


def interrupt(directory: Path) -> None:
    """What a kill while the second of three batches was being logged leaves behind."""
    log = directory / "shards.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(lines[0] + lines[1][:25])
    (directory / "batch-000002.safetensors").unlink()
    (directory / ".batch-000002.safetensors.4242").write_bytes(b"half a shard")


def test_recording_goes_on_where_it_was_interrupted(model, copy):
    interrupt(copy)
    assert stages.record(model, data(), copy, batch_size=BATCH).recorded == 2


def test_an_interrupted_recording_ends_with_the_shards_of_an_uninterrupted_one(model, recording, copy):
    interrupt(copy)
    stages.record(model, data(), copy, batch_size=BATCH)
    shards = [name for name in contents(recording.store.directory) if name.endswith(".safetensors")]
    assert all(contents(copy)[name] == contents(recording.store.directory)[name] for name in shards)


def test_an_interrupted_recording_ends_complete(model, copy):
    interrupt(copy)
    stages.record(model, data(), copy, batch_size=BATCH)
    assert open_store(copy).is_complete


def test_an_interrupted_recording_replays_bit_for_bit_when_it_is_finished(model, copy):
    interrupt(copy)
    finished = stages.record(model, data(), copy, batch_size=BATCH).store
    assert replay_identity(model, load_data(data(), model.traced), finished).bitwise


def test_a_finished_recording_is_not_recorded_again(model, copy):
    assert stages.record(model, data(), copy, batch_size=BATCH).recorded == 0


# --- other processes ------------------------------------------------------------------------------------------------


def run(*args: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, args)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 or not check, done.stderr
    return done


KILLED = """
    import os, signal, sys
    import torch
    torch.set_num_threads(1)
    from fxaudit import stages
    from fxaudit.replay import store

    writes = 0
    replace = os.replace

    def kill_before_the_second_shard(source, target):
        global writes
        writes += str(target).endswith(".safetensors")
        if writes == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = kill_before_the_second_shard
    frozen = stages.freeze(stages.load(sys.argv[1]))
    stages.record(frozen, "resampled:7", sys.argv[2], batch_size=3)
"""


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """A recording killed in the middle of its second shard, then finished and replayed, each in its own process."""
    folder = tmp_path_factory.mktemp("processes")
    model, store = f"{FILE}:gated", folder / "store"
    common = (model, "--data", "resampled:7", "--json")
    killed = run("-c", textwrap.dedent(KILLED), model, store, check=False)
    left = sorted(path.name for path in store.iterdir())
    finished = run("-m", "fxaudit", "record", *common, "-o", store, "--batch-size", "3")
    here = stages.freeze(stages.load(model))
    whole = stages.record(here, "resampled:7", folder / "whole", batch_size=3)
    options = ("--store", store, "--batch-size", "3", "--interventions", "identity")
    replayed = run("-m", "fxaudit", "replay", *common, *options)
    return {
        "killed": killed.returncode,
        "left": left,
        "finished": json.loads(finished.stdout),
        "replayed": json.loads(replayed.stdout),
        "store": contents(store),
        "whole": contents(folder / "whole"),
        "traced batch": here.traced.sample_count,
        "recorded batch": whole.store.batches[0].size,
    }


def test_a_recording_can_be_killed_in_the_middle_of_a_shard(processes):
    assert processes["killed"] == -signal.SIGKILL
    assert [name for name in processes["left"] if name.endswith(".safetensors")] == ["batch-000000.safetensors"]


def test_a_killed_recording_leaves_a_shard_half_written_under_another_name(processes):
    assert any(name.startswith(".batch-000001.safetensors.") for name in processes["left"])


def test_another_process_records_only_what_a_killed_one_did_not(processes):
    assert processes["finished"]["recorded"] == 2


def test_a_killed_and_finished_store_equals_an_uninterrupted_one_byte_for_byte(processes):
    assert processes["store"] == processes["whole"]


def test_replay_in_a_fresh_process_is_bitwise_in_every_batch_the_padded_one_too(processes):
    identity = processes["replayed"]["identity"]
    assert [comparison["bitwise"] for comparison in identity["comparisons"]] == [True, True, True]
    assert identity["bitwise"]


def test_the_batch_size_of_these_recordings_is_not_the_traced_one(processes):
    assert (processes["traced batch"], processes["recorded batch"]) == (2, 3)

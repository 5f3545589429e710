import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.fx import Graph

from fxaudit.controllers.controller import Coefficient, Domain
from fxaudit.errors import StoreError
from fxaudit.replay import store
from fxaudit.replay.store import create, from_samples, open_store, plan_batches, to_samples, with_strides

# --- layouts --------------------------------------------------------------------------------------------------------

NODE = Graph().placeholder("coefficient")


def coefficient(axes: tuple[tuple[str, ...], ...], sizes: dict[str, int], dtype=torch.float32) -> Coefficient:
    roles = {name: "sample" if name == "batch" else "unit" for axis in axes for name in axis if not name.isdigit()}
    return Coefficient("gate#0/coefficient", "coefficient", NODE, dtype, axes, sizes, roles, Domain("real"))


@st.composite
def recorded(draw):
    """A coefficient with any axes (products, ones, the input axis anywhere), and a tensor with any strides."""
    names = draw(st.permutations(["batch", "token", "feature", "1"]))
    names = [name for name in names if name == "batch" or draw(st.booleans())]
    axes: list[tuple[str, ...]] = []
    for name in names:
        joined = axes and name != "1" and axes[-1] != ("1",) and draw(st.booleans())
        axes = [*axes[:-1], (*axes[-1], name)] if joined else [*axes, (name,)]
    sizes = {name: draw(st.integers(1, 4)) for name in ("batch", "token", "feature")}
    shape = [math.prod(sizes.get(name, 1) for name in axis) for axis in axes]
    order = draw(st.permutations(range(len(shape))))
    kinds = [draw(st.sampled_from(["whole", "sliced", "expanded"])) for _ in shape]
    base = [{"whole": n, "sliced": 2 * n + 1, "expanded": 1}[kind] for n, kind in zip(shape, kinds, strict=True)]
    memory = torch.arange(float(math.prod(base))).reshape([base[i] for i in order])
    tensor = memory.permute([order.index(i) for i in range(len(shape))])
    tensor = tensor[
        tuple(slice(0, 2 * n, 2) if kind == "sliced" else slice(None) for n, kind in zip(shape, kinds, strict=True))
    ]
    return coefficient(tuple(axes), sizes), tensor.expand(shape), sizes


@settings(max_examples=200, deadline=None)
@given(recorded())
def test_what_comes_back_from_the_store_has_the_values_that_went_in(case):
    described, tensor, sizes = case
    back = from_samples(to_samples(tensor, described, sizes["batch"]), described, tensor.stride())
    assert torch.equal(back, tensor)


@settings(max_examples=200, deadline=None)
@given(recorded())
def test_what_comes_back_from_the_store_has_the_strides_that_went_in(case):
    described, tensor, sizes = case
    back = from_samples(to_samples(tensor, described, sizes["batch"]), described, tensor.stride())
    # The stride of an axis of one element addresses nothing.
    where = [i for i, size in enumerate(tensor.shape) if size > 1]
    assert [back.stride(i) for i in where] == [tensor.stride(i) for i in where]


@settings(max_examples=200, deadline=None)
@given(recorded())
def test_the_stored_form_has_the_input_axis_first_and_products_factored(case):
    described, tensor, sizes = case
    names = [name for axis in described.axes for name in axis]
    factored = tensor.contiguous().numpy().reshape([sizes.get(name, 1) for name in names])
    expected = np.moveaxis(factored, names.index("batch"), 0)
    stored = to_samples(tensor, described, sizes["batch"])
    assert np.array_equal(stored.numpy(), expected)


@settings(max_examples=50, deadline=None)
@given(recorded())
def test_the_stored_form_lies_in_memory_row_by_row(case):
    described, tensor, sizes = case
    assert to_samples(tensor, described, sizes["batch"]).is_contiguous()


def test_what_comes_back_has_memory_of_its_own():
    described = coefficient((("batch",), ("feature",)), {"batch": 2, "feature": 3})
    stored = torch.zeros(2, 3)
    from_samples(stored, described, (3, 1)).fill_(1.0)
    assert stored.sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_copy_with_strides_keeps_the_dtype(dtype):
    assert with_strides(torch.ones(2, 3).to(dtype), (1, 2)).dtype == dtype


def test_an_axis_of_unknown_size_is_refused():
    import sympy

    described = coefficient((("batch",), ("feature",)), {"batch": 2, "feature": sympy.Symbol("s0")})
    with pytest.raises(StoreError, match="unknown size"):
        to_samples(torch.zeros(2, 3), described, 2)


def test_the_need_of_one_input_is_its_elements_times_their_width():
    described = coefficient((("batch", "token"), ("feature",)), {"batch": 9, "token": 4, "feature": 3})
    half = dataclasses.replace(described, dtype=torch.float16)
    assert store.bytes_per_input([described, half]) == 4 * 3 * 4 + 4 * 3 * 2


def test_a_description_names_the_stored_axes_with_the_input_axis_first():
    described = coefficient((("token",), ("batch", "feature")), {"batch": 2, "token": 4, "feature": 3})
    assert store.describe(described)["axes"] == ["batch", "token", "feature"]


# --- batches --------------------------------------------------------------------------------------------------------


@given(count=st.integers(1, 60), size=st.integers(1, 20))
def test_batches_cover_every_input_once_and_in_order(count, size):
    covered = [batch.start + i for batch in plan_batches(count, size) for i in range(batch.real)]
    assert covered == list(range(count))


@given(count=st.integers(1, 60), size=st.integers(1, 20))
def test_every_batch_has_one_size_and_only_the_last_is_filled_up(count, size):
    batches = plan_batches(count, size)
    assert {batch.size for batch in batches} == {size}
    assert all(batch.real == size for batch in batches[:-1])


# --- files ----------------------------------------------------------------------------------------------------------

MANIFEST = {"count": 5, "batch_size": 2, "model": {"fingerprint": "abc"}}


def tensors(index: int) -> dict[str, torch.Tensor]:
    return {"gate#0/coefficient": torch.arange(6.0).reshape(2, 3) + index}


def fill(writer, indices=(0, 1, 2)) -> None:
    for batch in writer.store.batches:
        if batch.index in indices:
            writer.write(batch, tensors(batch.index), {"gate#0/coefficient": (3, 1)}, f"digest {batch.index}")


@pytest.fixture
def directory(tmp_path):
    place = tmp_path / "store"
    fill(create(place, MANIFEST, 0))
    return place


def test_a_store_gives_back_what_was_written(directory):
    opened = open_store(directory)
    for batch in opened.batches:
        assert torch.equal(opened.samples(batch)["gate#0/coefficient"], tensors(batch.index)["gate#0/coefficient"])


def test_a_store_gives_back_the_digest_of_the_outputs(directory):
    opened = open_store(directory)
    assert [opened.outputs_digest(batch) for batch in opened.batches] == ["digest 0", "digest 1", "digest 2"]


def test_a_store_with_every_batch_is_complete(directory):
    assert open_store(directory).is_complete


def test_a_store_without_its_last_batch_is_incomplete(tmp_path):
    fill(create(tmp_path / "store", MANIFEST, 0), [0, 1])
    assert not open_store(tmp_path / "store").is_complete


def test_the_size_of_a_store_is_that_of_its_shards(directory):
    shards = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    assert open_store(directory).size_bytes == shards


def test_shards_are_plain_safetensors(directory):
    with safe_open(directory / "batch-000001.safetensors", framework="np") as file:
        assert file.get_tensor("gate#0/coefficient").tolist() == tensors(1)["gate#0/coefficient"].tolist()


def test_a_finished_store_holds_its_shards_a_log_and_a_manifest(directory):
    assert sorted(path.name for path in directory.iterdir()) == [
        "batch-000000.safetensors",
        "batch-000001.safetensors",
        "batch-000002.safetensors",
        "manifest.json",
        "shards.jsonl",
    ]


def test_a_changed_byte_in_a_shard_is_found_by_its_hash(directory):
    path = directory / "batch-000001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    opened = open_store(directory)
    with pytest.raises(StoreError, match="is not what was recorded") as caught:
        opened.samples(opened.batches[1])
    assert caught.value.where == str(path)


def test_a_truncated_shard_is_found(directory):
    path = directory / "batch-000001.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    opened = open_store(directory)
    with pytest.raises(StoreError, match="is not what was recorded"):
        opened.samples(opened.batches[1])


def test_a_missing_shard_is_found(directory):
    (directory / "batch-000001.safetensors").unlink()
    opened = open_store(directory)
    with pytest.raises(StoreError, match="has no batch 1"):
        opened.samples(opened.batches[1])


@pytest.mark.parametrize("damage", ["changed", "truncated", "missing"])
def test_only_a_damaged_batch_is_recorded_again(directory, damage):
    path = directory / "batch-000001.safetensors"
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(data[:-1] if damage == "truncated" else data[:-1] + b"?")
    assert [batch.index for batch in create(directory, MANIFEST, 0).missing()] == [1]


def test_a_damaged_batch_can_be_written_again(directory):
    (directory / "batch-000001.safetensors").write_bytes(b"")
    fill(create(directory, MANIFEST, 0), [1])
    opened = open_store(directory)
    assert torch.equal(opened.samples(opened.batches[1])["gate#0/coefficient"], tensors(1)["gate#0/coefficient"])


def test_a_store_that_was_begun_lacks_only_the_batches_not_yet_written(tmp_path):
    fill(create(tmp_path / "store", MANIFEST, 0), [0])
    assert [batch.index for batch in create(tmp_path / "store", MANIFEST, 0).missing()] == [1, 2]


def tear(directory) -> None:
    """What a kill in the middle of the last line of the log leaves behind."""
    log = directory / "shards.jsonl"
    log.write_bytes(log.read_bytes()[:-30])


def test_a_torn_line_of_the_log_is_recorded_again(directory):
    tear(directory)
    assert [batch.index for batch in create(directory, MANIFEST, 0).missing()] == [2]


def test_a_store_that_goes_on_after_a_torn_line_is_complete_when_opened_anew(directory):
    tear(directory)
    fill(create(directory, MANIFEST, 0), [2])
    assert open_store(directory).is_complete


def test_a_shard_that_a_kill_left_half_written_is_recorded_again(tmp_path):
    place = tmp_path / "store"
    fill(create(place, MANIFEST, 0), [0])
    (place / ".batch-000001.safetensors.12345").write_bytes(b"half")
    assert [batch.index for batch in create(place, MANIFEST, 0).missing()] == [1, 2]


def test_a_shard_without_its_line_in_the_log_is_recorded_again(directory):
    log = directory / "shards.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:2]))
    assert [batch.index for batch in create(directory, MANIFEST, 0).missing()] == [2]


def test_a_store_that_was_killed_before_its_manifest_can_be_begun_again(tmp_path):
    place = tmp_path / "store"
    place.mkdir()
    (place / ".manifest.json.12345").write_bytes(b"{")
    fill(create(place, MANIFEST, 0))
    assert open_store(place).is_complete


def test_a_directory_with_other_files_is_refused_by_their_names(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(StoreError) as caught:
        create(tmp_path, MANIFEST, 0)
    assert "thesis.tex" in caught.value.found


def test_a_directory_with_other_files_is_left_untouched(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(StoreError):
        create(tmp_path, MANIFEST, 0)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"thesis.tex": "precious"}


def test_a_file_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "store").write_text("precious")
    with pytest.raises(StoreError):
        create(tmp_path / "store", MANIFEST, 0)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_recorded(tmp_path):
    with pytest.raises(StoreError, match="too small") as caught:
        create(tmp_path / "store", MANIFEST, 10**18)
    assert caught.value.expected == "1,000,000,000,000,000,000 bytes"


def test_a_refusal_for_want_of_space_leaves_no_manifest(tmp_path):
    with pytest.raises(StoreError):
        create(tmp_path / "store", MANIFEST, 10**18)
    assert not list(tmp_path.rglob("*.json"))


def test_another_manifest_is_refused_with_what_changed(directory):
    with pytest.raises(StoreError) as caught:
        create(directory, {**MANIFEST, "model": {"fingerprint": "xyz"}}, 0)
    assert caught.value.changed == ["model.fingerprint: abc -> xyz"]


def test_another_manifest_leaves_the_store_as_it_was(directory):
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(StoreError):
        create(directory, {**MANIFEST, "batch_size": 3}, 0)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


def test_a_directory_without_a_manifest_is_no_store(tmp_path):
    with pytest.raises(StoreError, match="is no coefficient store"):
        open_store(tmp_path)


def test_a_manifest_of_another_version_is_refused_with_both(directory):
    (directory / "manifest.json").write_text(json.dumps({**MANIFEST, "schema": "fxaudit.store/9"}))
    with pytest.raises(StoreError) as caught:
        open_store(directory)
    assert (caught.value.expected, caught.value.found) == ("fxaudit.store/1", "fxaudit.store/9")


@pytest.mark.parametrize(
    "text", ["{", "[]", "7", '{"schema": "fxaudit.store/1"}'], ids=["torn", "list", "number", "bare"]
)
def test_a_damaged_manifest_is_refused(directory, text):
    (directory / "manifest.json").write_text(text)
    with pytest.raises(StoreError):
        open_store(directory).batches  # noqa: B018


@pytest.mark.parametrize(
    "line", ['{"batch": 0}', '{"batch": 0, "sha256": 7, "outputs": null}', "[0]", '{"batch": "x"}']
)
def test_a_line_of_the_log_that_lacks_its_hash_does_not_count(directory, line):
    (directory / "shards.jsonl").write_text(line + "\n")
    assert [batch.index for batch in create(directory, MANIFEST, 0).missing()] == [0, 1, 2]


@pytest.mark.parametrize("line", ['{"batch": 0}', '{"batch": 0, "sha256": 7, "outputs": null}'])
def test_a_batch_whose_line_lacks_its_hash_cannot_be_read(directory, line):
    (directory / "shards.jsonl").write_text(line + "\n")
    opened = open_store(directory)
    with pytest.raises(StoreError):
        opened.samples(opened.batches[0])


def test_a_log_cannot_point_outside_its_store(directory, tmp_path):
    import hashlib

    secret = tmp_path / "secret.safetensors"
    secret.write_bytes((directory / "batch-000001.safetensors").read_bytes())
    line = {"batch": 0, "file": "../secret.safetensors", "outputs": ""}
    line["sha256"] = hashlib.sha256(secret.read_bytes()).hexdigest()
    with (directory / "shards.jsonl").open("a") as log:
        log.write(json.dumps(line) + "\n")
    opened = open_store(directory)
    with pytest.raises(StoreError, match="is not what was recorded"):
        opened.samples(opened.batches[0])

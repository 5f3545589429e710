import hashlib
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fxaudit.errors import DataError
from fxaudit.model.data import batched_inputs, load_data, require_disjoint
from fxaudit.model.load import subject
from fxaudit.model.trace import trace


class Scaled(nn.Module):
    """Two inputs of one batch, and a number that all inputs share."""

    def forward(self, ids, mask, scale):
        return ids * mask * scale


def arrays(count: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(0, 10, (count, 4), generator=generator)
    return {"ids": ids, "mask": torch.rand(count, 4, generator=generator)}


@pytest.fixture(scope="module")
def traced():
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 3)

        def forward(self, ids, mask):
            return self.embedding(ids) * mask[..., None]

    return trace(subject(One(), arrays(2)))


def refused(place: object, traced) -> DataError:
    with pytest.raises(DataError) as caught:
        load_data(place, traced)
    error = caught.value
    assert all([error.what, error.where or error.found, error.expected, error.remedy]), f"a part is missing:\n{error}"
    assert error.exit_code == 6
    return error


def values(data, traced, size: int) -> dict[str, torch.Tensor]:
    """All inputs of a data set, read in batches of `size`, repetitions left out."""
    parts = []
    for start in range(0, data.count, size):
        leaves, real = data.leaves(traced, start, size)
        parts.append([leaf[:real] for leaf in leaves])
    return {name: torch.cat(rows) for name, rows in zip(traced.input_names, zip(*parts, strict=True), strict=True)}


def written(folder: Path, form: str) -> Path:
    path = folder / f"data.{form}"
    if form == "safetensors":
        save_file(arrays(), path)
    else:
        np.savez(path, **{name: array.numpy() for name, array in arrays().items()})
    return path


# --- forms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["safetensors", "npz"])
@pytest.mark.parametrize("size", [1, 2, 5, 7])
def test_a_file_gives_its_own_values_in_any_batch_size(tmp_path, traced, form, size):
    data = load_data(written(tmp_path, form), traced)
    found = values(data, traced, size)
    assert all(torch.equal(found[name], array) for name, array in arrays().items())


def test_one_content_has_one_digest_in_either_form(tmp_path, traced):
    a = load_data(written(tmp_path, "safetensors"), traced)
    b = load_data(written(tmp_path, "npz"), traced)
    assert a.digest == b.digest


def test_a_dict_of_arrays_has_the_digest_of_its_content(tmp_path, traced):
    assert load_data(arrays(), traced).digest == load_data(written(tmp_path, "npz"), traced).digest


def test_a_digest_is_sha256_over_names_forms_and_values(traced):
    given = arrays()
    expected = hashlib.sha256()
    expected.update(b"ids;torch.int64;(5, 4);" + given["ids"].numpy().tobytes())
    expected.update(b"mask;torch.float32;(5, 4);" + given["mask"].numpy().tobytes())
    assert load_data(given, traced).digest == expected.hexdigest()


@pytest.mark.parametrize("name", ["ids", "mask"])
def test_one_changed_value_changes_the_digest(traced, name):
    changed = arrays()
    changed[name][3, 2] = 1 - changed[name][3, 2]
    assert load_data(changed, traced).digest != load_data(arrays(), traced).digest


def test_a_function_may_give_the_data(tmp_path, traced):
    path = tmp_path / "data.py"
    path.write_text(
        "import torch\ndef inputs():\n    return {'ids': torch.ones(3, 4).long(), 'mask': torch.ones(3, 4)}\n"
    )
    assert load_data(f"{path}:inputs", traced).count == 3


def test_the_example_is_data(traced):
    found = values(load_data("example", traced), traced, 2)
    assert all(torch.equal(found[name], array) for name, array in arrays(2).items())


def test_resampled_data_holds_as_many_inputs_as_asked_for(traced):
    assert load_data("resampled:7", traced).count == 7


def test_resampled_data_holds_only_values_of_the_example(traced):
    found = values(load_data("resampled:7", traced), traced, 7)
    assert all(set(found[name].flatten().tolist()) <= set(arrays(2)[name].flatten().tolist()) for name in found)


def test_resampled_data_is_the_same_each_time(traced):
    assert load_data("resampled:7", traced).digest == load_data("resampled:7", traced).digest


def test_resampled_data_of_another_seed_shares_no_input(traced):
    evaluation, calibration = load_data("resampled:7", traced), load_data("resampled:5:2", traced)
    assert (evaluation.count, calibration.count) == (7, 5)
    require_disjoint(evaluation, calibration)
    with pytest.raises(DataError, match="7 inputs that are in both") as caught:
        require_disjoint(evaluation, load_data("resampled:7:1", traced))
    assert "resampled:N:2" in str(caught.value)


def test_keyword_inputs_in_any_order_are_the_example():
    class Product(nn.Module):
        def forward(self, x, scale):
            return x * scale

    given = {"scale": torch.full((2, 1), 3.0), "x": torch.ones(2, 4)}
    found = trace(subject(Product(), given))
    leaves, _ = load_data("example", found).leaves(found, 0, 2)
    assert {n: leaf.shape for n, leaf in zip(found.input_names, leaves, strict=True)} == {"x": (2, 4), "scale": (2, 1)}


def test_a_number_that_all_inputs_share_is_no_part_of_the_data():
    found = trace(subject(Scaled(), {**arrays(2), "scale": torch.tensor(3.0)}))
    assert batched_inputs(found) == ["ids", "mask"]


def test_a_number_that_all_inputs_share_keeps_the_value_of_the_example():
    found = trace(subject(Scaled(), {**arrays(2), "scale": torch.tensor(3.0)}))
    leaves, _ = load_data(arrays(), found).leaves(found, 0, 5)
    assert leaves[found.input_names.index("scale")].item() == 3.0


# --- batches --------------------------------------------------------------------------------------------------------


def test_the_last_batch_is_filled_by_repeating_its_inputs(traced):
    leaves, real = load_data(arrays(), traced).leaves(traced, 3, 5)
    assert real == 2
    assert torch.equal(leaves[traced.input_names.index("ids")], arrays()["ids"][[3, 4, 3, 4, 3]])


def test_a_full_batch_is_not_filled(traced):
    leaves, real = load_data(arrays(), traced).leaves(traced, 1, 3)
    assert real == 3
    assert torch.equal(leaves[traced.input_names.index("ids")], arrays()["ids"][1:4])


def test_reading_a_file_reads_only_the_rows_asked_for(tmp_path, traced):
    data = load_data(written(tmp_path, "safetensors"), traced)
    assert data.columns["ids"].rows(2, 4).shape == (2, 4)


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_missing_file_is_refused(tmp_path, traced):
    assert refused(tmp_path / "none.npz", traced).found == "no such file"


def test_a_file_of_another_kind_is_refused_by_its_ending(tmp_path, traced):
    (tmp_path / "data.csv").write_text("1,2")
    assert refused(tmp_path / "data.csv", traced).found == ".csv"


def test_a_missing_input_is_refused_by_its_name(traced):
    given = arrays()
    del given["mask"]
    assert refused(given, traced).missing == ["mask"]


def test_an_unknown_input_is_refused_with_the_nearest_one(traced):
    given = arrays()
    given["maks"] = given.pop("mask")
    assert "did you mean `mask`?" in refused(given, traced).what


def test_a_wrong_dtype_is_refused_with_both(traced):
    given = arrays()
    given["mask"] = given["mask"].double()
    error = refused(given, traced)
    assert "torch.float64" in error.found
    assert "torch.float32" in error.expected


def test_a_wrong_shape_is_refused_with_both(traced):
    given = arrays()
    given["mask"] = torch.ones(5, 3)
    error = refused(given, traced)
    assert "[inputs, 3]" in error.found
    assert "[inputs, 4]" in error.expected


def test_unequal_numbers_of_inputs_are_refused_by_their_counts(traced):
    given = arrays()
    given["mask"] = given["mask"][:4]
    assert refused(given, traced).found == "ids: 5, mask: 4"


def test_a_model_without_an_input_axis_takes_no_data():
    class Product(nn.Module):
        def forward(self, x, y):
            return x @ y

    product = trace(subject(Product(), (torch.ones(2, 3), torch.ones(3, 4))))
    for place in ("example", {"x": torch.ones(2, 3), "y": torch.ones(3, 4)}):
        error = refused(place, product)
        assert error.expected == "inputs that share their first axis"
        assert error.found == "x [2, 3], y [3, 4]"


def test_a_number_that_all_inputs_share_is_refused_in_every_form(tmp_path, traced):
    given = {**arrays(), "scale": torch.tensor(3.0)}
    save_file(given, tmp_path / "data.safetensors")
    np.savez(tmp_path / "data.npz", **{name: array.numpy() for name, array in given.items()})
    for place in (given, tmp_path / "data.safetensors", tmp_path / "data.npz"):
        assert "`scale`" in refused(place, traced).what


def test_data_without_an_input_is_refused(traced):
    refused({name: array[:0] for name, array in arrays().items()}, traced)


def test_resampling_no_input_is_refused(traced):
    refused("resampled:0", traced)


def test_object_arrays_are_refused_without_unpickling_them(tmp_path, traced):
    np.savez(tmp_path / "data.npz", ids=np.array([{"a": 1}], dtype=object))
    assert "pickle" in refused(tmp_path / "data.npz", traced).remedy


@pytest.mark.parametrize("array", [np.array(["a", "b"]), np.array([b"a", b"b"]), np.array(["2026-01-01"], "M8[D]")])
def test_arrays_of_anything_but_numbers_are_refused_by_name(tmp_path, traced, array):
    np.savez(tmp_path / "data.npz", ids=array, mask=np.ones(2))
    assert "`ids`" in refused(tmp_path / "data.npz", traced).found


@pytest.mark.parametrize("form", ["safetensors", "npz"])
def test_a_truncated_file_is_refused(tmp_path, traced, form):
    path = written(tmp_path, form)
    path.write_bytes(path.read_bytes()[:-40])
    refused(path, traced)


@pytest.mark.parametrize("form", ["safetensors", "npz"])
def test_a_file_of_garbage_is_refused(tmp_path, traced, form):
    path = tmp_path / f"data.{form}"
    path.write_bytes(b"garbage" * 20)
    refused(path, traced)


def test_a_single_array_named_as_an_archive_is_refused(tmp_path, traced):
    with (tmp_path / "data.npz").open("wb") as file:
        np.save(file, np.ones(3))
    refused(tmp_path / "data.npz", traced)


def test_a_zip_of_something_else_is_refused(tmp_path, traced):
    with zipfile.ZipFile(tmp_path / "data.npz", "w") as archive:
        archive.writestr("notes.txt", "hello")
    refused(tmp_path / "data.npz", traced)


def test_a_function_that_returns_no_dict_is_refused_by_its_type(tmp_path, traced):
    path = tmp_path / "data.py"
    path.write_text("def inputs():\n    return 7\n")
    assert refused(f"{path}:inputs", traced).found == "int"


def test_a_function_that_raises_is_refused_at_its_line(tmp_path, traced):
    path = tmp_path / "data.py"
    path.write_text("def inputs():\n    raise ValueError('no data today')\n")
    assert f"{path}:2" in refused(f"{path}:inputs", traced).where


def test_a_function_that_fails_inside_torch_is_refused_at_its_own_line(tmp_path, traced):
    path = tmp_path / "data.py"
    path.write_text("import torch\ndef inputs():\n    return torch.nn.Linear(3, 2)(torch.zeros(5))\n")
    assert f"{path}:3" in refused(f"{path}:inputs", traced).where


def test_a_function_that_ends_the_process_is_refused_at_its_line(tmp_path, traced):
    path = tmp_path / "data.py"
    path.write_text("import sys\ndef inputs():\n    sys.exit(3)\n")
    assert f"{path}:3" in refused(f"{path}:inputs", traced).where


@pytest.mark.parametrize("code", ["def inputs(:", "1 / 0"])
def test_a_file_that_cannot_be_imported_is_refused_as_data(tmp_path, traced, code):
    path = tmp_path / "data.py"
    path.write_text(f"import torch\n{code}\n")
    assert f"{path}:2" in refused(f"{path}:inputs", traced).where


def test_a_missing_file_of_a_function_is_refused_as_data(tmp_path, traced):
    assert refused(f"{tmp_path}/data.py:inputs", traced).found == "no such file"


def test_a_function_may_import_a_file_beside_its_own_when_it_is_called(tmp_path, traced):
    (tmp_path / "fxaudit_test_rows.py").write_text("COUNT = 6\n")
    path = tmp_path / "data.py"
    path.write_text(
        "import torch\ndef inputs():\n    from fxaudit_test_rows import COUNT\n"
        "    return {'ids': torch.ones(COUNT, 4).long(), 'mask': torch.ones(COUNT, 4)}\n"
    )
    try:
        assert load_data(f"{path}:inputs", traced).count == 6
    finally:
        sys.modules.pop("fxaudit_test_rows", None)


def test_arrays_that_are_still_being_trained_are_data(traced):
    given = arrays()
    given["mask"].requires_grad_()
    assert load_data(given, traced).digest == load_data(arrays(), traced).digest


def test_a_function_that_does_not_exist_is_refused_as_data(tmp_path, traced):
    path = tmp_path / "data.py"
    path.write_text("def inputs():\n    return {}\n")
    assert "did you mean `inputs`?" in refused(f"{path}:input", traced).what


def test_a_function_that_returns_something_else_than_arrays_is_refused(tmp_path, traced):
    path = tmp_path / "data.py"
    path.write_text("def inputs():\n    return {'ids': 'text', 'mask': None}\n")
    error = refused(f"{path}:inputs", traced)
    assert "`ids`" in error.what
    assert error.found.startswith("str")


@pytest.mark.parametrize("value", [None, [[1, 2], [3]], object(), {"a": 1}])
def test_values_that_are_not_arrays_are_refused_by_name(traced, value):
    assert "`mask`" in refused({**arrays(), "mask": value}, traced).what


# --- texts ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bytes_model():
    torch.manual_seed(0)
    return trace(subject(nn.Sequential(nn.Embedding(256, 4), nn.Linear(4, 256)), torch.randint(256, (2, 5))))


def test_a_text_is_cut_into_windows_of_bytes_with_the_bytes_that_follow_as_targets(tmp_path, bytes_model):
    (tmp_path / "text.txt").write_bytes(b"abcdefghijklm")
    data = load_data(tmp_path / "text.txt", bytes_model)
    (name,) = batched_inputs(bytes_model)
    assert data.columns[name].rows(0, 9).tolist() == [list(b"abcde"), list(b"fghij")]
    assert data.targets_of(0, 9).tolist() == [list(b"bcdef"), list(b"ghijk")]


@pytest.mark.parametrize("text", [b"", b"abcde"])
def test_a_text_without_a_whole_window_and_its_targets_is_refused(tmp_path, bytes_model, text):
    (tmp_path / "text.txt").write_bytes(text)
    assert refused(tmp_path / "text.txt", bytes_model).found == f"{len(text)} tokens"


def test_a_folder_named_as_a_text_is_refused(tmp_path, bytes_model):
    (tmp_path / "text.txt").mkdir()
    refused(tmp_path / "text.txt", bytes_model)


@pytest.mark.parametrize("form", ["safetensors", "npz"])
def test_a_folder_named_as_a_file_of_arrays_is_refused(tmp_path, traced, form):
    (tmp_path / f"data.{form}").mkdir()
    refused(tmp_path / f"data.{form}", traced)

"""Data in folders and from functions that yield batches."""

from __future__ import annotations

import numpy as np
import pytest
import timm
import timm.data
import torch
from PIL import Image
from small_models import FILE
from torch import nn

from fxaudit import stages
from fxaudit.errors import DataError
from fxaudit.model.data import load_data

SIZE = 64


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(0)
    module = timm.create_model("resnet10t", pretrained=False, num_classes=7).eval()
    return stages.trace(module, torch.randn(2, 3, 176, 176)), module


@pytest.fixture
def pictures(tmp_path):
    generator = np.random.default_rng(0)
    for i, place in enumerate(["2/a.png", "2/b.png", "5/c.png"]):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (90 + i, 120, 3), dtype=np.uint8)).save(tmp_path / place)
    return tmp_path


def test_images_are_what_the_models_own_transform_makes_of_them(classifier, pictures):
    traced, module = classifier
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(module), is_training=False)
    data = load_data(pictures, traced)
    (name,) = data.columns
    expected = torch.stack([transform(Image.open(p).convert("RGB")) for p in sorted(pictures.rglob("*.png"))])
    assert torch.equal(data.columns[name].rows(0, 3), expected)


def test_folders_named_by_whole_numbers_are_the_targets(classifier, pictures):
    assert load_data(pictures, classifier[0]).targets_of(0, 3).tolist() == [2, 2, 5]


def test_folders_named_otherwise_are_no_targets(classifier, pictures):
    (pictures / "5").rename(pictures / "cat")
    assert load_data(pictures, classifier[0]).targets is None


def test_a_damaged_image_is_named(classifier, pictures):
    (pictures / "5" / "c.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"c\.png is no image"):
        load_data(pictures, classifier[0])


def test_a_folder_without_images_says_what_it_holds(classifier, tmp_path):
    (tmp_path / "notes.md").write_text("nothing")
    with pytest.raises(DataError, match="holds no images") as caught:
        load_data(tmp_path, classifier[0])
    assert caught.value.found == "notes.md"


def test_a_model_that_does_not_say_how_it_takes_pictures_is_refused(pictures):
    traced = stages.trace(nn.Sequential(nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 8, 8))
    with pytest.raises(DataError, match="does not say how pictures become its inputs"):
        load_data(pictures, traced)


class Bytes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, ids):
        return self.head(self.embed(ids))


@pytest.fixture(scope="module")
def language():
    return stages.trace(Bytes().eval(), torch.zeros(2, 4, dtype=torch.int64))


def saved(columns, place):
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns).save_to_disk(place)
    return place


def test_a_saved_data_set_gives_its_columns_by_the_names_of_the_inputs(language, tmp_path):
    place = saved({"ids": [[1, 2, 3, 4], [5, 6, 7, 8]], "labels": [[2, 3, 4, -100]] * 2}, tmp_path / "d")
    data = load_data(place, language)
    assert data.columns["ids"].rows(0, 2).tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert data.targets_of(1, 2).tolist() == [[2, 3, 4, -100]]


def test_the_text_of_a_saved_data_set_is_read_like_a_text_file(language, tmp_path):
    (tmp_path / "t.txt").write_text("hello\nworld")
    data = load_data(saved({"text": ["hello", "world"]}, tmp_path / "d"), language)
    assert data.digest == load_data(tmp_path / "t.txt", language).digest


def test_a_saved_data_set_in_splits_asks_for_one(language, tmp_path):
    import datasets

    split = datasets.Dataset.from_dict({"ids": [[1, 2, 3, 4]]})
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "d")
    with pytest.raises(DataError, match="in splits") as caught:
        load_data(tmp_path / "d", language)
    assert caught.value.found == "train, test"


def test_a_saved_data_set_without_the_inputs_names_its_columns(language, tmp_path):
    with pytest.raises(DataError, match="does not hold the inputs") as caught:
        load_data(saved({"tokens": [[1, 2, 3, 4]]}, tmp_path / "d"), language)
    assert caught.value.found == "tokens"


YIELDING = """
import torch
def batches():
    for i in range(3):
        yield {"ids": torch.full((2, 4), i), "targets": torch.full((2, 4), i + 1)}
def broken():
    yield {"ids": torch.zeros(2, 4, dtype=torch.int64)}
    raise RuntimeError("out of data")
def uneven():
    yield {"ids": torch.zeros(2, 4, dtype=torch.int64)}
    yield {"ids": torch.zeros(2, 5, dtype=torch.int64)}
"""


@pytest.fixture
def yielding(tmp_path):
    (tmp_path / "data.py").write_text(YIELDING)
    return tmp_path / "data.py"


def test_batches_that_a_function_yields_are_joined_in_order(language, yielding):
    data = load_data(f"{yielding}:batches", language)
    assert data.columns["ids"].rows(0, 6)[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert data.targets_of(4, 5)[0, 0].item() == 3


def test_a_function_that_fails_while_it_yields_is_told_with_its_line(language, yielding):
    with pytest.raises(DataError, match="failed while it yielded") as caught:
        load_data(f"{yielding}:broken", language)
    assert 'raise RuntimeError("out of data")' in caught.value.where


def test_batches_of_different_lengths_do_not_go_together(language, yielding):
    with pytest.raises(DataError, match="do not go together"):
        load_data(f"{yielding}:uneven", language)


def test_a_mask_says_which_positions_count(language):
    valid = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    data = load_data({"ids": torch.zeros(2, 4, dtype=torch.int64), "valid": valid}, language)
    assert torch.equal(data.valid_positions(), valid != 0)


def test_a_mask_of_ones_masks_nothing(language):
    data = load_data({"ids": torch.zeros(2, 4, dtype=torch.int64), "valid": torch.ones(2, 4)}, language)
    assert data.valid_positions() is None


def test_an_input_without_a_valid_position_is_refused(language):
    data = load_data({"ids": torch.zeros(2, 4, dtype=torch.int64), "valid": torch.tensor([[1] * 4, [0] * 4])}, language)
    with pytest.raises(DataError, match="no valid position"):
        data.valid_positions()


def test_a_data_set_of_another_models_name_is_told(language):
    with pytest.raises(DataError, match="does not exist"):
        load_data(FILE.parent / "no such folder", language)

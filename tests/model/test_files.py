import io
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from fxaudit.errors import LoadError
from fxaudit.model.files import describe_file
from fxaudit.model.load import load, load_weights


def refused(model: str) -> LoadError:
    with pytest.raises(LoadError) as caught:
        load(model)
    return caught.value


# --- hostile files --------------------------------------------------------------------------------------------------


class Hostile:
    """Unpickling it creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def hidden(marker: Path) -> bytes:
    """A pickle that calls os.mkdir, and that pushes and pops an innocent name just before the call."""

    def text(value: str) -> bytes:
        return b"\x8c" + bytes([len(value)]) + value.encode() + b"\x94"

    decoy = text("collections") + text("OrderedDict") + b"00"
    return b"\x80\x04" + text("os") + text("mkdir") + b"00" + decoy + b"h\x00h\x01\x93" + text(str(marker)) + b"\x85R."


def legacy(marker: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save(Hostile(marker), buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def archived(marker: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"weights": Hostile(marker)}, buffer)
    return buffer.getvalue()


HOSTILE = {
    "torch archive": archived,
    "legacy torch file": legacy,
    "pickle": lambda marker: pickle.dumps(Hostile(marker)),
    "text pickle": lambda marker: pickle.dumps(Hostile(marker), protocol=0),
    "pickle with a decoy": hidden,
}


@pytest.fixture(params=HOSTILE)
def hostile(request, tmp_path):
    marker = tmp_path / "executed"
    path = tmp_path / "model.pt"
    path.write_bytes(HOSTILE[request.param](marker))
    return path, marker


def test_the_hostile_files_of_these_tests_are_hostile(hostile):
    path, marker = hostile
    torch.load(path, weights_only=False) if zipfile.is_zipfile(path) else _unpickle(path)
    assert marker.exists()


def _unpickle(path: Path) -> None:
    with path.open("rb") as file:
        try:
            while True:
                pickle.load(file)
        except (EOFError, pickle.UnpicklingError):
            pass


def test_a_hostile_file_is_never_executed(hostile):
    path, marker = hostile
    refused(str(path))
    assert not marker.exists()


def test_a_hostile_file_is_refused_by_what_it_would_call(hostile):
    path, _ = hostile
    found = refused(str(path)).found
    assert "posix.mkdir" in found or "os.mkdir" in found


@pytest.mark.parametrize("ending", [".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pt2"])
def test_every_ending_of_a_pickle_is_refused(tmp_path, ending):
    marker = tmp_path / "executed"
    path = tmp_path / f"model{ending}"
    path.write_bytes(archived(marker))
    refused(str(path))
    assert not marker.exists()


def test_a_hostile_file_given_as_weights_is_never_executed(hostile):
    path, marker = hostile
    with pytest.raises(LoadError):
        load_weights(nn.Linear(3, 2), path)
    assert not marker.exists()


def described(tmp_path: Path, data: bytes, name: str = "model.pt") -> str:
    path = tmp_path / name
    path.write_bytes(data)
    return describe_file(path)


def saved(what: object, **options) -> bytes:
    buffer = io.BytesIO()
    torch.save(what, buffer, **options)
    return buffer.getvalue()


def test_a_state_dict_is_described_as_one(tmp_path):
    assert described(tmp_path, saved(nn.Linear(2, 2).state_dict())) == "a pickled state dict (tensors only)"


def test_a_legacy_state_dict_is_described_as_one(tmp_path):
    data = saved(nn.Linear(2, 2).state_dict(), _use_new_zipfile_serialization=False)
    assert described(tmp_path, data) == "a torch file of the old format; a pickled state dict (tensors only)"


def test_a_pickled_module_is_described_by_its_class(tmp_path):
    assert "torch.nn.modules.linear.Linear" in described(tmp_path, saved(nn.Linear(2, 2)))


def test_a_legacy_pickled_module_is_described_by_its_class(tmp_path):
    data = saved(nn.Linear(2, 2), _use_new_zipfile_serialization=False)
    assert "torch.nn.modules.linear.Linear" in described(tmp_path, data)


def test_a_class_called_storage_is_not_taken_for_a_tensor(tmp_path):
    assert "evil.Storage" in described(tmp_path, b"\x80\x02cevil\nStorage\n)R.")


@pytest.mark.filterwarnings("ignore")
def test_a_torchscript_archive_is_described_as_one(tmp_path):
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), buffer)
    assert described(tmp_path, buffer.getvalue()) == "a TorchScript archive"


def test_an_export_archive_is_described_as_one(tmp_path):
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.randn(2, 2),)), buffer)
    assert described(tmp_path, buffer.getvalue(), "model.pt2") == "a torch.export archive (.pt2)"


def test_an_empty_file_is_described_as_one(tmp_path):
    assert described(tmp_path, b"") == "an empty file"


def test_a_truncated_archive_is_described_as_damaged(tmp_path):
    data = saved(nn.Linear(20, 20).state_dict())
    found = described(tmp_path, data[: len(data) // 2])
    assert found == "a truncated or damaged archive"


def test_another_file_is_described_as_neither(tmp_path):
    assert described(tmp_path, b"hello, world") == "neither a torch archive nor a pickle"


def test_a_zip_of_something_else_is_described_as_one(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("notes.txt", "hello")
    assert described(tmp_path, buffer.getvalue()) == "a zip archive that torch did not write"


def test_an_archive_that_cannot_be_unpacked_is_described_all_the_same(tmp_path):
    data = bytearray(saved(nn.Linear(2, 2).state_dict()))
    for signature, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):  # the compression method of the first entry
        start = data.index(signature)
        data[start + offset : start + offset + 2] = (99).to_bytes(2, "little")
    assert described(tmp_path, bytes(data)).startswith("a truncated or damaged archive")


def test_an_archive_of_damaged_compressed_bytes_is_described_as_damaged(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(list(range(1000))))
    data = bytearray(buffer.getvalue())
    start = data.index(b"data.pkl") + len(b"data.pkl")
    data[start : start + 40] = b"\xff" * 40
    assert described(tmp_path, bytes(data)).startswith("a truncated or damaged archive")


def test_a_missing_weight_file_does_not_exist(tmp_path):
    assert refused(f"{tmp_path}/model.pt").found == "no such file"


def test_describing_a_folder_says_that_it_cannot_be_read(tmp_path):
    assert describe_file(tmp_path).startswith("an unreadable file")


def innocent(count: int) -> bytes:
    """Opcodes that name `count` classes of torch."""
    return b"".join(b"ctorch.nn\nLayer%d\n0" % i for i in range(count))


# What each pickle would call when it is loaded, from the definition of its opcodes.
DECOYS = {
    "a second pickle after a whole one": (b"N." + b"cos\nsystem\n.", "os.system"),
    "a name from the memo": (b"\x80\x04\x8c\x02os\x94\x8c\x06system\x940h\x00h\x01\x93.", "os.system"),
    "a name from the memo under a number of its own": (
        b"\x80\x04\x8c\x02osr\xff\x00\x00\x000j\xff\x00\x00\x00\x8c\x06system\x93.",
        "os.system",
    ),
    "a name pushed twice": (b"\x80\x04\x8c\x04eval\x8c\x04eval2\x93.", "eval.eval"),
    "a name below a mark": (b"\x80\x04\x8c\x02os\x8c\x06system(\x8c\x01x1\x93.", "os.system"),
    "an instance of the old kind": (b"(S'ls'\nios\nsystem\n.", "os.system"),
    "a name that a call makes": (b"\x80\x04cbuiltins\nstr\n)R\x8c\x06system\x93.", "an unknown global"),
    "a name that a loader makes": (b"\x80\x04Pos\n\x8c\x06system\x93.", "an unknown global"),
    "a number in a registry": (b"\x80\x02\x82\x05.", "an unknown global"),
    "a method of a harmless class": (
        b"\x80\x04\x8c\x0bcollections\x8c\x12OrderedDict.update\x93.",
        "OrderedDict.update",
    ),
    "a loader beside the storages": (b"ctorch.storage\n_load_from_bytes\n.", "torch.storage._load_from_bytes"),
    "a rebuilder that torch does not have": (b"ctorch._utils\n_rebuild_evil\n.", "torch._utils._rebuild_evil"),
    "one name behind many of torch": (innocent(20) + b"cos\nsystem\n.", "os.system"),
    "a pickle that breaks off": (b"\x80\x02cos\nsystem\n(", "os.system"),
    "a pickle with an archive behind it": (b"cos\nsystem\n." + archived(Path("nowhere")), "os.system"),
}


@pytest.mark.parametrize("name", DECOYS)
def test_a_pickle_that_hides_what_it_would_call_is_described_by_it(tmp_path, name):
    data, called = DECOYS[name]
    assert called in described(tmp_path, data)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_archive_with_two_entries_of_one_name_is_described_by_both(tmp_path):
    for first, second in ((b"N.", b"cos\nsystem\n."), (b"cos\nsystem\n.", b"N.")):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("archive/data.pkl", first)
            archive.writestr("archive/data.pkl", second)
        assert "os.system" in described(tmp_path, buffer.getvalue())


def test_a_pickle_longer_than_what_is_read_is_not_called_harmless(tmp_path):
    numbers = b"N0" * 3_000_000
    assert "unfinished" in described(tmp_path, b"\x80\x02" + numbers + b"cos\nsystem\n.")


def test_a_truncated_torch_file_of_the_old_format_is_not_called_harmless(tmp_path):
    data = saved(nn.Linear(2, 2).state_dict(), _use_new_zipfile_serialization=False)
    start = data.index(b"_rebuild_tensor_v2")
    assert described(tmp_path, data[:start]).endswith("a damaged or unfinished pickle")


def test_plain_values_are_not_called_tensors(tmp_path):
    assert described(tmp_path, pickle.dumps({"width": 3})) == "a bare pickle; a pickle of plain values"


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.bool, torch.int8, torch.complex64, torch.uint16, torch.float8_e4m3fn]
)
def test_a_state_dict_of_any_dtype_is_described_as_one(tmp_path, dtype):
    data = saved({"weight": torch.zeros(2).to(dtype), "again": nn.Parameter(torch.zeros(1))})
    assert described(tmp_path, data) == "a pickled state dict (tensors only)"


def test_what_a_file_names_cannot_command_the_terminal(tmp_path):
    found = described(tmp_path, b"\x80\x04" + b"\x8c\x08\x1b[2Jevil" + b"\x8c\x01f\x93.")
    assert found == "a bare pickle; a pickle that would call ?[2Jevil.f"


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_random_bytes_are_always_described(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for start in (b"", b"\x80\x02", b"PK\x03\x04", struct.pack("<q", 99)):
        for _ in range(50):
            data = start + bytes(torch.randint(256, (200,), generator=generator).tolist())
            assert isinstance(described(tmp_path, data), str)

"""Which patterns are searched for."""

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxaudit import stages
from fxaudit.controllers.library import available_patterns, installed_folders
from fxaudit.controllers.pattern import library_path
from fxaudit.errors import PatternError, UsageError

from .build import pattern, pattern_text

GATE = "coefficient = sigmoid(linear(input))\napply = value * coefficient"


def write(folder, name, summary="A family."):
    folder.mkdir(parents=True, exist_ok=True)
    text = pattern_text(GATE, name=name).replace("A family.", summary)
    (folder / f"{name}.toml").write_text(text, encoding="utf-8")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A distribution on the path whose entry point names a package, or a folder in one."""

    def install(value):
        info = tmp_path / "acme_patterns-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-patterns\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[fxaudit.patterns]\nacme = {value}\n")
        package = tmp_path / "acme_patterns"
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        monkeypatch.syspath_prepend(tmp_path)
        return package

    yield install
    sys.modules.pop("acme_patterns", None)


def names(*places, **options):
    return [chosen.name for chosen in available_patterns(*places, **options)]


def test_the_shipped_patterns_are_there_without_asking():
    assert names() == sorted(path.stem for path in library_path().glob("*.toml"))


def test_the_users_patterns_are_added_to_the_shipped_ones(tmp_path):
    write(tmp_path, "my-gate")
    assert names([tmp_path]) == sorted([*names(), "my-gate"])


def test_without_the_library_only_the_users_patterns_are_there(tmp_path):
    write(tmp_path, "my-gate")
    assert names([tmp_path / "my-gate.toml"], shipped=False) == ["my-gate"]


def test_without_the_library_and_without_any_file_there_is_nothing_to_search_for():
    with pytest.raises(UsageError, match="there is no pattern to search for"):
        available_patterns(shipped=False)


def test_a_users_pattern_takes_the_place_of_the_shipped_one_of_its_name(tmp_path):
    write(tmp_path, "se-gate", "Mine.")
    assert {p.name: p.summary for p in available_patterns([tmp_path])}["se-gate"] == "Mine."


def test_an_installed_packages_patterns_are_there_and_the_package_is_not_imported(installed):
    write(installed("acme_patterns"), "acme-gate")
    assert "acme-gate" in names()
    assert "acme_patterns" not in sys.modules


def test_an_entry_point_may_name_a_folder_of_a_package(installed):
    write(installed("acme_patterns:gates") / "gates", "acme-gate")
    assert "acme-gate" in names()


def test_the_users_pattern_stays_before_an_installed_one(installed, tmp_path):
    write(installed("acme_patterns"), "acme-gate", "Theirs.")
    write(tmp_path / "own", "acme-gate", "Mine.")
    assert {p.name: p.summary for p in available_patterns([tmp_path / "own"])}["acme-gate"] == "Mine."


def test_an_entry_point_without_its_package_is_an_error_that_names_it(installed):
    installed("acme_missing")
    with pytest.raises(PatternError, match="the patterns `acme` of an installed package cannot be found") as caught:
        installed_folders()
    assert "fxaudit.patterns: acme = acme_missing" in caught.value.where


# --- what exporting hides -------------------------------------------------------------------------------------------


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.gate = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4)

    def forward(self, x):
        x, _ = self.rnn(x)
        return F.scaled_dot_product_attention(x, x, x) * torch.sigmoid(self.gate(x))


@pytest.fixture(scope="module")
def fused():
    return stages.trace(Fused().eval(), torch.randn(2, 3, 4))


def hidden(fused, head):
    chosen = pattern(GATE, head=head, shape={"coefficient": "batch token feature"})
    return [finding.text for finding in stages.match(fused, [chosen]).findings if finding.kind == "hidden"]


def test_attention_in_one_op_hides_what_a_pattern_requires(fused):
    (text,) = hidden(fused, 'requires = { attention = "eager" }')
    assert text == "`family` sees nothing inside 1 `scaled_dot_product_attention`: trace with --attention eager"


def test_a_recurrent_layer_in_one_op_hides_what_a_pattern_requires(fused):
    (text,) = hidden(fused, 'requires = { decompose = "lstm" }')
    assert text == "`family` sees nothing inside 1 `lstm`: trace with --decompose lstm"


def test_a_pattern_that_requires_nothing_has_no_such_finding(fused):
    assert hidden(fused, "") == []

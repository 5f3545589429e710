"""The documents about the zoo say what its results say."""

from __future__ import annotations

from tests.zoo import render
from tests.zoo.models import ZOO


def test_the_readmes_section_is_what_the_results_say() -> None:
    readme = render.README.read_text(encoding="utf-8")
    assert render.with_section(readme, render.section(render.read(), render.not_run(render.read()))) == readme


def test_the_table_is_what_the_results_say() -> None:
    assert render.TABLE.read_text(encoding="utf-8") == render.page(render.read())


def test_the_results_are_of_at_least_150_models_of_the_zoo_in_its_order() -> None:
    names = [row["name"] for row in render.read()]
    assert len(names) >= 150
    assert names == [name for name in ZOO if name in names]


def test_no_model_of_the_zoo_is_wrong_in_silence() -> None:
    assert [row["name"] for row in render.read() if row["outcome"] == "wrong" or row.get("identity") is False] == []

import json
import runpy
from pathlib import Path

import pytest
import torch

from fxaudit.axes import parse_shape
from fxaudit.model.frames import user_frame

HERE = Path(__file__)


def raised(function) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011  which one does not matter here
        function()
    return caught.value


def line_of(text: str) -> int:
    """The number of the only line of this file that ends in `text`."""
    (number,) = [i for i, line in enumerate(HERE.read_text().splitlines(), 1) if line.endswith(text)]
    return number


def in_torch():
    torch.zeros(2) @ torch.nn.Linear(3, 2)(torch.zeros(5))  # fails in torch


def in_the_standard_library():
    json.loads("{")  # fails in json


def in_fxaudit():
    parse_shape("batch, token")  # fails in fxaudit


def in_code_without_a_file():
    exec("1 / 0")  # fails in a string


@pytest.mark.parametrize(
    ("function", "mark"),
    [
        (in_torch, "# fails in torch"),
        (in_the_standard_library, "# fails in json"),
        (in_fxaudit, "# fails in fxaudit"),
        (in_code_without_a_file, "# fails in a string"),
    ],
)
def test_an_error_in_a_library_is_at_the_line_that_called_it(function, mark):
    found = user_frame(raised(function))
    assert found.startswith(f"{HERE}:{line_of(mark)}   ")
    assert found.endswith(mark)


def test_a_folder_of_the_user_may_be_called_like_a_library(tmp_path):
    path = tmp_path / "torch" / "fxaudit" / "importlib" / "user.py"
    path.parent.mkdir(parents=True)
    path.write_text("x = 1\n1 / 0\n")
    assert user_frame(raised(lambda: runpy.run_path(str(path)))) == f"{path}:2   1 / 0"


def test_a_package_of_the_environment_is_not_passed_over():
    timm = pytest.importorskip("timm")
    found = user_frame(raised(lambda: timm.create_model("no_such_model")))
    assert str(Path(timm.__file__).parent) in found


def test_a_file_that_does_not_parse_is_at_its_own_line(tmp_path):
    path = tmp_path / "user.py"
    path.write_text("x = 1\ndef f(:\n")
    assert user_frame(raised(lambda: runpy.run_path(str(path)))) == f"{path}:2   def f(:"


def test_a_string_that_does_not_parse_is_at_the_line_that_evaluates_it():
    found = user_frame(raised(lambda: eval("1 +")))  # fails to parse
    assert found.startswith(f"{HERE}:{line_of('# fails to parse')}   ")


def test_an_error_that_was_never_raised_has_no_line():
    assert user_frame(ValueError()) == ""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fxaudit.errors import LoadError, UsageError
from fxaudit.model.load import load, subject

GOOD = """
import torch
from torch import nn

def build():
    return nn.Linear(3, 2), torch.randn(2, 3)

def alone():
    return nn.Linear(3, 2)

def number():
    return 7

def broken():
    width = 3
    raise ValueError("no such width")

def broken_inside_torch():
    layer = nn.Linear(3, 2)
    return layer(torch.zeros(5))

def leaves():
    raise SystemExit("wrong arguments")

def leaves_quietly():
    import argparse
    argparse.ArgumentParser().parse_args(["--no-such-option"])

def imports_its_neighbour():
    from neighbour import layer
    return layer(), torch.randn(2, 3)

def needs_a_width(width):
    return nn.Linear(width, 2), torch.randn(2, width)

def tokens():
    return nn.Embedding(9, 2), torch.arange(12).reshape(2, 6) % 9

SIZE = 5
"""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(GOOD)
    return path


def refused(model: str, **options) -> LoadError:
    with pytest.raises(LoadError) as caught:
        load(model, **options)
    assert caught.value.exit_code == 3
    return caught.value


def is_complete(error: LoadError) -> bool:
    return all([error.what, error.where or error.found, error.expected, error.remedy])


# --- callables ------------------------------------------------------------------------------------------------------


def test_a_function_in_a_file_builds_the_subject(file):
    loaded = load(f"{file}:build")
    assert isinstance(loaded.module, nn.Linear)
    assert loaded.arguments[0][0].shape == (2, 3)


def test_a_function_in_a_package_builds_the_subject(file, monkeypatch):
    monkeypatch.syspath_prepend(str(file.parent))
    monkeypatch.delitem(sys.modules, "models", raising=False)
    assert isinstance(load("models:build").module, nn.Linear)


def test_inputs_that_are_given_replace_the_models_own(file):
    x = torch.ones(4, 3)
    assert load(f"{file}:build", inputs=x).arguments == ((x,), {})


def test_one_seed_builds_the_same_weights(file):
    first, second = load(f"{file}:build", seed=3), load(f"{file}:build", seed=3)
    assert torch.equal(first.module.weight, second.module.weight)


def test_another_seed_builds_other_weights(file):
    first, second = load(f"{file}:build", seed=3), load(f"{file}:build", seed=4)
    assert not torch.equal(first.module.weight, second.module.weight)


def test_loading_does_not_touch_the_global_generator(file):
    state = torch.get_rng_state()
    load(f"{file}:build")
    assert torch.equal(torch.get_rng_state(), state)


def test_the_parameter_count_is_that_of_the_module(file):
    assert load(f"{file}:build").parameter_count == 3 * 2 + 2


def test_a_subject_holds_the_module_itself_not_a_copy():
    module = nn.Linear(3, 2)
    assert subject(module, torch.randn(2, 3)).module is module


def test_loading_leaves_the_import_path_as_it_was(file):
    before = list(sys.path)
    load(f"{file}:build")
    assert sys.path == before


def test_a_function_may_import_a_file_beside_its_own_when_it_is_called(file):
    (file.parent / "neighbour.py").write_text("from torch import nn\n\ndef layer():\n    return nn.Linear(3, 2)\n")
    try:
        assert isinstance(load(f"{file}:imports_its_neighbour").module, nn.Linear)
    finally:
        sys.modules.pop("neighbour", None)


def test_a_failed_function_leaves_the_import_path_as_it_was(file):
    before = list(sys.path)
    refused(f"{file}:broken")
    assert sys.path == before


@pytest.fixture
def package_in_the_working_directory(file, monkeypatch):
    """The import path of an installed script, which unlike `python -m` leaves the working directory out."""
    package = file.parent / "fxaudit_test_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "nets.py").write_text(GOOD)
    monkeypatch.chdir(file.parent)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(file.parent))])
    yield "fxaudit_test_package.nets"
    for name in ("fxaudit_test_package", "fxaudit_test_package.nets"):
        sys.modules.pop(name, None)


def test_a_package_in_the_working_directory_is_found(package_in_the_working_directory):
    assert isinstance(load(f"{package_in_the_working_directory}:build").module, nn.Linear)


def test_a_package_in_the_working_directory_leaves_the_import_path_as_it_was(package_in_the_working_directory):
    before = list(sys.path)
    load(f"{package_in_the_working_directory}:build")
    assert sys.path == before


def test_the_command_finds_a_package_in_the_working_directory(file):
    # -P leaves the working directory off the import path, as it is for an installed script.
    root = Path(__file__).resolve().parents[2]
    code = f"import sys; sys.path.append({str(root)!r}); from fxaudit.cli import main; main()"
    command = [sys.executable, "-P", "-c", code, "trace", "models:alone"]
    run = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, timeout=120)
    assert "models:alone came without example inputs" in run.stderr
    assert run.returncode == 3


def test_a_missing_python_file_is_refused(tmp_path):
    assert "nothing.py does not exist" in refused(f"{tmp_path}/nothing.py:build").what


def test_a_python_file_without_a_function_is_refused_with_the_form_to_use(file):
    assert f"{file}:build" in refused(str(file)).remedy


def test_an_unknown_function_is_refused_with_the_nearest_one(file):
    assert "did you mean `build`?" in refused(f"{file}:biuld").what


def test_an_unknown_function_is_refused_with_those_that_exist(file):
    assert "alone" in refused(f"{file}:xyz").found


def test_a_name_that_is_no_function_is_refused_by_its_type(file):
    assert refused(f"{file}:SIZE").found == "a int"


def test_a_function_that_raises_is_reported_at_the_users_line(file):
    line = GOOD.splitlines().index('    raise ValueError("no such width")') + 1
    assert f"{file}:{line}" in refused(f"{file}:broken").where


def test_a_function_that_raises_is_reported_with_its_own_message(file):
    assert refused(f"{file}:broken").found == "ValueError: no such width"


@pytest.mark.parametrize(
    ("function", "statement"),
    [
        ("leaves", 'raise SystemExit("wrong arguments")'),
        ("leaves_quietly", 'argparse.ArgumentParser().parse_args(["--no-such-option"])'),
    ],
)
def test_a_function_that_ends_the_process_is_reported_at_the_users_line(file, function, statement):
    line = GOOD.splitlines().index(f"    {statement}") + 1
    error = refused(f"{file}:{function}")
    assert f"{file}:{line}" in error.where
    assert error.found.startswith("SystemExit: ")


def test_a_file_that_ends_the_process_on_import_is_reported_at_its_line(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import sys\n\nsys.exit(4)\n")
    error = refused(f"{path}:build")
    assert f"{path}:3" in error.where
    assert error.found == "SystemExit: 4"


def test_a_package_that_ends_the_process_on_import_is_reported_at_its_line(tmp_path, monkeypatch):
    path = tmp_path / "fxaudit_test_script.py"
    path.write_text("import sys\n\nsys.exit(4)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert f"{path}:3" in refused("fxaudit_test_script:build").where


def test_a_file_that_failed_on_import_is_not_taken_for_imported(tmp_path):
    path = tmp_path / "bad_once.py"
    path.write_text("1 / 0\n")
    refused(f"{path}:build")
    assert "fxaudit_user_bad_once" not in sys.modules


def test_a_function_that_needs_arguments_is_refused_with_what_it_misses(file):
    error = refused(f"{file}:needs_a_width")
    assert "'width'" in error.found
    assert "takes no argument" in error.expected


def test_a_package_that_cannot_give_its_member_is_refused(tmp_path, monkeypatch):
    code = "def __getattr__(name):\n    raise RuntimeError(f'{name} needs another package')\n"
    (tmp_path / "fxaudit_test_lazy.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert refused("fxaudit_test_lazy:build").found == "RuntimeError: build needs another package"


def test_a_function_that_fails_inside_torch_is_reported_at_the_users_line(file):
    line = GOOD.splitlines().index("    return layer(torch.zeros(5))") + 1
    assert f"{file}:{line}" in refused(f"{file}:broken_inside_torch").where


def test_a_file_that_fails_on_import_is_reported_at_its_line(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("import torch\n\nraise RuntimeError('not today')\n")
    assert f"{path}:3" in refused(f"{path}:build").where


def test_a_syntax_error_is_reported_at_its_line(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("import torch\n\ndef build(:\n    pass\n")
    assert f"{path}:3" in refused(f"{path}:build").where


def test_a_function_that_returns_no_module_is_refused_by_what_it_returns(file):
    assert refused(f"{file}:number").found == "builtins.int"


def test_a_module_without_inputs_is_refused(file):
    assert "without example inputs" in refused(f"{file}:alone").what


def test_inputs_can_be_given_for_a_module_that_comes_alone(file):
    assert load(f"{file}:alone", inputs=torch.ones(2, 3)).arguments[0][0].shape == (2, 3)


def test_an_unknown_package_is_refused():
    assert "no package `fxaudit_no_such_package`" in refused("fxaudit_no_such_package:build").what


def test_a_misspelt_zoo_is_refused_with_the_nearest_one():
    assert "did you mean `torchvision`?" in refused("torchvison:resnet18").what


def test_a_path_without_its_ending_is_refused(tmp_path):
    assert "with the ending" in refused(f"{tmp_path}/models:build").remedy


def test_a_package_whose_own_import_fails_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import fxaudit_no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    error = refused("needs_more:build")
    assert "importing needs_more failed" in error.what
    assert "fxaudit_no_such_dependency" in error.found


def test_a_name_that_is_nothing_does_not_exist():
    assert "does not exist" in refused("nothing-like-a-model").what


def test_a_file_of_an_unknown_kind_is_refused_by_its_ending(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"")
    assert ".onnx" in refused(f"{tmp_path}/model.onnx").found


REFUSED = """
    {folder}/nothing.py:build {file} {file}:biuld {file}:SIZE {file}:broken {file}:broken_inside_torch
    {file}:leaves {file}:needs_a_width {file}:number {file}:alone {folder}/unimportable.py:build
    fxaudit_no_such_package:build {folder}/models:build nothing-like-a-model {folder} {folder}/model.onnx
    {folder}/model.pt {folder}/missing.pt torchvision:resnet81 timm:seresnt50
""".split()


@pytest.mark.parametrize("model", REFUSED)
def test_a_refusal_says_what_failed_what_was_found_and_expected_and_what_to_do(file, model):
    (file.parent / "unimportable.py").write_text("1 / 0\n")
    (file.parent / "model.onnx").touch()
    (file.parent / "model.pt").touch()
    error = refused(model.format(file=file, folder=file.parent))
    assert is_complete(error), f"a part is missing:\n{error}"


# --- model zoos -----------------------------------------------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch):
    """Whatever the machine, every download fails as it does without a network."""

    def fail(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr("urllib.request.urlopen", fail)
    monkeypatch.setattr("torch.hub.load_state_dict_from_url", fail)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fail)


def test_an_unknown_torchvision_model_is_refused_with_the_nearest_one():
    assert "did you mean `resnet18`?" in refused("torchvision:resnet81").what


def test_an_unknown_timm_model_is_refused_with_the_nearest_one():
    assert "did you mean `seresnet50`?" in refused("timm:seresnt50").what


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("model", ["torchvision:resnet18", "timm:resnet18"])
def test_pretrained_weights_without_a_network_name_random_init(model):
    assert "--random-init" in refused(model).remedy


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("model", ["torchvision:squeezenet1_1", "timm:resnet18"])
def test_random_init_needs_no_network(model):
    assert load(model, random_init=True).parameter_count > 0


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["lraspp_mobilenet_v3_large", "ssdlite320_mobilenet_v3_large", "fcn_resnet50"])
def test_random_init_does_not_download_a_pretrained_backbone(name):
    assert load(f"torchvision:{name}", random_init=True).parameter_count > 0


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("model", ["torchvision:resnet18", "timm:resnet18"])
def test_a_failed_download_is_refused_with_all_parts(model):
    error = refused(model)
    assert is_complete(error), f"a part is missing:\n{error}"
    assert error.where == model


def test_a_model_that_cannot_be_built_without_weights_is_not_told_to_leave_them_out(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("a missing operator")

    monkeypatch.setattr("torchvision.models.get_model", fail)
    error = refused("torchvision:resnet18", random_init=True)
    assert is_complete(error), f"a part is missing:\n{error}"
    assert "--random-init" not in error.remedy


def test_a_zoo_that_is_not_installed_is_refused_with_all_parts(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    error = refused("timm:resnet18")
    assert is_complete(error), f"a part is missing:\n{error}"
    assert "pip install" in error.remedy


def test_a_zoo_model_comes_with_inputs_of_its_own_size():
    assert load("timm:mobilenetv3_small_050.lamb_in1k", random_init=True).arguments[0][0].shape == (2, 3, 224, 224)


# --- windows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [3, 6, 10])
def test_a_window_sets_the_number_of_tokens(file, window):
    assert load(f"{file}:tokens", window=window).arguments[0][0].shape == (2, window)


def test_a_shorter_window_keeps_the_first_tokens(file):
    expected = torch.tensor([[0, 1, 2], [6, 7, 8]])
    assert torch.equal(load(f"{file}:tokens", window=3).arguments[0][0], expected)


def test_a_window_for_a_model_without_tokens_has_no_meaning(file):
    with pytest.raises(UsageError) as caught:
        load(f"{file}:build", window=3)
    assert is_complete(caught.value)


def test_the_options_that_a_model_was_loaded_with_are_kept() -> None:
    loaded = load("torchvision:resnet18", random_init=True, dtype="float64", seed=3)
    assert loaded.loading == {"random_init": "True", "seed": "3", "dtype": "float64"}

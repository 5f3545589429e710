"""The options that say what is loaded, on the command line: the same for every command over a model."""

import io
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file
from torch import nn
from torchvision.ops import SqueezeExcitation

from fxaudit.cli import main
from tests.model.hostile import CONTAINERS

OPTIONS = {
    *"weights random_init inputs window prepare dtype device trust_pickle trust_remote_code seed".split(),
}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def gate(tmp_path) -> tuple[Path, Path]:
    """A pickled module of torchvision with one controller, and a file of inputs for it."""
    torch.manual_seed(0)
    torch.save(SqueezeExcitation(8, 4).eval(), tmp_path / "gate.pt")
    save_file({"input": torch.randn(2, 8, 4, 4)}, tmp_path / "inputs.safetensors")
    return tmp_path / "gate.pt", tmp_path / "inputs.safetensors"


@pytest.mark.parametrize(
    "name", [name for name, c in main.commands.items() if any(p.name == "model" for p in c.params)]
)
def test_every_command_over_a_model_takes_every_option_of_loading(name):
    assert {parameter.name for parameter in main.commands[name].params} >= OPTIONS
    assert "--trust-pickle" in run(name, "--help").stdout


def test_a_pickled_module_is_traced_without_a_flag(gate):
    model, inputs = gate
    done = run("trace", model, "--inputs", inputs, "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["model"]["class"].endswith("SqueezeExcitation")
    assert found["fidelity"]["bitwise"] is True
    assert found["identity"]["bitwise"] is True
    assert found["counts"]["se-gate"] == 1


def test_a_pickled_module_is_recorded_and_replayed(gate, tmp_path):
    model, inputs = gate
    done = run("record", model, "--inputs", inputs, "--data", "resampled:4", "-o", tmp_path / "store", "--json")
    assert done.exit_code == 0, done.stderr


def test_an_exported_program_is_traced_without_a_flag(tmp_path):
    buffer = io.BytesIO()
    batch = {"input": {0: torch.export.Dim("batch")}}
    x = torch.randn(2, 8, 4, 4)
    torch.export.save(torch.export.export(SqueezeExcitation(8, 4).eval(), (x,), dynamic_shapes=batch), buffer)
    (tmp_path / "gate.pt2").write_bytes(buffer.getvalue())
    done = run("trace", tmp_path / "gate.pt2", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["counts"]["se-gate"] == 1


def test_a_state_dict_ends_in_the_command_that_works(tmp_path):
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "w.pt")
    done = run("trace", tmp_path / "w.pt")
    assert done.exit_code == 3
    assert f"fxaudit trace file.py:function --weights {tmp_path / 'w.pt'}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["MODEL", "--weights", "--inputs"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_bomb_ends_in_exit_code_3_and_runs_nothing(gate, tmp_path, option, container):
    marker, path = tmp_path / "executed", tmp_path / "bomb.pt"
    path.write_bytes(CONTAINERS[container](marker))
    done = run("trace", path) if option == "MODEL" else run("trace", gate[0], option, path)
    assert done.exit_code == 3
    for part in ("LoadError: ", "expected: ", "found: ", "next: "):
        assert part in done.stderr
    assert not marker.exists()


def test_a_flag_lets_a_file_run_its_code(tmp_path):
    marker, path = tmp_path / "executed", tmp_path / "bomb.pt"
    path.write_bytes(CONTAINERS["torch archive"](marker))
    assert run("trace", path, "--trust-pickle").exit_code == 3  # what it makes is no model
    assert marker.exists()


def test_dtype_preparation_and_weights_work_together(gate, tmp_path):
    (tmp_path / "own.py").write_text(
        "from torchvision.ops import SqueezeExcitation\n"
        "def build():\n    return SqueezeExcitation(8, 4)\n"
        "def freeze(module):\n    module.requires_grad_(False)\n"
    )
    torch.save(SqueezeExcitation(8, 4).state_dict(), tmp_path / "w.pt")
    own = f"{tmp_path}/own.py"
    options = ["--weights", tmp_path / "w.pt", "--inputs", gate[1], "--dtype", "float64", "--prepare", f"{own}:freeze"]
    done = run("trace", f"{own}:build", *options, "--device", "cpu", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["identity"]["bitwise"] is True


@pytest.mark.parametrize(
    ("options", "code"),
    [(["--dtype", "int8"], 2), (["--device", "gpu"], 2), (["--device", "meta", "--weights", "w.pt"], 2)],
)
def test_an_option_without_a_meaning_is_a_mistake_of_usage(gate, options, code):
    assert run("trace", gate[0], "--inputs", gate[1], *options).exit_code == code


def test_a_model_on_meta_is_traced_without_a_claim_about_values(gate):
    done = run("trace", gate[0], "--inputs", gate[1], "--device", "meta", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["counts"]["se-gate"] == 1
    assert found["fidelity"] is None or found["fidelity"]["bitwise"] is None
    assert "no-values" in {finding["kind"] for finding in found["findings"]}

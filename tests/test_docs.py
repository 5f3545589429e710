"""The documentation names everything that a user can write, and what it shows works."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import click
import pytest
import torch
from torch import nn

from fxaudit import cli, ops
from fxaudit.controllers import language, pattern, predicates
from fxaudit.controllers.examples import run_example
from fxaudit.execution import bundle
from fxaudit.execution.samples import Sample
from fxaudit.execution.verdict import DATA_DEPENDENT_KERNELS as KERNELS
from fxaudit.execution.verdict import DATA_DEPENDENT_SHAPES as SHAPES
from fxaudit.execution.verdict import INCOMPLETE, OBSERVED_CONSTANT, PROVEN_STATIC, REDISTRIBUTED


class _Gate(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.gate(x)) * self.value(x)


ROOT = Path(__file__).resolve().parents[1]
EXECUTION = (ROOT / "docs" / "execution.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "patterns.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


EXPORT_GUIDE = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
EXPORTING = [parameter for name in ("export", "verify") for parameter in cli.main.commands[name].params]


def _shared_options() -> set[str]:
    """Those of every command over a model, which the README and `--help` explain."""
    return {option for parameter in cli.main.commands["trace"].params for option in parameter.opts} | {"--onnx"}


def _export_options() -> set[str]:
    return {
        option for parameter in EXPORTING for option in parameter.opts if option.startswith("--")
    } - _shared_options()


def _check_names() -> set[str]:
    source = (ROOT / "fxaudit" / "execution" / "verification.py").read_text(encoding="utf-8")
    named = {"identity", "outputs for exchanged coefficients"}
    return named.union(re.findall(r'Check\("([^"]+)"', source))


def _code(text: str) -> set[str]:
    """Every word inside backticks."""
    return {word for span in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"[A-Za-z_*.-]+|T\d+", span)}


@pytest.mark.parametrize("key", [*pattern.KEYS, *pattern.INTERVENE_KEYS, *pattern.EXAMPLE_KEYS])
def test_every_key_of_a_pattern_file_is_documented(key: str) -> None:
    assert key in _code(GUIDE)


@pytest.mark.parametrize("name", sorted({*ops.CLASS_NAMES, *predicates.PREDICATES, *language.CLOSURES}))
def test_every_op_class_predicate_and_closure_is_documented(name: str) -> None:
    assert name in _code(GUIDE)


@pytest.mark.parametrize(
    "name", [*pattern.ROLES, *pattern.ACTS, *pattern.TAPS, *pattern.FAMILY_CLASSES, *pattern.DOMAINS]
)
def test_every_role_action_tap_class_and_domain_is_documented(name: str) -> None:
    assert name in _code(GUIDE)


@pytest.mark.parametrize("option", cli.main.commands["audit"].params, ids=lambda option: str(option.name))
def test_options_of_executing_are_documented(option: click.Parameter) -> None:
    if option.name in ("provider", "timed"):
        assert option.opts[0] in _code(EXECUTION)
        assert option.opts[0] in README


def _execution_fields() -> list[str]:
    """Every field of `execution` in audit.json that does not depend on the model."""
    tree = ast.parse((ROOT / "fxaudit" / "report" / "audit_json.py").read_text(encoding="utf-8"))
    (function,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "execution")
    keys = {key.value for node in ast.walk(function) if isinstance(node, ast.Dict) for key in node.keys if key}  # type: ignore[attr-defined]
    return sorted(keys - {"error"})


@pytest.mark.parametrize("name", _execution_fields())
def test_every_field_about_execution_is_documented(name: str) -> None:
    assert f"`{name}`" in EXECUTION


@pytest.mark.parametrize("name", [PROVEN_STATIC, OBSERVED_CONSTANT, REDISTRIBUTED, SHAPES, KERNELS, INCOMPLETE])
def test_every_verdict_on_execution_is_documented(name: str) -> None:
    assert f"`{name}`" in EXECUTION


def _commands(group: click.Group, prefix: str = "fxaudit") -> list[str]:
    found = []
    for name, command in group.commands.items():
        path = f"{prefix} {name}"
        found += _commands(command, path) if isinstance(command, click.Group) else [path]
    return found


@pytest.mark.parametrize("command", _commands(cli.main))
def test_every_command_is_in_the_readme(command: str) -> None:
    assert command in README


@pytest.mark.parametrize("option", sorted(_export_options()))
def test_every_option_of_export_and_verify_is_documented(option: str) -> None:
    assert option in EXPORT_GUIDE


@pytest.mark.parametrize("name", sorted(_check_names()))
def test_every_check_of_verify_is_documented(name: str) -> None:
    assert f"`{name}`" in EXPORT_GUIDE


@pytest.mark.parametrize("name", sorted({*bundle.FILES, *(entry.name for entry in dataclasses.fields(Sample))}))
def test_every_file_of_a_bundle_and_field_of_a_sample_is_documented(name: str) -> None:
    assert f"`{name}`" in EXPORT_GUIDE


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "patterns").glob("*.toml")))
def test_every_family_is_in_the_readme(name: str) -> None:
    assert f"`{name}`" in README


def test_the_guides_first_pattern_passes_its_own_example(tmp_path: Path) -> None:
    block = next(b for b in re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL) if "pooled-gate" in b)
    path = tmp_path / "pooled-gate.toml"
    path.write_text(re.sub(r"^   ", "", block, flags=re.MULTILINE), encoding="utf-8")
    loaded = pattern.load_pattern(path)
    assert [run_example(loaded, example).label for example in loaded.examples] == ["ok"]


def test_the_readmes_python_runs_and_another_inputs_coefficients_change_the_output() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), _Gate(8))
    namespace = {"model": model, "inputs": torch.randn(3, 5, 8)}
    exec(block, namespace)
    expected = model[0](namespace["inputs"])
    gate = torch.sigmoid(model[1].gate(expected)).flip(0)
    assert torch.allclose(namespace["difference"] + namespace["output"], gate * model[1].value(expected), atol=1e-6)
    assert float(namespace["difference"].detach().abs().max()) > 0

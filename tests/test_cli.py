import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors import safe_open
from safetensors.torch import save, save_file
from small_models import FILE, TOKENS, WIDTH, TransposedGate

import fxaudit
from fxaudit.cli import main

ROOT = FILE.parent.parent
GATED, ROUTED, PLAIN = f"{FILE}:gated", f"{FILE}:routed", f"{FILE}:plain"


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def output(*args: object) -> dict:
    """The JSON on stdout of a command that succeeds; anything else on stdout would not parse."""
    result = run(*args)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def fails(code: int, *args: object) -> Result:
    result = run(*args)
    assert result.exit_code == code, f"exit code {result.exit_code}\n{result.output}\n{result.exception!r}"
    return result


# --- help -----------------------------------------------------------------------------------------------------------


def commands(group: click.Group = main, path: tuple[str, ...] = ()) -> dict[str, click.Command]:
    found = {}
    for name, command in group.commands.items():
        found[" ".join((*path, name))] = command
        if isinstance(command, click.Group):
            found.update(commands(command, (*path, name)))
    return found


ALL = commands()
LEAVES = [name for name, command in ALL.items() if not isinstance(command, click.Group)]
OPTIONS = [
    (name, option)
    for name in LEAVES
    for parameter in ALL[name].params
    if isinstance(parameter, click.Option)
    for option in parameter.opts
]


def help_of(name: str) -> str:
    return run(*name.split(), "--help").stdout


def example(name: str) -> list[str]:
    """The arguments of a command's example, which ends at the first empty line."""
    text = help_of(name)
    start = text.index("Example: fxaudit ") + len("Example: fxaudit ")
    return shlex.split(text[start:].split("\n\n")[0])


@pytest.mark.parametrize(
    "name", ["trace", "record", "replay", "pattern list", "pattern show", "pattern test", "doctor"]
)
def test_the_commands_of_this_version_exist(name):
    assert name in LEAVES


@pytest.mark.parametrize("name", ALL)
def test_a_command_is_listed_with_what_it_does_in_the_help_above_it(name):
    *group, own = name.split()
    assert re.search(rf"^  {own} +\S", run(*group, "--help").stdout, re.MULTILINE)


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_an_option_is_in_the_help_with_text(name, option):
    (parameter,) = (p for p in ALL[name].params if option in p.opts)
    assert parameter.help
    assert option in help_of(name)
    assert " ".join(parameter.help.split()[:3]) in " ".join(help_of(name).split())


@pytest.mark.parametrize("name", LEAVES)
def test_the_help_of_a_command_has_an_example(name):
    assert re.search(r"^ *Example: fxaudit ", help_of(name), re.MULTILINE)


@pytest.mark.parametrize("name", LEAVES)
def test_the_example_of_a_command_is_of_that_command(name):
    assert example(name)[: len(name.split())] == name.split()


@pytest.mark.parametrize("name", LEAVES)
def test_the_example_of_a_command_parses(name):
    arguments = example(name)[len(name.split()) :]
    assert ALL[name].make_context(name, arguments).params


@pytest.mark.parametrize("name", ["pattern list", "pattern show", "doctor"])
def test_the_example_of_a_cheap_command_runs(name):
    assert run(*example(name)).exit_code == 0


def test_the_short_help_option_works():
    assert run("-h").stdout == run("--help").stdout


def test_the_version_is_that_of_the_package():
    assert run("--version").stdout.strip().endswith(fxaudit.__version__)


# --- usage ----------------------------------------------------------------------------------------------------------


def test_an_unknown_command_is_refused_with_the_nearest_one():
    assert "did you mean `trace`?" in fails(2, "trcae", GATED).stderr


def test_an_unknown_subcommand_is_refused_with_the_nearest_one():
    assert "did you mean `list`?" in fails(2, "pattern", "lits").stderr


def test_an_unknown_option_is_a_usage_error():
    assert "--jsno" in fails(2, "trace", GATED, "--jsno").stderr


def test_a_missing_model_is_a_usage_error():
    assert "MODEL" in fails(2, "trace").stderr


def test_missing_data_is_a_usage_error(tmp_path):
    assert "--data" in fails(2, "record", GATED, "-o", tmp_path / "store").stderr


@pytest.mark.parametrize("size", ["0", "-3", "many"])
def test_a_batch_size_that_is_no_number_of_inputs_is_refused(tmp_path, size):
    result = run("record", GATED, "--data", "example", "-o", tmp_path / "store", "--batch-size", size)
    assert result.exit_code in (2, 6)


# --- trace ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traced():
    return output("trace", GATED, "--json")


def test_a_trace_has_its_schema(traced):
    assert traced["schema"] == "fxaudit.trace/1"


@pytest.mark.parametrize(
    "key",
    ["model", "graph", "fidelity", "identity", "counts", "other", "controllers", "findings", "provenance"],
)
def test_a_trace_has_every_part_that_the_design_names(traced, key):
    assert key in traced


def test_a_trace_names_the_class_of_the_model(traced):
    assert traced["model"]["class"].endswith("small_models.TransposedGate")


def test_a_trace_counts_the_parameters_of_the_model(traced):
    assert traced["model"]["parameters"] == sum(p.numel() for p in TransposedGate().parameters())


def test_a_controller_is_described_with_its_symbolic_shape(traced):
    (coefficient,) = traced["controllers"][0]["coefficients"]
    assert coefficient["shape"] == ["inputs", TOKENS, WIDTH]


def test_a_routers_shape_is_a_multiple_of_the_inputs():
    found = output("trace", ROUTED, "--json")["controllers"][0]["coefficients"][0]
    assert (found["shape"], found["axes"]) == ([f"{TOKENS}*inputs", 2], ["batch*token", "k"])


def test_the_flops_of_a_cone_are_for_one_input(traced):
    # One matrix product of [features, tokens] by [tokens, tokens].
    assert traced["controllers"][0]["cone"]["flops"] == 2 * WIDTH * TOKENS * TOKENS


def test_the_provenance_names_the_version_of_torch(traced):
    assert traced["provenance"]["environment"]["packages"]["torch"] == metadata.version("torch")


def test_a_model_without_controllers_is_traced_all_the_same():
    assert set(output("trace", PLAIN, "--json")["counts"].values()) == {0}


def test_without_json_a_trace_is_text_on_stdout():
    text = run("trace", GATED).stdout
    assert "1 feature-gate" in text
    assert "mix#0" in text


def test_a_trace_that_succeeds_writes_nothing_to_stderr():
    assert run("trace", GATED, "--json").stderr == ""


def test_another_seed_is_another_model(traced):
    assert output("trace", GATED, "--seed", "1", "--json")["model"]["fingerprint"] != traced["model"]["fingerprint"]


def test_weights_are_loaded_from_a_file(tmp_path, traced):
    save_file(TransposedGate().state_dict(), tmp_path / "w.safetensors")
    found = output("trace", GATED, "--weights", tmp_path / "w.safetensors", "--json")
    assert found["model"]["fingerprint"] != traced["model"]["fingerprint"]


def test_the_users_patterns_are_added_to_the_shipped_ones(tmp_path, traced):
    text = (ROOT / "patterns" / "se-gate.toml").read_text().replace('"se-gate"', '"my-gate"')
    (tmp_path / "my-gate.toml").write_text(text)
    assert set(output("trace", GATED, "--patterns", tmp_path, "--json")["counts"]) == {*traced["counts"], "my-gate"}


def test_the_library_may_be_left_out():
    found = output("trace", GATED, "--no-library", "--patterns", ROOT / "patterns" / "se-gate.toml", "--json")
    assert found["counts"] == {"se-gate": 0}


def test_an_enabled_family_is_audited_and_counted_apart(tmp_path):
    text = (
        (ROOT / "patterns" / "feature-gate.toml").read_text().replace('"feature-gate"', '"my-gate"\nclass = "opt-in"')
    )
    (tmp_path / "my-gate.toml").write_text(text)
    options = ("--no-library", "--patterns", tmp_path, "--json")
    assert output("trace", GATED, *options)["controllers"] == []
    found = output("trace", GATED, *options, "--enable", "my-gate")
    assert (found["counts"], found["other"]) == ({}, {"my-gate": 1})
    assert [controller["class"] for controller in found["controllers"]] == ["opt-in"]


# --- exit codes and errors ------------------------------------------------------------------------------------------

FAILURES = {
    "no such file": (3, ("trace", "nothing.py:build")),
    "no such function": (3, ("trace", f"{FILE}:gaetd")),
    "no such setting": (2, ("trace", GATED, "--attention", "eager")),
    "no such model": (3, ("trace", "torchvision:resnet81", "--random-init")),
    "data-dependent branch": (3, ("trace", f"{FILE}:branching")),
    "other values under export": (3, ("trace", f"{FILE}:changed_under_export")),
    "no such pattern": (4, ("pattern", "show", "se-gaet")),
    "no pattern file": (4, ("trace", GATED, "--patterns", "nothing.toml")),
    "no controller": (4, ("record", PLAIN, "--data", "example", "-o", "{folder}/store")),
    "no such data": (6, ("record", GATED, "--data", "nothing.npz", "-o", "{folder}/store")),
    "foreign directory": (6, ("record", GATED, "--data", "example", "-o", "{folder}")),
}


@pytest.fixture(scope="module", params=FAILURES)
def failure(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("failure")
    (folder / "precious.txt").write_text("precious")
    code, arguments = FAILURES[request.param]
    return code, run(*(argument.format(folder=folder) for argument in arguments), "--json")


def test_a_failure_ends_with_its_exit_code(failure):
    code, result = failure
    assert result.exit_code == code


def test_a_failure_writes_nothing_to_stdout(failure):
    assert failure[1].stdout == ""


def test_a_failure_is_told_on_stderr_without_a_traceback(failure):
    assert re.search(r"^\w+Error: ", failure[1].stderr, re.MULTILINE)
    assert "Traceback" not in failure[1].stderr


def test_a_failure_says_what_to_do_next(failure):
    assert re.search(r"^  next: +\S", failure[1].stderr, re.MULTILINE)


def test_a_process_of_its_own_ends_with_the_exit_code_and_the_users_line(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fxaudit", "trace", f"{FILE}:branching", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    line = [line.strip() for line in FILE.read_text().splitlines()].index("if x.sum() > 0:") + 1
    assert (done.returncode, done.stdout) == (3, "")
    assert f"{FILE}:{line}" in done.stderr
    assert done.stderr.startswith("TraceError: ")


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_a_hostile_file_is_not_executed_but_described(tmp_path):
    torch.save(Hostile(tmp_path / "executed"), tmp_path / "model.pt")
    result = fails(3, "trace", tmp_path / "model.pt")
    assert not (tmp_path / "executed").exists()
    assert re.search(r"would call \w+\.mkdir", result.stderr)


# --- record and replay ----------------------------------------------------------------------------------------------

DATA = ("--data", "resampled:5")
IDENTITY = ("--interventions", "identity")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    directory = tmp_path_factory.mktemp("stores") / "store"
    return directory, output("record", GATED, *DATA, "-o", directory, "--batch-size", "3", "--json")


@pytest.fixture
def store(recorded, tmp_path) -> Path:
    return Path(shutil.copytree(recorded[0], tmp_path / "copy"))


def test_a_recording_has_its_schema(recorded):
    assert recorded[1]["schema"] == "fxaudit.record/1"


def test_a_recording_says_how_many_inputs_in_how_many_batches(recorded):
    assert {key: recorded[1][key] for key in ("inputs", "batch_size", "batches", "recorded")} == {
        "inputs": 5,
        "batch_size": 3,
        "batches": 2,
        "recorded": 2,
    }


def test_a_recording_is_replayed_at_once(recorded):
    assert recorded[1]["identity"]["bitwise"]


def test_a_recording_says_how_large_it_is(recorded):
    assert recorded[1]["bytes"] == sum(path.stat().st_size for path in recorded[0].glob("*.safetensors"))


def test_without_json_a_recording_is_text_on_stdout(store):
    text = run("record", GATED, *DATA, "-o", store, "--batch-size", "3").stdout
    assert "2 batches of 3" in text
    assert "2 recorded before" in text


def test_a_replay_has_its_schema_and_is_bitwise(store):
    found = output("replay", GATED, *DATA, "--store", store, "--batch-size", "3", *IDENTITY, "--json")
    assert (found["schema"], found["inputs"]) == ("fxaudit.replay/1", 5)
    assert [comparison["bitwise"] for comparison in found["identity"]["comparisons"]] == [True, True]


def test_a_replay_takes_the_batch_size_of_its_store(store):
    assert output("replay", GATED, *DATA, "--store", store, *IDENTITY, "--json")["identity"]["bitwise"]


CHANGED = {
    "weights": ("model.fingerprint", ("--seed", "1")),
    "data": ("data.digest", ("--data", "resampled:6")),
    "batch size": ("batch_size", ("--batch-size", "2")),
}


@pytest.mark.parametrize("what", ["weights", "data", "batch size"])
def test_a_store_of_something_else_is_refused_by_what_changed(store, what):
    key, options = CHANGED[what]
    result = fails(6, "record", GATED, *DATA, "-o", store, "--batch-size", "3", *options)
    assert "\nStoreError: " in f"\n{result.stderr}"
    assert f"{key}: " in result.stderr


def test_coefficients_that_do_not_reproduce_the_output_fail_the_self_check(store):
    path = store / "batch-000000.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata_, key = file.metadata(), next(iter(file.keys()))
        value = file.get_tensor(key)
    path.write_bytes(save({key: torch.zeros_like(value)}, metadata_))
    lines = [json.loads(line) for line in (store / "shards.jsonl").read_text().splitlines()]
    lines[0]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (store / "shards.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = fails(5, "replay", GATED, *DATA, "--store", store, "--batch-size", "3", *IDENTITY)
    assert "batch 0" in result.stderr


# --- pattern --------------------------------------------------------------------------------------------------------

SHIPPED = sorted(path.stem for path in (ROOT / "patterns").glob("*.toml"))


def test_the_patterns_are_listed_as_json():
    found = output("pattern", "list", "--json")
    assert found["schema"] == "fxaudit.pattern-list/1"
    assert sorted(pattern["name"] for pattern in found["patterns"]) == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_the_patterns_are_listed_as_text(name):
    assert name in run("pattern", "list").stdout


@pytest.mark.parametrize("name", SHIPPED)
def test_a_pattern_is_shown_as_its_file(name):
    assert run("pattern", "show", name).stdout == (ROOT / "patterns" / f"{name}.toml").read_text()


def test_a_pattern_is_shown_as_json():
    found = output("pattern", "show", "se-gate", "--json")
    assert (found["schema"], found["name"]) == ("fxaudit.pattern-show/1", "se-gate")
    assert found["text"] == (ROOT / "patterns" / "se-gate.toml").read_text()


def test_a_pattern_is_explained_as_json_with_its_matches():
    found = output("explain", "feature-gate", GATED, "--json")
    assert (found["schema"], len(found["matches"])) == ("fxaudit.explain/1", 1)


@pytest.fixture(scope="module")
def silu_gate(tmp_path_factory):
    """A pattern that one token keeps from matching the gate."""
    path = tmp_path_factory.mktemp("explain") / "silu-gate.toml"
    text = (ROOT / "patterns" / "feature-gate.toml").read_text().replace('"feature-gate"', '"silu-gate"')
    match = """match = '''
    coefficient = silu(chain(linear | layout)(input))
    apply       = chain(layout, least=0)(coefficient) * value
    '''"""
    text = re.sub(r"match = '''.*?'''", match, text, count=1, flags=re.DOTALL)
    path.write_text(re.sub(r"^gate  .*\n", "", text, flags=re.MULTILINE))
    return path


def test_a_near_miss_is_explained_with_an_edit_that_then_matches(silu_gate):
    (edit, *_) = [miss["edit"] for miss in output("explain", silu_gate, GATED, "--json")["near_misses"] if miss["edit"]]
    lines = silu_gate.read_text().split("\n")
    assert lines[edit["line"] - 1] == edit["before"]
    lines[edit["line"] - 1] = edit["after"]
    folder = silu_gate.parent / "edited"
    folder.mkdir()
    (folder / silu_gate.name).write_text("\n".join(lines))
    assert len(output("explain", folder / silu_gate.name, GATED, "--json")["matches"]) == 1


def test_a_near_miss_is_explained_as_text_with_the_users_line(silu_gate):
    text = run("explain", silu_gate, GATED).stdout
    assert "no match" in text
    assert "expected silu, found sigmoid" in text
    assert "small_models.py:" in text


def test_a_drafted_pattern_finds_the_controller_that_it_was_drafted_from(tmp_path, traced):
    (controller,) = traced["controllers"]
    path = tmp_path / "drafted.toml"
    assert run("pattern", "new", GATED, controller["module"], "-o", path).exit_code == 0
    found = output("trace", GATED, "--no-library", "--patterns", path, "--json")
    assert found["counts"] == {"drafted": 1}
    assert found["controllers"][0]["applies"] == controller["applies"]


def test_an_existing_file_is_not_drafted_over(tmp_path):
    (tmp_path / "drafted.toml").write_text("mine")
    fails(2, "pattern", "new", GATED, "mix", "-o", tmp_path / "drafted.toml")
    assert (tmp_path / "drafted.toml").read_text() == "mine"


def test_a_draft_is_linted_for_what_its_author_still_owes(tmp_path):
    run("pattern", "new", GATED, "mix", "-o", tmp_path / "drafted.toml")
    found = fails(4, "pattern", "lint", "--patterns", tmp_path, "--json").stdout
    assert [c["kind"] for c in json.loads(found)["complaints"]] == ["no-positive-example", "no-negative-example"]


def test_an_unknown_pattern_is_refused_with_the_nearest_one():
    assert "did you mean `se-gate`?" in fails(4, "pattern", "show", "se-gaet").stderr


@pytest.fixture(scope="module")
def gates(tmp_path_factory):
    """A pattern file with one example, which states the right number of controllers or one too many."""
    text = (ROOT / "patterns" / "feature-gate.toml").read_text()
    head, *examples = text.split("[[example]]")
    one = next(example for example in examples if "expect = 1\n" in example)
    folder = tmp_path_factory.mktemp("patterns")
    for name, expect in (("right", 1), ("wrong", 2)):
        (folder / name).mkdir()
        written = head + "[[example]]" + one.replace("expect = 1\n", f"expect = {expect}\n")
        (folder / name / "feature-gate.toml").write_text(written)
    return folder


def test_an_example_that_holds_is_ok(gates):
    found = output("pattern", "test", "feature-gate", "--patterns", gates / "right", "--json")
    assert (found["schema"], found["failed"]) == ("fxaudit.pattern-test/1", 0)
    assert [row["outcome"] for row in found["examples"]] == ["ok"]


def test_an_example_that_does_not_hold_ends_with_the_exit_code_of_patterns(gates):
    result = fails(4, "pattern", "test", "--patterns", gates / "wrong", "--json")
    (row,) = json.loads(result.stdout)["examples"]
    assert (row["expect"], row["found"], row["outcome"]) == (2, 1, "Missing")


def test_an_example_that_does_not_hold_is_told_as_text(gates):
    result = fails(4, "pattern", "test", "--patterns", gates / "wrong")
    assert "2 expected, 1 found" in result.stdout
    assert "1 of 1 examples failed" in result.stderr


# --- doctor ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def doctor():
    return output("doctor", "--json")


def test_the_doctor_has_its_schema(doctor):
    assert doctor["schema"] == "fxaudit.doctor/1"


@pytest.mark.parametrize("package", ["torch", "transformers", "onnx", "safetensors", "click"])
def test_the_doctor_names_the_installed_version(doctor, package):
    assert doctor["versions"][package] == metadata.version(package)


def test_the_doctor_counts_the_patterns(doctor):
    assert doctor["patterns"]["files"] == len(SHIPPED)


def test_the_doctor_names_the_providers_of_onnxruntime(doctor):
    import onnxruntime

    assert doctor["onnxruntime"]["providers"] == onnxruntime.get_available_providers()


def test_the_doctor_says_for_which_cuda_torch_and_onnxruntime_are_built_and_whether_a_gpu_is_usable(doctor):
    import onnxruntime

    built = doctor["gpu"]["cuda"]
    assert built["torch"] == torch.version.cuda
    assert built["onnxruntime"] == (getattr(onnxruntime, "cuda_version", None) or None)
    if not torch.cuda.is_available():
        assert not doctor["gpu"]["onnxruntime_usable"]
        assert doctor["gpu"]["reason"] == "torch sees no GPU"


def test_the_doctor_finds_a_torch_and_an_onnxruntime_for_different_cuda(monkeypatch):
    from fxaudit.report import doctor as module

    monkeypatch.setattr(module.torch.version, "cuda", "12.8")
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    found = module._gpu({"providers": ["CPUExecutionProvider"], "cuda_version": "13.0"})
    assert "built for CUDA 13.0 and torch for 12.8" in " ".join(found["notes"])
    assert found["problems"] == []
    assert module._gpu({"providers": ["CPUExecutionProvider"], "cuda_version": "12.4"})["notes"] == []


def test_the_doctor_finds_a_gpu_that_onnxruntime_does_not_reach(monkeypatch):
    from fxaudit.errors import ProviderError
    from fxaudit.report import doctor as module

    def unusable(provider):
        raise ProviderError(f"onnxruntime does not run probe.onnx on {provider}", found="a silent fallback")

    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("fxaudit.execution.evidence.require_usable", unusable)
    found = module._gpu({"providers": ["CUDAExecutionProvider"], "cuda_version": module.torch.version.cuda})
    assert not found["onnxruntime_usable"]
    assert "a silent fallback" in found["problems"][0]
    assert "no CUDA provider" in module._gpu({"providers": [], "cuda_version": None})["notes"][0]


def test_the_doctor_finds_a_missing_package(monkeypatch):
    from fxaudit.report import doctor as module

    installed = module._version
    monkeypatch.setattr(module, "_version", lambda name: None if name == "scipy" else installed(name))
    assert output("doctor", "--json")["problems"] == ["scipy is missing: pip install scipy"]


def test_the_doctor_finds_two_runtimes_that_overwrite_each_other(monkeypatch):
    from fxaudit.report import doctor as module

    installed = module._version
    monkeypatch.setattr(module, "_version", lambda name: "1.0" if name.startswith("onnxruntime") else installed(name))
    assert "both installed" in " ".join(output("doctor", "--json")["problems"])


def test_the_doctor_speaks_text_without_json():
    assert f"fxaudit {fxaudit.__version__}" in run("doctor").stdout

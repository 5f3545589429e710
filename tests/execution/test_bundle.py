"""Bundles as strangers and enemies see them: run without fxaudit, verified without the model, refused when they lie."""

import hashlib
import io
import json
import pickle
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn

import fxaudit
from fxaudit.cli import main
from fxaudit.errors import DataError, ExportError, LoadError, SelfCheckError
from fxaudit.execution import samples as sampling
from fxaudit.execution.export.programs import live_module
from fxaudit.model.settings import TraceOptions
from tests.execution.test_export import WIDTH, BatchedGroups, Gate, Router, SharedGate, frozen, x


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Coefficients of the shared gate on nine inputs of its own."""
    data = {"x": torch.randn(9, 5, WIDTH, generator=torch.Generator().manual_seed(1))}
    return fxaudit.record(frozen(SharedGate, (x(),)), data, tmp_path_factory.mktemp("store")).store


@pytest.fixture(scope="module")
def written(tmp_path_factory, store):
    """A bundle of every form, its weights in one file."""
    return fxaudit.export(frozen(SharedGate, (x(),)), tmp_path_factory.mktemp("bundle"), store, external=True)


@pytest.fixture
def bundle(written, tmp_path):
    """A copy of it that a test may spoil."""
    return shutil.copytree(written.directory, tmp_path / "copy")


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


def rewrite(folder, change=None):
    """Change the manifest, with the hashes of the files as they are now: what an author who lies would write."""
    manifest = manifest_of(folder)
    for name, described in manifest["files"].items():
        if (folder / name).exists():
            data = (folder / name).read_bytes()
            described.update(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
    if change is not None:
        change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def edit(path, change):
    model = onnx.load(str(path), load_external_data=False)
    change(model)
    path.write_bytes(model.SerializeToString())
    rewrite(path.parent)


def failed(folder):
    found = fxaudit.verify(folder)
    return {(check.file, check.name) for check in found.checks if check.passed is False}


# --- what a bundle holds --------------------------------------------------------------------------------------------


def test_a_bundle_verifies_from_its_files_alone(written):
    found = fxaudit.verify(written.directory)
    assert [check for check in found.checks if not check.passed] == []
    assert found.verdict == {"live": "PROVEN_STATIC", "baked": "PROVEN_STATIC"}
    made = {(check.file, check.name) for check in found.checks}
    for form in ("live", "tapped", "bound", "baked"):
        assert {(f"{form}.onnx", name) for name in ("onnx.checker", "names", "proof", "outputs", "FLOPs")} <= made
    assert {("bound.onnx", "identity"), ("bound.onnx", "outputs for exchanged coefficients")} <= made
    for form in ("bound", "baked"):
        assert {(f"{form}.pt2", name) for name in ("scan", "outputs", "FLOPs")} <= made


def test_the_manifest_says_how_everything_was_made(written):
    manifest = manifest_of(written.directory)
    files = {path.name for path in written.directory.iterdir()} - {"manifest.json"}
    assert set(manifest["files"]) == files
    assert files == {*(f"{g}.onnx" for g in ("live", "tapped", "bound", "baked")), "weights.data", "bound.pt2",
                     "baked.pt2", "samples.safetensors"}  # fmt: skip
    for name, described in manifest["files"].items():
        assert described["sha256"] == hashlib.sha256((written.directory / name).read_bytes()).hexdigest()
    options = manifest["options"]
    assert (options["opset"], options["precision"], options["fold"], options["batch"]) == (20, "fp32", False, "batch")
    assert options["profile"]["inputs"] == 9
    first, second = manifest["coefficients"]
    assert (first["key"], first["name"]) == ("gate.linear#0/coefficient", "gate.linear_0_coefficient")
    assert first["roles"] == {"batch": "sample", "token": "position", "feature": "unit"}
    assert (second["module"], second["call"]) == ("gate.linear", 1)
    (module,) = [row for row in manifest["removed"]["modules"] if row["module"] == "gate.linear"]
    assert (module["parameters"], module["bytes"]) == (WIDTH * WIDTH + WIDTH, 4 * (WIDTH * WIDTH + WIDTH))
    assert manifest["graphs"]["live"]["inputs"] == [{"name": "x", "dtype": "float", "shape": ["batch", 5, WIDTH]}]


def test_samples_hold_what_the_model_computes(written):
    tensors = load_file(written.directory / "samples.safetensors")
    module = written.frozen.traced.subject.module
    for i, run in enumerate(manifest_of(written.directory)["samples"]["runs"]):
        given = tensors[f"{i}/inputs/x"]
        assert given.shape[0] == run["batch"]
        with torch.no_grad():
            gate = module.gate(given)
            expected = module(given)
            wide = module.double()(given.double())
            module.float()
        assert torch.equal(tensors[f"{i}/outputs/output"], expected)
        assert torch.equal(tensors[f"{i}/coefficients/gate.linear_1_coefficient"], gate)
        assert torch.allclose(tensors[f"{i}/outputs_float64/output"], wide, rtol=1e-12)
        first, second = (tensors[f"{i}/exchanged/gate.linear_{n}_coefficient"] for n in (0, 1))
        assert torch.equal(first.sort(0).values, gate.sort(0).values)
        with torch.no_grad():
            changed = first * module.first(given) + second * module.second(given)
        assert torch.equal(tensors[f"{i}/exchanged_outputs/output"], changed)
        matrix = 2 * given.shape[0] * 5 * WIDTH * WIDTH
        assert run["flops"] == {"live": 4 * matrix, "bound": 2 * matrix, "baked": 2 * matrix}


STRANGER = """
import json, sys
sys.modules["fxaudit"] = sys.modules["torch"] = None
try:
    import fxaudit
except ImportError:
    pass
else:
    raise SystemExit("fxaudit is here")
import numpy as np, onnxruntime
from safetensors.numpy import load_file
manifest, samples = json.load(open("manifest.json")), load_file("samples.safetensors")
for form in ("live", "bound", "baked"):
    session = onnxruntime.InferenceSession(manifest["graphs"][form]["file"], providers=["CPUExecutionProvider"])
    for i, run in enumerate(manifest["samples"]["runs"]):
        feeds = {}
        for value in session.get_inputs():
            group = "inputs" if f"{i}/inputs/{value.name}" in samples else "coefficients"
            feeds[value.name] = samples[f"{i}/{group}/{value.name}"]
        names = [value.name for value in session.get_outputs()]
        group = "baked_outputs" if form == "baked" else "outputs"
        for name, found in zip(names, session.run(names, feeds)):
            expected = samples[f"{i}/{group}/{name}"]
            assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max(), (form, i, name)
print("ran", len(manifest["samples"]["runs"]))
"""


def test_a_stranger_runs_it_with_onnxruntime_alone(written):
    done = subprocess.run([sys.executable, "-I", "-c", STRANGER], cwd=written.directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"ran {len(written.manifest['samples']['runs'])}"


def test_weights_and_indices_of_a_router_verify_together(tmp_path):
    bundle = fxaudit.export(frozen(Router, (x(),)), tmp_path)
    assert fxaudit.verify(tmp_path).passed
    assert set(bundle.manifest["graphs"]) == {"live", "tapped", "bound"}


def test_a_choice_has_no_baked_graph_and_the_bundle_says_so(tmp_path):
    model = frozen(Router, (x(),))
    store = fxaudit.record(model, {"x": torch.randn(4, 5, WIDTH)}, tmp_path / "store").store
    bundle = fxaudit.export(model, tmp_path / "bundle", store)
    assert set(bundle.manifest["graphs"]) == {"live", "tapped", "bound"}
    assert "no-baked-graph" in {finding["kind"] for finding in bundle.manifest["findings"]}
    with pytest.raises(ExportError, match="no baked graph"):
        fxaudit.export(model, tmp_path / "other", store, forms=("baked",))


def test_a_profile_of_other_weights_is_a_finding(tmp_path, store, written):
    kinds = [finding["kind"] for finding in written.manifest["findings"]]
    torch.manual_seed(1)
    other = fxaudit.export(fxaudit.freeze(SharedGate().eval(), (x(),)), tmp_path, store, forms=("baked",))
    assert [finding["kind"] for finding in other.manifest["findings"]] == [*kinds, "foreign-profile"]


def test_one_form_alone_is_a_bundle(tmp_path, store):
    fxaudit.export(frozen(SharedGate, (x(),)), tmp_path, store, forms=("baked",), fold=True)
    assert {path.name for path in tmp_path.iterdir()} == {
        "baked.onnx", "baked.pt2", "samples.safetensors", "manifest.json",
    }  # fmt: skip
    folded = manifest_of(tmp_path)["folded"]
    assert {(f["folded"], f["into"][0]) for f in folded} == {(True, "first.weight"), (True, "second.weight")}
    assert "Mul" not in {node.op_type for node in onnx.load(tmp_path / "baked.onnx").graph.node}
    assert fxaudit.verify(tmp_path).passed


def test_an_export_replaces_an_earlier_one_and_leaves_other_files(bundle):
    (bundle / "notes.txt").write_text("mine")
    fxaudit.export(frozen(SharedGate, (x(),)), bundle, forms=("live",))
    assert {path.name for path in bundle.iterdir()} == {
        "live.onnx", "samples.safetensors", "manifest.json", "notes.txt",
    }  # fmt: skip
    unlisted = [check for check in fxaudit.verify(bundle).checks if check.name == "unlisted"]
    assert [check.file for check in unlisted] == ["notes.txt"]


def test_a_static_batch_is_exported_with_samples_of_that_batch(tmp_path):
    bundle = fxaudit.export(frozen(BatchedGroups, (torch.randn(2, WIDTH, 5, 5),)), tmp_path)
    assert bundle.manifest["options"]["batch"] == 1
    assert "static-batch-export" in {finding["kind"] for finding in bundle.manifest["findings"]}
    assert fxaudit.verify(tmp_path).passed


def test_without_memory_for_float64_the_bundle_says_so(written):
    samples = sampling.read_samples(written.directory / "samples.safetensors")
    bare = [replace(sample, outputs_float64={}, baked_outputs_float64={}) for sample in samples]
    live = live_module(written.frozen)
    again, reason = sampling.with_referee(bare, live, None)
    assert reason == ""
    assert torch.equal(again[0].outputs_float64["output"], samples[0].outputs_float64["output"])
    same, reason = sampling.with_referee(bare, live, None, budget=1000)
    assert same == tuple(bare)
    assert "float64 would take more than" in reason


class Solving(nn.Module):
    """Code for export that solves the same triangular system with products."""

    def __init__(self):
        super().__init__()
        self.gate, self.value = Gate(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.gate(x) * self.value(x)
        lower = torch.tril(x @ x.transpose(1, 2), -1) / 100
        eye = torch.eye(5)
        if torch.compiler.is_exporting():
            inverse = eye
            for _ in range(4):
                inverse = eye - lower @ inverse
            return inverse @ y
        return torch.linalg.solve_triangular(eye + lower, y, upper=False, unitriangular=True)


def test_where_only_the_code_for_export_can_be_written_that_is_exported(tmp_path):
    model = frozen(Solving, (x(),))
    assert model.traced.settings.get("code") is None
    bundle = fxaudit.export(model, tmp_path)
    assert bundle.frozen is not model
    assert bundle.frozen.traced.settings["code"] == "export"
    assert "export-code" in {finding["kind"] for finding in bundle.manifest["findings"]}
    assert fxaudit.verify(tmp_path).passed
    tensors = load_file(tmp_path / "samples.safetensors")
    expected = model.traced.subject.module(tensors["0/inputs/x"])
    assert torch.allclose(tensors["0/outputs/output"], expected, atol=1e-5)


def test_who_chose_the_eager_code_gets_its_error(tmp_path):
    torch.manual_seed(0)
    traced = fxaudit.trace(Solving().eval(), (x(),), options=TraceOptions(code="eager"))
    with pytest.raises(ExportError, match="linalg_solve_triangular"):
        fxaudit.export(fxaudit.freeze(traced), tmp_path)
    assert not (tmp_path / "manifest.json").exists()


# --- what is refused ------------------------------------------------------------------------------------------------


def point(location, **more):
    """Let the first external tensor lie in another file."""

    def change(model):
        tensor = next(t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL)
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
            if entry.key in more:
                entry.value = more[entry.key]

    return change


def in_attribute(model):
    """A tensor outside the bundle, hidden in an attribute of a branch."""
    tensor = onnx.TensorProto(name="t", data_type=1, dims=[1], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="/etc/passwd")
    constant = onnx.helper.make_node("Constant", [], ["c"], value=tensor)
    branch = onnx.helper.make_graph([constant], "b", [], [onnx.helper.make_tensor_value_info("c", 1, [1])])
    model.graph.node.append(onnx.helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch))


def custom_op(model):
    model.opset_import.add(domain="evil", version=1)
    model.graph.node[0].domain = "evil"


@pytest.mark.parametrize(
    "change",
    [
        point("../secret"),
        point("/etc/passwd"),
        point("./weights.data"),
        point("manifest.json"),
        point("weights.data", length="99999999"),
        point("weights.data", offset="-4"),
        point("weights.data", length="many"),
        in_attribute,
        custom_op,
    ],
)
def test_a_graph_that_reaches_outside_is_refused(bundle, change):
    edit(bundle / "live.onnx", change)
    with pytest.raises(DataError, match=r"live\.onnx is refused"):
        fxaudit.verify(bundle)


def test_a_changed_file_is_refused_before_it_is_read(bundle):
    data = bytearray((bundle / "weights.data").read_bytes())
    data[100] ^= 1
    (bundle / "weights.data").write_bytes(bytes(data))
    with pytest.raises(DataError, match="is not what was exported"):
        fxaudit.verify(bundle)
    result = CliRunner().invoke(main, ["verify", str(bundle)])
    assert result.exit_code == 6
    assert "sha256" in result.stderr


def test_a_link_is_refused(bundle):
    target = bundle.parent / "elsewhere.data"
    shutil.move(bundle / "weights.data", target)
    (bundle / "weights.data").symlink_to(target)
    with pytest.raises(DataError, match="is not what was exported"):
        fxaudit.verify(bundle)


def listed(name):
    return lambda manifest: manifest["files"].update({name: {"sha256": "0" * 64, "bytes": 0}})


@pytest.mark.parametrize(
    "change",
    [
        listed("../secret"),
        listed("/etc/passwd"),
        listed("model.pkl"),
        lambda manifest: manifest["graphs"]["live"].update(file="../live.onnx"),
        lambda manifest: manifest["programs"]["bound"].update(file="../bound.pt2"),
        lambda manifest: manifest["graphs"].update({"../x": manifest["graphs"]["live"]}),
        lambda manifest: manifest.update(schema="fxaudit.bundle/99"),
        lambda manifest: manifest.pop("samples"),
        lambda manifest: manifest["samples"].pop("runs"),
        lambda manifest: manifest.update(graphs={}),
        lambda manifest: manifest["files"].pop("samples.safetensors"),
        lambda manifest: manifest.update(coefficients=[{"name": 3}]),
        lambda manifest: manifest["files"].update({"live.onnx": None}),
    ],
)
def test_a_manifest_that_is_none_is_refused(bundle, change):
    rewrite(bundle, change)
    with pytest.raises(DataError, match="damaged manifest"):
        fxaudit.verify(bundle)


@pytest.mark.parametrize(
    "name", ["0/inputs/x", "1/outputs/output", "2/coefficients/gate.linear_0_coefficient", "0/baked_outputs/output"]
)
def test_samples_that_lack_something_are_refused(bundle, name):
    change_samples(bundle, lambda tensors: tensors.pop(name))
    with pytest.raises(DataError, match="does not fit the manifest"):
        fxaudit.verify(bundle)


def test_a_sample_too_few_is_refused(bundle):
    rewrite(bundle, lambda manifest: manifest["samples"]["runs"].append(manifest["samples"]["runs"][0]))
    with pytest.raises(DataError, match="does not fit the manifest"):
        fxaudit.verify(bundle)


def test_what_a_manifest_says_does_not_reach_the_terminal_as_it_is(bundle):
    change = lambda m: m["programs"]["bound"].update(file=None, reason="\x1b[2Jgone")  # noqa: E731
    rewrite(bundle, change)
    assert "?[2Jgone" in run("verify", bundle).stdout
    assert "\x1b[2J" not in run("verify", bundle).stdout


def test_a_directory_without_a_manifest_is_no_bundle(tmp_path):
    with pytest.raises(DataError, match="is no bundle"):
        fxaudit.verify(tmp_path)
    (tmp_path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match="is no bundle"):
        fxaudit.verify(tmp_path)


class Bomb:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (self.marker, "w")


def test_a_program_with_a_pickle_that_runs_code_is_refused(bundle):
    marker = str(bundle.parent / "marker")
    buffer = io.BytesIO()
    torch.save(Bomb(marker), buffer)
    spoiled = io.BytesIO()
    with zipfile.ZipFile(bundle / "bound.pt2") as old, zipfile.ZipFile(spoiled, "w") as new:
        for name in old.namelist():
            data = buffer.getvalue() if name.endswith("data/sample_inputs/model.pt") else old.read(name)
            new.writestr(name, data)
    (bundle / "bound.pt2").write_bytes(spoiled.getvalue())
    rewrite(bundle)
    with pytest.raises(LoadError, match="refused"):
        fxaudit.verify(bundle)
    (bundle / "bound.pt2").write_bytes(pickle.dumps(Bomb(marker)))
    rewrite(bundle)
    with pytest.raises(LoadError):
        fxaudit.verify(bundle)
    assert not (bundle.parent / "marker").exists()


# --- what is found --------------------------------------------------------------------------------------------------


def change_samples(folder, change):
    tensors = load_file(folder / "samples.safetensors")
    change(tensors)
    save_file(tensors, folder / "samples.safetensors")
    rewrite(folder)


def test_outputs_other_than_the_recorded_ones_are_found(bundle):
    change_samples(bundle, lambda tensors: tensors["1/outputs/output"].mul_(1.01))
    assert failed(bundle) >= {("live.onnx", "outputs"), ("bound.onnx", "outputs"), ("bound.pt2", "outputs")}
    with pytest.raises(SelfCheckError, match="does not hold what its manifest says"):
        fxaudit.verify(bundle).require()
    result = CliRunner().invoke(main, ["verify", str(bundle)])
    assert result.exit_code == 5
    assert "FAILED" in result.stdout


def swap_coefficients(model):
    """Let each of two readers read the other's coefficient: with equal values nothing changes."""
    names = {f"gate.linear_{a}_coefficient": f"gate.linear_{b}_coefficient" for a, b in ((0, 1), (1, 0))}
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = names.get(name, name)


def test_confused_coefficients_are_found_although_their_values_are_equal(bundle):
    edit(bundle / "bound.onnx", swap_coefficients)
    assert failed(bundle) == {("bound.onnx", "outputs for exchanged coefficients")}


def test_another_weight_in_bound_is_found(bundle):
    def change(model):
        tensor = next(t for t in model.graph.initializer if t.name == "first.bias")
        value = onnx.numpy_helper.to_array(tensor) + np.float32(1e-7)
        tensor.CopyFrom(onnx.numpy_helper.from_array(value.astype(np.float32), "first.bias"))

    edit(bundle / "bound.onnx", change)
    assert ("bound.onnx", "identity") in failed(bundle)


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (lambda m: m["samples"]["runs"][0]["flops"].update(live=1), ("live.onnx", "FLOPs")),
        (lambda m: m["graphs"]["live"].update(static=False), ("live.onnx", "proof")),
        (lambda m: m["removed"]["nodes"].pop(), ("bound.onnx", "removed")),
        (lambda m: m["graphs"]["live"]["inputs"][0].update(shape=["batch", 6, WIDTH]), ("live.onnx", "names")),
    ],
)
def test_a_manifest_that_says_something_else_is_found(bundle, change, check):
    rewrite(bundle, change)
    assert check in failed(bundle)


# --- the command line -----------------------------------------------------------------------------------------------


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--form", "all"], "needs a profile"),
        (["--fold"], "needs a profile"),
        (["--precision", "fp16", "--dtype", "float64"], "contradict each other"),
    ],
)
def test_options_that_contradict_each_other_are_usage_errors(tmp_path, arguments, message):
    from tests.small_models import FILE

    result = run("export", f"{FILE}:gated", *arguments, "-o", tmp_path)
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_command_writes_checks_and_describes_a_bundle(tmp_path):
    from tests.small_models import FILE

    result = run("export", f"{FILE}:gated", "--opset", 21, "--external-data", "-o", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    described = json.loads(result.stdout)
    assert described["options"]["opset"] == 21
    assert described["verified"]["passed"]
    assert (tmp_path / "weights.data").exists()
    again = run("verify", tmp_path)
    assert again.exit_code == 0
    assert "bit for bit" in again.stdout


def test_half_precision_is_exported_and_checked_against_torch(tmp_path):
    from tests.small_models import FILE

    result = run("export", f"{FILE}:gated", "--precision", "fp16", "-o", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    manifest = manifest_of(tmp_path)
    assert manifest["options"]["precision"] == "fp16"
    assert {value["dtype"] for value in manifest["graphs"]["bound"]["inputs"]} == {"float16"}
    verified = json.loads(result.stdout)["verified"]
    assert verified["passed"]
    # What onnxruntime rounds differs, and is not called equal.
    assert [check["passed"] for check in verified["checks"] if check["name"] == "identity"] == [None]


def test_what_the_cpu_cannot_run_is_refused_with_the_reason(tmp_path):
    from tests.small_models import FILE

    result = run("export", f"{FILE}:squeeze_excite", "--precision", "bf16", "-o", tmp_path)
    assert result.exit_code == 7, result.output
    assert "Conv" in result.stderr
    assert list(tmp_path.iterdir()) == []

"""A bundle checked from its files alone: the model that it came from is not needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from torch import Tensor
from torch.fx import GraphModule

from fxaudit.errors import ExportError, SelfCheckError
from fxaudit.execution.bundle import PRECISIONS, program_flops, program_inputs, value_of
from fxaudit.execution.closeness import Closeness, closeness, same_bits
from fxaudit.execution.export.files import check_file
from fxaudit.execution.manifest import open_bundle, require_fitting
from fxaudit.execution.options import CPU
from fxaudit.execution.profile import CountedRun, CountedRuns, count_runs
from fxaudit.execution.proof import Proof, prove
from fxaudit.execution.runtime import Runtime
from fxaudit.execution.samples import SAMPLES, Sample, read_samples
from fxaudit.execution.verdict import INCOMPLETE, classify
from fxaudit.model.exported import load_exported
from fxaudit.model.settings import exact_numerics

_DTYPES = {short: name for name, short in PRECISIONS.items()}


@dataclass(frozen=True, slots=True)
class Check:
    """One statement about a file of a bundle; `passed` is None where it could not be made, and `detail` says why."""

    name: str
    file: str
    passed: bool | None
    detail: str


@dataclass(frozen=True, slots=True)
class Verification:
    """Everything that was checked about a bundle, and the verdict of each graph on its samples."""

    directory: Path
    manifest: Mapping[str, Any]
    checks: tuple[Check, ...]
    verdict: Mapping[str, str]

    @property
    def passed(self) -> bool:
        return all(check.passed is not False for check in self.checks)

    def require(self) -> Verification:
        """Itself, unless a check failed.

        Raises:
            SelfCheckError: with the checks that failed.
        """
        failed = [check for check in self.checks if check.passed is False]
        if failed:
            raise SelfCheckError(
                f"{self.directory} does not hold what its manifest says",
                where=failed[0].file,
                expected=f"{len(self.checks)} checks that hold",
                found="\n".join(f"{check.file}: {check.name}: {check.detail}" for check in failed),
                remedy="report this model; do not use the files",
            )
        return self

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "fxaudit.verify/1",
            "directory": str(self.directory),
            "model": dict(self.manifest["model"]),
            "options": dict(self.manifest["options"]),
            "provider": CPU,
            "passed": self.passed,
            "checks": [asdict(check) for check in self.checks],
            "verdict": dict(self.verdict),
        }


def verify_bundle(directory: Path) -> Verification:
    """Check a bundle: files, graphs, names, outputs, counts, proofs and programs, each against what was recorded.

    Every graph runs in onnxruntime on the CPU, unoptimised; nothing of the bundle is unpickled without a scan.

    Raises:
        DataError: it is no bundle, it was changed, or it refers to something outside of it.
        LoadError: a .pt2 file could run code that it carries.
        ExportError: onnxruntime cannot run a graph.
    """
    manifest = open_bundle(directory)
    samples = read_samples(directory / SAMPLES)
    require_fitting(samples, manifest, directory / SAMPLES)
    with Runtime() as runtime:
        opened = _Opened(directory, manifest, samples, runtime)
        found = tuple(opened.checks())
    checks = tuple(replace(check, file=_shown(check.file), detail=_shown(check.detail)) for check in found)
    return Verification(directory, manifest, checks, opened.verdict)


def _shown(text: str) -> str:
    """Text that may come from a hostile file as it may go to a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)[:2000]


class _Opened:
    """A bundle whose files are known to be the recorded ones, while it is checked."""

    def __init__(
        self, directory: Path, manifest: Mapping[str, Any], samples: Sequence[Sample], runtime: Runtime
    ) -> None:
        self.directory, self.manifest, self.samples, self.runtime = directory, manifest, samples, runtime
        self.paths = {form: directory / graph["file"] for form, graph in manifest["graphs"].items()}
        self.bound_names = [c["name"] for c in manifest["coefficients"] if c["bound"]]
        self.dtype = _DTYPES.get(manifest["options"]["precision"], "float32")
        self.runs: dict[str, CountedRuns] = {}
        self.proofs: dict[str, Proof] = {}
        self.verdict: dict[str, str] = {}

    def checks(self) -> Iterator[Check]:
        files = self.manifest["files"]
        yield Check("unchanged", "manifest.json", True, f"{len(files)} files have the recorded SHA-256")
        unlisted = sorted(p.name for p in self.directory.iterdir() if p.name not in {*files, "manifest.json"})
        if unlisted:
            yield Check("unlisted", unlisted[0], None, f"{len(unlisted)} files are no part of the bundle, and not read")
        for form in self.paths:
            yield from self._form(form)
        yield from self._samples()
        if {"live", "tapped", "bound"} <= self.paths.keys():
            yield from self._identity()
        if {"live", "bound"} <= self.paths.keys():
            yield self._removed()
        for form, program in self.manifest["programs"].items():
            yield from self._program(form, program)

    # --- the graph itself

    def _form(self, form: str) -> Iterator[Check]:
        path = self.paths[form]
        recorded = self.manifest["graphs"][form]
        try:
            check_file(path)
            yield Check("onnx.checker", path.name, True, "a valid ONNX model")
        except ExportError as error:
            yield Check("onnx.checker", path.name, False, error.found)
            return
        model = onnx.load(str(path), load_external_data=False)
        ends = {"inputs": model.graph.input, "outputs": model.graph.output}
        odd = [kind for kind, values in ends.items() if [value_of(v) for v in values] != recorded[kind]]
        detail = f"{len(model.graph.input)} inputs and {len(model.graph.output)} outputs"
        yield Check("names", path.name, not odd, f"other {odd[0]} than recorded" if odd else detail)
        own = {v["name"] for v in recorded["inputs"]} - set(self.bound_names) if form == "bound" else None
        proof = self.proofs[form] = prove(model, own)
        said = "static" if proof.static else f"not static: {len(proof.roots)} roots, {len(proof.opaque)} unknown ops"
        given = " given its coefficients" if form == "bound" else ""
        yield Check("proof", path.name, proof.static == recorded["static"], f"{said}{given}")

    # --- what it computes

    def _samples(self) -> Iterator[Check]:
        """Runs every graph on every sample: outputs against torch, and executed against recorded work."""
        for form in [form for form in ("live", "tapped", "bound", "baked") if form in self.proofs]:
            self.runs[form] = self._run(form, [self._feed(form, sample) for sample in self.samples])
            group = "baked_outputs" if form == "baked" else "outputs"
            yield self._outputs("outputs", form, self.runs[form].outputs, group)
            yield self._counts(form)
            if form in ("live", "baked"):
                yield self._verdict(form)
        if "bound" in self.runs:
            feeds = [self._feed("bound", sample, "exchanged") for sample in self.samples]
            found = self._run("bound", feeds).outputs
            yield self._outputs("outputs for exchanged coefficients", "bound", found, "exchanged_outputs")

    def _run(self, form: str, feeds: Sequence[dict[str, np.ndarray]]) -> CountedRuns:
        return count_runs(self.paths[form], feeds, runtime=self.runtime)

    def _feed(self, form: str, sample: Sample, group: str = "coefficients") -> dict[str, np.ndarray]:
        given = {**sample.inputs}
        if form == "bound":
            given |= {name: getattr(sample, group)[name] for name in self.bound_names}
        return {name: as_array(tensor) for name, tensor in given.items()}

    def _outputs(self, name: str, form: str, found: Sequence[Mapping[str, np.ndarray]], group: str) -> Check:
        file = self.paths[form].name
        if self.proofs[form].random:
            return Check(name, file, None, "the graph draws random numbers, which differ from torch's")
        worst: Closeness | None = None
        for outputs, sample in zip(found, self.samples, strict=True):
            expected, referee = getattr(sample, group), getattr(sample, f"{group}_float64", {})
            if not expected.keys() <= outputs.keys():
                return Check(name, file, False, f"the graph has other outputs than {', '.join(expected)}")
            for key, tensor in expected.items():
                wide = as_array(referee[key]) if key in referee else None
                close = closeness(as_array(tensor), outputs[key], self.dtype, wide)
                if not close.holds:
                    return Check(name, file, False, f"`{key}` differs from torch: {close}")
                worst = close if worst is None or close.largest > worst.largest else worst
        if worst is None:
            return Check(name, file, None, "no outputs were recorded")
        return Check(name, file, True, f"as torch in {len(found)} samples; at most {worst}")

    def _counts(self, form: str) -> Check:
        file = self.paths[form].name
        runs = self.runs[form].runs
        if unknown := sorted({op for run in runs for op in run.unknown}):
            return Check("FLOPs", file, None, f"no formula for {', '.join(unknown)}")
        recorded = [run["flops"].get("live" if form == "tapped" else form) for run in self.manifest["samples"]["runs"]]
        if None in recorded:
            return Check("FLOPs", file, None, "the torch graph has ops without a formula")
        found = [run.flops for run in runs]
        if found != recorded:
            i = next(i for i, pair in enumerate(zip(found, recorded, strict=False)) if pair[0] != pair[1])
            return Check("FLOPs", file, False, f"sample {i}: {found[i]:,} executed, {recorded[i]:,} in torch")
        return Check("FLOPs", file, True, f"{_range(found)} executed, as in torch")

    def _verdict(self, form: str) -> Check:
        """The verdict on the runs of each size of inputs; the most dynamic of them is the graph's."""
        file = self.paths[form].name
        by_size: dict[str, list[CountedRun]] = {}
        for run, sample in zip(self.runs[form].runs, self.samples, strict=True):
            by_size.setdefault(str([tuple(t.shape) for t in sample.inputs.values()]), []).append(run)
        try:
            verdicts = [classify(self.proofs[form], runs) for runs in by_size.values()]
        except SelfCheckError as error:
            return Check("verdict", file, False, f"{error.what}: {error.found}")
        self.verdict[form] = max(verdicts, key=_DYNAMIC.index)
        return Check("verdict", file, None if self.verdict[form] == INCOMPLETE else True, self.verdict[form])

    def _identity(self) -> Iterator[Check]:
        """Live against bound, fed with what live computes in onnxruntime under the same options."""
        if not {"live", "tapped", "bound"} <= self.runs.keys():
            return
        name, file = "identity", self.paths["bound"].name
        if self.proofs["live"].random:
            yield Check(name, file, None, "the graph draws random numbers")
            return
        captured = self.runs["tapped"].outputs
        feeds = [
            {**self._feed("live", sample), **{n: outputs[n] for n in self.bound_names}}
            for sample, outputs in zip(self.samples, captured, strict=True)
        ]
        found = self._run("bound", feeds).outputs
        rounded = self.dtype in ("float16", "bfloat16")
        for i, (live, bound) in enumerate(zip(self.runs["live"].outputs, found, strict=True)):
            for key, value in live.items():
                close = closeness(value, bound[key], self.dtype)
                if not (close.holds if rounded else same_bits(value, bound[key])):
                    yield Check(name, file, False, f"sample {i}: `{key}` differs from live.onnx: {close}")
                    return
        if rounded:
            text = "close; not bitwise, since the CPU provider computes in float32 and rounds only what goes in and out"
            yield Check(name, file, None, text)
        else:
            yield Check(name, file, True, "live.onnx bit for bit, fed the coefficients that live.onnx computes")

    # --- live against bound

    def _removed(self) -> Check:
        graphs = {f: onnx.load(str(self.paths[f]), load_external_data=False).graph for f in ("live", "bound")}
        nodes = {form: {node.name for node in graph.node} for form, graph in graphs.items()}
        tensors = {form: {t.name for t in graph.initializer} for form, graph in graphs.items()}
        recorded = {g: {entry["name"] for entry in self.manifest["removed"][g]} for g in ("nodes", "parameters")}
        gone = nodes["live"] - nodes["bound"]
        holds = gone == recorded["nodes"] and nodes["bound"] <= nodes["live"]
        holds = holds and recorded["parameters"] <= tensors["live"] - tensors["bound"]
        detail = f"{len(gone)} nodes and {len(recorded['parameters'])} parameters fewer than live.onnx"
        return Check("removed", self.paths["bound"].name, holds, detail if holds else "another set than recorded")

    # --- torch programs

    def _program(self, form: str, program: Mapping[str, Any]) -> Iterator[Check]:
        if program["file"] is None:
            yield Check("program", f"{form}.pt2", None, f"it was not written: {program['reason']}")
            return
        module, _ = load_exported(self.directory / program["file"], trust=False)
        assert isinstance(module, GraphModule)
        yield Check("scan", program["file"], True, "tensors, ATen operators and sizes alone")
        group = "baked_outputs" if form == "baked" else "outputs"
        bits, worst = True, 0.0
        for i, sample in enumerate(self.samples):
            leaves = program_inputs(form, self.bound_names, sample)
            try:
                with exact_numerics():
                    outputs = tuple(module(*leaves))
                matched = list(zip(getattr(sample, group).items(), outputs, strict=True))
            except Exception as error:  # a program that does not fit its samples fails in as many ways as torch has ops
                text = str(error).splitlines()[:1] or [type(error).__name__]
                yield Check("outputs", program["file"], False, f"sample {i}: {text[0]}")
                return
            for (key, expected), found in matched:
                close = closeness(as_array(expected), as_array(found), self.dtype)
                if not close.holds:
                    yield Check("outputs", program["file"], False, f"sample {i}: `{key}`: {close}")
                    return
                worst = max(worst, close.largest)
                bits = bits and same_bits(as_array(expected), as_array(found))
        detail = "as recorded, bit for bit" if bits else f"as recorded, within {worst:.2g} of the largest element"
        yield Check("outputs", program["file"], True, detail)
        without_guards(module)
        flops = [program_flops(module, program_inputs(form, self.bound_names, sample)) for sample in self.samples]
        recorded = [run["flops"].get(form) for run in self.manifest["samples"]["runs"]]
        yield Check("FLOPs", program["file"], None if None in flops else flops == recorded, f"{_range(flops)}")


def without_guards(module: GraphModule) -> None:
    """Take the checks of its inputs out of a loaded program: they are no work of the model."""
    for node in list(module.graph.nodes):
        if node.op == "call_module" and node.target == "_guards_fn":
            module.graph.erase_node(node)
    module.recompile()


_DYNAMIC = (
    "PROVEN_STATIC",
    "OBSERVED_CONSTANT",
    "REDISTRIBUTED",
    "DATA_DEPENDENT_SHAPES",
    "DATA_DEPENDENT_KERNELS",
    INCOMPLETE,
)


def _range(values: Sequence[int | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "unknown"
    return f"{known[0]:,}" if len(set(known)) == 1 else f"{min(known):,} to {max(known):,}"


def as_array(tensor: Tensor) -> np.ndarray:
    """A tensor as an array; bfloat16, which numpy lacks, in the dtype of ml_dtypes that onnxruntime takes."""
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        import ml_dtypes
        import torch

        return tensor.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()

"""What is installed, what fits what, and what is missing: `fxaudit doctor`."""

from __future__ import annotations

from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from fxaudit import __version__
from fxaudit.errors import AuditError
from fxaudit.execution.options import CUDA
from fxaudit.provenance import environment

_REQUIRED = (
    "torch",
    "transformers",
    "networkx",
    "onnx",
    "onnxscript",
    "click",
    "safetensors",
    "rich",
    "numpy",
    "scipy",
    "jinja2",
    "sympy",
)
_OPTIONAL = {"torchvision": "torchvision:NAME models", "timm": "timm:NAME models"}


def examine(patterns: Path) -> dict[str, Any]:
    """Versions, devices and onnxruntime providers, and a list of problems, each with what to do about it."""
    problems = []
    versions = {name: _version(name) for name in (*_REQUIRED, *_OPTIONAL)}
    problems += [f"{name} is missing: pip install {name}" for name in _REQUIRED if versions[name] is None]
    notes = [
        f"{name} is not installed; {use} need it: pip install 'fxaudit[vision]'"
        for name, use in _OPTIONAL.items()
        if versions[name] is None
    ]
    runtime, runtime_problems = _onnxruntime()
    problems += runtime_problems
    gpu = _gpu(runtime)
    notes += gpu.pop("notes")
    problems += gpu.pop("problems")
    if not list(patterns.glob("*.toml")):
        problems.append(f"no pattern file in {patterns}: reinstall fxaudit")
    return {
        "schema": "fxaudit.doctor/1",
        "fxaudit": __version__,
        "versions": versions,
        "onnxruntime": runtime,
        "torch": {
            "cuda": torch.cuda.is_available(),
            "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
        "gpu": gpu,
        "environment": environment(),
        "patterns": {"path": str(patterns), "files": len(list(patterns.glob("*.toml")))},
        "problems": problems,
        "notes": notes,
    }


def _onnxruntime() -> tuple[dict[str, Any], list[str]]:
    if util.find_spec("onnxruntime") is None:
        return {"version": None, "providers": []}, ["onnxruntime is missing: pip install onnxruntime-gpu"]
    try:
        import onnxruntime
    except Exception as error:  # a broken native library must not stop the report on everything else
        return {"version": None, "providers": []}, [f"onnxruntime does not import: {error}"]
    installed = [name for name in ("onnxruntime", "onnxruntime-gpu") if _version(name)]
    problems = []
    if len(installed) > 1:
        problems.append(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other: uninstall onnxruntime"
        )
    return {
        "version": onnxruntime.__version__,
        "providers": list(onnxruntime.get_available_providers()),
        "cuda_version": getattr(onnxruntime, "cuda_version", None) or None,
    }, problems


def _gpu(runtime: dict[str, Any]) -> dict[str, Any]:
    """Which CUDA and cuDNN torch and onnxruntime are built for, whether those fit, and whether onnxruntime really runs
    on the GPU.

    The providers that onnxruntime lists are those that it was built with, so only a run on one tells.
    """
    built_for = {"torch": torch.version.cuda, "onnxruntime": runtime.get("cuda_version")}
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    notes: list[str] = []
    problems: list[str] = []
    present = torch.cuda.is_available()
    if present and CUDA not in runtime["providers"]:
        notes.append("torch sees a GPU but this onnxruntime has no CUDA provider: pip install onnxruntime-gpu")
    majors = {name: version.partition(".")[0] for name, version in built_for.items() if version}
    if len(set(majors.values())) > 1:
        text = (
            f"onnxruntime is built for CUDA {built_for['onnxruntime']} and torch for {built_for['torch']}: they cannot"
            " share libraries; install versions of one CUDA, or pip install 'onnxruntime-gpu[cuda,cudnn]'"
        )
        (problems if present else notes).append(text)
    usable, reason = False, "torch sees no GPU"
    if present and CUDA in runtime["providers"]:
        from fxaudit.execution.evidence import require_usable

        try:
            require_usable(CUDA)
            usable, reason = True, ""
        except AuditError as error:
            reason = f"{error.what}: {error.found}"
            problems.append(f"{reason}; onnxruntime needs a driver for CUDA {built_for['onnxruntime']} and cuDNN 9")
    return {
        "cuda": built_for,
        "cudnn": cudnn,
        "onnxruntime_usable": usable,
        "reason": reason,
        "notes": notes,
        "problems": problems,
    }


def show(found: dict[str, Any], console: Console) -> None:
    console.print(Text(f"fxaudit {found['fxaudit']}", style="bold"))
    for name, version in found["versions"].items():
        console.print(Text(f"  {name:<14}{version or 'not installed'}"))
    runtime = found["onnxruntime"]
    console.print(
        Text(f"  {'onnxruntime':<14}{runtime['version'] or 'not usable'}  {', '.join(runtime['providers'])}"),
        soft_wrap=True,
    )
    console.print(Text(f"  {'GPU':<14}{', '.join(found['torch']['devices']) or 'none'}"))
    gpu = found["gpu"]
    fits = ", ".join(f"{name} for {version or 'no CUDA'}" for name, version in gpu["cuda"].items())
    cudnn = f", cuDNN {gpu['cudnn']}" if gpu["cudnn"] else ""
    usable = "--provider cuda works" if gpu["onnxruntime_usable"] else f"--provider cuda does not work: {gpu['reason']}"
    console.print(Text(f"  {'CUDA':<14}{fits}{cudnn}; {usable}"), soft_wrap=True)
    console.print(
        Text(f"  {'patterns':<14}{found['patterns']['files']} in {found['patterns']['path']}"), soft_wrap=True
    )
    for note in found["notes"]:
        console.print(Text(f"note: {note}"), soft_wrap=True)
    for problem in found["problems"]:
        console.print(Text(f"problem: {problem}", style="red"), soft_wrap=True)
    if not found["problems"]:
        console.print(Text("no problems found", style="green"))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

"""The order of fxaudit's layers, checked from the source text alone, so that no import can hide a fault."""

import ast
import graphlib
import itertools
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 600

# Lowest first. A name is a module or a package directly under fxaudit.
LAYERS = (
    {"errors", "axes", "ops", "provenance"},
    {"model"},
    {"controllers"},
    {"replay", "execution"},
    {"stages"},
    {"audit"},
    {"report"},
    {"cli"},
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# These two sit above all layers. Nothing else may lean on what fxaudit/__init__.py re-exports, except its version.
EXEMPT = {"fxaudit", "fxaudit.__main__"}


@dataclass(frozen=True)
class Import:
    source: str
    place: str
    target: str


def source_files(root: Path) -> dict[str, Path]:
    """Module name -> file, of every module under root/fxaudit."""
    files = {}
    for path in sorted((root / "fxaudit").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imports(root: Path) -> list[Import]:
    """Every import, also those inside functions and under TYPE_CHECKING, with the module it names in full."""
    files = source_files(root)
    found = []
    for module, path in files.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            for target in _targets(node, module, path.name == "__init__.py", files):
                found.append(Import(module, f"{path.relative_to(root).as_posix()}:{node.lineno}", target))
    return found


def _targets(node: ast.AST, module: str, is_package: bool, files: dict[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = module.split(".")
            parents = parents[: len(parents) - node.level + is_package]
            base = ".".join([*parents, base] if base else parents)
        for alias in node.names:
            name = f"{base}.{alias.name}"
            # `from package import name` names a module where there is one, else something the package defines.
            # What the root defines keeps its name, which tells the version from a re-exported part of a layer.
            yield name if name in files or base == "fxaudit" else base


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def part(module: str) -> str:
    """The name under fxaudit that a module belongs to: model for fxaudit.model.graph, nothing for torch.ops."""
    return module.split(".")[1] if module.startswith("fxaudit.") else ""


def layer(module: str) -> str:
    rank = RANK.get(part(module))
    return "no layer" if rank is None else f"layer {rank} ({', '.join(sorted(LAYERS[rank]))})"


def layer_faults(root: Path) -> list[str]:
    faults = [
        f"{path.relative_to(root).as_posix()}: {module} has no layer; give it one in LAYERS"
        for module, path in source_files(root).items()
        if module not in EXEMPT and part(module) not in RANK
    ]
    for item in imports(root):
        if item.source in EXEMPT or part(item.source) not in RANK or not is_in(item.target, "fxaudit"):
            continue
        if item.target == "fxaudit.__version__":
            complaint = "" if part(item.source) != "errors" else "errors must import nothing from fxaudit"
        elif part(item.target) not in RANK:
            complaint = "import a name from the module that defines it, not from the top of fxaudit"
        else:
            complaint = _complaint(part(item.source), part(item.target))
        if complaint:
            faults.append(
                f"{item.place}: {item.source} [{layer(item.source)}] imports {item.target} [{layer(item.target)}]: "
                f"{complaint}"
            )
    return faults


def _complaint(source: str, target: str) -> str:
    if source == target:
        return ""
    if source == "errors":
        return "errors must import nothing from fxaudit"
    if RANK[target] > RANK[source]:
        return "this import goes upward"
    if RANK[target] == RANK[source] > 0:
        return "siblings must not import each other"
    return ""


def cycle_faults(root: Path) -> list[str]:
    """Cycles among modules of one layer; a cycle through several layers has an upward import, so it is found there."""
    places: dict[tuple[str, str], str] = {}
    graphs: dict[int, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for item in imports(root):
        rank = RANK.get(part(item.source))
        if rank is not None and rank == RANK.get(part(item.target)):
            graphs[rank][item.source].add(item.target)
            places.setdefault((item.source, item.target), item.place)
    faults = []
    for graph in graphs.values():
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            # graphlib lists a cycle from the imported module to the importing one.
            steps = itertools.pairwise(reversed(error.args[1]))
            faults.append("import cycle: " + "; ".join(f"{places[a, b]}: {a} imports {b}" for a, b in steps))
    return faults


def cli_faults(root: Path) -> list[str]:
    return [
        f"{item.place}: {item.source} imports {item.target}: only fxaudit/__main__.py may import fxaudit.cli"
        for item in imports(root)
        if is_in(item.target, "fxaudit.cli")
        and item.source != "fxaudit.__main__"
        and not is_in(item.source, "fxaudit.cli")
    ]


def networkx_faults(root: Path) -> list[str]:
    return [
        f"{item.place}: {item.source} imports {item.target}: only fxaudit/controllers/graphs.py may import networkx"
        for item in imports(root)
        if is_in(item.target, "networkx") and item.source != "fxaudit.controllers.graphs"
    ]


def length_faults(root: Path) -> list[str]:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in source_files(root).values()}
    return [
        f"{path.relative_to(root).as_posix()}: {count} lines, at most {MAX_LINES} are allowed"
        for path, count in lengths.items()
        if count > MAX_LINES
    ]


def listed(faults: list[str]) -> str:
    return "\n" + "\n".join(faults)


def test_the_checks_see_the_source_files():
    assert {"fxaudit", "fxaudit.__main__", "fxaudit.cli"} <= source_files(ROOT).keys()


def test_a_module_never_imports_upward():
    faults = layer_faults(ROOT)
    assert not faults, listed(faults)


def test_modules_of_a_layer_import_each_other_without_cycles():
    faults = cycle_faults(ROOT)
    assert not faults, listed(faults)


def test_only_main_imports_the_command_line():
    faults = cli_faults(ROOT)
    assert not faults, listed(faults)


def test_only_the_graph_controllers_import_networkx():
    faults = networkx_faults(ROOT)
    assert not faults, listed(faults)


def test_a_source_file_stays_short():
    faults = length_faults(ROOT)
    assert not faults, listed(faults)


def test_importing_fxaudit_loads_no_heavy_optional_library():
    code = (
        "import sys, fxaudit\n"
        "print(*sorted({'onnxruntime', 'transformers', 'torchvision', 'timm'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout.strip(), f"`import fxaudit` loads {done.stdout.strip()}"


SOUND = {
    "__init__.py": "from fxaudit.audit import audit\n__version__ = '1'\n",
    "__main__.py": "from fxaudit.cli import main\n",
    "errors.py": "",
    "axes.py": "from fxaudit.errors import AuditError\n",
    "ops.py": "from . import axes, errors\n",
    "provenance.py": "from fxaudit import __version__\n",
    "model/__init__.py": "from .load import load\n",
    "model/load.py": "from ..errors import AuditError\nfrom . import shapes\n",
    "model/shapes.py": "import fxaudit.axes\n",
    "controllers/__init__.py": "",
    "controllers/graphs.py": "import networkx as nx\nfrom networkx.algorithms import dag\n",
    "replay/__init__.py": "",
    "replay/run.py": "from fxaudit.controllers.graphs import cut\n",
    "execution/__init__.py": "from fxaudit.model import load\n",
    "stages.py": "from fxaudit.replay import run\n",
    "audit.py": "from . import stages\n",
    "report/__init__.py": "from fxaudit.audit import audit\n",
    "cli.py": "def main():\n    from fxaudit.report import render\n",
}


def write_tree(root: Path, changes: dict[str, str]) -> Path:
    for name, text in {**SOUND, **changes}.items():
        path = root / "fxaudit" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


ALL_CHECKS = (layer_faults, cycle_faults, cli_faults, networkx_faults, length_faults)


def test_a_sound_tree_has_no_faults(tmp_path):
    root = write_tree(tmp_path, {})
    assert not [fault for check in ALL_CHECKS for fault in check(root)]


@pytest.mark.parametrize(
    ("check", "name", "text", "fault"),
    [
        pytest.param(
            layer_faults,
            "model/load.py",
            "\nfrom fxaudit.report import render\n",
            "fxaudit/model/load.py:2: fxaudit.model.load [layer 1 (model)] imports fxaudit.report [layer 6 (report)]: "
            "this import goes upward",
            id="upward",
        ),
        pytest.param(
            layer_faults,
            "model/__init__.py",
            "from ..controllers.graphs import cut\n",
            "fxaudit/model/__init__.py:1: fxaudit.model [layer 1 (model)] imports fxaudit.controllers.graphs "
            "[layer 2 (controllers)]: this import goes upward",
            id="upward and relative, in a package's __init__",
        ),
        pytest.param(
            layer_faults,
            "audit.py",
            "def late():\n    from . import report\n",
            "fxaudit/audit.py:2: fxaudit.audit [layer 5 (audit)] imports fxaudit.report [layer 6 (report)]: "
            "this import goes upward",
            id="upward inside a function",
        ),
        pytest.param(
            layer_faults,
            "replay/run.py",
            "import fxaudit.execution\n",
            "fxaudit/replay/run.py:1: fxaudit.replay.run [layer 3 (execution, replay)] imports fxaudit.execution "
            "[layer 3 (execution, replay)]: siblings must not import each other",
            id="sibling",
        ),
        pytest.param(
            layer_faults,
            "errors.py",
            "from .axes import Axis\n",
            "fxaudit/errors.py:1: fxaudit.errors [layer 0 (axes, errors, ops, provenance)] imports fxaudit.axes "
            "[layer 0 (axes, errors, ops, provenance)]: errors must import nothing from fxaudit",
            id="errors",
        ),
        pytest.param(
            layer_faults,
            "model/load.py",
            "from fxaudit import audit_model\n",
            "fxaudit/model/load.py:1: fxaudit.model.load [layer 1 (model)] imports fxaudit.audit_model [no layer]: "
            "import a name from the module that defines it, not from the top of fxaudit",
            id="re-exported by the root",
        ),
        pytest.param(
            layer_faults,
            "helpers.py",
            "",
            "fxaudit/helpers.py: fxaudit.helpers has no layer; give it one in LAYERS",
            id="no layer",
        ),
        pytest.param(
            cycle_faults,
            "model/shapes.py",
            "from .load import load\n",
            "import cycle: fxaudit/model/load.py:2: fxaudit.model.load imports fxaudit.model.shapes; "
            "fxaudit/model/shapes.py:1: fxaudit.model.shapes imports fxaudit.model.load",
            id="cycle in a package",
        ),
        pytest.param(
            cycle_faults,
            "axes.py",
            "import fxaudit.ops\n",
            "import cycle: fxaudit/ops.py:1: fxaudit.ops imports fxaudit.axes; "
            "fxaudit/axes.py:1: fxaudit.axes imports fxaudit.ops",
            id="cycle of ground files",
        ),
        pytest.param(
            cli_faults,
            "__init__.py",
            "from fxaudit.cli import main\n",
            "fxaudit/__init__.py:1: fxaudit imports fxaudit.cli: only fxaudit/__main__.py may import fxaudit.cli",
            id="command line",
        ),
        pytest.param(
            networkx_faults,
            "stages.py",
            "from networkx.algorithms import dag\n",
            "fxaudit/stages.py:1: fxaudit.stages imports networkx.algorithms: "
            "only fxaudit/controllers/graphs.py may import networkx",
            id="networkx",
        ),
        pytest.param(
            length_faults,
            "ops.py",
            "#\n" * (MAX_LINES + 1),
            f"fxaudit/ops.py: {MAX_LINES + 1} lines, at most {MAX_LINES} are allowed",
            id="length",
        ),
    ],
)
def test_a_faulty_tree_is_reported(tmp_path, check, name, text, fault):
    root = write_tree(tmp_path, {name: text})
    if check is cycle_faults:
        # Where a cycle is entered is up to graphlib.
        (found,) = check(root)
        assert sorted(found.removeprefix("import cycle: ").split("; ")) == sorted(
            fault.removeprefix("import cycle: ").split("; ")
        )
    else:
        assert check(root) == [fault]

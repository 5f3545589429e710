import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = sorted((ROOT / "patterns").glob("*.toml"))


def run_python(*args: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *args], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{args} failed\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run_python("-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_contains_every_pattern_unchanged(wheel):
    prefix = "fxaudit/patterns/"
    with zipfile.ZipFile(wheel) as archive:
        packed = {
            name.removeprefix(prefix): archive.read(name)
            for name in archive.namelist()
            if name.startswith(prefix) and name.endswith(".toml")
        }
    assert packed
    assert packed == {path.name: path.read_bytes() for path in PATTERNS}


def test_the_installed_wheel_lists_its_patterns_away_from_the_checkout(wheel, tmp_path):
    target, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run_python("-m", "pip", "install", "--no-index", "--no-deps", "--target", target, wheel, cwd=elsewhere)
    listing = run_python("-m", "fxaudit", "pattern", "list", "--json", cwd=elsewhere, PYTHONPATH=str(target))
    names = [pattern["name"] for pattern in json.loads(listing)["patterns"]]
    assert sorted(names) == [path.stem for path in PATTERNS]

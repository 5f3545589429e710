"""onnxruntime as fxaudit uses it: in a child process, in one of three roles, on a provider that is checked.

The options of each role are those measured in the study of executed compute: a count is only exact without graph
optimisation and without prepacked weights, a time only means something without profiling.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from fxaudit.errors import RunError
from fxaudit.execution.options import CPU
from fxaudit.execution.providers import require_providers

Feed = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Role:
    """What a session is for, and the options that follow.

    `level` is onnxruntime's graph optimisation; `prepacked` whether it may rearrange weights in advance.
    """

    name: str
    level: str
    prepacked: bool
    profiled: bool


COUNT = Role("COUNT", "ORT_DISABLE_ALL", prepacked=False, profiled=True)
EVIDENCE = Role("EVIDENCE", "ORT_ENABLE_ALL", prepacked=True, profiled=True)
TIME = Role("TIME", "ORT_ENABLE_ALL", prepacked=True, profiled=False)


@dataclass(frozen=True, slots=True)
class Session:
    """What a session returned: outputs by name for each feed, its profile, the graph that it ran, and which provider
    claimed which node (`assignment`: dicts of provider, node and op; only where it was asked for)."""

    outputs: tuple[dict[str, np.ndarray], ...]
    events: list[dict[str, Any]]
    optimized: Path | None
    assignment: tuple[dict[str, str], ...]


class Runtime:
    """A child process that runs onnxruntime; used as a context manager, and started anew after a crash."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="fxaudit-runtime-")
        self._log: IO[str] = open(Path(self._folder.name) / "log", "w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._count = 0

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.restart()
        self._log.close()
        self._folder.cleanup()

    def restart(self) -> None:
        """End the process; the next request starts another one."""
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.close()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
            self._process = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def run(
        self, path: Path, feeds: Sequence[Feed], role: Role, provider: str = CPU, *, optimized: bool = False
    ) -> Session:
        """Run a model once for each feed in a fresh session.

        Args:
            optimized: also keep the graph that onnxruntime made of the model, and which provider claimed what.

        Raises:
            RunError: the model cannot be loaded or run, or the process died.
            ProviderError: onnxruntime would use another provider without saying so.
        """
        self._count += 1
        place = Path(self._folder.name) / str(self._count)
        place.mkdir()
        request = {
            "verb": "run",
            "model": str(path),
            "feeds": str(write_feeds(place / "feeds.npz", feeds)),
            "outputs": str(place / "outputs.npz"),
            "profile": str(place / "profile") if role.profiled else None,
            "optimized": str(place / "optimized.onnx") if optimized else None,
            **_session_options(role, provider),
        }
        answer = self._ask(request, path)
        require_providers(path, provider, answer["providers"])
        return Session(
            outputs=tuple(_read_runs(place / "outputs.npz")),
            events=json.loads(Path(answer["profile"]).read_text(encoding="utf-8")) if role.profiled else [],
            optimized=place / "optimized.onnx" if optimized else None,
            assignment=tuple(answer.get("assignment") or ()),
        )

    def time(
        self, first: tuple[Path, Feed], second: tuple[Path, Feed], provider: str = CPU, **design: Any
    ) -> tuple[list[int], list[int]]:
        """Nanoseconds of alternating runs of two models, each in a fresh session; see `worker.time_pair`.

        Raises:
            RunError, ProviderError: as `run`.
        """
        self._count += 1
        place = Path(self._folder.name) / str(self._count)
        place.mkdir()
        request: dict[str, Any] = {"verb": "time", **_session_options(TIME, provider), **design}
        for name, (path, feed) in (("first", first), ("second", second)):
            request[name] = {"model": str(path), "feeds": str(write_feeds(place / f"{name}.npz", [feed]))}
        answer = self._ask(request, first[0])
        for name, (path, _) in (("first", first), ("second", second)):
            require_providers(path, provider, answer["providers"][name])
        return answer["first"], answer["second"]

    def _ask(self, request: Mapping[str, Any], path: Path) -> dict[str, Any]:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise self._died(process, path)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise _refused(answer, path)
        return answer

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._log.truncate(0)
            self._process = subprocess.Popen(
                # Without -P the folder of the script would come first on the path, and its profile.py hide Python's.
                [sys.executable, "-P", str(Path(__file__).with_name("worker.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                encoding="utf-8",
            )
        return self._process

    def _died(self, process: subprocess.Popen[str], path: Path) -> RunError:
        code = process.wait()
        self._process = None
        self._log.seek(0)
        said = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return RunError(
            f"onnxruntime died on {path.name}",
            where=str(path),
            expected="outputs, or an error that it reports itself",
            found=f"{name}{'; its last line: ' + said[-1][:300] if said else ''}",
            remedy="SIGKILL mostly means that memory ran out: use fewer or smaller inputs; anything else is a fault of"
            " onnxruntime, to be reported with the file named above",
            signal=name,
        )


def write_feeds(path: Path, feeds: Sequence[Feed]) -> Path:
    """Arrays by run and input name as one file that needs no pickle."""
    arrays = {f"{i}/{name}": value for i, feed in enumerate(feeds) for name, value in feed.items()}
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, runs=np.asarray(len(feeds)), **arrays)
    return path


def _read_runs(path: Path) -> list[dict[str, np.ndarray]]:
    with np.load(path, allow_pickle=False) as stored:
        runs: list[dict[str, np.ndarray]] = [{} for _ in range(int(stored["runs"]))]
        for key in stored.files:
            if key != "runs":
                index, _, name = key.partition("/")
                runs[int(index)][name] = stored[key]
    return runs


def _session_options(role: Role, provider: str) -> dict[str, Any]:
    return {
        "level": role.level,
        "prepacked": role.prepacked,
        "providers": [provider] if provider == CPU else [provider, CPU],
    }


def _refused(answer: Mapping[str, Any], path: Path) -> RunError:
    import onnxruntime

    if answer["stage"] == "load":
        return RunError(
            f"onnxruntime cannot load {path.name}",
            where=str(path),
            expected=f"a model that onnxruntime {onnxruntime.__version__} can run",
            found=answer["error"],
            remedy="float32 models run everywhere; other dtypes lack CPU kernels for some ops",
        )
    return RunError(
        f"onnxruntime cannot run {path.name}",
        where=str(path),
        expected="outputs for the inputs that the torch model takes",
        found=answer["error"],
        remedy="report this model: the export and the torch model disagree about their inputs",
    )

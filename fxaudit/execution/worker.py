"""onnxruntime in a process of its own: a file that is run, never imported, and that imports nothing of fxaudit.

Native code that crashes or runs out of memory takes this process with it and nothing else. Requests are lines of JSON
on stdin, each answered by one line; arrays travel as .npz files.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime

Arrays = dict[str, np.ndarray]


class Failed(Exception):
    """A request that onnxruntime refuses; `stage` is ``load`` or ``run``."""

    def __init__(self, stage: str, error: Exception) -> None:
        lines = (line.strip() for line in str(error).splitlines())
        super().__init__(next((line for line in lines if line), type(error).__name__))
        self.stage = stage


def options_of(request: dict[str, Any]) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, request["level"])
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    # Errors are raised; what is logged besides would only repeat them.
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not request["prepacked"]:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if request.get("profile"):
        # A second run would lay out all its memory anew, beside what the first one left: large models take it twice.
        options.enable_mem_pattern = False
        options.enable_profiling = True
        options.profile_file_prefix = request["profile"]
    if path := request.get("optimized"):
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        options.optimized_model_filepath = path
        name = f"{os.path.basename(path)}.data"
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", name)
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    return options


def session_of(request: dict[str, Any], path: str) -> onnxruntime.InferenceSession:
    if request["providers"][0] == "CUDAExecutionProvider":
        onnxruntime.preload_dlls()
    try:
        return onnxruntime.InferenceSession(path, options_of(request), providers=request["providers"])
    except Exception as error:
        raise Failed("load", error) from error


def feeds_of(path: str) -> list[Arrays]:
    """The arrays of a file, whose names are ``<run>/<input>``, run by run."""
    with np.load(path, allow_pickle=False) as stored:
        runs: list[Arrays] = [{} for _ in range(int(stored["runs"]))]
        for key in stored.files:
            if key != "runs":
                index, _, name = key.partition("/")
                runs[int(index)][name] = stored[key]
    return runs


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run a model once for each feed."""
    answer: dict[str, Any] = {}
    if request.get("optimized"):
        # In a session of its own: one that keeps its graph holds every weight twice, as it is and rearranged.
        keeping = session_of({**request, "prepacked": False, "profile": None}, request["model"])
        answer["assignment"] = assignment_of(keeping)
        del keeping
    session = session_of({**request, "optimized": None}, request["model"])
    names = [output.name for output in session.get_outputs()]
    outputs: Arrays = {"runs": np.asarray(0)}
    feeds = feeds_of(request["feeds"])
    for i, feed in enumerate(feeds):
        try:
            results = session.run(names, feed)
        except Exception as error:
            raise Failed("run", error) from error
        outputs |= {f"{i}/{name}": value for name, value in zip(names, results, strict=True)}
    outputs["runs"] = np.asarray(len(feeds))
    np.savez(request["outputs"], allow_pickle=False, **outputs)
    answer["providers"] = session.get_providers()
    if request.get("profile"):
        answer["profile"] = session.end_profiling()
    return answer


def assignment_of(session: onnxruntime.InferenceSession) -> list[dict[str, str]]:
    """Which provider claimed which node, before the later fusions."""
    return [
        {"provider": part.ep_name, "node": node.name, "op": node.op_type}
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
    ]


def time_pair(request: dict[str, Any]) -> dict[str, Any]:
    """Nanoseconds of runs of two fresh sessions in the order first, second, second, first, again and again.

    On the CPU provider the time of this thread, on which all of its work is done; elsewhere wall time up to the
    moment when the outputs are complete.
    """
    order = ("second", "first") if request["swapped"] else ("first", "second")
    sessions = {name: session_of(request, request[name]["model"]) for name in order}
    runs = {}
    for name in ("first", "second"):
        feed = feeds_of(request[name]["feeds"])[0]
        runs[name] = timed(sessions[name], feed, on_cpu=request["providers"][0] == "CPUExecutionProvider")
    found: dict[str, list[int]] = {"first": [], "second": []}
    try:
        for _ in range(request["warm_up"]):
            longest = max(runs["first"](), runs["second"]())
        rounds = max(request["least_rounds"], min(request["rounds"], int(request["budget"] // (4 * longest + 1))))
        for _ in range(rounds):
            for name in ("first", "second", "second", "first"):
                found[name].append(runs[name]())
    except Exception as error:
        raise Failed("run", error) from error
    return {**found, "providers": {name: session.get_providers() for name, session in sessions.items()}}


def timed(session: onnxruntime.InferenceSession, feed: Arrays, on_cpu: bool) -> Callable[[], int]:
    """A function that runs a session once and returns the nanoseconds that it took."""
    if on_cpu:

        def once() -> int:
            started = time.thread_time_ns()
            session.run(None, feed)
            return time.thread_time_ns() - started

        return once
    binding = session.io_binding()
    for name, value in feed.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(value, "cuda", 0))
    for output in session.get_outputs():
        binding.bind_output(output.name, "cuda", 0)

    def bound() -> int:
        binding.synchronize_inputs()
        started = time.perf_counter_ns()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return time.perf_counter_ns() - started

    return bound


VERBS = {"run": run, "time": time_pair}


def main() -> None:
    # onnxruntime prints some warnings to stdout, where they would mix with the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = VERBS[request["verb"]](request)
        except Failed as error:
            answer = {"error": str(error), "stage": error.stage}
        except MemoryError as error:
            answer = {"error": f"out of memory: {error}", "stage": "run"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

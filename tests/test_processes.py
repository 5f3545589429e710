from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from tests.processes import GIBIBYTE, Lost, each


def work(name: str) -> Any:
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "asleep":
        time.sleep(100)
    if name == "greedy":
        try:
            torch.zeros(8 * GIBIBYTE, dtype=torch.uint8)
        except (MemoryError, RuntimeError):
            return "refused"
    return name.upper()


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    names = ["first", "killed", "asleep", "greedy", "last"]
    return dict(each(work, names, seconds=3, memory=4 * GIBIBYTE))


def test_every_name_has_a_result_whatever_the_others_do(results) -> None:
    assert results["first"] == "FIRST"
    assert results["last"] == "LAST"
    assert len(results) == 5


def test_a_process_that_is_killed_is_lost_with_the_signal(results) -> None:
    assert results["killed"] == Lost(f"the process ended with {-signal.SIGKILL}")


def test_a_process_that_does_not_end_is_killed(results) -> None:
    assert results["asleep"] == Lost("more than 3 s", timed_out=True)


def test_memory_is_bounded(results) -> None:
    assert results["greedy"] == "refused"


def test_each_name_has_a_process_of_its_own() -> None:
    pids = [pid for _, pid in each(lambda _: os.getpid(), "abc", seconds=60, memory=4 * GIBIBYTE, processes=1)]
    assert len({*pids, os.getpid()}) == 4

"""Work on many models, each in a process of its own: a model that crashes or hangs is a result like any other."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

GIBIBYTE = 2**30


@dataclass(frozen=True, slots=True)
class Lost:
    """Why there is no result."""

    reason: str
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class _Running:
    name: str
    process: Any
    receiver: Connection
    until: float


def each(
    work: Callable[[str], Any], names: Iterable[str], *, seconds: float, memory: int, processes: int = 2
) -> Iterator[tuple[str, Any | Lost]]:
    """Each name with what `work` returns for it, in the order in which they end.

    A process that takes longer than `seconds` is killed; one that asks for more than `memory` bytes gets an error.
    What the caller has imported is there in the processes: they are forked from it.
    """
    waiting = deque(names)
    running: list[_Running] = []
    while waiting or running:
        while waiting and len(running) < processes:
            running.append(_start(work, waiting.popleft(), seconds, memory))
        wait([one.receiver for one in running], timeout=max(0, min(one.until for one in running) - time.monotonic()))
        for one in tuple(running):
            if one.receiver.poll() or time.monotonic() > one.until:
                running.remove(one)
                yield one.name, _result(one, seconds)


def _start(work: Callable[[str], Any], name: str, seconds: float, memory: int) -> _Running:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(work, name, sender, memory), daemon=True)
    process.start()
    sender.close()  # so that the receiver sees the end of a process that dies
    return _Running(name, process, receiver, time.monotonic() + seconds)


def _child(work: Callable[[str], Any], name: str, sender: Connection, memory: int) -> None:
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sender.send(work(name))


def _result(one: _Running, seconds: float) -> Any | Lost:
    try:
        if one.receiver.poll():
            return one.receiver.recv()
        one.process.kill()
        return Lost(f"more than {seconds:g} s", timed_out=True)
    except EOFError:
        one.process.join()
        return Lost(f"the process ended with {one.process.exitcode}")
    finally:
        one.receiver.close()
        one.process.join()

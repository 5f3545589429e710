"""The inline examples of a pattern, run as tests."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxaudit.controllers.controller import build_controllers
from fxaudit.controllers.graphs import Dataflow
from fxaudit.controllers.match import NearMiss, find_matches
from fxaudit.controllers.pattern import Example, Pattern
from fxaudit.errors import PatternError
from fxaudit.model.load import subject
from fxaudit.model.trace import trace

_PRELUDE = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an example gave. ``Missing``: fewer controllers than expected; ``Noisy``: more; ``ok``: as many."""

    example: Example
    found: int
    near_miss: NearMiss | None

    @property
    def label(self) -> str:
        if self.found == self.example.expect:
            return "ok"
        return "Missing" if self.found < self.example.expect else "Noisy"


def run_example(pattern: Pattern, example: Example) -> Outcome:
    """Build the example's model, trace it, and count the controllers that `pattern` finds.

    Raises:
        PatternError: the example's code fails.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        namespace: dict[str, Any] = {}
        try:
            exec(compile(_PRELUDE + textwrap.dedent(example.code), f"{pattern.path} (example)", "exec"), namespace)
            model = namespace["model"]
        except Exception as error:
            raise PatternError(
                f"an example of `{pattern.name}` fails",
                where=f"{pattern.path}: {example.why}",
                expected="code that assigns `model`",
                found=f"{type(error).__name__}: {error}",
                remedy="torch, nn and F are imported already; everything else the code imports itself",
            ) from error
        if not isinstance(model, nn.Module):
            raise PatternError(
                f"an example of `{pattern.name}` defines no model",
                where=example.why,
                expected="an nn.Module called `model`",
                found=type(model).__name__,
                remedy="end the code with `model = M()`",
            )
        inputs = tuple(_input(text) for text in example.inputs)
    traced = trace(subject(model, inputs, source=f"{pattern.name}: {example.why}"))
    dataflow = Dataflow(traced.graph_module)
    result = find_matches(pattern, dataflow, traced.sample)
    controllers, _ = build_controllers([result], dataflow, [pattern.name])
    return Outcome(example, len(controllers), result.near_misses[0] if result.near_misses else None)


def _input(text: str) -> torch.Tensor:
    """``"2 16 8 8"``: random numbers of that shape; ``"int 2 6"``: token ids below 8."""
    if text.startswith("int "):
        return torch.randint(0, 8, [int(size) for size in text[4:].split()])
    return torch.randn([int(size) for size in text.split()])

"""One model of the zoo: traced, matched, and its graph compared with the eager model.

The comparison, on a second input, is code of its own, so that a trace that is wrong without saying so is found.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxaudit import stages
from fxaudit.errors import AuditError
from fxaudit.model.load import subject
from fxaudit.model.trace import TracedModel
from tests.third_party import Inputs
from tests.zoo.models import ZOO


def examine(name: str) -> dict[str, Any]:
    """Everything that the zoo's table holds about one model."""
    started = time.perf_counter()
    row: dict[str, Any] = {"name": name}
    try:
        module, inputs = _build(name)
        row["parameters"] = sum(parameter.numel() for parameter in module.parameters())
        traced = stages.trace(subject(module, inputs, source=name))
        row |= _trace_facts(traced)
        row["second"] = second = second_input(traced, *_build(name))
        row |= _controller_facts(traced)
        row["outcome"] = _outcome(row["fidelity"], second)
    except AuditError as error:
        row |= {"outcome": "refused", "reason": _reason(error)}
    except MemoryError:
        row |= {"outcome": "out of memory", "reason": "more than a process may have"}
    except Exception as error:
        row |= {"outcome": "crashed", "reason": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    row["seconds"] = round(time.perf_counter() - started, 1)
    return row


def _build(name: str) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    return ZOO[name]()


def _reason(error: AuditError) -> str:
    # The lines of an error are: what failed, then where, expected, found and what to do next.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    found = next((line for line in lines if line.startswith("found:")), "")
    return re.sub(r"\S*/site-packages/", "", " ".join([lines[0], found]))[:400].strip()


def _trace_facts(traced: TracedModel) -> dict[str, Any]:
    return {
        "frontend": traced.frontend,
        "settings": dict(traced.settings),
        "nodes": len(traced.graph.nodes),
        "trace_seconds": round(traced.seconds, 1),
        "batch": "any" if traced.is_batch_dynamic else str(traced.sample),
        "fidelity": {"bitwise": traced.fidelity.bitwise, "max_abs_diff": traced.fidelity.max_abs_diff},
        "findings": dict(Counter(finding.kind for finding in traced.findings)),
    }


def _controller_facts(traced: TracedModel) -> dict[str, Any]:
    matched = stages.match(traced)
    found = Counter(controller.pattern for controller in matched.controllers)
    identity = stages.identity(stages.freeze(matched)).bitwise if matched.controllers else None
    return {"controllers": dict(found), "identity": identity}


def _outcome(fidelity: dict[str, Any], second: dict[str, Any]) -> str:
    """``bitwise``, ``inexact`` within what the trace itself reports, or ``wrong``."""
    if second["refused"]:
        return "bitwise, second input refused" if fidelity["bitwise"] else "inexact"
    if fidelity["bitwise"]:
        return "bitwise" if second["bitwise"] else "wrong"
    reported = max(4 * fidelity["max_abs_diff"], 1e-5 * second["scale"])
    return "inexact" if second["max_abs_diff"] <= reported else "wrong"


# --- the second input -----------------------------------------------------------------------------------------------


def second_input(traced: TracedModel, module: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """The graph against `module`, a model built anew, on other inputs.

    The model runs under the settings that the trace reports, after one call on the first input; the graph is
    interpreted node by node from its initial buffers. Both draw the same random numbers, if any.
    """
    other = other_inputs(inputs)
    apply_settings(module, traced.settings)
    with torch.no_grad():
        torch.backends.mha.set_fastpath_enabled(False)
        _call(module, inputs)
        torch.manual_seed(1)
        expected = _tensors(_call(module, other))
        for name, value in traced.initial_state.items():
            traced.graph_module.get_buffer(name).copy_(value)
        torch.manual_seed(1)
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in _in_graph_order(traced, other)]
        try:
            traced.check(leaves)
        except AuditError as error:
            return {"refused": True, "reason": str(error).splitlines()[0], "bitwise": False, "max_abs_diff": None}
        found = _tensors(torch.fx.Interpreter(traced.graph_module).run(*leaves))
    same = len(expected) == len(found) and all(a.shape == b.shape for a, b in zip(expected, found, strict=True))
    pairs = list(zip(expected, found, strict=True)) if same else []
    return {
        "refused": False,
        "bitwise": same and all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs),
        "max_abs_diff": max((_difference(a, b) for a, b in pairs), default=None) if same else float("inf"),
        "scale": max((float(a.double().nan_to_num().abs().max()) for a, _ in pairs if a.numel()), default=0.0),
    }


def other_inputs(inputs: Inputs) -> Inputs:
    """Other values of the same kind: whole numbers from the same range, normal numbers; constant tensors stay."""
    generator = torch.Generator().manual_seed(11)

    def draw(tensor: Tensor) -> Tensor:
        if tensor.unique().numel() == 1:
            return tensor.clone()
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        low, high = int(tensor.min()), int(tensor.max())
        return torch.randint(low, high + 1, tensor.shape, generator=generator).to(tensor.dtype)

    return pytree.tree_map_only(Tensor, draw, inputs)


def apply_settings(module: nn.Module, settings: dict[str, str]) -> None:
    """Set what the trace says that it changed: for transformers models by their own public switches."""
    module.eval()
    config = getattr(module, "config", None)
    if "use_cache" in settings:
        for part in [config, *vars(config).values()]:
            if hasattr(part, "use_cache"):
                part.use_cache = False
    if "experts_implementation" in settings:
        module.set_experts_implementation(settings["experts_implementation"])
    if "attn_implementation" in settings:
        module.set_attn_implementation(settings["attn_implementation"])


def _call(module: nn.Module, inputs: Inputs) -> Any:
    copies = pytree.tree_map_only(Tensor, torch.clone, inputs)
    return module(**copies) if isinstance(copies, dict) else module(*copies)


def _in_graph_order(traced: TracedModel, inputs: Inputs) -> list[Any]:
    if isinstance(inputs, tuple):
        return list(inputs)
    names = list(traced.in_spec.child(1).context)
    return pytree.tree_leaves([inputs[name] for name in names])


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def _difference(a: Tensor, b: Tensor) -> float:
    difference = (a.double() - b.double()).abs()
    return float(torch.where(a.isnan() & b.isnan(), 0.0, difference).max()) if a.numel() else 0.0

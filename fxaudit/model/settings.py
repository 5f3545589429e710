"""Settings under which a model is traced, run and compared: chosen here, recorded, undone afterwards."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxaudit.errors import UsageError

ATTENTION = ("eager", "sdpa")
EXPERTS = ("batched_mm", "grouped_mm")
DECOMPOSE = ("lstm",)
CODE = ("eager", "export")


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What the user may choose about a trace; None leaves the choice to fxaudit.

    Attributes:
        attention: implementation of attention in a transformers model, one of `ATTENTION`.
        experts: implementation of experts in a transformers model, one of `EXPERTS`.
        code: which code is traced where a model has one for eager mode and one for export, one of `CODE`.
        decompose: fused ops to trace as their parts: ``lstm`` unrolls LSTM and GRU layers into their gates.
        dynamic_sequence: trace the axes after the first with any size, too, where the model allows it.
        fixed_batch: trace the number of inputs that the example has, and no other; so for models that keep something of
            each input in buffers of one size, which are found out.
    """

    attention: str | None = None
    experts: str | None = None
    code: str | None = None
    decompose: tuple[str, ...] = ()
    dynamic_sequence: bool = False
    fixed_batch: bool = False


@contextlib.contextmanager
def traceable(module: nn.Module, options: TraceOptions | None = None) -> Iterator[dict[str, str]]:
    """A module in the state in which it is traced and used as the reference; yields the settings that differ from its
    own.

    Eval mode; for transformers models no cache in the outputs and experts as batched matrix products, since the eager
    loop over the experts that were hit branches on data. On leaving, every flag is what it was.

    Raises:
        UsageError: an option that only a transformers model has.
    """
    options = options or TraceOptions()
    training = [(m, m.training) for m in module.modules()]
    applied: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(_restore_modes, training)
        if any(flag for _, flag in training):
            applied["mode"] = "eval"
        module.eval()
        for config in _configs(module):
            if getattr(config, "use_cache", False):
                _set(stack, config, "use_cache", False)
                applied["use_cache"] = "False"
        models = [model for model in _pretrained_models(module) if model._can_set_experts_implementation()]
        if options.experts is not None and not models:
            raise _no_such_setting(module, "experts", options.experts)
        for model in models:
            _set_setting(stack, applied, model.config, "experts", options.experts or "batched_mm")
        if options.attention is not None:
            configs = [config for config in _configs(module) if hasattr(config, "_attn_implementation_internal")]
            if not configs:
                raise _no_such_setting(module, "attn", options.attention)
            for config in configs:
                _set_setting(stack, applied, config, "attn", options.attention)
        if options.decompose:
            applied["decompose"] = ",".join(options.decompose)
        if options.dynamic_sequence:
            applied["dynamic_sequence"] = "True"
        yield applied


def _set_setting(stack: contextlib.ExitStack, applied: dict[str, str], config: Any, kind: str, value: str) -> None:
    """Set an implementation in a transformers config, past the property that copies it to other configs."""
    name = f"_{kind}_implementation_internal"
    if getattr(config, name, None) != value:
        _set(stack, config, name, value)
        applied[f"{kind}_implementation"] = value


def _no_such_setting(module: nn.Module, kind: str, value: str) -> UsageError:
    option = {"attn": "attention"}.get(kind, kind)
    return UsageError(
        f"--{option} {value} has no meaning for this model",
        where=f"{type(module).__module__}.{type(module).__qualname__}",
        expected=f"a transformers model whose {option} can be chosen",
        found="a model without that setting",
        remedy=f"leave --{option} out",
    )


def _restore_modes(training: list[tuple[nn.Module, bool]]) -> None:
    for module, flag in training:
        module.training = flag


def _set(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _pretrained_models(module: nn.Module) -> list[Any]:
    # By method, not by class: a transformers model is recognised without importing transformers.
    return [m for m in module.modules() if hasattr(m, "_can_set_experts_implementation") and hasattr(m, "config")]


def _configs(module: nn.Module) -> list[Any]:
    found = {id(m.config): m.config for m in _pretrained_models(module)}
    for config in list(found.values()):
        for value in vars(config).values():
            if hasattr(value, "use_cache"):
                found[id(value)] = value
    return list(found.values())


@contextlib.contextmanager
def exact_numerics() -> Iterator[None]:
    """Deterministic algorithms, no TF32, no fused attention fast path, no gradients: what bitwise comparisons need.

    An op without a deterministic kernel still runs: a model that differs from itself is found by running it twice.
    """
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, fast_path = torch.backends.cudnn.benchmark, torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
        torch.backends.mha.set_fastpath_enabled(False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
        torch.backends.cudnn.benchmark = benchmark
        torch.backends.mha.set_fastpath_enabled(fast_path)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """Without torch's own log lines and warnings: what they say reaches the user as an error or a finding."""
    # torch gives its sub-loggers handlers and levels of their own, so the switch must be the global one.
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        # torch.export prints the graph of a failed trace straight to stderr.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)

"""The front ends: ways to make an exported program of a model, the most faithful one first."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from fxaudit.model.inputs import Arguments, batch_of, cloned, resampled
from fxaudit.model.load import Subject
from fxaudit.model.settings import TraceOptions
from fxaudit.model.trace.leaves import Leaf, leaf_of, observed, opaque
from fxaudit.model.trace.patches import Recording, Replaying, eager_answers, eager_masks, unmoved_modules
from fxaudit.model.trace.refusals import first_line, untraceable
from fxaudit.model.trace.traced import Finding

# How often the part that defeats tracing may be looked for again, after it was made a leaf.
_MAX_LEAVES = 6

Patch = Callable[[], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Captured:
    """An exported program, and how it was made.

    `leaves` are the submodules that were left whole; `rescued_from` is the failure of the model as it is, if it failed.
    Programs of a later `round` cover fewer input sizes.
    """

    program: ExportedProgram
    frontend: str
    settings: dict[str, str]
    findings: tuple[Finding, ...] = ()
    leaves: tuple[Leaf, ...] = ()
    rescued_from: Exception | None = None
    round: int = 0


def captures(subject: Subject, options: TraceOptions) -> Iterator[Captured]:
    """Programs of `subject`, each made when it is asked for; a caller stops at the first that computes what eager does.

    First the code that eager runs, then the code that the model has for export, with any number of inputs, then in one
    batch size. Where neither can be traced: with Python values replayed, with the failing part left whole, and by
    torch.fx.symbolic_trace.

    Raises:
        TraceError: there is no such program.
    """
    failures: dict[str, Exception] = {}  # the last of each kind of code, the eager code's first
    dynamic: Exception | None = None
    count = 0
    for turn, dimensions in enumerate(_dimensions(subject, options)):
        for name, patch in (("eager", eager_answers), ("export", contextlib.nullcontext)):
            if options.code not in (None, name) or isinstance(failures.get(name), _FINAL):
                continue
            try:
                with patch(), unmoved_modules():
                    program = _export(subject.module, subject.arguments, dimensions)
            except Exception as error:
                failures[name] = error
                dynamic = dynamic or error
                continue
            count += 1
            settings = {} if name == "eager" else {"code": "export"}
            findings = _batch_findings(options, dimensions, dynamic)
            yield Captured(program, "torch.export", settings, findings, round=turn)
    if count:
        return
    failure = next(iter(failures.values()))
    for rescue in (_with_replayed_values, _with_leaves, _by_symbolic_trace):
        try:
            captured = rescue(subject, failure, options)
        except Exception:
            continue  # the failure that counts is that of the model as it is
        count += 1
        yield replace(captured, rescued_from=failure)
    if not count:
        raise untraceable(subject, failure) from failure


def _final_failures() -> tuple[type[Exception], ...]:
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    )
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (
        GuardOnDataDependentSymNode,
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    )


# Failures that fixed input sizes would not help against.
_FINAL = _final_failures()


# --- torch.export ---------------------------------------------------------------------------------------------------


def _dimensions(subject: Subject, options: TraceOptions) -> list[Any]:
    """What the input axes are traced as: one symbol that all inputs share, one for each, or fixed sizes.

    One symbol first: two towers that meet late, or never, still have one input axis. Where the model relates their
    sizes in another way that is refused, and each input gets a symbol of its own.
    """
    if batch_of(subject.arguments) is None or options.fixed_batch:
        return [None]
    if options.dynamic_sequence:
        return [(Dim("batch"), Dim.AUTO), (Dim.AUTO, Dim.AUTO), (Dim("batch"), None), (Dim.AUTO, None), None]
    return [(Dim("batch"), None), (Dim.AUTO, None), None]


def _export(module: nn.Module, arguments: Arguments, dimensions: Any) -> ExportedProgram:
    args, kwargs = cloned(arguments)
    shapes = None if dimensions is None else _dynamic_shapes(module, args, kwargs, *dimensions)
    return torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=False)


def _dynamic_shapes(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], first: Any, rest: Any) -> Any:
    """The `dynamic_shapes` of torch.export: positional arguments by the names of the signature, then keyword ones."""

    def shape(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return None
        return {0: first} | ({} if rest is None else dict.fromkeys(range(1, leaf.ndim), rest))

    positional, keyword = pytree.tree_map(shape, (args, kwargs))
    names = _parameter_names(module, len(args))
    # A `*args` signature names no argument; then there is nothing but the position to go by.
    return {**dict(zip(names, positional, strict=True)), **keyword} if len(names) == len(args) else positional


def _parameter_names(module: nn.Module, count: int) -> list[str]:
    parameters = inspect.signature(module.forward).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [p.name for p in positional[:count]]


def _batch_findings(options: TraceOptions, dimensions: Any, failure: Exception | None) -> tuple[Finding, ...]:
    if dimensions is not None:
        return ()
    if options.fixed_batch:
        reason = "the model writes to buffers that are made for it"
    elif failure is None:
        reason = "the inputs share no first axis"
    else:
        reason = f"tracing with any batch failed: {first_line(failure)}"
    return (Finding("static-batch", f"the graph takes only the traced batch size; {reason}"),)


# --- rescues: models that cannot be traced as they are ---------------------------------------------------------------


def _any_export(
    subject: Subject, options: TraceOptions, *patches: Patch
) -> tuple[ExportedProgram, tuple[Finding, ...]]:
    """The first export that works, under `patches`, from any number of inputs to one batch size.

    Raises whatever the last one ended in.
    """
    failure: Exception | None = None
    for dimensions in _dimensions(subject, options):
        try:
            with contextlib.ExitStack() as stack:
                for patch in (eager_answers, unmoved_modules, *patches):
                    stack.enter_context(patch())
                return _export(subject.module, subject.arguments, dimensions), _batch_findings(
                    options, dimensions, failure
                )
        except Exception as error:
            if dimensions is None or isinstance(error, _FINAL):
                raise
            failure = error
    raise AssertionError("the last of the dimensions is None")


def _with_replayed_values(subject: Subject, failure: Exception, options: TraceOptions) -> Captured:
    """A trace in which the Python values that model code reads from tensors are those of the example."""
    args, kwargs = cloned(subject.arguments)
    with Recording() as recording:
        subject.module(*args, **kwargs)
    program, findings = _any_export(subject, options, eager_masks, lambda: Replaying(recording.reading))
    return Captured(program, "torch.export", {"python_values": "replayed"}, findings)


def _with_leaves(subject: Subject, failure: Exception, options: TraceOptions) -> Captured:
    """A trace in which the submodules that defeat it are left whole."""
    leaves: list[Leaf] = []
    for _ in range(_MAX_LEAVES):
        found = _culprits(subject.module, failure, {leaf.path for leaf in leaves})
        if not found:
            raise failure
        leaves = [leaf for leaf in leaves if not any(_is_within(leaf.path, path) for path, _ in found)]
        leaves = [leaf_of(leaf.path, leaf.module) for leaf in leaves] + [leaf_of(*pair) for pair in found]
        _observe(subject, leaves)
        try:
            program, findings = _any_export(subject, options, functools.partial(opaque, leaves))
        except Exception as error:
            failure = error
            continue
        return Captured(program, "torch.export", {}, findings, tuple(leaves))
    raise failure


def _culprits(module: nn.Module, failure: Exception, known: set[str]) -> list[tuple[str, nn.Module]]:
    """The innermost submodule whose forward was running when tracing failed, with all others of its class: they run
    the same code. Its parent, where it was made a leaf in vain; none, where it is the whole model."""
    paths = {id(inner): path for path, inner in module.named_modules()}
    path = ""
    frame = failure.__traceback__
    while frame is not None:
        owner = frame.tb_frame.f_locals.get("self")
        if frame.tb_frame.f_code.co_name == "forward" and id(owner) in paths:
            path = paths[id(owner)]
        frame = frame.tb_next
    while path in known:
        path = path.rpartition(".")[0]
    if not path:
        return []
    kind = type(module.get_submodule(path))
    if kind.__module__.startswith("torch."):
        return [(path, module.get_submodule(path))]
    alike = [(other, inner) for other, inner in module.named_modules() if type(inner) is kind and other]
    return [pair for pair in alike if not any(_is_within(pair[0], other) for other, _ in alike)]


def _is_within(path: str, outer: str) -> bool:
    return path.startswith(f"{outer}.")


def _observe(subject: Subject, leaves: list[Leaf]) -> None:
    """Let `leaves` see the example, other inputs of its sizes and, where the model takes it, another batch size."""
    with observed(leaves):
        for arguments in (cloned(subject.arguments), resampled(subject.arguments, 1)):
            args, kwargs = arguments
            subject.module(*args, **kwargs)
        count = batch_of(subject.arguments)
        if count is not None:
            args, kwargs = resampled(subject.arguments, 1, count + 1)
            with contextlib.suppress(RuntimeError, ValueError, IndexError):
                subject.module(*args, **kwargs)


def _by_symbolic_trace(subject: Subject, failure: Exception, options: TraceOptions) -> Captured:
    """torch.fx.symbolic_trace, which runs the code with proxies instead of fake tensors, lowered to ATen by export."""
    graph_module = torch.fx.symbolic_trace(subject.module)
    simple = Subject(subject.source, graph_module, subject.arguments)
    program, findings = _any_export(simple, options)
    return Captured(program, "torch.fx.symbolic_trace", {}, findings)

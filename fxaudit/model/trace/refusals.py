"""Why a model cannot be traced, as an error with the user's line, one sentence of reason and the next thing to try."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fxaudit.errors import TraceError
from fxaudit.model.frames import user_frame
from fxaudit.model.inputs import Arguments, tensors_of
from fxaudit.model.load import Subject

_ENUMERATE = (
    "compute every case densely (for experts: a batched product over all of them, gathered by index),"
    " or name a part of the model without the loop"
)
_BRANCH = "write the branch with torch.where or torch.cond, or name a part of the model that has no such branch"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One kind of failure: the classes of the error and the words in its text that tell it, and what is said."""

    name: str
    classes: tuple[str, ...]
    words: str
    reason: str
    remedy: str

    def fits(self, error: BaseException) -> bool:
        classes = {c.__name__ for c in type(error).__mro__}
        return (not self.classes or bool(classes & set(self.classes))) and bool(re.search(self.words, str(error)))


# The first that fits is the one that is said.
REFUSALS = (
    Refusal(
        "data-dependent-size",
        ("GuardOnDataDependentSymNode", "DynamicOutputShapeException"),
        r"Size-like symbols: u\d|Dynamic output shape|aten\.(nonzero|unique|masked_select|repeat_interleave)",
        "a Python loop or branch runs over a number of elements that depends on values (as of nonzero)",
        _ENUMERATE,
    ),
    Refusal(
        "data-dependent-branch",
        ("GuardOnDataDependentSymNode",),
        "",
        "Python control flow depends on the value of a tensor",
        _BRANCH,
    ),
    Refusal(
        "data-dependent-value",
        ("DataDependentOutputException", "DynamicOutputShapeException"),
        "",
        "a tensor is turned into a Python value",
        "keep the value a tensor: compare and select with torch.where instead of .item(), .tolist() or float()",
    ),
    Refusal(
        "numpy",
        (),
        r"numpy\(\)|Numpy is not available|can't convert .* to numpy",
        "a tensor is turned into a numpy array",
        "do the computation in torch: numpy code leaves no graph",
    ),
    Refusal(
        "no-shape-rule",
        ("UnsupportedOperatorException",),
        "",
        "an op has no description of its output shapes",
        "register one for the op with torch.library.register_fake",
    ),
    Refusal(
        "output-type",
        (),
        r"(?i)unsupported (output|input)|to be one of the supported|not.*pytree|Expected .* to be only|register_pytree",
        "an input or output is a container of a type that torch does not know how to take apart",
        "return a tensor, tuple, dict or dataclass, or register the type with torch.export.register_dataclass or"
        " torch.utils._pytree.register_pytree_node before it is traced",
    ),
    Refusal(
        "batch-guard",
        ("ConstraintViolationError",),
        "",
        "the code fixes an input size, or relates sizes in a way that torch cannot express",
        "give an example in the one size that the model is used with",
    ),
    Refusal(
        "missing-input",
        ("TypeError",),
        r"missing \d+ required|unexpected keyword|'NoneType' object|positional argument",
        "an argument that the code needs while it is traced is missing",
        "pass the optional inputs (attention masks, position ids) in the example inputs as well",
    ),
)


def untraceable(subject: Subject, error: BaseException) -> TraceError:
    """The error that stands for a failure of tracing."""
    if isinstance(error, TraceError):
        return error
    kind = next((refusal for refusal in REFUSALS if refusal.fits(error)), None)
    reason = kind.reason if kind else f"{type(error).__name__}: {first_line(error)}"
    return TraceError(
        f"{subject.source} cannot be traced: {reason}",
        where=user_frame(error) or _forward_of(subject),
        expected="a forward pass that is the same sequence of tensor ops for every input",
        found=f"{type(error).__name__}: {first_line(error)}",
        remedy=kind.remedy
        if kind
        else "run torch.export.export(model, args, strict=False) on the model by itself to see the whole message",
        reason=kind.name if kind else "",
    )


def fails_in_eager(subject: Subject, arguments: Arguments, error: BaseException) -> TraceError:
    """The error of a model that does not run on its own example inputs."""
    return TraceError(
        f"{subject.source} fails on its example inputs before any tracing",
        where=user_frame(error) or _forward_of(subject),
        found=f"{type(error).__name__}: {first_line(error)}",
        expected="a model that runs on its example inputs",
        remedy="check the inputs: " + describe(arguments),
        reason="missing-input" if isinstance(error, TypeError) and "argument" in str(error) else "fails-in-eager",
    )


def _forward_of(subject: Subject) -> str:
    """Where the model's forward begins, for errors that no line of it raises."""
    code = getattr(type(subject.module).forward, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}   def {code.co_name}" if code is not None else ""


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def describe(arguments: Arguments) -> str:
    """The dtypes and shapes of input tensors in one line."""
    return ", ".join(f"{tensor.dtype} {list(tensor.shape)}".replace("torch.", "") for tensor in tensors_of(arguments))

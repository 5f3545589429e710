"""How well outputs fit their targets, or how far they are from the live outputs: one number for each input, in float64.

    nll             targets [inputs, positions]: mean over valid positions of -log p(target), in nats
    cross-entropy   targets [inputs]: -log p(class), in nats, with accuracy beside it
    kl              no targets: mean over positions of KL(live || replayed), in nats
    file.py:NAME    what the user's function returns for (outputs, targets, live outputs)

Positions that the data calls invalid count nowhere. Outputs may be logits, probabilities or log-probabilities: the op
that made them tells which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxaudit import ops
from fxaudit.errors import DataError, nearest
from fxaudit.model.frames import user_frame
from fxaudit.model.functions import Purpose, find_function

IGNORED = -100
_PURPOSE = Purpose(
    DataError,
    "metric",
    "one number for each input",
    "path/to/file.py:function or package.module:function",
    takes="(outputs, targets, live outputs)",
)


@dataclass(frozen=True, slots=True)
class Score:
    """Values of a batch, one for each input; `accuracy` is the share of right answers where there are targets.

    `weight` is the number of valid targets of each input.
    """

    values: Tensor
    accuracy: Tensor | None
    weight: Tensor


def output_form(node: Node) -> str:
    """What an output holds, by the op that made it: ``probabilities`` after a softmax over its last axis,
    ``log-probabilities`` after a log-softmax, otherwise ``logits``."""
    axis: int | None = len(ops.sizes(node) or ()) - 1
    while axis is not None and axis >= 0 and ops.in_class(node, "layout") and ops.operands(node):
        axis = _axis_before(node, axis)
        node = ops.operands(node)[0]
    name, rank = ops.op_name(node), len(ops.sizes(node) or ())
    if axis is not None and rank and name in ("softmax", "log_softmax") and ops.attributes(node)["dim"] % rank == axis:
        return "probabilities" if name == "softmax" else "log-probabilities"
    return "logits"


def _axis_before(node: Node, axis: int) -> int | None:
    """The axis of a layout op's operand that became `axis` whole; None when there is none."""
    before, after = ops.sizes(ops.operands(node)[0]), ops.sizes(node)
    if before is None or after is None:
        return None
    rank, attributes = len(before), ops.attributes(node)
    match ops.op_name(node):
        case "transpose":
            one, other = attributes["dim0"] % rank, attributes["dim1"] % rank
            found: int | None = {one: other, other: one}.get(axis, axis)
        case "t":
            found = rank - 1 - axis
        case "permute":
            found = attributes["dims"][axis] % rank
        case "select":
            dim = attributes["dim"] % rank
            found = axis + (axis >= dim)
        case "unsqueeze":
            dim = attributes["dim"] % len(after)
            found = None if axis == dim else axis - (axis > dim)
        case "expand":
            found = axis - (len(after) - rank)
        case "view" | "reshape" | "squeeze":
            # Rows along the last axis stay rows when their length does.
            found = rank - 1 if axis == len(after) - 1 else None
        case _:
            found = axis if len(before) == len(after) else None
    return found if found is not None and 0 <= found < rank and before[found] == after[axis] else None


def log_probabilities(values: Tensor, form: str) -> Tensor:
    """Log-probabilities in float64 of an output of the given form.

    A probability that has underflowed to 0 counts as the smallest normal number of its dtype.
    """
    match form:
        case "probabilities":
            return values.double().clamp(min=torch.finfo(values.dtype).tiny).log()
        case "log-probabilities":
            return values.double()
    return torch.log_softmax(values.double(), -1)


@dataclass(frozen=True, slots=True)
class Metric:
    """How outputs are scored: by name, or by a user's function of (outputs, targets, live outputs) that returns one
    number for each input."""

    name: str
    function: Callable[[Tensor, Tensor | None, Tensor], Any] | None = None

    @staticmethod
    def of(targets: Tensor | None) -> Metric:
        """The metric that the targets of a data set call for."""
        return Metric(metric_name(targets))

    def score(
        self, output: Tensor, targets: Tensor | None, live: Tensor, form: str = "logits", valid: Tensor | None = None
    ) -> Score:
        """Score an output of a batch; see `score`.

        Raises:
            DataError: what does not go together, or a user's function that fails.
        """
        if self.function is None:
            return score(output, targets, live, form, valid)
        try:
            found = torch.as_tensor(self.function(output, targets, live)).detach().double()
        except Exception as error:
            raise DataError(
                f"the metric {self.name} failed",
                where=user_frame(error) or self.name,
                expected="a function of (outputs, targets, live outputs)",
                found=f"{type(error).__name__}: {error}",
                remedy="run it in Python by itself on one batch",
            ) from error
        if tuple(found.shape) != tuple(output.shape[:1]):
            raise DataError(
                f"the metric {self.name} did not return one number for each input",
                expected=f"[{output.shape[0]}]",
                found=f"{list(found.shape)}",
                remedy="average over everything but the first axis",
            )
        return Score(found, None, torch.ones_like(found))


def load_metric(place: str) -> Metric:
    """The metric that ``path/to/file.py:function`` names.

    Raises:
        DataError: no such file or function, or the user's file failed.
    """
    return Metric(place, find_function(place, _PURPOSE))


def metric_name(targets: Tensor | None) -> str:
    """The metric that the targets of a data set call for."""
    if targets is None:
        return "kl"
    return "cross-entropy" if targets.ndim == 1 else "nll"


def score(
    logits: Tensor,
    targets: Tensor | None,
    live: Tensor | None = None,
    form: str = "logits",
    valid: Tensor | None = None,
) -> Score:
    """Score `logits` ([inputs, classes] or [inputs, positions, classes]) against targets, or against the live logits.

    Both are of the given form; see `output_form`. Of outputs with as many positions as `valid` ([inputs, positions])
    only valid ones count.

    Raises:
        DataError: shapes that do not go together, targets out of range, or an input without a valid target.
    """
    if targets is None:
        if live is None:
            raise DataError("there is nothing to compare with", expected="targets or live outputs", found="neither")
        return _kl(log_probabilities(live, form), log_probabilities(logits, form), valid)
    if tuple(targets.shape) != tuple(logits.shape[:-1]):
        raise DataError(
            "the targets do not fit the output",
            expected=f"{list(logits.shape[:-1])}, one class for each of the output's distributions",
            found=f"{list(targets.shape)}",
            remedy="name the output that holds the logits with --output, or align the targets",
        )
    targets = targets.long()
    if valid is not None and valid.shape == targets.shape:
        targets = torch.where(valid, targets, IGNORED)
    valid = targets != IGNORED
    if not bool(((targets >= 0) & (targets < logits.shape[-1]))[valid].all()):
        raise DataError(
            "a target is no class of the output",
            expected=f"0 to {logits.shape[-1] - 1}, or {IGNORED} for positions that do not count",
            found=f"values from {int(targets.min())} to {int(targets.max())}",
            remedy="check the tokenizer or the label order",
        )
    log_p = log_probabilities(logits, form)
    chosen = log_p.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    right = (logits.argmax(-1) == targets).double()
    axes = tuple(range(1, targets.ndim))
    weight = valid.sum(axes).double() if axes else valid.double()
    if bool((weight == 0).any()):
        raise DataError("an input has no valid target", expected=f"some target other than {IGNORED}", found="none")
    # Chosen, not multiplied: a position that does not count may hold an infinity.
    losses, right = (torch.where(valid, values, 0.0) for values in (-chosen, right))
    if axes:
        losses, right = losses.sum(axes) / weight, right.sum(axes) / weight
    return Score(losses, right, weight)


def _kl(p: Tensor, q: Tensor, valid: Tensor | None) -> Score:
    # Never negative but for rounding of equal distributions.
    # A class that the live output rules out adds nothing, whatever the replayed one says of it.
    divergence = torch.where(p.isneginf(), 0.0, p.exp() * (p - q)).sum(-1).clamp(min=0)
    axes = tuple(range(1, divergence.ndim))
    if valid is not None and valid.shape == divergence.shape:
        weight = valid.sum(1).double()
        return Score(torch.where(valid, divergence, 0.0).sum(1) / weight, None, weight)
    values = divergence.mean(axes) if axes else divergence
    positions = divergence[0].numel()
    return Score(values, None, torch.full_like(values, float(positions)))


def choose_output(leaves: Sequence[Any], names: Sequence[str], asked: str | None = None) -> int:
    """The position of the output that holds the logits: the one asked for, one called ``logits``, or the first float.

    Raises:
        DataError: no such output, or none with classes along its last axis.
    """
    usable = [
        i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 1
    ]
    if asked is not None:
        position = int(asked) if asked.isdecimal() else next((i for i, name in enumerate(names) if name == asked), None)
        if position is not None and position in usable:
            return position
        raise DataError(
            f"the model has no output `{asked}` that can hold logits{nearest(asked, list(names))}",
            expected=", ".join(f"{names[i]} ({i})" for i in usable) or "a floating-point output with a class axis",
            found=asked,
            remedy="name one of these with --output",
        )
    if not usable:
        raise DataError(
            "the model has no output that can hold logits",
            expected="a floating-point output with classes along its last axis",
            found=", ".join(names),
            remedy="audit a model with a head, or wrap it",
        )
    return next((i for i in usable if names[i] == "logits"), usable[0])

"""Recording and replaying sigmoid gates by intercepting torch.sigmoid, and statistics by their definitions.

An independent implementation of what fxaudit does by rewriting graphs: it runs the eager model, and knows nothing of
graphs, patterns or stores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Sigmoids(TorchFunctionMode):
    """Records the result of every torch.sigmoid call, in order, or replaces it by given tensors."""

    def __init__(self, replaced: list[Tensor] | None = None) -> None:
        super().__init__()
        self.recorded: list[Tensor] = []
        self.replaced = replaced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.sigmoid, Tensor.sigmoid):
            self.recorded.append(result)
            if self.replaced is not None:
                return self.replaced[len(self.recorded) - 1]
        return result


def record(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """Every gate of a model on one batch, in call order."""
    with torch.no_grad(), Sigmoids() as gates:
        model(ids)
    return gates.recorded


def replay(model: nn.Module, ids: Tensor, gates: list[Tensor]) -> Tensor:
    """The logits of a model whose gates are given."""
    with torch.no_grad(), Sigmoids(gates):
        return model(ids)


def nll(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean negative log-likelihood of each input, nats, by its definition in float64."""
    wide = logits.double()
    log_p = wide - wide.exp().sum(-1, keepdim=True).log()
    return -torch.stack(
        [torch.stack([log_p[i, t, targets[i, t]] for t in range(targets.shape[1])]).mean() for i in range(len(targets))]
    )


def static(gates: Tensor, level: str) -> Tensor:
    """The mean of a gate [inputs, positions, units] over calibration inputs, in float64, rounded once."""
    wide = gates.double()
    match level:
        case "controller":
            return wide.mean().float().reshape(1, 1, 1)
        case "unit":
            return wide.mean((0, 1), keepdim=True).float()
    return wide.mean(0, keepdim=True).float()


def intervened(
    name: str,
    level: str | None,
    own: list[Tensor],
    calibration: list[Tensor],
    chosen: list[int],
    donors: Tensor,
    positions: Tensor,
) -> list[Tensor]:
    """The gates [inputs, positions, units] of one intervention on the chosen controllers; the others keep their own."""
    result = []
    for k, gate in enumerate(own):
        if k not in chosen or name == "identity":
            result.append(gate)
        elif name == "reassign":
            result.append(torch.stack([gate[int(d)] for d in donors]))
        elif name == "shuffle-tokens":
            result.append(torch.stack([gate[i][positions[i]] for i in range(len(gate))]))
        elif name == "static":
            result.append(static(calibration[k], str(level)).expand_as(gate))
        elif name == "neutral":
            result.append(torch.ones_like(gate))
        else:
            raise ValueError(name)
    return result


def layer_share(gates: list[Tensor], level: str) -> float:
    """The share of the total sum of squares that lies between controllers, for values averaged as `level` says."""
    averaged = {
        "element": lambda g: g.reshape(-1),
        "mean_input_position": lambda g: g.mean((0, 1)),
        "mean_unit": lambda g: g.mean(2).reshape(-1),
        "mean_unit_position": lambda g: g.mean((1, 2)),
    }[level]
    values = [averaged(gate.double()) for gate in gates]
    everything = torch.cat(values)
    total = ((everything - everything.mean()) ** 2).sum()
    between = sum(len(v) * (v.mean() - everything.mean()) ** 2 for v in values)
    return float(between / total)


def shares(gate: Tensor) -> dict[str, float]:
    """The split of one gate's sum of squares into unit, position, input and the rest, by the definition."""
    wide = gate.double()
    mean = wide.mean()
    total = ((wide - mean) ** 2).sum()
    parts = {
        "unit": ((wide.mean((0, 1), keepdim=True) - mean).expand_as(wide) ** 2).sum(),
        "position": ((wide.mean((0, 2), keepdim=True) - mean).expand_as(wide) ** 2).sum(),
        "input": ((wide.mean((1, 2), keepdim=True) - mean).expand_as(wide) ** 2).sum(),
    }
    found = {name: float(part / total) for name, part in parts.items()}
    return {**found, "residual": 1.0 - sum(found.values())}

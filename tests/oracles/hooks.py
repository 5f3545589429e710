"""Replay by forward hooks on the eager model: what fxaudit does by rewriting graphs, without any of it.

All inputs run in one batch. A coefficient is a tuple of tensors [inputs, positions, units]: one for a gate, weights and
indices for a router. A coefficient without positions has one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Value = tuple[Tensor, ...]
Change = Callable[[int, Value], Value]


class Hooked:
    """A model whose controllers are seen or replaced; `shape` tells a gate of tokens from one of channels."""

    def __init__(self, model: nn.Module, positions: int) -> None:
        self.model, self.positions = model.eval(), positions
        self.controllers: list[nn.Module] = model.controllers()  # type: ignore[operator]

    def run(self, inputs: Tensor, change: Change) -> Tensor:
        """The output, with every controller's coefficient replaced by what `change` makes of it."""

        def hook(k: int) -> Callable[..., Any]:
            def replaced(module: nn.Module, args: Any, output: Any) -> Any:
                parts = output if isinstance(output, tuple) else (output,)
                value = tuple(part.reshape(len(inputs), self.positions, -1) for part in parts)
                made = change(k, value)
                shaped = tuple(new.reshape(old.shape).to(old.dtype) for new, old in zip(made, parts, strict=True))
                return shaped if isinstance(output, tuple) else shaped[0]

            return replaced

        handles = [module.register_forward_hook(hook(k)) for k, module in enumerate(self.controllers)]
        try:
            with torch.no_grad():
                return self.model(inputs)
        finally:
            for handle in handles:
                handle.remove()

    def record(self, inputs: Tensor) -> list[Value]:
        """Every coefficient, unperturbed."""
        seen: dict[int, Value] = {}

        def keep(k: int, value: Value) -> Value:
            seen[k] = tuple(part.clone() for part in value)
            return value

        self.run(inputs, keep)
        return [seen[k] for k in range(len(self.controllers))]

    def scores(self, inputs: Tensor) -> list[Tensor]:
        """The dense scores of every router, [inputs, positions, experts]."""
        seen: list[Tensor] = []
        modules = [module.softmax for module in self.controllers if hasattr(module, "softmax")]
        handles = [m.register_forward_hook(lambda *call: seen.append(call[2])) for m in modules]
        with torch.no_grad():
            self.model(inputs)
        for handle in handles:
            handle.remove()
        return [scores.reshape(len(inputs), self.positions, -1) for scores in seen]


def nll(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean negative log-likelihood of each input over its targets other than -100, nats."""
    wide = logits.double()
    log_p = wide - wide.exp().sum(-1, keepdim=True).log()
    rows = []
    for i in range(len(targets)):
        if targets.ndim == 1:
            rows.append(-log_p[i, targets[i]])
        else:
            rows.append(-torch.stack([log_p[i, t, y] for t, y in enumerate(targets[i]) if y != -100]).mean())
    return torch.stack(rows)


class Interventions:
    """What each intervention makes of a coefficient, given records, calibration records and permutations."""

    def __init__(
        self,
        own: Sequence[Value],
        calibration: Sequence[Value],
        scores: Sequence[Tensor],
        permutations: Mapping[str, Any],
        ids: Sequence[str],
    ) -> None:
        self.own, self.calibration, self.scores, self.ids = own, calibration, scores, ids
        self.permutations = {name: torch.as_tensor(value) for name, value in permutations.items()}

    def value(self, row: Mapping[str, Any], k: int, value: Value) -> Value:
        """What stands in for `value`, the coefficient of controller k in this run."""
        each = row["draws"] == "each"

        def array(name: str) -> Tensor:
            return self.permutations[f"{name}/{self.ids[k]}" if each else name]

        inputs = torch.arange(len(value[0]))
        match row["name"]:
            case "identity":
                return value
            case "reassign":
                return part(row, value, tuple(p[array("donors")] for p in value))
            case "shuffle-tokens":
                return part(row, value, tuple(p[inputs[:, None], array("positions")] for p in value))
            case "swap-controllers":
                return part(row, value, self.own[int(self.permutations["controllers"][k])])
            case "neutral":
                return tuple(torch.ones_like(p) for p in value)
            case "permute-units":
                units = array("units")
                if len(value) == 1:
                    return (value[0][..., units],)
                # Expert u takes the place of expert units[u].
                label = torch.tensor([units.tolist().index(e) for e in range(len(units))])
                return value[0], label[value[1]]
            case "resample":
                donors = self.permutations[f"resample/donors/{self.ids[k]}"]
                places = self.permutations.get(f"resample/positions/{self.ids[k]}")
                made = torch.empty_like(value[0])
                for i, t, u in torch.cartesian_prod(*map(torch.arange, made.shape)).tolist():
                    place = int(places[i, t]) if places is not None else 0
                    made[i, t, u] = value[0][donors[i, u], place, u]
                return (made,)
            case "static":
                return self._static(row["level"], k, value)
        raise ValueError(row["name"])

    def _static(self, level: str, k: int, value: Value) -> Value:
        axes = {"controller": (0, 1, 2), "unit": (0, 1), "unit-position": (0,)}[level]
        source = self.scores[k] if len(value) > 1 else self.calibration[k][0]
        mean = source.double().mean(axes, keepdim=True).float()
        if len(value) == 1:
            return (mean.expand_as(value[0]),)
        weights, indices = mean.topk(value[1].shape[-1], -1)
        weights = weights / weights.sum(-1, keepdim=True)
        return weights.expand_as(value[0]), indices.expand_as(value[1])


def part(row: Mapping[str, Any], own: Value, given: Value) -> Value:
    """Both parts of what is given, or only the weights or the indices of a router."""
    match row["discrete"]:
        case "weights":
            return given[0], own[1]
        case "indices":
            return own[0], given[1]
    return given


def expected(hooked: Hooked, inputs: Tensor, interventions: Interventions, row: Mapping[str, Any]) -> Tensor:
    """The output under one row of a replay."""
    chosen = [interventions.ids.index(identifier) for identifier in row["controllers"]]

    def change(k: int, value: Value) -> Value:
        if row["feedback"] == "in-flight" and k in chosen:
            return interventions.value(row, k, value)
        if k in chosen:
            return interventions.value(row, k, interventions.own[k])
        return interventions.own[k] if row["feedback"] == "frozen" else value

    return hooked.run(inputs, change)

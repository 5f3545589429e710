"""A model with controllers, its frozen form, and what hooks see at the bind points of the eager model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from fxaudit import stages
from fxaudit.stages import Matched


@dataclass
class Eager:
    """A model, two inputs for it, and where its coefficients are.

    `gates` names the modules whose outputs are the coefficients, in the order in which they are computed, each perhaps
    followed by what the model does to that output before it is applied (`finish`). `cone` is an expression for the
    names of the parameters and buffers that only the controllers need. `families` says how many controllers there are.
    """

    module: nn.Module
    inputs: tuple[Tensor, ...]
    others: tuple[Tensor, ...]
    families: Mapping[str, int]
    gates: list[str]
    cone: str
    finish: Callable[[Tensor], Tensor] = field(default=lambda output: output)

    @cached_property
    def matched(self) -> Matched:
        return stages.match(stages.trace(self.module.eval(), self.inputs))

    @cached_property
    def frozen(self):
        return stages.freeze(self.matched)

    def run(self, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The eager output, and the coefficients that hooks see on the way."""
        seen: list[Tensor] = []
        modules = dict(self.module.named_modules())
        hooks = [
            modules[gate].register_forward_hook(lambda m, _, output: seen.append(self.finish(output)))
            for gate in dict.fromkeys(self.gates)
        ]
        try:
            with torch.no_grad():
                output = self.module(*inputs)
        finally:
            for hook in hooks:
                hook.remove()
        return output, seen

    def check_counts(self) -> None:
        found = {family: count for family, count in self.matched.counts.items() if count}
        assert found == self.families

    def check_coefficients(self) -> None:
        _, expected = self.run(*self.others)
        found = list(self.frozen.live(*self.others).coefficients.values())
        assert len(found) == len(expected)
        assert all(torch.equal(a.reshape(b.shape), b) for a, b in zip(found, expected, strict=True))

    def check_identity(self) -> None:
        expected, _ = self.run(*self.others)
        live = self.frozen.live(*self.others)
        replayed = self.frozen(*self.others, coefficients=live.coefficients)
        assert torch.equal(live.output, expected)
        assert torch.equal(replayed, expected)

    def check_exchange(self) -> None:
        own, _ = self.run(*self.inputs)
        other = self.frozen.live(*self.others).coefficients
        moved = self.frozen(*self.inputs, coefficients=other)
        assert (moved - own).abs().max() > 1e-3 * own.abs().max()

    def check_cone(self) -> None:
        assert all(controller.cone and controller.parameters for controller in self.frozen.controllers)
        state = {name for name, value in self.module.state_dict().items() if value.is_floating_point()}
        removed = {name for name in state if re.fullmatch(self.cone, name)}
        assert removed
        assert state - set(self.frozen.frozen.state_dict()) == removed


CHECKS = [Eager.check_counts, Eager.check_coefficients, Eager.check_identity, Eager.check_exchange, Eager.check_cone]


@torch.no_grad()
def telling(module: nn.Module, seed: int = 0) -> nn.Module:
    """`module` with weights for which its gates depend on the input, and its output on the gates."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            spread = parameter[0].numel() ** -0.5
            parameter.normal_(std=2.0 * spread, generator=generator)
        else:
            parameter.uniform_(0.5, 1.5, generator=generator)
    return module.eval()


def images(*sizes: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Two batches of random maps whose channels have means of their own, since gates see pooled maps."""
    drawn = []
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        shift = torch.randn(*sizes[:2], *(1 for _ in sizes[2:]), generator=generator)
        drawn.append((torch.randn(sizes, generator=generator) + shift,))
    return drawn[0], drawn[1]

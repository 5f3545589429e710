"""Recording and replaying the outputs of a model's gate modules by other tools, as rows beside ours.

Each peer is first checked: it must record what a forward hook sees, and a replay of other values must give what a
hook gives, bit for bit. Otherwise a tool that does nothing would look fast.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class Peer:
    """A tool's way to record the outputs of modules and to run the model on given ones.

    `record` returns the recorded values by module, `replay` the model's output. `given` makes of the modules' outputs
    what the tool takes, where it replaces another value.
    """

    name: str
    record: Callable[[], Values] | None
    replay: Callable[[Values], Tensor]
    given: Callable[[Values], Values] = dict


def peers(module: nn.Module, gates: Sequence[str], batch: Tensor) -> list[Peer]:
    """Every peer, set up for the gate modules of a model and one batch.

    Raises:
        AssertionError: a peer records or computes something else than forward hooks do.
    """
    warnings.filterwarnings("ignore", module="nnsight")
    logging.getLogger().setLevel(logging.ERROR)
    # Asked for before nnsight puts its own function in the place of forward.
    argument = next(iter(inspect.signature(module.forward).parameters))
    found = [hooks(module, gates, batch), *nnsight(module, gates, batch)]
    found += [pyvene(module, gates, batch, argument), torchlens(module, gates, batch)]
    check(found)
    return found


def check(found: Sequence[Peer]) -> None:
    reference = found[0]
    assert reference.record is not None
    own = reference.record()
    generator = torch.Generator().manual_seed(0)
    other = {name: value + torch.rand(value.shape, generator=generator) for name, value in own.items()}
    wanted = reference.replay(other)
    assert not torch.equal(wanted, reference.replay(own)), "exchanging the gates changes nothing: no row means anything"
    for peer in found:
        if peer.record is not None:
            recorded = peer.record()
            assert recorded.keys() == own.keys(), f"{peer.name} records {len(recorded)} of {len(own)} gates"
            same = all(torch.equal(value, recorded[name]) for name, value in peer.given(own).items())
            assert same, f"{peer.name} records other values than hooks do"
        assert torch.equal(peer.replay(peer.given(other)), wanted), f"{peer.name} does not replay what it is given"


def hooks(module: nn.Module, gates: Sequence[str], batch: Tensor) -> Peer:
    def run(given: Values | None) -> tuple[Tensor, Values]:
        recorded: dict[str, Tensor] = {}

        def hook(name: str) -> Callable[..., Tensor | None]:
            def called(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
                recorded[name] = output
                return None if given is None else given[name]

            return called

        handles = [module.get_submodule(name).register_forward_hook(hook(name)) for name in gates]
        try:
            return module(batch), recorded
        finally:
            for handle in handles:
                handle.remove()

    return Peer("hooks", lambda: run(None)[1], lambda given: run(given)[0])


def nnsight(module: nn.Module, gates: Sequence[str], batch: Tensor) -> list[Peer]:
    import nnsight

    model = nnsight.NNsight(module)

    def envoy(path: str) -> Any:
        found: Any = model
        for part in path.split("."):
            found = found[int(part)] if part.isdigit() else getattr(found, part)
        return found

    envoys = {name: envoy(name) for name in gates}

    # The bodies of these blocks are read as source and run elsewhere.
    def record() -> Values:
        with model.trace(batch):
            recorded = nnsight.save({})
            for name, gate in envoys.items():
                recorded[name] = gate.output
        return dict(recorded)

    def replay(given: Values) -> Tensor:
        with model.trace(batch):
            for name, gate in envoys.items():
                gate.output = given[name]
            output = model.output.save()
        return output

    def skip(given: Values) -> Tensor:
        with model.trace(batch):
            for name, gate in envoys.items():
                gate.skip(given[name])
            output = model.output.save()
        return output

    name = f"nnsight {version('nnsight')}"
    return [Peer(name, record, replay), Peer(f"{name}, skip", None, skip)]


def pyvene(module: nn.Module, gates: Sequence[str], batch: Tensor, argument: str) -> Peer:
    import pyvene

    if not hasattr(module, "config"):
        module.config = SimpleNamespace()  # it reads the attribute, and does nothing with it

    def intervenable(intervention: type) -> Any:
        # Without a width given here it looks the model's class up in a table of those that it knows.
        components = [
            {"component": f"{_indexed(n)}.output", "intervention": intervention(embed_dim=None)} for n in gates
        ]
        return pyvene.IntervenableModel(pyvene.IntervenableConfig(components), model=module)

    collecting, replacing = intervenable(pyvene.CollectIntervention), intervenable(pyvene.VanillaIntervention)

    def record() -> Values:
        (_, collected), _ = collecting(base={argument: batch}, unit_locations=None)
        return dict(zip(gates, collected, strict=True))

    def replay(given: Values) -> Tensor:
        sources = {key: given[name] for key, name in zip(replacing.sorted_keys, gates, strict=True)}
        _, output = _pair(replacing(base={argument: batch}, source_representations=sources, unit_locations=None))
        return output

    return Peer(f"pyvene {version('pyvene')}", record, replay)


def torchlens(module: nn.Module, gates: Sequence[str], batch: Tensor) -> Peer:
    """It sees operations: the sigmoids, in the order in which they run, which is that of the gates."""
    import torchlens

    def record() -> Values:
        recording = torchlens.record(module, batch, save=torchlens.func("sigmoid"))
        return dict(zip(gates, (recording[i].ram_payload for i in range(len(recording))), strict=True))

    def replay(given: Values) -> Tensor:
        ordered = list(given.values())

        def intervene(context: Any) -> Any:
            return torchlens.replace_with(ordered[context.type_index - 1]) if context.layer_type == "sigmoid" else None

        output, _ = torchlens.record(module, batch, intervene=intervene, save=_nothing, return_output=True)
        return output

    after = all(isinstance(module.get_submodule(name), nn.Linear) for name in gates)
    squash: Callable[[Values], Values] = lambda given: {n: torch.sigmoid(v) for n, v in given.items()}  # noqa: E731
    return Peer(f"torchlens {version('torchlens')}", record, replay, squash if after else dict)


def _nothing(_: Any) -> bool:
    return False


def _pair(result: Any) -> tuple[Any, Any]:
    return result if isinstance(result, tuple) else (None, result)


def _indexed(path: str) -> str:
    """A module path as pyvene writes it: layers[0].gate."""
    written = ""
    for part in path.split("."):
        written += f"[{part}]" if part.isdigit() else f".{part}" if written else part
    return written

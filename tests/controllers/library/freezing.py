"""What every family must hold once its controllers are frozen, and how eager values are captured."""

import textwrap
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

from fxaudit import stages
from fxaudit.controllers.pattern import library_path, load_pattern
from fxaudit.model.load import subject


def family(name):
    return load_pattern(library_path() / f"{name}.toml")


def example_model(example, seed=0):
    """The module of an inline example, and inputs for it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        namespace = {"torch": torch, "nn": nn, "F": F}
        exec(textwrap.dedent(example.code), namespace)
        inputs = []
        for text in example.inputs:
            kind, _, sizes = text.rpartition("int ")
            shape = [int(size) for size in sizes.split()]
            inputs.append(torch.randint(0, 8, shape) if kind or text.startswith("int") else torch.randn(shape))
    return namespace["model"].eval(), tuple(inputs)


def frozen_family(module, inputs, name):
    """The module with the controllers of one family frozen, and what they compute for its inputs."""
    frozen = stages.freeze(stages.trace(subject(module, inputs, source=name)), patterns=[family(name)])
    arguments, keywords = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    return (
        frozen,
        frozen.live(*arguments, **keywords),
        lambda values: frozen(*arguments, coefficients=values, **keywords),
    )


def check_freezing(module, inputs, name):
    """Identity replay is bitwise, reassignment changes the output, cones are not empty and leave the state dict."""
    frozen, live, replay = frozen_family(module, inputs, name)
    assert all(torch.equal(a, b) for a, b in zip(tensors(live.output), tensors(replay(live.coefficients)), strict=True))
    swapped = {
        c.key: live.coefficients[c.key].flip([axis == (c.sample_axis,) for axis in c.axes].index(True))
        for c in frozen.coefficients
    }
    assert any(not torch.allclose(a, b) for a, b in zip(tensors(live.output), tensors(replay(swapped)), strict=True))
    kept = set(frozen.frozen.state_dict())
    for controller in frozen.controllers:
        assert controller.cone
        assert controller.parameter_names
        assert not controller.parameter_names & kept
    return frozen


def tensors(output):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


@contextmanager
def captured(module, wanted):
    """Path, module, inputs and output of every call of the submodules that `wanted(path, module)` picks, in order."""
    calls = []
    handles = [
        child.register_forward_hook(
            lambda m, args, kwargs, out, path=path: calls.append((path, m, (*args, *kwargs.values()), out)),
            with_kwargs=True,
        )
        for path, child in module.named_modules()
        if wanted(path, child)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()

"""Folded coefficients: which fold, into what, and that the folded graph computes what the model computes."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxaudit
from fxaudit.errors import SelfCheckError
from fxaudit.execution import folding
from fxaudit.execution.export import export_graphs
from fxaudit.execution.export.programs import baked_module
from fxaudit.execution.folding import fold, fold_checked
from fxaudit.execution.proof import module_scope

C = 6


class Squeeze(nn.Module):
    """The squeeze-excite gate of an image."""

    def __init__(self, width=C):
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)

    def forward(self, x):
        return torch.sigmoid(self.expand(F.relu(self.reduce(x.mean((2, 3), keepdim=True)))))


class Image(nn.Module):
    """A gate on the result of `before`, which `after` reads."""

    def __init__(self, before, after=None):
        super().__init__()
        self.stem, self.gate, self.before, self.after = nn.Conv2d(3, C, 3), Squeeze(), before, after or nn.Identity()

    def forward(self, x):
        x = self.stem(x)
        value = self.before(x)
        return self.after(value * self.gate(value))


class Half(nn.Module):
    def forward(self, x):
        return F.hardswish(x)


def norm(width=C):
    layer = nn.BatchNorm2d(width)
    with torch.no_grad():
        for tensor in (layer.weight, layer.running_var):
            tensor.uniform_(0.5, 2)
        for tensor in (layer.bias, layer.running_mean):
            tensor.uniform_(-1, 1)
    return layer


class Reading(nn.Module):
    """Adds the value's own mean, so that the value is read twice."""

    def __init__(self):
        super().__init__()
        self.stem, self.gate, self.before = nn.Conv2d(3, C, 3), Squeeze(), nn.Conv2d(C, C, 1)
        self.after, self.other = nn.Conv2d(C, 2, 1), nn.Conv2d(C, 3, 1)

    def forward(self, x):
        value = self.before(self.stem(x))
        gated = value * self.gate(value)
        return self.after(gated).mean() + self.other(F.relu(gated)).mean((1, 2, 3)) + value.mean((1, 2, 3))


class Twice(nn.Module):
    """One convolution before a gated value and, again, elsewhere."""

    def __init__(self):
        super().__init__()
        self.stem, self.gate, self.shared = nn.Conv2d(3, C, 3), Squeeze(), nn.Conv2d(C, C, 1)

    def forward(self, x):
        x = self.stem(x)
        value = self.shared(x)
        return value * self.gate(value) + self.shared(x + 1)


MODELS = {
    "convolution": (lambda: Image(nn.Conv2d(C, C, 3, groups=2)), "before", {"before.weight", "before.bias"}, ()),
    "convolution without bias": (lambda: Image(nn.Conv2d(C, C, 3, bias=False)), "before", {"before.weight"}, ()),
    "batch norm": (
        lambda: Image(nn.Sequential(nn.Conv2d(C, C, 3), norm())), "before", {"before.1.weight", "before.1.bias"}, (),
    ),
    "past relu": (
        lambda: Image(nn.Sequential(norm(), nn.ReLU())), "before", {"before.0.weight", "before.0.bias"}, ("relu",),
    ),
    "past pools": (
        lambda: Image(nn.Sequential(nn.Conv2d(C, C, 1), nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(2))),
        "before", {"before.0.weight", "before.0.bias"}, ("avg_pool2d", "max_pool2d"),
    ),
    "next convolution": (
        lambda: Image(Half(), nn.Conv2d(C, 4, 3, padding=1)), "after", {"after.weight"}, (),
    ),
    "next grouped convolution": (
        lambda: Image(Half(), nn.Conv2d(C, 2 * C, 3, groups=3)), "after", {"after.weight"}, (),
    ),
    "next depthwise convolution": (
        lambda: Image(Half(), nn.Conv2d(C, C, 3, groups=C)), "after", {"after.weight"}, (),
    ),
    "next batch norm": (lambda: Image(Half(), norm()), "after", {"after.weight", "after.bias"}, ()),
    "next linear past pooling": (
        lambda: Image(Half(), nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(2), Pool(), nn.Linear(C, 3))),
        "after", {"after.3.weight"}, ("adaptive_avg_pool2d", "view", "mean"),
    ),
    "both readers": (Reading, "after", {"after.weight", "other.weight"}, ("relu",)),
    "a weight that is read twice": (Twice, "before", {"shared.weight_folded", "shared.bias_folded"}, ()),
}  # fmt: skip


class Pool(nn.Module):
    def forward(self, x):
        return x.mean(-1)


def frozen(build, image=True):
    torch.manual_seed(0)
    inputs = torch.randn(3, 3, 9, 9) if image else torch.randn(3, 5, C)
    return fxaudit.freeze(build().eval(), (inputs,))


def profile_of(model, low=0.1, high=2.0):
    """Random values for each unit, apart from zero."""
    generator = torch.Generator().manual_seed(5)
    leaves = model.traced.flatten(model.traced.subject.arguments)
    values = model.run_tapped(leaves)[1]
    found = {}
    for coefficient, value in zip(model.coefficients, values, strict=False):
        roles = [coefficient.roles.get(axis[0], "unit") for axis in coefficient.axes]
        shape = [1 if role in ("sample", "position") else n for n, role in zip(value.shape, roles, strict=True)]
        found[coefficient.key] = low + (high - low) * torch.rand(shape, generator=generator)
    return found


def folded(model, profile):
    module, buffers = baked_module(model, profile, {key: key for key in profile})
    return fold_checked(module, buffers, model.traced.flatten(model.traced.subject.arguments))


def expected(model, profile, x):
    """The frozen model with the profile repeated along samples and positions."""
    shapes = {key: value.shape for key, value in model.live(x).coefficients.items()}
    return model(x, coefficients={key: value.expand(shapes[key]).clone() for key, value in profile.items()})


def assert_same(found, wanted):
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_a_gate_of_channels_folds(name):
    build, direction, into, crossed = MODELS[name]
    model = frozen(build)
    profile = profile_of(model)
    before = {key: value.clone() for key, value in model.traced.subject.module.state_dict().items()}
    found = folded(model, profile)
    (entry,) = found.folds
    assert (entry.folded, entry.direction) == (True, direction), entry.reason
    assert set(entry.into) == into
    assert entry.crossed == crossed
    x = torch.randn(5, 3, 9, 9, generator=torch.Generator().manual_seed(3))
    assert_same(found.module(x)[0], expected(model, profile, x))
    assert not any("coefficient" in name for name, _ in found.module.named_buffers())
    after = model.traced.subject.module.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_weight_that_is_read_twice_keeps_its_own_value_beside_the_copy():
    model = frozen(Twice)
    found = folded(model, profile_of(model))
    assert set(found.folds[0].copied) == {"shared.weight", "shared.bias"}
    own = model.traced.subject.module.shared.weight
    assert torch.equal(found.module.shared.weight, own)
    assert not torch.equal(found.module.shared.weight_folded, own)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.value, self.head = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C)
        self.head.weight = self.value.weight

    def forward(self, x):
        return self.head(F.gelu(torch.sigmoid(self.gate(x)) * self.value(x)))


def test_a_tied_weight_is_copied():
    model = frozen(Tied, image=False)
    profile = profile_of(model)
    found = folded(model, profile)
    assert "value.weight" in found.folds[0].copied or "head.weight" in found.folds[0].copied
    x = torch.randn(2, 5, C)
    assert_same(found.module(x)[0], expected(model, profile, x))


REFUSED = {
    "a negative scale past relu": (
        lambda: Image(nn.Sequential(norm(), nn.ReLU()), Half()), (-2.0, -0.1), "`relu` commutes with scales that",
    ),
    "an activation on both sides": (lambda: Image(Half(), Half()), (0.1, 2.0), "`hardswish` does not commute"),
    "an output": (lambda: Image(Half()), (0.1, 2.0), "the product is an output"),
    "a normalisation after it": (
        lambda: Image(Half(), nn.InstanceNorm2d(C)), (0.1, 2.0), "does not commute with a scale",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_exact_stays_and_says_why(name):
    build, (low, high), reason = REFUSED[name]
    model = frozen(build)
    profile = profile_of(model, low, high)
    found = folded(model, profile)
    (entry,) = found.folds
    assert not entry.folded
    assert reason in entry.reason
    x = torch.randn(2, 3, 9, 9)
    assert torch.equal(found.module(x)[0], expected(model, profile, x))


def test_a_profile_by_position_stays():
    model = frozen(Tied, image=False)
    (coefficient,) = model.coefficients
    found = folded(model, {coefficient.key: torch.rand(1, 5, C) + 0.5})
    assert "more than one axis" in found.folds[0].reason


class Shuffled(nn.Module):
    """A gate on features that change their order before it or after it."""

    def __init__(self, before):
        super().__init__()
        self.gate, self.value, self.out, self.before = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C), before

    def forward(self, x):
        gate = torch.sigmoid(self.gate(x))
        if self.before:
            return F.gelu(gate * self._shuffle(self.value(x)))
        return self.out(self._shuffle(gate * F.gelu(self.value(x))))

    def _shuffle(self, x):
        return x.unflatten(-1, (2, 3)).transpose(-1, -2).flatten(-2)


@pytest.mark.parametrize(("before", "weight"), [(True, "value.weight"), (False, "out.weight")])
def test_a_scale_is_followed_through_ops_that_move_elements(before, weight):
    model = frozen(lambda: Shuffled(before), image=False)
    profile = profile_of(model)
    found = folded(model, profile)
    assert weight in found.folds[0].into
    x = torch.randn(4, 5, C)
    assert_same(found.module(x)[0], expected(model, profile, x))


def test_an_inexact_fold_is_an_error(monkeypatch):
    model = frozen(MODELS["convolution"][0])
    monkeypatch.setattr(folding, "_along", lambda scale, axis, op: scale.reshape(-1) * 1.01)
    with pytest.raises(SelfCheckError, match="folded graph does not compute"):
        folded(model, profile_of(model))


def test_a_folded_onnx_graph_has_no_trace_of_its_gates(tmp_path):
    model = frozen(MODELS["batch norm"][0])
    profile = profile_of(model)
    exported = export_graphs(model, tmp_path, profile, graphs=("baked",), fold=True)
    graph = onnx.load(exported.baked).graph
    assert [(node.op_type, module_scope(node)) for node in graph.node] == [
        ("Conv", "stem"),
        ("Conv", "before.0"),
        ("BatchNormalization", "before.1"),
    ]
    session = onnxruntime.InferenceSession(str(exported.baked), providers=["CPUExecutionProvider"])
    x = torch.randn(4, 3, 9, 9)
    wanted = expected(model, profile, x).detach().numpy()
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()
    assert fold(*baked_module(model, profile, {key: key for key in profile}), [x]).folds[0].folded

import pytest
import torch
from torch import nn

from fxaudit.errors import TraceError
from fxaudit.model.load import subject
from fxaudit.model.state import remember, set_back
from fxaudit.model.trace import trace

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


class Remembering(nn.Module):
    """What a call leaves behind is up to `after`."""

    def __init__(self, after):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.history, self.table, self.last, self._hidden = [], {"calls": 0}, None, 0
        self.constant = torch.ones(3)
        self.after = after

    def forward(self, x):
        y = self.layer(x)
        self.after(self, y)
        return y


def keep_output(module, y):
    module.last = y


def append(module, y):
    module.history.append(y)


def count_in_a_dict(module, y):
    module.table["calls"] += 1


def count_privately(module, y):
    module._hidden += 1


def add_an_attribute(module, y):
    module.fresh = 1


def remove_an_attribute(module, y):
    vars(module).pop("table", None)


def write_to_a_tensor(module, y):
    module.constant.add_(1)


def add_a_buffer(module, y):
    module.register_buffer("cache", torch.zeros(3), persistent=False)


def grow_a_buffer(module, y):
    module.seen = torch.zeros(5)


CHANGES = {
    keep_output: "last", append: "history", count_in_a_dict: "table", count_privately: "_hidden",
    add_an_attribute: "fresh", remove_an_attribute: "table", write_to_a_tensor: "constant", add_a_buffer: "cache",
    grow_a_buffer: "seen",
}  # fmt: skip


def snapshot(module):
    plain = {name: value for name, value in vars(module).items() if name not in vars(nn.Module())}
    return {
        "history": list(module.history), "table": dict(module.table), "last": module.last, "hidden": module._hidden,
        "constant": module.constant.tolist(), "names": sorted(plain), "buffers": sorted(module._buffers),
        "seen": module.seen.tolist(), "modules": sorted(module._modules),
    }  # fmt: skip


@pytest.mark.parametrize("after", CHANGES, ids=lambda after: after.__name__)
def test_what_a_call_leaves_behind_is_set_back(after):
    module = Remembering(after)
    before, objects = snapshot(module), (module.history, module.table, module.constant, module.seen)
    state = remember(module)
    module(X)
    assert set_back(module, state) == [CHANGES[after]]
    assert snapshot(module) == before
    assert all(
        a is b for a, b in zip(objects, (module.history, module.table, module.constant, module.seen), strict=True)
    )


def test_a_call_that_leaves_nothing_behind_changes_nothing():
    module = Remembering(lambda module, y: None)
    state = remember(module)
    module(X)
    assert set_back(module, state) == []


@pytest.mark.parametrize("after", [keep_output, append, add_an_attribute])
def test_tracing_leaves_no_trace_in_the_model(after):
    module = Remembering(after)
    before = snapshot(module)
    result = trace(subject(module, X))
    assert snapshot(module) == before
    assert CHANGES[after] in next(f.text for f in result.findings if f.kind == "mutated-attribute")


@pytest.mark.parametrize("after", [keep_output, append])
def test_a_failed_trace_leaves_no_trace_in_the_model(after):
    class Failing(Remembering):
        def forward(self, x):
            return super().forward(x) if x.sum() > 1e9 else -super().forward(x)

    module = Failing(after)
    before = snapshot(module)
    with pytest.raises(TraceError):
        trace(subject(module, X))
    assert snapshot(module) == before


class Sticky(nn.Module):
    """The modulation of the first call stays in force for all later ones."""

    def __init__(self):
        super().__init__()
        self.scale = None

    def forward(self, x):
        if self.scale is None:
            self.scale = 2.0
            return x
        return x * self.scale


def test_a_first_call_that_differs_from_later_ones_is_a_finding():
    result = trace(subject(Sticky(), X))
    assert [finding.kind for finding in result.findings] == ["cold-call", "mutated-attribute"]


class Rescaled(nn.Module):
    """Divides its own weights in its first call, as rwkv does."""

    def __init__(self):
        super().__init__()
        self.layer, self.is_rescaled = nn.Linear(3, 3), False

    def forward(self, x):
        if not self.is_rescaled:
            with torch.no_grad():
                self.layer.weight.div_(2)
            self.is_rescaled = True
        return self.layer(x)


def test_a_call_that_changes_parameters_is_a_finding():
    result = trace(subject(Rescaled(), X))
    assert [finding.kind for finding in result.findings] == ["mutates-parameters"]


def test_a_model_that_changed_its_parameters_still_computes_what_it_did():
    module, other = Rescaled(), Rescaled()
    other.load_state_dict(module.state_dict())
    trace(subject(module, X))
    with torch.no_grad():
        assert torch.equal(module(X), other(X))


class RescaledAndRemembering(Rescaled):
    def forward(self, x):
        self.last = super().forward(x)
        return self.last


def test_a_model_that_changed_its_parameters_keeps_nothing_of_its_trace():
    module = RescaledAndRemembering()
    trace(subject(module, X))
    assert type(module.last) is torch.Tensor


class Growing(nn.Module):
    """Its table of positions grows with its input, as tables of rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(1.0), persistent=False)

    def forward(self, x):
        if x.shape[1] > self.table.shape[0]:
            self.table = torch.arange(float(x.shape[1]))
        return x + self.table


def test_a_buffer_that_grew_is_set_back_and_is_no_change_of_parameters():
    module = Growing()
    result = trace(subject(module, X))
    assert module.table.shape == (1,)
    assert "table" in next(finding.text for finding in result.findings if finding.kind == "mutated-attribute")
    assert "mutates-parameters" not in [finding.kind for finding in result.findings]

import copy

import numpy as np
import pytest
import torch
from torch import nn

from fxaudit.execution.numerics import Referee, ask, limit_for
from fxaudit.model.load import subject
from fxaudit.model.trace import trace
from tests.execution.suite import CASES, INPUTS


def traced_case(name):
    torch.manual_seed(0)
    (case,) = (case for case in CASES if case.name == name)
    model, inputs = case.build().eval(), case.inputs()
    return model, inputs, trace(subject(model, (inputs[:2],)))


@pytest.mark.parametrize(
    "name", ["several exits", "a loop until the state is small", "a scan over tokens", "GRU of two layers"]
)
def test_the_referee_is_the_model_in_float64(name):
    model, inputs, traced = traced_case(name)
    wide = copy.deepcopy(model).double()
    for i in range(0, INPUTS, 3):
        found = ask(traced.graph_module, traced.initial_state, [inputs[i : i + 1]])
        with torch.no_grad():
            expected = wide(inputs[i : i + 1].double())
        assert found.skipped == ""
        assert found.outputs[0].dtype == torch.float64
        torch.testing.assert_close(found.outputs[0], expected, rtol=1e-12, atol=1e-12)


class Insistent(nn.Module):
    """Names float32 in its code and writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return (x.to(torch.float32) / torch.full((3,), 7.0, dtype=torch.float32)) + self.calls


def test_dtypes_that_the_code_names_are_widened_and_buffers_stay_as_they_were():
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    traced = trace(subject(Insistent(), (x,)))
    start = traced.initial_state["calls"].clone()
    (found,) = ask(traced.graph_module, traced.initial_state, [x]).outputs
    torch.testing.assert_close(found, x.double() / 7 + float(start) + 1, rtol=1e-15, atol=0)
    assert torch.equal(traced.initial_state["calls"], start)


def test_a_referee_above_its_memory_budget_is_not_asked_and_says_so():
    traced = trace(subject(nn.Linear(8, 8), (torch.randn(2, 8),)))
    found = ask(traced.graph_module, traced.initial_state, [torch.randn(2, 8)], budget=8 * (72 + 16) - 1)
    assert found.outputs is None
    assert "GiB" in found.skipped
    assert ask(traced.graph_module, traced.initial_state, [torch.randn(2, 8)], budget=8 * (72 + 16)).outputs


def test_a_graph_that_float64_does_not_run_says_why():
    @torch.library.custom_op("fxaudit_tests::narrow_only", mutates_args=())
    def narrow_only(x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise NotImplementedError("no kernel for double")
        return x + 1

    narrow_only.register_fake(torch.empty_like)

    class Narrow(nn.Module):
        def forward(self, x):
            return narrow_only(x)

    x = torch.randn(2, 3)
    traced = trace(subject(Narrow(), (x,)))
    found = ask(traced.graph_module, traced.initial_state, [x])
    assert found == Referee(None, found.skipped)
    assert "no kernel for double" in found.skipped


def refereed(*values, decides=False):
    return Referee((torch.tensor(values, dtype=torch.float64),), decides=decides)


def test_the_limit_is_four_times_torchs_own_error_and_one_rounding_of_the_largest_element():
    referee = refereed(1.0, -2.0)
    expected = (referee.outputs[0] + torch.tensor([3e-6, 0.0])).float()
    limit = limit_for(expected, referee, 0)
    assert limit.torch_error == pytest.approx(3e-6, rel=0.05)
    assert limit.largest == pytest.approx(4 * limit.torch_error + 2 * 2.0**-23)
    assert limit.reference.dtype == np.float64


@pytest.mark.parametrize(
    ("referee", "heard"),
    [
        (Referee(None, "too large"), False),
        (refereed(1.0), False),  # another shape
        (refereed(1.0, -2.01), True),
        (refereed(1.0, -2.01, decides=True), False),  # a choice was made otherwise
        (refereed(1.0, -2.001, decides=True), True),
        (refereed(1.0, -3.0), False),  # torch's own result means nothing
    ],
)
def test_without_a_referee_that_took_the_same_course_errors_are_relative(referee, heard):
    limit = limit_for(torch.tensor([1.0, -2.0]), referee, 0)
    assert (limit.largest is not None) is heard
    assert limit.relative == 1e-5


def test_whole_numbers_must_be_equal():
    assert limit_for(torch.ones(2, dtype=torch.int64), Referee(None), 0).relative == 0.0


class Choosing(nn.Module):
    def forward(self, x):
        return x.topk(2, -1).values


@pytest.mark.parametrize(("module", "decides"), [(nn.Linear(4, 4), False), (Choosing(), True)])
def test_a_graph_that_chooses_is_known_to(module, decides):
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    traced = trace(subject(module, (x,)))
    assert ask(traced.graph_module, traced.initial_state, [x]).decides is decides

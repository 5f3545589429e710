"""Failures that others have reported in public, numbered as in docs/failures.md, each under test where it could arise
here."""

import ast
import dataclasses
import re
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from small_models import Branching, SqueezeExcite
from torch import nn
from torch.nn import functional as F

from fxaudit import ops, stages
from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.errors import DataError, TraceError
from fxaudit.model.load import subject
from fxaudit.model.trace import run_flat, trace

ROOT = Path(__file__).resolve().parents[2]
FAILURES = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def traced(module: nn.Module, *args, **kwargs):
    torch.manual_seed(0)
    return trace(subject(module, kwargs or args))


def run(result, *args, **kwargs):
    with torch.no_grad():
        leaves = result.flatten((args, kwargs))
        return result.unflatten(run_flat(result.graph_module, leaves, result.initial_state))


def assert_same(result, *args):
    """The traced graph computes, bit for bit, what the model computes on inputs that it was not traced with."""
    with torch.no_grad():
        assert torch.equal(run(result, *args), result.subject.module(*args))


# --- Python around shapes -------------------------------------------------------------------------------------------


class Splat(nn.Module):
    def forward(self, x):
        return x.view(*x.shape[:-1], 2, -1).transpose(-1, -2).reshape((*x.shape[:2], -1))


class Unpack(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(6, 12)

    def forward(self, x):
        batch, tokens, width = x.shape
        first, second = self.projection(x).chunk(2, -1)
        return (first * second).reshape(batch, tokens * width)


class Scaled(nn.Module):
    def forward(self, x):
        return x * float(1.0 / x.shape[1])


class Concatenated(nn.Module):
    def forward(self, x):
        return x.reshape(x.shape[:-1] + (3, 2)).sum(-1)  # noqa: RUF005


class Checked(nn.Module):
    """As einops does, it refuses what is no tensor."""

    def forward(self, x):
        if not isinstance(x, torch.Tensor):
            raise RuntimeError(f"Tensor type unknown: {type(x)}")
        return x * 2


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(Splat(), id="2-splat-of-a-shape"),
        pytest.param(Unpack(), id="3-unpacking"),
        pytest.param(Scaled(), id="6-float-of-a-size"),
        pytest.param(Concatenated(), id="7-sum-of-shapes"),
        pytest.param(Checked(), id="8-type-check"),
    ],
)
def test_python_on_shapes_and_types_is_traced_for_any_batch(module):
    assert_same(traced(module, drawn(2, 5, 6)), drawn(3, 5, 6, seed=1))


def test_4_optional_and_boolean_arguments_need_no_mention():
    class Optional(nn.Module):
        def forward(self, x, mask=None, double=False):
            x = x if mask is None else x * mask
            return 2 * x if double else x

    assert_same(traced(Optional(), drawn(2, 3)), drawn(4, 3, seed=1))


# --- control flow on data -------------------------------------------------------------------------------------------


def test_1_a_branch_on_data_is_refused_with_a_reason():
    with pytest.raises(TraceError) as caught:
        traced(Branching(), drawn(2, 3))
    assert caught.value.reason == "data-dependent-branch"


class Indexed(nn.Module):
    def forward(self, x):
        return x[:, int(x[0].argmax())]


class Computed(nn.Module):
    def forward(self, x):
        return x * float(x[0].numpy().sum())


@pytest.mark.parametrize(
    ("module", "reason"), [(Indexed(), "data-dependent-branch"), (Computed(), "numpy")], ids=["index", "numpy"]
)
def test_16_a_python_number_read_from_activations_is_refused(module, reason):
    with pytest.raises(TraceError) as caught:
        traced(module, drawn(2, 3))
    assert caught.value.reason == reason
    assert "test_public_failures.py" in caught.value.where


class Experts(nn.Module):
    """The loop over experts that were hit, as in transformers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for expert in chosen.unique():
            token, slot = torch.where(chosen == expert)
            out.index_add_(0, token, self.layers[int(expert)](x[token]) * weights[token, slot, None])
        return out


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(4, 3), Experts()

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        return self.experts(x, weights, chosen)


@pytest.fixture(scope="module")
def mixture():
    return traced(Mixture(), drawn(6, 4))


def test_17_a_loop_over_the_experts_that_were_hit_becomes_an_opaque_leaf(mixture):
    assert [leaf.path for leaf in mixture.unseen] == ["experts"]
    assert_same(mixture, drawn(9, 4, seed=1))


def test_17_the_router_before_such_a_loop_stays_visible(mixture):
    assert "topk" in {ops.op_name(node) for node in mixture.graph.nodes}


def test_38_experts_that_the_example_does_not_reach_are_not_dropped(mixture):
    module = mixture.subject.module
    with torch.no_grad():
        module.router.bias.copy_(torch.tensor([0.0, 9.0, 9.0]))
        assert_same(mixture, drawn(5, 4, seed=2))
        module.router.bias.copy_(torch.tensor([9.0, 0.0, 9.0]))
        assert_same(mixture, drawn(5, 4, seed=2))


class Long(nn.Module):
    """Rotary scaling that depends on the largest position, as longrope does."""

    def forward(self, x, positions):
        factor = 2.0 if positions.max() + 1 > 8 else 1.0
        return x * factor


@pytest.fixture(scope="module")
def long():
    return traced(Long(), drawn(2, 4), torch.arange(4).expand(2, 4).contiguous())


def test_18_a_branch_on_positions_is_taken_as_in_the_example_and_said(long):
    assert "branch-specialised" in [finding.kind for finding in long.findings]
    assert torch.equal(run(long, drawn(2, 4), torch.arange(4).expand(2, 4)), drawn(2, 4))


def test_18_inputs_that_would_take_the_other_branch_are_refused(long):
    with pytest.raises(DataError, match="assumption"):
        run(long, drawn(2, 4), torch.arange(8, 12).expand(2, 4))


def test_21_a_number_among_the_inputs_is_never_baked_in_silently():
    class Power(nn.Module):
        def forward(self, x, k):
            return x * k

    result = traced(Power(), drawn(2, 3), 2)
    with pytest.raises(DataError):
        run(result, drawn(2, 3), 3)


# --- the batch ------------------------------------------------------------------------------------------------------


def test_19_attention_takes_any_batch():
    class Attention(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    assert_same(traced(Attention(), drawn(2, 2, 5, 4)), drawn(7, 2, 5, 4, seed=1))


def test_20_a_batch_that_was_specialised_is_a_finding_and_other_batches_are_refused():
    class Fixed(nn.Module):
        def forward(self, x):
            return x.view(2, 3) * 2

    result = traced(Fixed(), drawn(2, 3))
    assert [finding.kind for finding in result.findings] == ["static-batch"]
    with pytest.raises(DataError):
        run(result, drawn(3, 3))


Pair = namedtuple("Pair", "first second")


def test_23_inputs_of_a_type_of_their_own_keep_the_dynamic_batch():
    class Sum(nn.Module):
        def forward(self, pair):
            return pair.first + pair.second

    result = traced(Sum(), Pair(drawn(2, 3), drawn(2, 3)))
    assert result.is_batch_dynamic
    assert_same(result, Pair(drawn(5, 3), drawn(5, 3, seed=1)))


def test_37_a_dynamic_batch_stays_dynamic(mixture):
    assert mixture.is_batch_dynamic


# --- outputs --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None


def test_22_a_dataclass_is_returned_as_one():
    class Model(nn.Module):
        def forward(self, x):
            return Output(2 * x)

    out = run(traced(Model(), drawn(2, 3)), drawn(2, 3))
    assert isinstance(out, Output)
    assert torch.equal(out.logits, 2 * drawn(2, 3))
    assert out.hidden is None


def test_22_an_output_of_an_unknown_type_is_refused_with_how_to_register_it():
    class Box:
        def __init__(self, x):
            self.x = x

    class Model(nn.Module):
        def forward(self, x):
            return Box(2 * x)

    with pytest.raises(TraceError) as caught:
        traced(Model(), drawn(2, 3))
    assert caught.value.reason == "output-type"


# --- parameters -----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids))


def test_24_tied_weights_stay_one_tensor():
    result = traced(Tied(), torch.tensor([[1, 2], [3, 6]]))
    read = {getattr_of(result.graph_module, str(n.target)) for n in result.graph.nodes if n.op == "get_attr"}
    assert read == {id(result.subject.module.embedding.weight)}


def getattr_of(module: nn.Module, path: str) -> int:
    for part in path.split("."):
        module = getattr(module, part)
    return id(module)


def test_25_a_module_that_is_called_twice_keeps_its_weights():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(self.layer(x))

    model = Twice()
    before = model.layer.weight.clone()
    assert_same(traced(model, drawn(2, 3)), drawn(3, 3, seed=1))
    assert torch.equal(model.layer.weight, before)


def test_53_two_parameters_of_one_memory_are_two_parameters():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            memory = torch.ones(2, 3)
            self.first, self.second = nn.Parameter(memory[0]), nn.Parameter(memory[0])

        def forward(self, x):
            return x * self.first + self.second

    result = traced(Views(), drawn(2, 3))
    assert {str(n.target) for n in result.graph.nodes if n.op == "get_attr"} == {"first", "second"}


@pytest.mark.parametrize(
    "normalise",
    [
        torch.nn.utils.parametrizations.weight_norm,
        torch.nn.utils.parametrizations.spectral_norm,
        torch.nn.utils.weight_norm,
        torch.nn.utils.spectral_norm,
        torch.nn.utils.parametrizations.orthogonal,
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_31_a_parametrized_weight_is_computed_in_the_graph(normalise):
    result = traced(nn.Sequential(normalise(nn.Linear(3, 3))).eval(), drawn(2, 3))
    assert result.fidelity.bitwise
    assert_same(result, drawn(5, 3, seed=1))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_54_a_weight_normalised_gate_is_frozen_without_copying_the_model():
    model = SqueezeExcite()
    torch.nn.utils.weight_norm(model.fc2)
    assert stages.inspect(model, drawn(2, 3, 8, 8)).identity.bitwise


# --- state, mutation, modes -----------------------------------------------------------------------------------------


def test_27_a_slice_of_the_input_that_is_overwritten_is_a_finding_and_exact():
    class Cut(nn.Module):
        def forward(self, x):
            x[:, 1:] = 0
            return x + 1

    result = traced(Cut(), drawn(2, 3))
    assert [finding.kind for finding in result.findings] == ["mutated-input"]
    x = drawn(3, 3, seed=1)
    expected = torch.cat([x[:, :1] + 1, torch.ones(3, 2)], 1)
    assert torch.equal(run(result, x), expected)
    assert torch.equal(x, drawn(3, 3, seed=1))


def test_28_a_buffer_that_is_added_to_is_written_in_every_run():
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x):
            self.total += x.sum(0)
            return x + self.total

    x = drawn(2, 3)
    result = traced(Running(), x)
    after_warm_up = x.sum(0)
    y = drawn(2, 3, seed=1)
    for _ in range(2):
        assert torch.equal(run(result, y), y + (after_warm_up + y.sum(0)))


def test_29_a_model_in_training_mode_is_traced_in_eval_mode_and_put_back():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).train()
    result = traced(model, drawn(2, 3))
    assert model.training
    assert result.settings["mode"] == "eval"


def test_36_dropout_of_a_model_in_training_mode_is_off_in_the_graph():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).train()
    assert torch.equal(run(traced(model, drawn(2, 3)), drawn(4, 3)), model[0](drawn(4, 3)))


def test_30_a_coefficient_that_is_written_over_later_is_recorded_as_it_was():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            x = self.conv(x)
            gate = torch.sigmoid(self.fc(x.mean((2, 3), keepdim=True)))
            out = x * gate
            gate.mul_(0)
            return out + gate

    model, x = InPlace(), drawn(2, 3, 4, 4)
    frozen = stages.freeze(model, x)
    _, coefficients = frozen.live(x)
    with torch.no_grad():
        expected = torch.sigmoid(model.fc(model.conv(x).mean((2, 3), keepdim=True)))
    (value,) = coefficients.values()
    assert torch.equal(value.reshape(-1), expected.reshape(-1))


# --- numbers --------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.first(x) * 0.5
            with torch.autocast("cpu", enabled=False):
                z = self.second(y.float())
        return y, z


def test_32_scalars_keep_their_dtype_beside_autocast():
    dtypes = {ops.dtype(node) for node in traced(Mixed(), drawn(2, 4)).graph.nodes if node.op == "call_function"}
    assert dtypes == {torch.bfloat16, torch.float32}


def test_33_autocast_is_in_the_graph():
    result = traced(Mixed(), drawn(2, 4))
    found, expected = run(result, drawn(3, 4, seed=1)), result.subject.module(drawn(3, 4, seed=1))
    assert [tensor.dtype for tensor in found] == [torch.bfloat16, torch.float32]
    assert all(map(torch.equal, found, expected))


class Spectrum(nn.Module):
    def forward(self, x):
        return torch.fft.ifft(torch.fft.fft(x) * (1 + 2j)).real


class Rotated(nn.Module):
    def forward(self, x):
        return x * torch.polar(torch.ones(3), torch.arange(3.0))


@pytest.mark.parametrize(
    ("module", "x"), [(Spectrum(), drawn(2, 8)), (Rotated(), torch.complex(drawn(2, 3), drawn(2, 3)))]
)
def test_34_complex_numbers_are_traced_bitwise(module, x):
    result = traced(module, x)
    assert result.fidelity.bitwise
    assert_same(result, x.repeat(2, 1) * 0.5)


# --- matching and rewriting -----------------------------------------------------------------------------------------


class Spelled(nn.Module):
    """One squeeze-excite gate in different words."""

    def __init__(self, spelling: str):
        super().__init__()
        self.conv, self.fc1, self.fc2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.sigmoid, self.spelling = nn.Sigmoid(), spelling

    def forward(self, x):
        x = self.conv(x)
        score = self.fc2(F.relu(self.fc1(x.mean((2, 3), keepdim=True))))
        if self.spelling == "module":
            return x * self.sigmoid(score)
        if self.spelling == "method, gate first":
            return score.sigmoid() * x
        if self.spelling == "function, torch.mul":
            return torch.mul(torch.sigmoid(score), x)
        if self.spelling == "auxiliary loss":
            gate = torch.sigmoid(score)
            return x * gate, gate.square().mean()
        assert self.spelling == "temperature"
        return x * torch.sigmoid(score / 2.5)


def matched(spelling: str):
    torch.manual_seed(0)
    return stages.match(stages.trace(Spelled(spelling), drawn(2, 3, 8, 8)))


@pytest.mark.parametrize("spelling", ["module", "method, gate first", "function, torch.mul"])
def test_11_and_13_every_spelling_of_a_gate_is_found(spelling):
    assert matched(spelling).counts["se-gate"] == 1


def test_14_a_gate_that_also_feeds_a_loss_is_found_and_the_other_reader_named():
    found = matched("auxiliary loss")
    assert found.counts["se-gate"] == 1
    assert found.controllers[0].leaks


def test_15_a_temperature_is_either_matched_or_named_as_what_differs():
    found = matched("temperature")
    misses = [miss for result in found.results if result.pattern.name == "se-gate" for miss in result.near_misses]
    assert found.counts["se-gate"] == 1 or misses


class Adjacent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = SqueezeExcite(), SqueezeExcite()

    def forward(self, x):
        return torch.cat([self.first(x), self.second(x)], 1)


def test_9_and_10_matches_side_by_side_are_all_replaced_exactly():
    frozen = stages.freeze(Adjacent(), drawn(2, 3, 8, 8))
    assert isinstance(frozen, FrozenModel)
    assert [controller.module for controller in frozen.controllers] == ["first", "second"]
    assert stages.identity(frozen).bitwise


def test_5_tracing_twice_gives_one_graph():
    model = Adjacent()
    first, second = traced(model, drawn(2, 3, 8, 8)), traced(model, drawn(2, 3, 8, 8))
    assert first.graph_digest() == second.graph_digest()


# --- the list -------------------------------------------------------------------------------------------------------


ROWS = re.findall(r"^\| (\d+) \|(.+)\|(.+)\|$", FAILURES, re.MULTILINE)


def test_every_public_failure_is_listed_once():
    assert [int(number) for number, _, _ in ROWS] == list(range(1, 56))


@pytest.mark.parametrize(("number", "where"), [(number, where) for number, _, where in ROWS])
def test_each_listed_failure_names_tests_that_exist_or_why_it_cannot_arise(number, where):
    places = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", where)
    for file, name in places:
        source = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        functions = {node.name for node in ast.walk(source) if isinstance(node, ast.FunctionDef)}
        assert not name or name in functions, f"{file} has no {name}"
    assert places or where.strip().startswith("cannot arise:"), where

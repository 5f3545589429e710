import dataclasses

import pytest
import torch
from small_models import Branching, ChangedUnderExport, PairedInputs
from torch import nn

from fxaudit.errors import DataError, TraceError
from fxaudit.model.load import load, subject
from fxaudit.model.trace import restore_state, run_flat, trace


def traced(module: nn.Module, *args, **kwargs):
    return trace(subject(module, kwargs or args))


def kinds(result) -> list[str]:
    return [finding.kind for finding in result.findings]


X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
OTHER = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))


# --- what a trace computes ------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


@pytest.fixture(scope="module")
def mlp():
    return traced(Mlp(), X)


def run(result, *args, **kwargs):
    leaves = result.flatten((args, kwargs))
    with torch.no_grad():
        return result.unflatten(run_flat(result.graph_module, leaves, result.initial_state))


def test_the_graph_computes_what_the_model_computes_on_unseen_inputs(mlp):
    with torch.no_grad():
        assert torch.equal(run(mlp, OTHER), mlp.subject.module(OTHER))


def test_the_linear_layers_stay_whole(mlp):
    assert [str(n.target) for n in mlp.graph.nodes if n.op == "call_function"] == [
        "aten.linear.default",
        "aten.relu.default",
        "aten.linear.default",
    ]


def test_the_weights_are_the_models_own_not_copies(mlp):
    own = {name: p.data_ptr() for name, p in mlp.subject.module.named_parameters()}
    assert {name: p.data_ptr() for name, p in mlp.graph_module.named_parameters()} == own


def test_any_number_of_inputs_may_be_passed(mlp):
    assert mlp.is_batch_dynamic


def test_the_trace_is_compared_on_two_inputs_and_two_batch_sizes_twice_each(mlp):
    assert [comparison.inputs for comparison in mlp.fidelity.comparisons] == [
        "example",
        "example, again",
        "resampled",
        "resampled, again",
        "batch of 3",
        "batch of 3, again",
    ]


def test_a_trace_of_plain_layers_is_bitwise(mlp):
    assert mlp.fidelity.bitwise
    assert mlp.fidelity.max_abs_diff == 0.0


def test_a_trace_of_plain_layers_has_no_finding(mlp):
    assert mlp.findings == ()


def test_equal_models_have_equal_graphs(mlp):
    assert traced(Mlp(), X).graph_digest() == mlp.graph_digest()


def test_another_computation_has_another_graph(mlp):
    class Other(Mlp):
        def forward(self, x):
            return self.second(torch.tanh(self.first(x)))

    assert traced(Other(), X).graph_digest() != mlp.graph_digest()


def test_one_input_is_extended_to_two():
    result = traced(Mlp(), X[:1])
    assert (result.sample_count, result.is_batch_dynamic) == (2, True)


def test_a_source_line_is_kept_for_every_op(mlp):
    assert all("test_trace.py" in n.meta["stack_trace"] for n in mlp.graph.nodes if n.op == "call_function")


def test_a_module_called_twice_has_two_call_indices():
    from fxaudit.ops import module_path

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(self.layer(x))

    result = traced(Twice(), X)
    assert [module_path(n) for n in result.graph.nodes if n.op == "call_function"] == [("layer",), ("layer@1",)]


# --- inputs and outputs ---------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def forward(self, x, scale):
        return x * scale


def test_keyword_inputs_may_come_in_any_order():
    scale = torch.arange(2.0)[:, None]
    result = traced(Scaled(), scale=scale, x=X)
    assert torch.equal(run(result, x=X, scale=scale), X * scale)


def test_input_names_are_those_of_the_forward_method():
    assert set(traced(Scaled(), scale=X, x=X).input_names) == {"x", "scale"}


def test_nested_inputs_are_flattened_to_their_tensors():
    class Nested(nn.Module):
        def forward(self, batch):
            return batch["a"] + batch["rest"][0] * batch["rest"][1]

    batch = {"a": X, "rest": [X + 1, X + 2]}
    result = traced(Nested(), batch)
    assert torch.equal(run(result, batch), X + (X + 1) * (X + 2))


def test_a_number_among_the_inputs_is_passed_on():
    assert torch.equal(run(traced(Scaled(), X, 3.0), X, 3.0), X * 3.0)


def test_a_dict_of_outputs_is_returned_as_a_dict():
    class Named(nn.Module):
        def forward(self, x):
            return {"double": 2 * x, "triple": 3 * x}

    result = traced(Named(), X)
    assert set(run(result, X)) == {"double", "triple"}
    assert torch.equal(run(result, X)["triple"], 3 * X)


def test_outputs_are_named_by_their_keys():
    class Named(nn.Module):
        def forward(self, x):
            return {"double": 2 * x, "triple": 3 * x}

    assert traced(Named(), X).output_names == ("double", "triple")


def test_a_nested_output_is_named_without_quotes_and_brackets():
    class Nested(nn.Module):
        def forward(self, x):
            return {"hidden": (2 * x, 3 * x)}

    assert traced(Nested(), X).output_names == ("hidden.0", "hidden.1")


def test_a_single_output_is_called_output(mlp):
    assert mlp.output_names == ("output",)


def test_a_tuple_of_outputs_is_returned_as_a_tuple():
    class Pair(nn.Module):
        def forward(self, x):
            return 2 * x, 3 * x

    double, triple = run(traced(Pair(), X), X)
    assert torch.equal(double, 2 * X)
    assert torch.equal(triple, 3 * X)


def test_none_among_the_outputs_stays_none():
    class Optional(nn.Module):
        def forward(self, x):
            return 2 * x, None

    assert run(traced(Optional(), X), X)[1] is None


def test_a_model_output_of_transformers_is_returned_as_one():
    from transformers.modeling_outputs import BaseModelOutput

    class Encoder(nn.Module):
        def forward(self, x):
            return BaseModelOutput(last_hidden_state=2 * x)

    out = run(traced(Encoder(), X), X)
    assert isinstance(out, BaseModelOutput)
    assert torch.equal(out.last_hidden_state, 2 * X)


def test_an_output_that_is_an_input_is_returned():
    class Same(nn.Module):
        def forward(self, x):
            return x, 2 * x

    assert torch.equal(run(traced(Same(), X), OTHER)[0], OTHER)


def test_inputs_of_another_structure_are_refused(mlp):
    with pytest.raises(DataError, match="another structure"):
        mlp.flatten(((OTHER, OTHER), {}))


def test_inputs_of_another_shape_are_refused_with_both_shapes(mlp):
    with pytest.raises(DataError) as caught:
        mlp.flatten(((torch.zeros(2, 4),), {}))
    assert caught.value.found == "[2, 4]"
    assert caught.value.expected.endswith(", 3]")


def test_inputs_of_another_rank_are_refused(mlp):
    with pytest.raises(DataError, match="shape"):
        mlp.flatten(((torch.zeros(2, 3, 1),), {}))


def test_inputs_that_break_a_guard_are_refused():
    result = traced(Scaled(), X, X + 1)
    with pytest.raises(DataError, match="assumption"):
        result.flatten(((torch.zeros(2, 3), torch.zeros(4, 3)), {}))


def test_inputs_of_another_dtype_are_refused(mlp):
    with pytest.raises(DataError):
        mlp.flatten(((OTHER.double(),), {}))


# --- findings -------------------------------------------------------------------------------------------------------


class FixedBatch(nn.Module):
    def forward(self, x):
        return x.view(2, 3) * 2


class Unbatched(nn.Module):
    """Its inputs differ in their first axis."""

    def forward(self, x, table):
        return x @ table


def test_a_model_that_fixes_its_batch_is_traced_all_the_same():
    result = traced(FixedBatch(), X)
    assert (result.sample, result.is_batch_dynamic) == (2, False)
    assert torch.equal(run(result, X), 2 * X)


def test_a_model_that_fixes_its_batch_has_one_finding_that_says_so():
    assert kinds(traced(FixedBatch(), X)) == ["static-batch"]


def test_a_model_that_bakes_in_the_size_of_its_batch_has_that_finding():
    class Mean(nn.Module):
        def forward(self, x):
            return x / float(x.shape[0])

    assert kinds(traced(Mean(), X)) == ["static-batch"]


def test_a_batch_that_export_cannot_make_dynamic_is_fixed_with_one_finding():
    class Counted(nn.Module):
        def forward(self, x):
            if not isinstance(x.shape[0], int):
                raise TypeError("a number of inputs is needed")
            return x * 2

    assert kinds(traced(Counted(), X)) == ["static-batch"]


def test_inputs_without_a_common_first_axis_have_no_input_axis():
    result = traced(Unbatched(), X, torch.ones(3, 4))
    assert result.sample is None
    assert kinds(result) == ["static-batch"]


def test_a_model_that_takes_only_an_even_number_of_inputs_is_traced():
    result = traced(PairedInputs(), torch.randn(4, 5, 8))
    x = torch.randn(6, 5, 8)
    with torch.no_grad():
        assert torch.equal(run(result, x), result.subject.module(x))


def test_a_batch_whose_half_is_traced_as_the_constant_one_refuses_other_batches():
    result = traced(PairedInputs(), torch.randn(2, 5, 8))
    with pytest.raises(DataError, match="assumption"):
        run(result, torch.randn(4, 5, 8))


def test_a_random_op_is_a_finding_at_its_line():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + 0 * torch.rand_like(x)

    (finding,) = traced(Noisy(), X).findings
    assert finding.kind == "random-op"
    assert "0 * torch.rand_like(x)" in finding.where


def test_dropout_is_no_random_op_in_a_traced_model():
    assert kinds(traced(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), X)) == []


def test_a_custom_op_is_a_finding():
    @torch.library.custom_op("fxaudit_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    twice.register_fake(torch.empty_like)

    class Opaque(nn.Module):
        def forward(self, x):
            return twice(x)

    (finding,) = traced(Opaque(), X).findings
    assert finding.kind == "opaque-op"
    assert "fxaudit_tests::twice" in finding.text


# --- state ----------------------------------------------------------------------------------------------------------


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Rebound(Counter):
    def forward(self, x):
        self.calls = self.calls + 1
        return x * self.calls


class WritesInput(nn.Module):
    def forward(self, x):
        x.mul_(2)
        return x + 1


@pytest.fixture(scope="module", params=[Counter, Rebound])
def counter(request):
    return traced(request.param(), X)


def test_a_buffer_that_a_call_writes_to_is_a_finding(counter):
    (finding,) = counter.findings
    assert finding.kind == "mutated-buffer"
    assert "`calls`" in finding.text


def test_a_traced_model_with_state_starts_every_run_from_the_state_after_one_call(counter):
    # The warm-up call counted to one; the call that is replayed counts to two, however often it runs.
    assert torch.equal(run(counter, X), 2 * X)
    assert torch.equal(run(counter, OTHER), 2 * OTHER)


def test_the_buffers_of_the_module_are_what_they_were_before(counter):
    assert counter.subject.module.calls.item() == 0


def test_running_the_graph_does_not_write_to_the_models_own_buffers(counter):
    run(counter, X)
    assert counter.subject.module.calls.item() == 0


def test_state_can_be_restored_by_hand(counter):
    counter.graph_module.get_buffer("calls").fill_(9)
    restore_state(counter.graph_module, counter.initial_state)
    assert counter.graph_module.get_buffer("calls").item() == 1


def test_an_input_that_a_call_writes_to_is_a_finding():
    assert kinds(traced(WritesInput(), X.clone())) == ["mutated-input"]


def test_the_example_of_a_model_that_writes_to_its_input_is_left_alone():
    x = X.clone()
    traced(WritesInput(), x)
    assert torch.equal(x, X)


def test_a_model_that_writes_to_its_input_computes_the_right_values():
    assert torch.equal(run(traced(WritesInput(), X.clone()), OTHER.clone()), 2 * OTHER + 1)


def test_running_the_graph_does_not_write_to_the_callers_inputs():
    x = OTHER.clone()
    run(traced(WritesInput(), X.clone()), x)
    assert torch.equal(x, OTHER)


def test_batch_statistics_do_not_move_while_a_model_is_traced():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).train()
    before = model[1].running_mean.clone()
    traced(model, X)
    assert torch.equal(model[1].running_mean, before)


def test_a_model_in_training_mode_is_back_in_it():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).train()
    traced(model, X)
    assert all(module.training for module in model.modules())


def test_a_model_whose_trace_fails_is_back_in_training_mode():
    model = Branching().train()
    with pytest.raises(TraceError):
        traced(model, X)
    assert model.training


def test_the_parameters_are_left_alone():
    model = Mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    traced(model, X)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_gradients_stay_enabled_for_the_models_parameters():
    model = Mlp()
    traced(model, X)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_python_attributes_that_a_call_writes_are_what_they_were_before():
    class Remembers(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return 2 * x

    model = Remembers()
    traced(model, X)
    assert model.calls == 0


# --- failures -------------------------------------------------------------------------------------------------------


def fails(module: nn.Module, *args, **kwargs) -> TraceError:
    with pytest.raises(TraceError) as caught:
        traced(module, *args, **kwargs)
    error = caught.value
    assert all([error.what, error.where or error.found, error.expected, error.remedy]), f"a part is missing:\n{error}"
    assert error.exit_code == 3
    return error


def line_of(file: str, code: str) -> str:
    with open(file) as source:
        return f"{file}:{[line.strip() for line in source].index(code) + 1}"


def test_a_branch_on_data_is_refused_at_the_users_line():
    import small_models

    assert line_of(small_models.__file__, "if x.sum() > 0:") in fails(Branching(), X).where


def test_a_branch_on_data_is_refused_with_the_reason():
    assert "control flow depends on the value" in fails(Branching(), X).what


def test_a_users_line_is_named_also_in_a_folder_called_torch(tmp_path):
    folder = tmp_path / "torch"
    folder.mkdir()
    file = folder / "branching.py"
    file.write_text(
        "import torch\n\n\nclass M(torch.nn.Module):\n    def forward(self, x):\n"
        "        if x.sum() > 0:\n            return x\n        return -x\n\n\n"
        "def build():\n    return M(), torch.randn(2, 3)\n"
    )
    with pytest.raises(TraceError) as caught:
        trace(load(f"{file}:build"))
    assert f"{file}:6" in caught.value.where


def test_a_model_that_differs_under_export_is_refused():
    assert "does not compute what the model computes" in fails(ChangedUnderExport(), X).what


def test_a_difference_beside_an_infinite_output_is_refused():
    class Masked(ChangedUnderExport):
        def forward(self, x):
            return torch.cat([super().forward(x), torch.full_like(x, float("-inf"))], 1)

    assert "does not compute what the model computes" in fails(Masked(), X).what


def test_a_model_that_returns_nan_is_traced():
    class Undefined(nn.Module):
        def forward(self, x):
            return torch.log(-1 - x.abs())

    assert traced(Undefined(), X).fidelity.bitwise


def test_a_python_value_that_changes_from_call_to_call_is_refused():
    class Baked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    assert "does not compute what the model computes" in fails(Baked(), X).what


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


def test_randomness_that_reaches_the_output_is_drawn_alike_in_every_run():
    result = traced(Noisy(), X)
    assert result.fidelity.bitwise
    assert torch.equal(run(result, X), run(result, X))
    assert not torch.equal(run(result, X), X)


def test_a_run_with_random_draws_leaves_the_callers_random_state_alone():
    result = traced(Noisy(), X)
    state = torch.get_rng_state()
    run(result, X)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_fails_on_its_example_is_refused_at_the_users_line():
    class Broken(nn.Module):
        def forward(self, x):
            return x @ torch.zeros(7, 2)

    assert line_of(__file__, "return x @ torch.zeros(7, 2)") in fails(Broken(), X).where


def test_a_model_that_fails_on_its_example_is_refused_with_the_shapes():
    class Broken(nn.Module):
        def forward(self, x):
            return x @ torch.zeros(7, 2)

    assert "float32 [2, 3]" in fails(Broken(), X).remedy


def test_a_trace_that_fails_prints_nothing(capfd):
    with pytest.raises(TraceError):
        traced(Branching(), X)
    assert capfd.readouterr() == ("", "")


def test_a_traced_model_cannot_be_changed(mlp):
    with pytest.raises(dataclasses.FrozenInstanceError):
        mlp.seconds = 0.0

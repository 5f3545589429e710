import sys

import pytest
import torch
from small_models import SqueezeExcite
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_exporting
from torch.utils.checkpoint import checkpoint

from fxaudit import ops, stages
from fxaudit.errors import DataError, ExportError, TraceError, UsageError
from fxaudit.model.load import subject
from fxaudit.model.settings import TraceOptions
from fxaudit.model.trace import run_flat, trace
from fxaudit.model.trace.fidelity import ask_referee


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def traced(module: nn.Module, *args, options=None, **kwargs):
    return trace(subject(module, kwargs or args), options=options)


def kinds(result) -> list[str]:
    return [finding.kind for finding in result.findings]


def names(result) -> set[str]:
    return {ops.op_name(node) for node in result.graph.nodes if node.op == "call_function"}


def run(result, *args):
    with torch.no_grad():
        leaves = result.flatten((args, {}))
        return result.unflatten(run_flat(result.graph_module, leaves, result.initial_state))


X = drawn(2, 3)


# --- code that asks whether it is exported --------------------------------------------------------------------------


class AsksByModule(nn.Module):
    def forward(self, x):
        return 3 * x if torch.compiler.is_exporting() or torch.compiler.is_compiling() else 2 * x


class AsksByName(nn.Module):
    def forward(self, x):
        return 3 * x if is_exporting() else 2 * x


@pytest.mark.parametrize("model", [AsksByModule(), AsksByName()])
def test_code_that_asks_whether_it_is_exported_is_traced_as_eager_runs_it(model):
    assert torch.equal(run(traced(model, X), X), 2 * X)


class EagerBranch(nn.Module):
    """Its eager code checks the data; its export code does not."""

    def forward(self, x):
        if not torch.compiler.is_exporting() and x.sum() > 1e9:
            return -x
        return 2 * x


def test_code_for_export_is_traced_where_the_eager_code_cannot_be_and_said():
    result = traced(EagerBranch(), X)
    assert result.fidelity.bitwise
    assert kinds(result) == ["export-code"]
    assert result.settings["code"] == "export"


class Rounds(nn.Module):
    """Sums in another order when it is exported."""

    def forward(self, x):
        terms = [x / n for n in range(1, 40)]
        return sum(terms[::-1]) if torch.compiler.is_exporting() else sum(terms)


def test_code_for_export_is_traced_on_request_and_judged_by_float64():
    model, x = Rounds(), drawn(8, 16)
    result = traced(model, x, options=TraceOptions(code="export"))
    assert not result.fidelity.bitwise
    assert kinds(result) == ["export-code", "inexact-trace"]
    assert result.is_batch_dynamic
    assert "against float64 the model is off by" in result.findings[1].text


@pytest.mark.parametrize("fails", [False, True])
def test_every_patch_is_undone(fails):
    class Failing(nn.Module):
        def forward(self, x):
            return x.numpy()

    here = sys.modules[__name__]
    before = torch.compiler.is_exporting, torch.compiler.is_compiling, nn.Module.to, here.is_exporting
    try:
        traced(Failing() if fails else AsksByModule(), X)
    except TraceError:
        assert fails
    assert (torch.compiler.is_exporting, torch.compiler.is_compiling, nn.Module.to, here.is_exporting) == before


def test_a_value_that_is_read_from_sizes_alone_needs_no_guard():
    class Padded(nn.Module):
        def forward(self, x):
            mask = torch.ones(x.shape[:2])
            return x if mask.all() else x * mask

    result = traced(Padded(), X)
    assert (result.decisions, kinds(result)) == ((), [])
    assert torch.equal(run(result, drawn(5, 3)), drawn(5, 3))


def test_a_module_that_is_moved_to_where_it_is_needs_no_move():
    class Moves(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            self.layer = self.layer.to(x.dtype)
            return self.layer(x)

    model = Moves()
    assert torch.equal(run(traced(model, X), X), model(X))


def test_a_model_that_refuses_fake_tensors_goes_through_symbolic_trace():
    class Refuses(SqueezeExcite):
        def forward(self, x):
            if isinstance(x, FakeTensor):
                raise TypeError("a real image is needed")
            return super().forward(x)

    model, x = Refuses(), drawn(2, 3, 8, 8)
    result = traced(model, x)
    assert (result.frontend, result.fidelity.bitwise) == ("torch.fx.symbolic_trace", True)
    assert stages.match(result).counts["se-gate"] == 1


# --- opaque leaves --------------------------------------------------------------------------------------------------


class Selected(nn.Module):
    """Computes on the rows of positive sum alone, then puts them back: a size that depends on data."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        rows = [i for i in range(len(x)) if x[i].sum() > 0]
        out = x.clone()
        if rows:
            out[rows] = self.layer(x[rows])
        return out


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.part, self.head = SqueezeExcite(), Selected(), nn.Linear(4, 2)
        self.part = Selected()

    def forward(self, x):
        return self.head(self.part(self.gate(x).mean(3)[:, :4, 0]))


@pytest.fixture(scope="module")
def gated():
    return traced(Gated(), drawn(2, 3, 8, 8))


def test_a_submodule_that_defeats_tracing_becomes_a_leaf(gated):
    assert [leaf.path for leaf in gated.unseen] == ["part"]
    assert "unseen" in names(gated)


def test_a_leaf_runs_the_real_submodule_in_any_batch(gated):
    x = drawn(7, 3, 8, 8, seed=3)
    assert gated.is_batch_dynamic
    with torch.no_grad():
        assert torch.equal(run(gated, x), gated.subject.module(x))


def test_a_leaf_is_reported_with_its_share_of_the_parameters(gated):
    (finding,) = [finding for finding in gated.findings if finding.kind == "opaque-leaf"]
    model = gated.subject.module
    share = 20 / sum(parameter.numel() for parameter in model.parameters())
    assert f"20 parameters ({share:.0%} of the model) are unseen" in finding.text


def test_controllers_outside_a_leaf_are_found_and_replayed_exactly(gated):
    report = stages.inspect(gated)
    assert report.matched.counts["se-gate"] == 1
    assert report.identity.bitwise


def test_a_graph_with_a_leaf_has_one_digest_in_every_process(gated):
    assert traced(Gated(), drawn(2, 3, 8, 8)).graph_digest() == gated.graph_digest()


def test_a_model_with_a_leaf_is_not_exported(gated, tmp_path):
    with pytest.raises(ExportError, match="unseen"):
        stages.export(stages.freeze(gated), tmp_path)


def test_a_leaf_is_left_as_it_was(gated):
    assert "forward" not in vars(gated.subject.module.part)


class Inside(nn.Module):
    def __init__(self, part: nn.Module):
        super().__init__()
        self.part = part

    def forward(self, x):
        return self.part(x).sum(0)


class Filtered(nn.Module):
    def forward(self, x):
        return torch.stack([row for row in x if row.sum() > 0])


class Overwrites(nn.Module):
    def forward(self, x):
        x[0] = 0 if x.sum() > 0 else 1
        return x


@pytest.mark.parametrize("part", [Filtered(), Overwrites()], ids=["size depends on data", "writes to its input"])
def test_a_part_that_cannot_be_a_leaf_is_refused_for_the_reason_that_it_cannot_be_traced(part):
    x = drawn(16, 4)
    with pytest.raises(TraceError) as caught:
        traced(Inside(part), x)
    assert caught.value.reason.startswith("data-dependent")
    assert "test_trace_front_ends.py" in caught.value.where


# --- subgraphs ------------------------------------------------------------------------------------------------------


def test_a_branch_written_with_cond_is_kept_and_said_to_be_unsearched():
    class Conditional(nn.Module):
        def __init__(self):
            super().__init__()
            self.yes, self.no = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: self.yes(x), lambda x: self.no(x), (x,))

    model = Conditional()
    result = traced(model, X)
    assert [finding.text.split()[0] for finding in result.findings if finding.kind == "subgraph"] == ["`cond`"]
    with torch.no_grad():
        for x in (X.abs(), -X.abs()):
            assert torch.equal(run(result, x), model(x))


def test_regions_of_autocast_gradient_mode_and_checkpointing_are_seen_into():
    class Regions(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(3, 3) for _ in range(3))

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                x = self.first(x)
            with torch.enable_grad():
                x = self.second(x.float())
            with torch.inference_mode():
                x = x * 2
            return checkpoint(self.third, x, use_reentrant=False)

    result = traced(Regions(), X)
    assert result.fidelity.bitwise
    assert kinds(result) == []
    assert sum(ops.op_name(node) == "linear" for node in result.graph.nodes) == 3


# --- options --------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LSTM(3, 4, batch_first=True), nn.GRU(4, 4, batch_first=True)

    def forward(self, x):
        return self.second(self.first(x)[0])[0]


def test_recurrent_layers_are_one_op_and_the_flag_that_opens_them_is_named():
    result = traced(Recurrent(), drawn(2, 5, 3))
    assert {"lstm", "gru"} <= names(result)
    assert [finding.kind for finding in result.findings if "--decompose lstm" in finding.text] == [
        "fused-recurrence"
    ] * 2


def test_recurrent_layers_are_unrolled_on_request():
    model, x = Recurrent(), drawn(3, 5, 3, seed=1)
    result = traced(model, drawn(2, 5, 3), options=TraceOptions(decompose=("lstm",)))
    assert not {"lstm", "gru"} & names(result)
    # An LSTM has three sigmoid gates in each step, a GRU two.
    assert sum(ops.op_name(node) == "sigmoid" for node in result.graph.nodes) == 5 * (3 + 2)
    assert result.settings["decompose"] == "lstm"
    with torch.no_grad():
        assert torch.allclose(run(result, x), model(x), atol=1e-6)


@pytest.fixture(scope="module")
def llama():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


IDS = torch.randint(16, (2, 6), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("attention", "op"), [("eager", "softmax"), ("sdpa", "scaled_dot_product_attention")])
def test_the_attention_asked_for_is_traced_recorded_and_set_back(llama, attention, op):
    before = llama.config._attn_implementation
    llama.config._attn_implementation_internal = "sdpa" if attention == "eager" else "eager"
    result = traced(llama, input_ids=IDS, options=TraceOptions(attention=attention))
    assert op in names(result)
    assert result.fidelity.bitwise
    assert result.settings["attn_implementation"] == attention
    assert llama.config._attn_implementation == ("sdpa" if attention == "eager" else "eager")
    llama.config._attn_implementation_internal = before


@pytest.mark.parametrize("options", [TraceOptions(attention="eager"), TraceOptions(experts="grouped_mm")])
def test_a_setting_that_a_model_does_not_have_is_refused(options):
    with pytest.raises(UsageError):
        traced(nn.Linear(3, 3), X, options=options)


def test_other_lengths_are_refused_without_a_dynamic_sequence(llama):
    result = traced(llama, input_ids=IDS)
    with pytest.raises(DataError):
        result.flatten(((), {"input_ids": IDS[:, :5]}))


def test_other_lengths_are_traced_on_request(llama):
    result = traced(llama, input_ids=IDS, options=TraceOptions(dynamic_sequence=True))
    assert result.settings["dynamic_sequence"] == "True"
    longer = torch.cat([IDS, IDS[:, :3]], 1)
    leaves = result.flatten(((), {"input_ids": longer}))
    with torch.no_grad():
        found = result.unflatten(run_flat(result.graph_module, leaves, result.initial_state)).logits
        assert torch.equal(found, llama(input_ids=longer, use_cache=False).logits)


# --- the referee ----------------------------------------------------------------------------------------------------


def test_the_referee_measures_both_sides_against_float64():
    import copy

    model = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 2)).eval()
    result = traced(model, X)
    with torch.no_grad():
        error = (copy.deepcopy(model).double()(X.double()) - model(X).double()).abs().max().item()
    referee = ask_referee(result)
    assert (referee.eager, referee.traced) == (error, error)
    assert referee.accepts


def test_a_model_that_does_not_run_in_float64_has_no_referee():
    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 3))

        def forward(self, x):
            return x.float() @ self.weight

    referee = ask_referee(traced(Single(), X))
    assert "float64" in referee.skipped
    assert not referee.accepts


def test_the_weights_of_a_traced_model_lie_in_the_models_own_memory():
    model = nn.Sequential(nn.Linear(3, 64), nn.BatchNorm1d(64), nn.Linear(64, 2)).eval()
    result = traced(model, X)
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    held = [*result.graph_module.parameters(), *result.graph_module.buffers()]
    assert {tensor.untyped_storage().data_ptr() for tensor in held} <= own


def test_a_model_without_values_is_traced_and_matched_but_compared_with_nothing():
    with torch.device("meta"):
        model, x = SqueezeExcite(), torch.empty(2, 3, 8, 8)
    report = stages.inspect(model, x)
    assert report.matched.counts["se-gate"] == 1
    assert (report.traced.fidelity.is_measured, report.identity) == (False, None)
    assert "no-values" in kinds(report.traced)


# --- what is asked of every model -----------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm.train()(x) if isinstance(self.norm, nn.BatchNorm1d) else self.norm(x)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Normed(nn.BatchNorm1d(3)), True),
        (nn.BatchNorm1d(3, track_running_stats=False), True),
        (nn.BatchNorm1d(3), False),
        (nn.LayerNorm(3), False),
    ],
    ids=["set to training in forward", "without running statistics", "batch norm", "layer norm"],
)
def test_a_norm_over_the_batch_is_a_finding(model, expected):
    assert ("train-mode-norm" in kinds(traced(model, X))) is expected


@pytest.mark.parametrize(
    "x",
    [
        drawn(3, 2).t(),
        drawn(2, 6)[:, ::2],
        drawn(1, 3).expand(2, 3),
        torch.arange(6).reshape(2, 3),
        torch.tensor([[True, False, True], [False, False, True]]),
        drawn(2, 3).to(torch.bfloat16),
    ],
    ids=["transposed", "with gaps", "expanded", "integers", "booleans", "bfloat16"],
)
def test_inputs_of_any_layout_and_dtype_are_traced_bitwise(x):
    class Model(nn.Module):
        def forward(self, x):
            return (x * 2).cumsum(1), x.sum()

    result = traced(Model(), x)
    assert result.fidelity.bitwise
    assert all(map(torch.equal, run(result, x), ((x * 2).cumsum(1), x.sum())))


class Needy(nn.Module):
    def forward(self, x, mask):
        return x * mask


class Looping(nn.Module):
    def forward(self, x):
        for row in x.abs().sum(1).nonzero():
            x = x + x[row]
        return x


@pytest.mark.parametrize(
    ("model", "reason", "remedy"),
    [(Needy(), "missing-input", "float32 [2, 3]"), (Looping(), "data-dependent-size", "densely")],
)
def test_a_refusal_names_its_reason_its_line_and_what_to_do(model, reason, remedy):
    with pytest.raises(TraceError) as caught:
        traced(model, X)
    error = caught.value
    assert error.reason == reason
    assert remedy in error.remedy
    assert "test_trace_front_ends.py" in error.where

"""Counts in torch and onnxruntime against closed forms, and the verdicts drawn from them."""

import json
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxaudit
from fxaudit.errors import DataError, ExportError, RunError, SelfCheckError
from fxaudit.execution.export import export_graphs
from fxaudit.execution.options import ExecutionOptions
from fxaudit.execution.profile import CountedRun
from fxaudit.execution.proof import Proof
from fxaudit.execution.verdict import classify, execute, one_at_a_time, unexported

WIDTH, TOKENS, HEADS = 16, 6, 4


class Block(nn.Module):
    """A block of a FeatureGate Transformer: both residual branches are gated feature by feature."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out, self.gate = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.other_gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = self.qkv(h).unflatten(-1, (3 * HEADS, WIDTH // HEADS)).transpose(1, 2).chunk(3, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + torch.sigmoid(self.gate(h)) * self.out(mixed)
        h = self.other_norm(x)
        return x + torch.sigmoid(self.other_gate(h)) * self.down(F.gelu(self.up(h)))


BLOCK_FLOPS = 2 * TOKENS * (3 + 1 + 4 + 4 + 2) * WIDTH**2 + 4 * TOKENS**2 * WIDTH
GATE_FLOPS = 2 * TOKENS * WIDTH**2


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value, self.extra = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def gated(self, x):
        return torch.sigmoid(self.gate(x)) * self.value(x)

    def forward(self, x):
        return self.gated(x)


class BranchOnInput(Gated):
    def forward(self, x):
        h = self.gated(x)
        return torch.cond(x.mean() > 0, lambda h: h + self.extra(h), lambda h: h.clone(), (h,))


class BranchOnGate(Gated):
    """The branch is decided by the coefficient, so freezing it makes the work static."""

    def forward(self, x):
        gate = torch.sigmoid(self.gate(x))
        h = gate * self.value(x)
        return torch.cond(gate.mean() > 0.5, lambda h: h + self.extra(h), lambda h: h.clone(), (h,))


class Selecting(Gated):
    def forward(self, x):
        h = self.gated(x).reshape(-1, WIDTH)
        return self.extra(h.index_select(0, torch.nonzero(x.reshape(-1, WIDTH)[:, 0] > 0)[:, 0]))


class Routed(Gated):
    """Every token goes to one of two experts of equal cost."""

    def forward(self, x):
        h = self.gated(x).reshape(-1, WIDTH)
        first = x.reshape(-1, WIDTH)[:, 0] > 0
        out = torch.zeros_like(h)
        for expert, chosen in ((self.extra, first), (self.value, ~first)):
            rows = torch.nonzero(chosen)[:, 0]
            out = out.index_add(0, rows, expert(h.index_select(0, rows)))
        return out


class Fourier(Gated):
    def forward(self, x):
        return torch.fft.fft(self.gated(x)).abs()


class OwnProduct(nn.Module):
    """Multiplies two parameters in each call, and counts its calls: neither depends on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.u, self.v = nn.Parameter(torch.randn(WIDTH, 4)), nn.Parameter(torch.randn(4, WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return torch.sigmoid(self.gate(x)) * (x @ (self.u @ self.v)) + self.calls


class Recurrent(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 8, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(WIDTH, 8, batch_first=True)
        self.spread = nn.ConvTranspose1d(8, 4, 3, padding=1)

    def forward(self, x):
        return self.spread(self.gru(self.lstm(self.gated(x))[0])[0].transpose(1, 2))


def x(batch=4, shift=0.0):
    return torch.randn(batch, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)) + shift


def means(frozen):
    """For each coefficient its mean over samples and positions; an index is the first one found."""
    leaves = frozen.traced.flatten(frozen.traced.subject.arguments)
    profile = {}
    for coefficient, value in zip(frozen.coefficients, frozen.run_tapped(leaves)[1], strict=False):
        averaged = [
            i
            for i, axis in enumerate(coefficient.axes)
            if any(coefficient.roles.get(name) in ("sample", "position") for name in axis)
        ]
        if value.dtype.is_floating_point:
            profile[coefficient.key] = value.mean(averaged, keepdim=True)
        else:
            profile[coefficient.key] = value[
                tuple(slice(1) if i in averaged else slice(None) for i in range(value.ndim))
            ]
    return profile


def audited(model, example, directory, *, inputs=None, baked=True, probing=True):
    torch.manual_seed(0)
    frozen = fxaudit.freeze(model().eval(), example)
    exported = export_graphs(frozen, directory, means(frozen) if baked else None)
    leaves = frozen.traced.flatten(((inputs,), {}) if inputs is not None else frozen.traced.subject.arguments)
    options = ExecutionOptions(probing=probing)
    return frozen, exported, execute(frozen, exported, one_at_a_time(frozen.traced, leaves), options=options)


def counts(profile, form, kind="flops"):
    return [row[kind][form] for row in profile.per_input]


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    return audited(lambda: nn.Sequential(Block(), Block()), (x(),), tmp_path_factory.mktemp("blocks"))


@pytest.fixture(scope="module")
def squeeze(tmp_path_factory):
    timm = pytest.importorskip("timm")
    example = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))

    def make():
        return timm.create_model("seresnet18", zero_init_last=False)

    return audited(make, (example,), tmp_path_factory.mktemp("squeeze"))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    ids = torch.randint(0, 64, (3, 8), generator=torch.Generator().manual_seed(0))
    return audited(
        lambda: transformers.MixtralForCausalLM(config), {"input_ids": ids}, tmp_path_factory.mktemp("mixtral")
    )


def test_the_flops_of_gated_blocks_are_those_of_the_closed_form(blocks):
    _, _, profile = blocks
    assert profile.inputs == 4
    assert profile.exact is True
    for kind in ("flops", "fx"):
        assert counts(profile, "live", kind) == [2 * BLOCK_FLOPS] * 4
        assert (
            counts(profile, "bound", kind) == counts(profile, "baked", kind) == [2 * BLOCK_FLOPS - 4 * GATE_FLOPS] * 4
        )
    assert counts(profile, "live", "setup") == [0] * 4


def test_the_cone_flops_of_the_report_are_the_difference_of_the_executed_ones(blocks, squeeze, mixtral):
    from fxaudit.execution.flops import count_flops

    for frozen, _, profile in (blocks, squeeze, mixtral):
        cones = sum(count_flops(c.cone, frozen.traced.sample).total for c in frozen.controllers)
        assert cones == counts(profile, "live")[0] - counts(profile, "bound")[0] > 0


def test_squeeze_excite_gates_are_removed_with_their_nodes_and_parameters(squeeze):
    frozen, _, profile = squeeze
    modules = [m for m in frozen.traced.subject.module.modules() if type(m).__name__ == "SEModule"]
    weights = sum(m.fc1.weight.numel() + m.fc2.weight.numel() for m in modules)
    assert len(modules) == 8
    assert counts(profile, "live") == [297_291_776] * 2
    assert counts(profile, "bound") == [297_291_776 - 2 * weights] * 2
    assert profile.removed["parameters"] == sum(p.numel() for m in modules for p in m.parameters())
    # A mean, two convolutions, a ReLU and a sigmoid each.
    assert profile.removed["ops"] == {"Conv": 16, "ReduceMean": 8, "Relu": 8, "Sigmoid": 8}
    assert {row["module"].rpartition(".se")[0] for row in profile.removed["modules"]} == {
        f"layer{i}.{j}" for i in range(1, 5) for j in range(2)
    }


def test_routers_are_removed_and_the_experts_stay(mixtral):
    frozen, exported, profile = mixtral
    assert len(frozen.controllers) == 2
    assert len(exported.bound_inputs) == 4
    router = 2 * 8 * 32 * 4
    assert counts(profile, "live")[0] - counts(profile, "bound")[0] == 2 * router
    # Attention: 4 query heads and 2 key and value heads of width 8. Experts: two of four, each three matrices.
    layer = 2 * 8 * 32 * (32 + 16 + 16 + 32) + 4 * 8 * 8 * 32 + 2 * 8 * 2 * 3 * 32 * 48 + router
    assert counts(profile, "live") == [2 * layer + 2 * 8 * 32 * 64] * 3
    assert profile.removed["parameters"] == 2 * 32 * 4
    assert [row["module"] for row in profile.removed["modules"]] == [f"model.layers.{i}.mlp.gate" for i in range(2)]


def test_static_models_are_proven_static_and_bound_reproduces_live(blocks, squeeze, mixtral):
    for _, _, profile in (blocks, squeeze, mixtral):
        assert profile.verdict == {"live": "PROVEN_STATIC", "bound": "PROVEN_STATIC"}
        assert profile.identity == {"bitwise": True, "random": []}
        assert profile.unknown == []
        for errors in (profile.fidelity, profile.baked):
            assert errors["relative_l2"] <= 1e-5
            assert errors["relative_max"] <= 1e-5


def test_plain_onnxruntime_loads_every_file_and_bound_repeats_live_there(blocks, squeeze, mixtral):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    for frozen, exported, _ in (blocks, squeeze, mixtral):
        leaves = frozen.traced.flatten(frozen.traced.subject.arguments)
        feed = {name: leaves[i].numpy() for name, i in zip(exported.input_names, exported.input_positions, strict=True)}
        outputs = {}
        for form in ("tapped", "live", "baked"):
            onnxruntime.InferenceSession(str(getattr(exported, form)))
            session = onnxruntime.InferenceSession(str(getattr(exported, form)), options)
            outputs[form] = dict(zip([v.name for v in session.get_outputs()], session.run(None, feed), strict=True))
        taken = {name: outputs["tapped"][name] for name in exported.bound_inputs.values()}
        session = onnxruntime.InferenceSession(str(exported.bound), options)
        for name, value in zip(exported.output_names, session.run(None, feed | taken), strict=True):
            np.testing.assert_array_equal(value, outputs["live"][name])


def test_the_profile_is_plain_json(blocks):
    text = json.dumps(blocks[2].to_json())
    assert json.loads(text) == blocks[2].to_json()


def test_work_that_no_input_reaches_is_setup_in_both_counts(tmp_path):
    _, _, profile = audited(OwnProduct, (x(),), tmp_path)
    assert counts(profile, "live") == counts(profile, "live", "fx") == [2 * 2 * TOKENS * WIDTH**2] * 4
    assert counts(profile, "live", "setup") == [2 * WIDTH * 4 * WIDTH] * 4


def test_recurrent_layers_and_transposed_convolutions_agree_with_the_closed_form(tmp_path):
    _, _, profile = audited(Recurrent, (x(),), tmp_path, baked=False)
    lstm = 2 * TOKENS * 2 * 4 * 8 * (WIDTH + 8)
    gru = 2 * TOKENS * 3 * 8 * (WIDTH + 8)
    spread = 2 * 8 * TOKENS * 4 * 3
    assert counts(profile, "live") == [4 * TOKENS * WIDTH**2 + lstm + gru + spread] * 4
    assert profile.exact


def test_a_branch_on_the_input_has_other_kernels_and_is_counted_as_taken(tmp_path):
    inputs = torch.cat([x(2, 1.0), x(2, -1.0)])
    _, _, profile = audited(BranchOnInput, (x(),), tmp_path, inputs=inputs)
    assert profile.verdict == {"live": "DATA_DEPENDENT_KERNELS", "bound": "DATA_DEPENDENT_KERNELS"}
    linear = 2 * TOKENS * WIDTH**2
    assert counts(profile, "live") == counts(profile, "live", "fx") == [3 * linear] * 2 + [2 * linear] * 2
    assert [root["op"] for root in profile.proof["live"]["roots"]] == ["If"]


def test_a_branch_that_never_flips_is_observed_and_not_proven(tmp_path):
    _, _, profile = audited(BranchOnInput, (x(),), tmp_path, inputs=x(4, 1.0), baked=False, probing=False)
    assert profile.verdict["live"] == "OBSERVED_CONSTANT"
    assert [branch["never"] for branch in profile.branches] == [["else_branch"]]


def test_a_branch_on_the_coefficient_is_static_once_it_is_bound(tmp_path):
    frozen, exported, _ = audited(BranchOnGate, (x(),), tmp_path, baked=False)
    inputs = [[x(1, shift)] for shift in (3.0, -3.0, 1.0)]
    profile = execute(frozen, exported, inputs)
    assert len(set(counts(profile, "bound"))) == 2  # each with its own coefficient
    assert profile.verdict == {"live": "DATA_DEPENDENT_KERNELS", "bound": "PROVEN_STATIC"}


def test_a_selection_by_value_moves_shapes_and_flops(tmp_path):
    _, _, profile = audited(Selecting, (x(),), tmp_path, baked=False)
    assert profile.verdict["live"] == "DATA_DEPENDENT_SHAPES"
    kept = (x()[:, :, 0] > 0).sum(1).tolist()
    assert counts(profile, "live") == [4 * TOKENS * WIDTH**2 + 2 * n * WIDTH**2 for n in kept]


def test_tokens_that_change_experts_of_equal_cost_are_redistributed(tmp_path):
    _, _, profile = audited(Routed, (x(),), tmp_path, baked=False)
    assert profile.verdict["live"] == "REDISTRIBUTED"
    assert counts(profile, "live") == counts(profile, "live", "fx") == [6 * TOKENS * WIDTH**2] * 4


def test_an_op_without_a_formula_leaves_the_verdict_incomplete_and_is_named(tmp_path):
    _, _, profile = audited(Fourier, (x(),), tmp_path, baked=False)
    assert profile.verdict == {"live": "INCOMPLETE", "bound": "INCOMPLETE"}
    assert profile.exact is None
    assert profile.unknown == ["onnx DFT", "torch fft_fft"]


def test_a_model_that_cannot_be_exported_has_no_verdict_but_a_reason():
    profile = unexported(ExportError("no translation of `svd`", remedy="write it with others"))
    assert profile.verdict["live"] == "INCOMPLETE(export)"
    assert "svd" in profile.reason
    json.dumps(profile.to_json())


def run_of(ops="a", shapes="s", flops=1, unknown=()):
    return CountedRun(flops, 0, {}, 0, 1, {}, unknown, ops, shapes)


def proof_of(static):
    return Proof(static, (), (), (), frozenset())


@pytest.mark.parametrize(
    ("static", "runs", "expected"),
    [
        (True, [run_of(), run_of()], "PROVEN_STATIC"),
        (False, [run_of(), run_of()], "OBSERVED_CONSTANT"),
        (False, [run_of(shapes="s"), run_of(shapes="t")], "REDISTRIBUTED"),
        (False, [run_of(shapes="s"), run_of(shapes="t", flops=2)], "DATA_DEPENDENT_SHAPES"),
        (False, [run_of("a", "s"), run_of("b", "t")], "DATA_DEPENDENT_KERNELS"),
        (True, [run_of(unknown=("Det",))], "INCOMPLETE"),
    ],
)
def test_each_verdict_follows_from_the_proof_and_the_runs(static, runs, expected):
    assert classify(proof_of(static), runs) == expected


def test_a_proof_that_the_runs_contradict_is_a_failed_self_check():
    with pytest.raises(SelfCheckError, match="contradicted"):
        classify(proof_of(True), [run_of(shapes="s"), run_of(shapes="t")])


def with_files(exported, **paths):
    """An export some of whose files are others."""
    return replace(exported, paths={**exported.paths, **paths})


def altered(path, target, change):
    """A copy of a model with one initializer changed."""
    proto = onnx.load(path)
    for initializer in proto.graph.initializer:
        if initializer.name == target:
            value = change(onnx.numpy_helper.to_array(initializer).copy())
            initializer.CopyFrom(onnx.numpy_helper.from_array(value, target))
    onnx.save(proto, target := path.with_name(f"altered_{path.name}"))
    return target


def test_a_bound_graph_that_differs_within_tolerance_is_a_failed_self_check(blocks):
    frozen, exported, _ = blocks
    bound = altered(exported.bound, "1.down.bias", lambda bias: bias + np.float32(1e-6))
    with pytest.raises(SelfCheckError, match=r"bound\.onnx does not reproduce live\.onnx"):
        execute(frozen, with_files(exported, bound=bound), [[x(1)]])


def test_a_live_graph_that_differs_from_torch_is_a_failed_self_check_that_names_the_first_node(blocks):
    frozen, exported, _ = blocks
    wrong = {
        form: altered(getattr(exported, form), "1.down.bias", lambda bias: bias + 1)
        for form in ("live", "tapped", "bound")
    }
    with pytest.raises(SelfCheckError, match=r"live\.onnx does not compute what the torch graph computes") as raised:
        execute(frozen, with_files(exported, **wrong), [[x(1)]])
    assert "(linear) in 1.down" in raised.value.where
    assert "self.down(F.gelu(self.up(h)))" in raised.value.where
    assert not list(exported.live.parent.glob(".*"))


class Averaging(Gated):
    """`scatter_reduce` with a mean, which torch exports as if nothing were reduced, without a warning."""

    def forward(self, x):
        rows = self.gated(x).reshape(-1, WIDTH)
        index = (torch.arange(WIDTH) % 4).expand_as(rows)
        return self.extra(torch.zeros_like(rows).scatter_reduce(1, index, rows, "mean"))


def test_an_op_that_the_exporter_translates_wrongly_without_a_word_is_caught_and_named(tmp_path):
    with pytest.raises(SelfCheckError, match=r"live\.onnx does not compute") as raised:
        audited(Averaging, (x(),), tmp_path, baked=False)
    assert "(scatter_reduce)" in raised.value.where
    assert 'scatter_reduce(1, index, rows, "mean")' in raised.value.where


def test_counts_that_differ_are_a_failed_self_check_that_names_the_kind(blocks):
    frozen, exported, _ = blocks
    live = replace(with_files(exported, bound=exported.live), idle=tuple(exported.coefficient_names))
    with pytest.raises(SelfCheckError) as raised:
        execute(frozen, live, [[x(1)]])
    assert "matrix product" in raised.value.where
    assert f"{2 * BLOCK_FLOPS:,}" in raised.value.found


def test_nothing_to_execute_is_a_data_error(blocks):
    frozen, exported, _ = blocks
    with pytest.raises(DataError, match="nothing to execute"):
        execute(frozen, exported, [])


def test_more_inputs_are_made_up_and_a_branch_that_only_they_take_is_seen(tmp_path):
    _, _, profile = audited(BranchOnInput, (x(),), tmp_path, inputs=x(3, 1.0), baked=False)
    probes = {probe["name"]: probe for probe in profile.probes}
    assert probes["sign-flipped"] == {
        "name": "sign-flipped",
        "flops": 2 * 2 * TOKENS * WIDTH**2,
        "executed": "other ops",
        "compared": True,
    }
    assert probes["scaled 5"]["executed"] == "as a given input"
    assert profile.verdict["live"] == "DATA_DEPENDENT_KERNELS"
    (branch,) = profile.branches
    assert (branch["op"], branch["never"]) == ("If", [])
    assert branch["bodies"]["then_branch"]["inputs"] == [1, 1, 1]
    assert branch["bodies"]["else_branch"]["probes"]["sign-flipped"] == 1
    assert "torch.cond(x.mean() > 0" in branch["source"]


def test_work_is_told_by_module(mixtral):
    _, _, profile = mixtral
    rows = {row["module"]: row for row in profile.modules}
    gate = rows["model.layers.0.mlp.gate"]
    assert gate["live"]["flops"] == [2 * 8 * 32 * 4] * 3
    assert gate["bound"]["flops"] == gate["baked"]["flops"] == [0] * 3
    assert rows["lm_head"]["live"]["flops"] == [2 * 8 * 32 * 64] * 3
    for form in ("live", "bound", "baked"):
        assert [sum(row[form]["flops"][i] for row in rows.values()) for i in range(3)] == counts(profile, form)
        for figure, key in (("elements", "elementwise"), ("read", "read"), ("written", "written")):
            assert [sum(row[form][figure][i] for row in rows.values()) for i in range(3)] == counts(profile, form, key)


def test_experts_are_counted_as_the_models_own_router_chooses_them(mixtral):
    frozen, _, profile = mixtral
    module, ids = frozen.traced.subject.module, frozen.traced.subject.arguments[1]["input_ids"]
    chosen: dict[str, list[torch.Tensor]] = {}
    handles = [
        part.register_forward_hook(lambda _, __, out, name=name: chosen.setdefault(name, []).append(out[2]))
        for name, part in module.named_modules()
        if name.endswith("mlp.gate")
    ]
    with torch.no_grad():
        for i in range(3):
            module(ids[i : i + 1], use_cache=False)
    for handle in handles:
        handle.remove()
    experts = 2 * 8 * 2 * 3 * 32 * 48  # tokens, chosen, matrices
    assert [row["controller"] for row in profile.experts] == [f"model.layers.{i}.mlp.gate#0" for i in range(2)]
    for row in profile.experts:
        own = chosen[row["controller"].removesuffix("#0")]
        assert (row["experts"], row["chosen"]) == (4, 2)
        assert row["load"] == torch.bincount(torch.cat(own).flatten(), minlength=4).tolist()
        assert row["activated"] == [len(one.unique()) for one in own]
        assert row["never_used"] == [e for e in range(4) if row["load"][e] == 0]
        assert row["routed_flops"] == [experts] * 3
        assert row["dense_flops"] == [flops + experts for flops in counts(profile, "live")]


def test_every_figure_has_its_role_provider_precision_and_level(blocks):
    _, _, profile = blocks
    assert profile.roles == {
        "COUNT": {"provider": "CPUExecutionProvider", "level": "ORT_DISABLE_ALL", "precision": "float32"},
        "EVIDENCE": {"provider": "CPUExecutionProvider", "level": "ORT_ENABLE_ALL", "precision": "float32"},
    }
    assert set(profile.evidence) == {"live", "bound", "baked"}
    assert profile.time == []
    assert profile.evidence["bound"]["executed_nodes"] < profile.evidence["live"]["executed_nodes"]


def test_float64_referees_where_it_can_be_asked(blocks):
    _, _, profile = blocks
    for errors in (profile.fidelity, profile.baked):
        referee = errors["referee"]
        assert referee["heard"] == 4
        assert 0 < referee["torch_error"] < 1e-5
        assert 0 < referee["share_of_limit"] <= 1
        assert referee["unheard"] == ""


def test_times_are_measured_on_request_and_come_with_their_control(blocks):
    frozen, exported, _ = blocks
    options = ExecutionOptions(timed=True, blocks=2, probing=False, evident=False)
    profile = execute(frozen, exported, [[x(1)]], options=options)
    assert [row["name"] for row in profile.time] == ["controller cost", "specialisation gain"]
    for row in profile.time:
        assert len(row["blocks"]) == len(row["control"]["blocks"]) == 2
        assert row["resolvable"] is (row["outcome"] != "not resolvable")
    assert profile.roles["TIME"]["level"] == "ORT_ENABLE_ALL"
    assert profile.evidence == {}
    assert profile.probes == []


def test_a_death_of_onnxruntime_is_incomplete_and_says_why():
    profile = unexported(RunError("onnxruntime died on live.onnx", found="SIGKILL"))
    assert profile.verdict == {"live": "INCOMPLETE", "bound": "INCOMPLETE"}
    assert "SIGKILL" in profile.reason

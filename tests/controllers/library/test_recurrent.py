"""Families whose coefficient drives a scan: ssm-delta, delta-gate, linear-rnn-gate."""

import pytest
import torch
from torch.nn import functional as F

from fxaudit import stages
from fxaudit.model.load import subject

from .freezing import captured, check_freezing, example_model, family, frozen_family

EXAMPLES = [
    pytest.param(name, number, id=f"{name}-{number}")
    for name in ("ssm-delta", "delta-gate", "linear-rnn-gate")
    for number, example in enumerate(family(name).examples)
    if example.expect and "transformers" not in example.code
]
TOKENS = 4


@pytest.mark.parametrize(("name", "number"), EXAMPLES)
def test_an_example_freezes_exactly(name, number):
    check_freezing(*example_model(family(name).examples[number]), name)


def language_model(kind, attends=False, **sizes):
    """A tiny causal language model of transformers with weights large enough to matter, and two inputs."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.CONFIG_MAPPING[kind](vocab_size=32, hidden_size=16, num_hidden_layers=2, **sizes)
        # As fxaudit traces it, so that hooks see the same bits.
        settings = {"attn_implementation": "eager", "experts_implementation": "batched_mm"} if attends else {}
        model = transformers.AutoModelForCausalLM.from_config(config, **settings).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2 and parameter.std() < 0.1:
                    parameter.normal_(std=0.3)
        return model, {"input_ids": torch.randint(3, 32, (2, TOKENS))}


def run(model, inputs, wanted):
    """What hooks see in one eager call."""
    with captured(model, wanted) as calls, torch.no_grad():
        model(**inputs, use_cache=False)
    return calls


def is_called(name):
    return lambda path, module: path.rpartition(".")[2] == name


# --- ssm-delta ------------------------------------------------------------------------------------------------------

MAMBA = [
    ("mamba", {"state_size": 4, "time_step_rank": 2}),
    ("falcon_mamba", {"state_size": 4, "time_step_rank": 2}),
]
MAMBA_2 = {"num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 1, "chunk_size": 4}


@pytest.mark.parametrize(("kind", "sizes"), MAMBA, ids=[kind for kind, _ in MAMBA])
def test_the_step_of_a_mamba_mixer_is_bound_after_bias_and_softplus(kind, sizes):
    model, inputs = language_model(kind, **sizes)
    frozen, live, _ = frozen_family(model, inputs, "ssm-delta")
    mixers = [(path, m) for path, m in model.named_modules() if path.endswith(".mixer")]
    assert [c.module for c in frozen.controllers] == [path for path, _ in mixers]
    calls = run(model, inputs, is_called("x_proj"))
    for value, (_, mixer), (_, _, _, projected) in zip(live.coefficients.values(), mixers, calls, strict=True):
        step = projected[..., : mixer.time_step_rank]
        if kind == "falcon_mamba":
            step = mixer.dt_layernorm(step)
        step = mixer.dt_proj.weight @ step.transpose(1, 2)
        assert torch.equal(value, F.softplus(step + mixer.dt_proj.bias[:, None]))
        assert value.shape == (2, mixer.intermediate_size, TOKENS)
    check_freezing(model, inputs, "ssm-delta")


def test_the_step_of_a_mamba_2_head_is_bound_within_its_limits():
    model, inputs = language_model("mamba2", time_step_limit=(0.5, 0.8), **MAMBA_2)
    frozen, live, _ = frozen_family(model, inputs, "ssm-delta")
    mixers = [m for path, m in model.named_modules() if path.endswith(".mixer")]
    assert len(frozen.controllers) == len(mixers) == 2
    calls = run(model, inputs, is_called("in_proj"))
    for value, mixer, call in zip(live.coefficients.values(), mixers, calls, strict=True):
        step = F.softplus(call[3][..., -4:] + mixer.dt_bias)
        assert torch.equal(value, step.clamp(0.5, 0.8))
        assert not torch.equal(value, step)


def test_the_step_of_an_axis_is_named_whichever_way_it_lies():
    axes = []
    for number in (0, 1, 2):
        frozen, _, _ = frozen_family(*example_model(family("ssm-delta").examples[number]), "ssm-delta")
        axes.append([axis for (axis,) in frozen.coefficients[0].axes])
    last, first = ["batch", "token", "channel"], ["batch", "channel", "token"]
    assert axes == [last, first, last]


# --- delta-gate -----------------------------------------------------------------------------------------------------

LINEAR = {
    "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2, "head_dim": 8,
    "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
}  # fmt: skip


@pytest.mark.slow
def test_strength_and_decay_of_qwen3_next_are_one_controller():
    model, inputs = language_model("qwen3_next", attends=True, linear_num_value_heads=4, **LINEAR, **EXPERTS)
    frozen = check_freezing(model, inputs, "delta-gate")
    (path,) = [path for path, _ in model.named_modules() if path.endswith("linear_attn")]
    assert [(c.module.removesuffix(".in_proj_ba"), len(c.applies)) for c in frozen.controllers] == [(path, 2)]
    (layer,) = [m for p, m in model.named_modules() if p == path]
    calls = run(model, inputs, lambda p, m: p.startswith(f"{path}.in_proj"))
    *_, b, a = layer.fix_query_key_value_ordering(*(out for *_, out in calls))
    strength, decay = frozen.live(**inputs).coefficients.values()
    assert torch.equal(strength, b.sigmoid())
    assert torch.equal(decay, -layer.A_log.exp() * F.softplus(a + layer.dt_bias))


@pytest.mark.slow
def test_strength_and_decay_of_olmo_hybrid_are_one_controller():
    model, inputs = language_model("olmo_hybrid", attends=True, linear_num_value_heads=2, pad_token_id=0, **LINEAR)
    frozen = check_freezing(model, inputs, "delta-gate")
    (path,) = [path for path, _ in model.named_modules() if path.endswith("linear_attn")]
    (layer,) = [m for p, m in model.named_modules() if p == path]
    outputs = {p.rpartition(".")[2]: out for p, _, _, out in run(model, inputs, lambda p, m: p.startswith(path + "."))}
    strength, decay = frozen.live(**inputs).coefficients.values()
    assert torch.equal(strength, outputs["b_proj"].sigmoid() * (2.0 if layer.allow_neg_eigval else 1.0))
    assert torch.equal(decay, -layer.A_log.exp() * F.softplus(outputs["a_proj"] + layer.dt_bias))


def test_strength_and_decay_are_bound_as_unit_interval_and_logarithm():
    model, inputs = example_model(family("delta-gate").examples[0])
    frozen, live, _ = frozen_family(model, inputs, "delta-gate")
    with captured(model, lambda path, m: path in ("a", "b")) as calls, torch.no_grad():
        model(*inputs)
    outputs = {path: out for path, _, _, out in calls}
    strength, decay = live.coefficients.values()
    assert torch.equal(strength, torch.sigmoid(outputs["b"]))
    assert torch.equal(decay, -torch.exp(model.A_log) * F.softplus(outputs["a"] + model.dt_bias))
    assert [c.name for c in frozen.coefficients] == ["coefficient", "log_decay"]


# --- linear-rnn-gate ------------------------------------------------------------------------------------------------


def test_rwkv_has_two_receptances_in_each_layer():
    model, inputs = language_model("rwkv", attention_hidden_size=16, intermediate_size=32, context_length=16)
    frozen, live, _ = frozen_family(model, inputs, "linear-rnn-gate")
    calls = run(model, inputs, is_called("receptance"))
    assert [c.module for c in frozen.controllers] == [path for path, *_ in calls]
    assert len(calls) == 2 * model.config.num_hidden_layers
    for value, (*_, out) in zip(live.coefficients.values(), calls, strict=True):
        assert torch.equal(value, torch.sigmoid(out))
    check_freezing(model, inputs, "linear-rnn-gate")


def test_rg_lru_has_an_input_gate_and_a_log_decay_in_each_recurrent_block():
    model, inputs = language_model(
        "recurrent_gemma", attends=True, lru_width=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=32,
        block_types=["recurrent", "attention"], attention_window_size=8,
    )  # fmt: skip
    frozen, live, _ = frozen_family(model, inputs, "linear-rnn-gate")
    calls = run(model, inputs, is_called("rg_lru"))
    assert [c.module for c in frozen.controllers] == [path for path, *_ in calls for _ in range(2)]
    values = iter(live.coefficients.values())
    for _, layer, (x, *_), _ in calls:
        heads = x.reshape(-1, 2, 8).permute(1, 0, 2)
        gates = [
            torch.baddbmm(bias[:, None], heads, weight).transpose(0, 1).reshape(x.shape).sigmoid()
            for bias, weight in (
                (layer.input_gate_bias, layer.input_gate_weight),
                (layer.recurrent_gate_bias, layer.recurrent_gate_weight),
            )
        ]
        assert torch.equal(next(values), gates[0])
        assert torch.equal(next(values), -8.0 * gates[1] * F.softplus(layer.recurrent_param))
    check_freezing(model, inputs, "linear-rnn-gate")


def test_mlstm_has_three_gates_in_each_layer():
    model, inputs = language_model("xlstm", embedding_dim=16, num_heads=2, num_blocks=2, chunk_size=8)
    frozen, live, _ = frozen_family(model, inputs, "linear-rnn-gate")
    names = ("igate_preact", "fgate_preact", "ogate_preact")
    outputs = {path: out for path, _, _, out in run(model, inputs, lambda p, m: p.endswith(names))}
    assert sorted(c.module for c in frozen.controllers) == sorted(outputs)
    assert len(outputs) == 3 * model.config.num_blocks
    cap = model.config.gate_soft_cap
    for controller, value in zip(frozen.controllers, live.coefficients.values(), strict=True):
        out = outputs[controller.module]
        expected = torch.sigmoid(out) if controller.module.endswith("ogate_preact") else cap * torch.tanh(out / cap)
        assert torch.equal(value, expected)
    check_freezing(model, inputs, "linear-rnn-gate")


def test_the_output_gate_of_a_chunkwise_mlstm_belongs_to_the_recurrence_not_to_attention():
    model, inputs = language_model("xlstm", embedding_dim=16, num_heads=2, num_blocks=1, chunk_size=8)
    matched = stages.match(stages.trace(subject(model, inputs)))
    assert {name: count for name, count in matched.counts.items() if count} == {"linear-rnn-gate": 3}
    # Its other reading is not lost: it is said who lost it to whom.
    losers = [finding.text for finding in matched.findings if finding.kind == "overlap"]
    assert any("`attn-output-gate`" in text and "`linear-rnn-gate`" in text for text in losers)


def test_the_decay_of_gated_linear_attention_is_bound_as_its_logarithm():
    model, inputs = example_model(family("linear-rnn-gate").examples[3])
    _, live, _ = frozen_family(model, inputs, "linear-rnn-gate")
    with captured(model, lambda path, m: path == "gk") as calls, torch.no_grad():
        model(*inputs)
    ((*_, out),) = calls
    (value,) = live.coefficients.values()
    assert torch.equal(value, F.logsigmoid(out.unflatten(-1, (2, 4))) / 16)

"""Families that mix the residual stream, layers or heads: mudd-dense, hyper-connection, dcmha."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from .freezing import captured, check_freezing, example_model, family, frozen_family

EXAMPLES = [
    pytest.param(name, number, id=f"{name}-{number}")
    for name in ("mudd-dense", "hyper-connection", "dcmha")
    for number, example in enumerate(family(name).examples)
    if example.expect
]


@pytest.fixture(scope="module")
def mudd():
    path = Path(__file__).parents[3] / "examples" / "mudd" / "model.py"
    spec = importlib.util.spec_from_file_location("mudd_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def frozen_mudd(mudd):
    model, tokens = mudd.tiny()
    return model.eval(), tokens, *frozen_family(model, (tokens,), "mudd-dense")[:2]


@pytest.mark.parametrize(("name", "number"), EXAMPLES)
def test_an_example_freezes_exactly(name, number):
    check_freezing(*example_model(family(name).examples[number]), name)


# --- mudd-dense -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "total", "controllers", "coefficients"),
    [("MUDDPYTHIA_1_4B", 1_419_950_149, 4_583_493, 1_221), ("MUDDPYTHIA_2_8B", 2_784_962_589, 8_775_709, 2_141)],
)
def test_published_sizes_have_the_published_numbers_of_parameters(mudd, name, total, controllers, coefficients):
    config = getattr(mudd, name)
    with torch.device("meta"):
        parameters = dict(mudd.MUDDPythia(config).named_parameters())
    own = sum(p.numel() for n, p in parameters.items() if n.startswith(("dense_bs", "dynamic_dense")))
    assert (sum(p.numel() for p in parameters.values()), own, config.coefficients) == (total, controllers, coefficients)


def test_parameters_have_the_names_of_the_public_checkpoints(mudd):
    with torch.device("meta"):
        names = set(mudd.MUDDPythia(mudd.TINY).state_dict())
    expected = {"tok_embeddings.weight", "output.weight", "norm.weight", "norm.bias"}
    for layer in range(5):
        norms = ["attention_norm"] if layer == 0 else [f"attention_norms.{i}" for i in range(3)]
        linears = [f"attention.w{x}" for x in "qkvo"] + ["feed_forward.w1", "feed_forward.w2", "ffn_norm", *norms]
        expected |= {f"layers.{layer}.{path}.{kind}" for path in linears for kind in ("weight", "bias")}
        expected |= {f"layers.{layer}.attention.{side}_norm.weight" for side in "qk"}
        expected |= {f"dense_bs.{layer}", *(f"dynamic_dense.{layer}.w{i}.weight" for i in (1, 2))}
    assert names == expected


def test_mixing_by_products_and_by_contraction_agree(mudd):
    (model, tokens), (contracted, _) = mudd.tiny(), mudd.tiny(contraction=True)
    torch.testing.assert_close(model(tokens), contracted(tokens), rtol=1e-4, atol=1e-4)


def test_each_layer_has_one_mudd_controller_with_a_site_for_each_coefficient(frozen_mudd, mudd):
    _, _, frozen, _ = frozen_mudd
    assert [c.module for c in frozen.controllers] == [f"dynamic_dense.{layer}" for layer in range(5)]
    assert sum(len(c.applies) for c in frozen.controllers) == mudd.TINY.coefficients == 62


def test_a_mudd_coefficient_is_bound_after_the_static_bias(frozen_mudd):
    model, tokens, _, live = frozen_mudd
    with captured(model, lambda path, m: type(m).__name__ == "DynamicDense") as calls, torch.no_grad():
        model(tokens)
    expected = [out + bias[:, None, None] for (_, _, _, out), bias in zip(calls, model.dense_bs, strict=True)]
    assert all(map(torch.equal, live.coefficients.values(), expected))


def test_a_contraction_is_one_site_for_each_layer(mudd):
    model, tokens = mudd.tiny(contraction=True)
    frozen = check_freezing(model.eval(), (tokens,), "mudd-dense")
    assert [len(c.applies) for c in frozen.controllers] == [1] * 5


# --- hyper-connection -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deepseek():
    import transformers

    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(
        vocab_size=32, hidden_size=16, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, q_lora_rank=8, qk_rope_head_dim=8, o_groups=2, o_lora_rank=4, n_routed_experts=4,
        num_local_experts=4, num_experts_per_tok=2, index_topk=4, index_head_dim=16, index_n_heads=2,
        hc_sinkhorn_iters=3, sliding_window=8,
    )  # fmt: skip
    # As fxaudit traces it, so that hooks see the same bits.
    settings = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
    model = transformers.AutoModelForCausalLM.from_config(config, **settings).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "hc" in name:
                parameter.normal_(std=0.5)
    return model, {"input_ids": torch.randint(0, 32, (2, 5))}


def test_every_connection_of_deepseek_v4_is_one_controller_and_so_is_the_head(deepseek):
    model, inputs = deepseek
    frozen, live, _ = frozen_family(model, inputs, "hyper-connection")
    kinds = ("DeepseekV4HyperConnection", "DeepseekV4HyperHead")
    assert [c.module for c in frozen.controllers] == [
        path for path, m in model.named_modules() if type(m).__name__ in kinds
    ]
    assert len(frozen.controllers) == 2 * model.config.num_hidden_layers + 1
    with captured(model, lambda path, m: type(m).__name__ == kinds[0]) as calls, torch.no_grad():
        model(**inputs, use_cache=False)
    for path, _, _, (post, comb, _) in calls:
        assert torch.equal(live.coefficients[f"{path}#0/post"], post)
        assert torch.equal(live.coefficients[f"{path}#0/comb"], comb)
    check_freezing(model, inputs, "hyper-connection")


@pytest.mark.parametrize(
    ("number", "names"),
    [
        (0, [["coefficient", "post"]] * 2),
        (1, [["coefficient", "post", "comb"]] * 2 + [["coefficient"]]),
        (2, [["coefficient", "post"]]),
        (3, [["coefficient", "post"]]),
    ],
    ids=["HC", "mHC", "iHC", "gated residual"],
)
def test_what_a_connection_hands_over_is_bound_together(number, names):
    model, inputs = example_model(family("hyper-connection").examples[number])
    frozen, _, _ = frozen_family(model, inputs, "hyper-connection")
    assert [[c.name for c in controller.coefficients] for controller in frozen.controllers] == names


def test_mixing_weights_are_bound_after_the_last_sinkhorn_iteration():
    model, inputs = example_model(family("hyper-connection").examples[1])
    _, live, _ = frozen_family(model, inputs, "hyper-connection")
    with captured(model, lambda path, m: path.startswith("connections.") and path.count(".") == 1) as calls:
        model(*inputs)
    for path, _, _, (post, comb, _) in calls:
        assert torch.equal(live.coefficients[f"{path}.fn#0/post"], post)
        assert torch.equal(live.coefficients[f"{path}.fn#0/comb"], comb)


def test_hyper_connections_are_bound_after_their_static_weights():
    model, inputs = example_model(family("hyper-connection").examples[0])
    _, live, _ = frozen_family(model, inputs, "hyper-connection")
    with captured(model, lambda path, m: path.endswith(".norm")) as calls, torch.no_grad():
        model(*inputs)
    for (path, _, _, normed), layer in zip(calls, model.layers, strict=True):
        alpha = torch.tanh(normed @ layer.dynamic_alpha) * layer.alpha_scale + layer.static_alpha
        beta = torch.tanh(normed @ layer.dynamic_beta) * layer.beta_scale + layer.static_beta
        key = path.removesuffix(".norm")
        assert torch.equal(live.coefficients[f"{key}#0/coefficient"], alpha)
        assert torch.equal(live.coefficients[f"{key}#0/post"], beta)


# --- dcmha ----------------------------------------------------------------------------------------------------------


def test_the_weights_of_a_dynamically_composed_attention_are_bound_before_matrices_are_formed():
    model, inputs = example_model(family("dcmha").examples[1])
    frozen, live, _ = frozen_family(model, inputs, "dcmha")
    wanted = ("dw2", "dd")
    with captured(model, lambda path, m: path.endswith(wanted)) as calls, torch.no_grad():
        model(*inputs)
    values = iter(live.coefficients.values())
    outputs = {path: out for path, _, _, out in calls}
    for layer in range(2):
        factors = outputs[f"{layer}.dw2"].view(2, 4, 4, 4, 2)
        w1, w2 = factors.chunk(2, -2)
        assert torch.equal(next(values), torch.nn.functional.rms_norm(w1, (2,)))
        assert torch.equal(next(values), w2)
        assert torch.equal(next(values).reshape(2, 4, 4, 2), torch.tanh(outputs[f"{layer}.dd"]).reshape(2, 4, 4, 2))
    assert len(frozen.controllers) == 2

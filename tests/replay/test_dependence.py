import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from small_models import TOKENS, WIDTH, SqueezeExcite
from torch import nn
from torch.nn import functional as F

from fxaudit import stages
from fxaudit.errors import DataError
from fxaudit.model.data import load_data
from fxaudit.replay.dependence import measure_dependence
from fxaudit.replay.intervene import Intervention, default_interventions, parse_interventions
from fxaudit.replay.permutations import Permutations
from fxaudit.replay.results import Baseline, Dependence, ReplayResult

INPUTS, BATCH, SEED = 7, 3, 3


def measured(directory, frozen, arrays, interventions, calibration=None, **options) -> Dependence:
    """Dependence on `arrays`, recorded in batches of three, of which the last is filled up from one."""
    data = load_data(arrays, frozen.traced)
    recording = stages.record(frozen, data, directory / "evaluation", batch_size=BATCH).store
    profile = None
    if calibration is not None:
        profile = stages.record(frozen, calibration, directory / "calibration", batch_size=BATCH).store
    return measure_dependence(frozen, data, recording, profile, interventions, seeds=(SEED,), **options)


def result(found: Dependence, label: str, scope: str = "joint", index: int = 0) -> ReplayResult:
    return [r for r in found.results if r.label == label and r.scope == scope][index]


# --- a router, against hooks on the eager model ---------------------------------------------------------------------

VOCABULARY, LENGTH, LAYERS = 64, 6, 2
EXCHANGES = ("identity", "reassign", "shuffle-tokens")


@pytest.fixture(scope="module")
def mixtral():
    import transformers

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        initializer_range=0.5,  # so that experts differ enough to matter
        attn_implementation="eager",
        use_cache=False,
    )
    return transformers.MixtralForCausalLM(config).eval()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, VOCABULARY, (INPUTS, LENGTH + 1), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def targets(tokens):
    following = tokens[:, 1:].clone()
    following[2, 1] = following[4, 3:] = -100
    return following


@pytest.fixture(scope="module")
def frozen_mixtral(mixtral, tokens):
    return stages.freeze(mixtral, {"input_ids": tokens[:2, :-1]})


INTERVENTIONS = parse_interventions("identity,reassign,shuffle-tokens,static,neutral")


@pytest.fixture(scope="module")
def with_targets(frozen_mixtral, tokens, targets, tmp_path_factory):
    arrays = {"input_ids": tokens[:, :-1], "targets": targets}
    return measured(tmp_path_factory.mktemp("nll"), frozen_mixtral, arrays, INTERVENTIONS, {"input_ids": tokens[:, 1:]})


@pytest.fixture(scope="module")
def without_targets(frozen_mixtral, tokens, tmp_path_factory):
    arrays = {"input_ids": tokens[:, :-1]}
    return measured(tmp_path_factory.mktemp("kl"), frozen_mixtral, arrays, INTERVENTIONS)


def routers(model):
    return [layer.mlp.gate for layer in model.model.layers]


@pytest.fixture(scope="module")
def choices(mixtral, tokens):
    """What each router of the eager model returns: weights and indices, [inputs, positions, slots]."""
    seen, handles = [], []
    for router in routers(mixtral):
        handles.append(router.register_forward_hook(lambda *call: seen.append(call[2][1:])))
    with torch.no_grad():
        mixtral(tokens[:, :-1])
    for handle in handles:
        handle.remove()
    return [[part.reshape(INPUTS, LENGTH, -1) for part in pair] for pair in seen]


def eager(model, tokens, pairs) -> torch.Tensor:
    """Logits of the eager model whose routers return given weights and indices."""

    def hook(pair):
        return lambda module, inputs, output: (output[0], *(part.reshape(-1, part.shape[-1]) for part in pair))

    handles = [r.register_forward_hook(hook(pair)) for r, pair in zip(routers(model), pairs, strict=True)]
    try:
        with torch.no_grad():
            return model(tokens[:, :-1]).logits
    finally:
        for handle in handles:
            handle.remove()


def exchanged(pair, name: str, permutations: Permutations):
    """Weights and indices of the donors, or of the permuted positions, exchanged together."""
    if name == "reassign":
        return [part[permutations.donors] for part in pair]
    if name == "shuffle-tokens":
        order = permutations.positions[LENGTH]
        return [torch.stack([part[i][order[i]] for i in range(INPUTS)]) for part in pair]
    return pair


def nll(logits, targets):
    return torch.stack([F.cross_entropy(x.double(), t) for x, t in zip(logits, targets, strict=True)])


def divergence(live, replayed):
    p, q = (F.log_softmax(x.double(), -1) for x in (live, replayed))
    return F.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean(1)


def expected_logits(mixtral, tokens, choices, found, name, chosen):
    pairs = [
        exchanged(pair, name, found.permutations) if layer in chosen else pair for layer, pair in enumerate(choices)
    ]
    return eager(mixtral, tokens, pairs)


SCOPES = {"joint": range(LAYERS), "first": [0], "second": [1]}


def of_scope(found, name, scope):
    return result(found, name) if scope == "joint" else result(found, name, "controller", SCOPES[scope][0])


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", EXCHANGES)
def test_the_nll_of_exchanged_experts_is_that_of_hooked_routers(
    mixtral, tokens, targets, choices, with_targets, name, scope
):
    logits = expected_logits(mixtral, tokens, choices, with_targets, name, SCOPES[scope])
    found = of_scope(with_targets, name, scope).per_input
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), nll(logits, targets), rtol=0, atol=1e-5)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", EXCHANGES)
def test_the_divergence_of_exchanged_experts_is_that_of_hooked_routers(
    mixtral, tokens, choices, without_targets, name, scope
):
    with torch.no_grad():
        live = mixtral(tokens[:, :-1]).logits
    logits = expected_logits(mixtral, tokens, choices, without_targets, name, SCOPES[scope])
    found = of_scope(without_targets, name, scope).per_input
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), divergence(live, logits), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["reassign", "shuffle-tokens"])
def test_weights_exchanged_without_their_indices_would_be_seen(mixtral, tokens, targets, choices, with_targets, name):
    # The comparison above is sharp enough to tell the pair from its halves.
    pairs = [[exchanged(pair, name, with_targets.permutations)[0], pair[1]] for pair in choices]
    found = torch.tensor(result(with_targets, name).per_input, dtype=torch.float64)
    assert float((nll(eager(mixtral, tokens, pairs), targets) - found).abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["reassign", "shuffle-tokens"])
def test_exchanged_experts_move_the_output(with_targets, name):
    assert result(with_targets, name).changed


def test_a_router_is_exchanged_as_a_pair(with_targets):
    assert {r.discrete for r in with_targets.results if r.intervention != "static"} == {"pair"}


@pytest.mark.parametrize("scope", ["joint", "controller"])
def test_a_router_refuses_one_score_for_all_experts_with_the_reason(with_targets, scope):
    assert result(with_targets, "static:controller", scope).refused == "one score for all experts chooses none"


def test_a_router_refuses_neutral_with_the_reason(with_targets):
    assert result(with_targets, "neutral").refused == "the family has no neutral value"


def test_a_refused_intervention_has_no_numbers(with_targets):
    found = result(with_targets, "neutral")
    assert (found.per_input, found.delta, found.interval, found.p, found.changed) == ((), None, None, None, None)


def test_without_calibration_data_a_static_profile_is_refused_with_the_reason(without_targets):
    assert result(without_targets, "static:unit").refused == "a static profile needs calibration data"


def test_the_baseline_is_weighted_by_valid_targets_beside_the_mean(mixtral, tokens, targets, with_targets):
    with torch.no_grad():
        logits = mixtral(tokens[:, :-1]).logits
    expected = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten()).item()
    assert with_targets.baseline.token_weighted == pytest.approx(expected, abs=1e-5)


def test_the_accuracy_of_the_baseline_is_that_of_the_eager_model(mixtral, tokens, targets, with_targets):
    with torch.no_grad():
        right = (mixtral(tokens[:, :-1]).logits.argmax(-1) == targets).double()
    valid = (targets != -100).double()
    expected = float(((right * valid).sum(1) / valid.sum(1)).mean())
    assert with_targets.baseline.accuracy == pytest.approx(expected, abs=1e-12)


def test_the_effect_is_the_mean_difference_to_the_baseline(with_targets):
    found = result(with_targets, "reassign")
    expected = np.mean(np.subtract(found.per_input, with_targets.baseline.per_input))
    assert found.delta == pytest.approx(expected, abs=1e-12)


def test_the_p_value_is_that_of_every_assignment_of_signs(with_targets):
    found = result(with_targets, "reassign")
    differences = np.subtract(found.per_input, with_targets.baseline.per_input)
    signs = np.array(list(itertools.product([1, -1], repeat=INPUTS)))
    expected = np.mean(np.abs((signs * differences).mean(1)) >= abs(differences.mean()) - 1e-12)
    assert found.p == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["reassign", "shuffle-tokens"])
def test_p_values_are_corrected_over_the_controllers(with_targets, name):
    low, high = sorted(
        (r for r in with_targets.results if r.label == name and r.scope == "controller"), key=lambda r: r.p
    )
    smaller = min(1.0, 2 * low.p)
    assert (low.adjusted_p, high.adjusted_p) == pytest.approx((smaller, max(smaller, high.p)))


def test_joint_exchanges_are_one_family_of_the_correction(with_targets):
    names = ("reassign", "shuffle-tokens", "static")
    family = [r for r in with_targets.results if r.scope == "joint" and r.intervention in names and r.refused is None]
    smallest = min(family, key=lambda r: r.p)
    assert len(family) == 4
    assert smallest.adjusted_p == pytest.approx(min(1.0, 4 * smallest.p))


def test_the_frozen_controllers_of_a_row_are_named(with_targets):
    found = result(with_targets, "reassign", "controller", 1)
    assert found.controllers == ("model.layers.1.mlp.gate#0",)


def test_without_targets_the_baseline_is_zero(without_targets):
    assert without_targets.baseline.per_input == (0.0,) * INPUTS


# --- gates ----------------------------------------------------------------------------------------------------------


class Gated(nn.Module):
    """One gate, and a head by which a test decides how much of it reaches the output."""

    def __init__(self, head: float, then=lambda y: y) -> None:
        super().__init__()
        self.gate, self.value, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.then = then
        with torch.no_grad():
            self.head.weight.mul_(head)

    def forward(self, x):
        return self.then(self.head(torch.sigmoid(self.gate(x)) * self.value(x)))


def inputs(count: int = INPUTS, seed: int = 9) -> torch.Tensor:
    return torch.randn(count, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))


def labels(count: int = INPUTS) -> torch.Tensor:
    return torch.randint(0, 4, (count, TOKENS), generator=torch.Generator().manual_seed(2))


def frozen_model(module):
    torch.manual_seed(0)
    return stages.freeze(module.eval(), inputs(2, seed=4))


def seeded(module_of, *arguments):
    torch.manual_seed(5)
    return module_of(*arguments)


@pytest.fixture(scope="module")
def gates(tmp_path_factory):
    """Dependence by how large the head is and whether there are targets, each measured once."""
    models, known = {}, {}

    def of(head: float, targets: bool) -> Dependence:
        if (head, targets) not in known:
            if head not in models:
                models[head] = frozen_model(seeded(Gated, head))
            arrays = {"x": inputs(), **({"targets": labels()} if targets else {})}
            known[head, targets] = measured(
                tmp_path_factory.mktemp("gates"),
                models[head],
                arrays,
                default_interventions(),
                {"x": inputs(5, seed=8)},
            )
        return known[head, targets]

    return of


def with_margin(found: Dependence, margin: float | None) -> Dependence:
    return dataclasses.replace(found, margin=margin)


@pytest.mark.parametrize("targets", [True, False])
def test_a_gate_whose_product_is_multiplied_by_zero_is_inert(gates, targets):
    assert gates(0.0, targets).verdict == "INERT"


def test_an_inert_controller_is_named(gates):
    assert gates(0.0, True).inert == ("gate#0",)


def test_a_gate_that_reaches_the_output_is_not_inert(gates):
    assert gates(1.0, True).inert == ()


def test_an_inert_gate_stays_inert_with_a_margin(gates):
    assert with_margin(gates(0.0, True), 1.0).verdict == "INERT"


@pytest.mark.parametrize("targets", [True, False])
def test_small_effects_are_equivalent_within_a_margin(gates, targets):
    assert with_margin(gates(1e-3, targets), 0.5).verdict == "EQUIVALENT"


@pytest.mark.parametrize("targets", [True, False])
def test_no_effect_is_equivalent_without_a_margin(gates, targets):
    assert gates(1e-3, targets).verdict != "EQUIVALENT"


def test_a_divergence_without_a_margin_is_inconclusive_however_large(gates):
    assert gates(30.0, False).verdict == "INCONCLUSIVE"


def test_a_divergence_above_the_margin_is_a_dependence(gates):
    assert with_margin(gates(30.0, False), 1e-3).verdict == "DEPENDENT"


@pytest.mark.parametrize("level", ["controller", "unit", "unit-position"])
def test_a_static_replay_equals_a_forward_with_the_calibration_mean(gates, level):
    model, calibrating = seeded(Gated, 1.0).eval(), inputs(5, seed=8)
    with torch.no_grad():
        gate = torch.sigmoid(model.gate(calibrating)).double()
        axes = {"controller": (0, 1, 2), "unit": (0, 1), "unit-position": (0,)}[level]
        logits = model.head(gate.mean(axes, keepdim=True).float() * model.value(inputs()))
    found = torch.tensor(result(gates(1.0, True), f"static:{level}").per_input, dtype=torch.float64)
    torch.testing.assert_close(found, nll(logits, labels()), rtol=0, atol=1e-6)


def test_a_neutral_replay_equals_a_forward_without_the_gate(gates):
    model = seeded(Gated, 1.0).eval()
    with torch.no_grad():
        logits = model.head(model.value(inputs()))
    found = torch.tensor(result(gates(1.0, True), "neutral").per_input, dtype=torch.float64)
    torch.testing.assert_close(found, nll(logits, labels()), rtol=0, atol=1e-6)


def test_a_single_input_cannot_be_reassigned(tmp_path):
    found = measured(tmp_path, frozen_model(seeded(Gated, 1.0)), {"x": inputs(1)}, (Intervention("reassign"),))
    assert result(found, "reassign").refused == "reassignment needs two inputs"


def test_where_nothing_could_be_exchanged_nothing_is_concluded(tmp_path):
    found = measured(tmp_path, frozen_model(seeded(Gated, 1.0)), {"x": inputs(1)}, (Intervention("reassign"),))
    assert found.verdict == "INCONCLUSIVE"


def test_a_gate_of_channels_is_reassigned_like_the_eager_model_hooked(tmp_path):
    model = seeded(SqueezeExcite).eval()
    x = torch.randn(INPUTS, 3, 6, 6, generator=torch.Generator().manual_seed(6))
    frozen = stages.freeze(model, x[:2])
    found = measured(tmp_path, frozen, {"x": x}, (Intervention("reassign"),))
    with torch.no_grad():
        live, gate = model(x), []
        handle = model.squash.register_forward_hook(lambda *call: gate.append(call[2]))
        model(x)
        handle.remove()
        handle = model.squash.register_forward_hook(lambda *call: gate[0][found.permutations.donors])
        replayed = model(x)
        handle.remove()
    p, q = (F.log_softmax(v.double(), -1) for v in (live, replayed))
    expected = F.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean((1, 2))
    torch.testing.assert_close(
        torch.tensor(result(found, "reassign").per_input, dtype=torch.float64), expected, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("then", [lambda y: y.softmax(-1), lambda y: y.log_softmax(-1)], ids=["softmax", "log_softmax"])
def test_a_head_that_ends_in_a_softmax_has_the_effect_of_its_logits(gates, tmp_path, then):
    model = frozen_model(seeded(Gated, 1.0, then))
    arrays = {"x": inputs(), "targets": labels()}
    found = measured(tmp_path, model, arrays, (Intervention("reassign"),))
    assert result(found, "reassign").per_input == pytest.approx(
        result(gates(1.0, True), "reassign").per_input, abs=1e-5
    )


def test_targets_of_another_length_are_refused(tmp_path):
    arrays = {"x": inputs(), "targets": labels()[:, 1:]}
    with pytest.raises(DataError, match="do not fit the output"):
        measured(tmp_path, frozen_model(seeded(Gated, 1.0)), arrays, (Intervention("identity"),))


def test_a_gate_that_is_the_same_at_all_positions_is_inert_when_they_are_shuffled(tmp_path):
    alike = inputs()[:, :1].expand(-1, TOKENS, -1).contiguous()
    found = measured(tmp_path, frozen_model(seeded(Gated, 1.0)), {"x": alike}, default_interventions())
    assert found.outcome(result(found, "shuffle-tokens")) == "INERT"


def test_an_intervention_named_twice_does_not_double_the_family_of_the_correction(tmp_path):
    asked = parse_interventions("reassign,reassign")
    found = measured(tmp_path, frozen_model(seeded(Gated, 1.0)), {"x": inputs(), "targets": labels()}, asked)
    only = result(found, "reassign", "controller")
    assert only.adjusted_p == only.p


def test_a_shuffle_of_a_causal_models_tokens_is_told_to_be_non_causal(with_targets):
    assert with_targets.causal is True
    marked = {r.label for r in with_targets.results if with_targets.is_non_causal(r)}
    assert marked == {"shuffle-tokens"}


class Mixed(nn.Module):
    """Every position reads all others."""

    def __init__(self) -> None:
        super().__init__()
        self.gated, self.mix = Gated(1.0), nn.Linear(TOKENS, TOKENS)

    def forward(self, x):
        return self.gated(self.mix(x.transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize(("module", "causal"), [(Mixed, False), (lambda: Gated(1.0), True)])
def test_whether_a_model_is_causal_is_seen_from_its_outputs(tmp_path, module, causal):
    found = measured(tmp_path, frozen_model(seeded(module)), {"x": inputs()}, (Intervention("shuffle-tokens"),))
    assert found.causal is causal


# --- verdicts -------------------------------------------------------------------------------------------------------


def row(name="reassign", **facts) -> ReplayResult:
    facts = {"changed": True, "interval": (0.1, 0.3), "adjusted_p": 0.01, "scope": "joint", **facts}
    return ReplayResult(
        intervention=name, level=None, controllers=("gate#0",), discrete=None, seed=None, metric="nll", **facts
    )


def concluded(*rows: ReplayResult, margin: float | None = None, metric: str = "nll") -> Dependence:
    baseline = Baseline(metric, "logits", "logits", (1.0,), 1.0, 1.0, None)
    return Dependence(baseline, rows, Permutations(torch.tensor([0]), {}), {}, margin, ())


OUTCOMES = {
    "refused": (row(refused="no positions"), None, "nll", "REFUSED"),
    "no bit moves": (row(changed=False, interval=(0.0, 0.0)), None, "nll", "INERT"),
    "significant": (row(), None, "nll", "DEPENDENT"),
    "significant, and better": (row(interval=(-0.3, -0.1)), None, "nll", "DEPENDENT"),
    "not significant": (row(adjusted_p=0.051), None, "nll", "INCONCLUSIVE"),
    "the interval holds zero": (row(interval=(-0.1, 0.3)), None, "nll", "INCONCLUSIVE"),
    "one input": (row(interval=None, adjusted_p=None), None, "nll", "INCONCLUSIVE"),
    "one input, with a margin": (row(interval=None, adjusted_p=None), 10.0, "nll", "INCONCLUSIVE"),
    "not significant is not equivalent": (row(interval=(-1e-9, 1e-9), adjusted_p=1.0), None, "nll", "INCONCLUSIVE"),
    "within the margin": (row(interval=(-0.1, 0.3)), 0.31, "nll", "EQUIVALENT"),
    "within the margin, though significant": (row(), 0.31, "nll", "EQUIVALENT"),
    "on the margin": (row(), 0.3, "nll", "DEPENDENT"),
    "below the margin": (row(interval=(-0.4, 0.1), adjusted_p=0.5), 0.3, "nll", "INCONCLUSIVE"),
    "a divergence without a margin": (row(), None, "kl", "INCONCLUSIVE"),
    "a divergence within the margin": (row(), 0.31, "kl", "EQUIVALENT"),
    "a divergence across the margin": (row(), 0.2, "kl", "INCONCLUSIVE"),
    "a divergence above the margin": (row(), 0.05, "kl", "DEPENDENT"),
}


@pytest.mark.parametrize("case", OUTCOMES)
def test_a_result_says_by_itself(case):
    found, margin, metric, expected = OUTCOMES[case]
    assert concluded(found, margin=margin, metric=metric).outcome(found) == expected


STILL = {"changed": False, "interval": (0.0, 0.0), "adjusted_p": 1.0}
SMALL = {"interval": (-0.01, 0.01), "adjusted_p": 0.5}
VERDICTS = {
    "one assignment matters": ([row(), row("static", **SMALL)], 0.05, "DEPENDENT"),
    "all are within the margin": ([row(**SMALL), row("static", **SMALL)], 0.05, "EQUIVALENT"),
    "one is neither": ([row(**SMALL), row("static", adjusted_p=0.5)], 0.05, "INCONCLUSIVE"),
    "no bit moves": ([row(**STILL), row("shuffle-tokens", **STILL)], None, "INERT"),
    "some move bits, some do not": ([row(**STILL), row("static", **SMALL)], None, "INCONCLUSIVE"),
    "what moves no bit is within any margin": ([row(**SMALL), row("shuffle-tokens", **STILL)], 0.05, "EQUIVALENT"),
    "neutral does not count": ([row(**SMALL), row("neutral")], 0.05, "EQUIVALENT"),
    "identity does not count": ([row(), row("identity", **STILL)], None, "DEPENDENT"),
    "controllers alone do not count": ([row(**SMALL), row(scope="controller")], 0.05, "EQUIVALENT"),
    "refused ones do not count": ([row(**SMALL), row("shuffle-tokens", refused="no positions")], 0.05, "EQUIVALENT"),
    "nothing was run": ([row(refused="one input")], 0.05, "INCONCLUSIVE"),
    "nothing was asked": ([], None, "INCONCLUSIVE"),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_the_verdict_follows_from_every_assignment_of_all_controllers(case):
    rows, margin, expected = VERDICTS[case]
    assert concluded(*rows, margin=margin).verdict == expected


def test_an_output_that_is_not_finite_is_no_equivalence():
    rows = row(interval=(math.nan, math.nan), adjusted_p=math.nan)
    assert concluded(rows, margin=1.0).verdict == "INCONCLUSIVE"

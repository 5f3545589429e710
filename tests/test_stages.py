import pytest
import torch
from small_models import FILE, TOKENS, WIDTH, PairedInputs, Plain, Router, ScaledGate, TransposedGate, sequence
from torch import nn

from fxaudit import stages
from fxaudit.controllers.pattern import library_path, load_patterns
from fxaudit.errors import DataError, NoControllerError, PatternError, UsageError

COEFFICIENT = "mix#0/coefficient"
X = torch.randn(4, TOKENS, WIDTH, generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    return TransposedGate().eval()


@pytest.fixture(scope="module")
def traced(module):
    return stages.trace(module, sequence())


@pytest.fixture(scope="module")
def matched(traced):
    return stages.match(traced)


@pytest.fixture(scope="module")
def frozen(matched):
    return stages.freeze(matched)


@pytest.fixture(scope="module")
def plain():
    return stages.match(stages.trace(Plain(), sequence()))


# --- trace and match ------------------------------------------------------------------------------------------------


def test_a_module_with_inputs_is_traced(traced, module):
    assert traced.subject.module is module


def test_a_name_is_loaded_and_traced():
    assert stages.trace(f"{FILE}:plain").input_names == ("x",)


def test_a_loaded_subject_is_traced():
    assert stages.trace(stages.load(f"{FILE}:plain")).subject.source == f"{FILE}:plain"


def test_inputs_beside_a_loaded_subject_are_refused():
    with pytest.raises(UsageError, match="has inputs already") as caught:
        stages.trace(stages.load(f"{FILE}:plain"), X)
    assert caught.value.exit_code == 2


def test_every_shipped_pattern_is_searched_for(matched):
    classes = {p.name: p.family_class for p in load_patterns()}
    assert set(matched.counts) == {name for name, kind in classes.items() if kind in ("default", "external")}


def test_patterns_without_a_match_count_zero(plain):
    assert set(plain.counts.values()) == {0}


def test_only_the_patterns_that_are_given_are_searched_for(traced):
    found = stages.match(traced, [library_path() / "se-gate.toml"])
    assert found.counts == {"se-gate": 0}


def test_a_loaded_pattern_may_be_given(traced):
    (pattern,) = load_patterns(library_path() / "feature-gate.toml")
    assert stages.match(traced, [pattern]).counts == {"feature-gate": 1}


def test_a_broken_pattern_file_is_refused(traced, tmp_path):
    (tmp_path / "broken.toml").write_text("match = 3")
    with pytest.raises(PatternError) as caught:
        stages.match(traced, [tmp_path / "broken.toml"])
    assert caught.value.exit_code == 4


def test_the_controller_is_named_after_the_module_that_computes_it(matched):
    (controller,) = matched.controllers
    assert (controller.id, controller.module, controller.call) == ("mix#0", "mix", 0)


def test_the_parameters_of_a_controller_are_counted(matched, module):
    assert matched.controllers[0].parameters == sum(p.numel() for p in module.mix.parameters())


# --- freeze ---------------------------------------------------------------------------------------------------------


def test_a_module_is_frozen_in_one_call(module):
    assert [c.key for c in stages.freeze(module, sequence()).coefficients] == [COEFFICIENT]


def test_a_traced_model_is_frozen(traced):
    assert [c.key for c in stages.freeze(traced).coefficients] == [COEFFICIENT]


def test_a_model_without_controllers_cannot_be_frozen(plain):
    with pytest.raises(NoControllerError) as caught:
        stages.freeze(plain)
    assert caught.value.exit_code == 4


def test_the_refusal_names_the_nearest_misses(plain):
    with pytest.raises(NoControllerError) as caught:
        stages.freeze(plain)
    assert all(f"{name}: " in caught.value.found for name in plain.counts)


def test_live_returns_what_the_module_returns(frozen, module):
    with torch.no_grad():
        assert torch.equal(frozen.live(X).output, module(X))


def test_live_returns_the_coefficients_by_key(frozen, module):
    with torch.no_grad():
        expected = torch.sigmoid(module.mix(X.transpose(1, 2)).transpose(1, 2))
    assert torch.equal(frozen.live(X).coefficients[COEFFICIENT], expected)


def test_a_frozen_model_returns_what_its_coefficients_make_of_the_input(frozen, module):
    gate = torch.rand(4, TOKENS, WIDTH)
    with torch.no_grad():
        expected = module.head(gate * module.value(X))
    torch.testing.assert_close(frozen(X, coefficients={COEFFICIENT: gate}), expected, rtol=0, atol=1e-6)


def test_a_frozen_model_is_in_eval_mode(frozen):
    assert not frozen.training


def test_a_missing_coefficient_is_refused_by_its_key(frozen):
    with pytest.raises(DataError) as caught:
        frozen(X, coefficients={})
    assert f"missing {COEFFICIENT}" in caught.value.found


def test_an_unknown_coefficient_is_refused_by_its_key(frozen):
    given = {**frozen.live(X).coefficients, "other": X}
    with pytest.raises(DataError) as caught:
        frozen(X, coefficients=given)
    assert "unknown other" in caught.value.found


@pytest.mark.parametrize(
    "gate",
    [torch.rand(3, TOKENS, WIDTH), torch.rand(4, TOKENS, 1), torch.rand(4, TOKENS, WIDTH).double()],
    ids=["inputs", "axis", "dtype"],
)
def test_a_coefficient_that_does_not_fit_is_refused(frozen, gate):
    with pytest.raises(DataError, match="does not fit"):
        frozen(X, coefficients={COEFFICIENT: gate})


def test_an_input_that_the_trace_does_not_cover_is_refused(frozen):
    with pytest.raises(DataError):
        frozen.live(torch.zeros(2, TOKENS, WIDTH + 1))


def test_a_router_is_frozen_as_the_pair_of_weights_and_indices():
    frozen = stages.freeze(Router(), sequence())
    assert [c.name for c in frozen.coefficients] == ["coefficient", "indices"]
    assert [c.name for c in frozen.taps] == ["scores"]


def test_other_indices_of_a_router_choose_other_experts():
    torch.manual_seed(0)
    module = Router().eval()
    frozen = stages.freeze(module, sequence())
    weights = torch.full((2 * TOKENS, 2), 0.5)
    indices = torch.tensor([[0, 3]]).expand(2 * TOKENS, 2)
    given = {"router#0/coefficient": weights, "router#0/indices": indices.contiguous()}
    with torch.no_grad():
        expected = X[:2] @ (0.5 * module.experts[0] + 0.5 * module.experts[3])
    torch.testing.assert_close(frozen(X[:2], coefficients=given), expected, rtol=0, atol=1e-5)


# --- inspect --------------------------------------------------------------------------------------------------------


def test_inspection_replays_identity_on_the_example_other_inputs_and_other_batches(module):
    report = stages.inspect(module, sequence())
    assert [c.inputs for c in report.identity.comparisons] == [
        "example",
        "resampled",
        "batch of 3",
        "batch of 4",
        "batch of 1",
    ]
    assert report.identity.bitwise


def test_inspection_of_a_model_without_controllers_replays_nothing():
    assert stages.inspect(Plain(), sequence()).identity is None


def test_identity_skips_batches_that_the_model_does_not_take():
    torch.manual_seed(0)
    frozen = stages.freeze(PairedInputs(), sequence())
    assert {c.inputs for c in stages.identity(frozen).comparisons} == {"example", "resampled"}


def test_findings_of_the_trace_are_findings_of_the_inspection():
    class Noisy(TransposedGate):
        def forward(self, x):
            return super().forward(x) + 0 * torch.rand_like(x[..., :4])

    assert "random-op" in [finding.kind for finding in stages.inspect(Noisy(), sequence()).findings]


def test_a_router_that_does_not_renormalise_has_no_simplex_domain():
    class Unnormalised(Router):
        def forward(self, x):
            flat = x.reshape(-1, WIDTH)
            values, indices = self.softmax(self.router(flat)).topk(2, -1)
            outputs = (flat[:, None, None] @ self.experts[indices]).squeeze(2)
            return (outputs * values.unsqueeze(-1)).sum(1).view_as(x)

    (controller,) = stages.match(stages.trace(Unnormalised(), sequence())).controllers
    assert controller.coefficients[0].domain.kind == "interval"


# --- record and replay ----------------------------------------------------------------------------------------------


def test_a_store_is_replayed_from_its_path(frozen, tmp_path):
    stages.record(frozen, {"x": X}, tmp_path / "store")
    assert stages.replay(frozen, {"x": X}, str(tmp_path / "store")).bitwise


def test_a_store_is_replayed_from_its_recording(frozen, tmp_path):
    recording = stages.record(frozen, "resampled:3", tmp_path / "store")
    assert stages.replay(frozen, "resampled:3", recording.store).bitwise


def test_a_scaled_model_is_frozen_with_its_scale():
    torch.manual_seed(0)
    module = ScaledGate(3.0).eval()
    frozen = stages.freeze(nn.Sequential(module), sequence())
    gate = torch.ones(4, TOKENS, WIDTH)
    with torch.no_grad():
        expected = module.value(X) * 3.0
    torch.testing.assert_close(frozen(X, coefficients={"0.gate#0/coefficient": gate}), expected, rtol=0, atol=1e-5)

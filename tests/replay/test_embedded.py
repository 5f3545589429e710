"""The embedded model's replay and variance against an implementation that intercepts the gates of the eager model."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fxaudit import stages
from fxaudit.model.data import DataSet
from fxaudit.replay.dependence import measure_dependence
from fxaudit.replay.intervene import parse_interventions
from fxaudit.replay.results import Dependence
from fxaudit.replay.variation import LEVELS, Variation, measure_variation
from tests.oracles import gates as oracle

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "featuregate"
INPUTS, CALIBRATION, BATCH = 10, 9, 4


@dataclass(frozen=True)
class Run:
    dependence: Dependence
    variation: Variation
    ids: Tensor
    targets: Tensor
    own: list[Tensor]
    calibration: list[Tensor]
    model: nn.Module


def _eager() -> nn.Module:
    spec = importlib.util.spec_from_file_location("featuregate_eager", EXAMPLE / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.trained()[0].eval()


def _ids(data: DataSet) -> Tensor:
    return data.columns["input_ids"].rows(0, data.count)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    place = tmp_path_factory.mktemp("embedded")
    frozen = stages.freeze(stages.load(f"{EXAMPLE / 'model.py'}:trained"))
    data = stages.load_data(EXAMPLE / "evaluation.txt", frozen.traced).limited(INPUTS)
    calibrating = stages.load_data(EXAMPLE / "calibration.txt", frozen.traced).limited(CALIBRATION)
    # Batches of 4 leave last batches of 2 and 1, filled up: repeated inputs must not count.
    recording = stages.record(frozen, data, place / "evaluation", batch_size=BATCH)
    profile = stages.record(frozen, calibrating, place / "calibration", batch_size=BATCH)
    asked = parse_interventions("identity,reassign,shuffle-tokens,static,neutral")
    scopes = ("joint", "controller")
    found = measure_dependence(frozen, data, recording.store, profile.store, asked, seeds=(3,), scopes=scopes)
    model = _eager()
    targets = data.targets_of(0, INPUTS)
    assert targets is not None
    return Run(
        found,
        measure_variation(recording.store, frozen.controllers),
        _ids(data),
        targets,
        oracle.record(model, _ids(data)),
        oracle.record(model, _ids(calibrating)),
        model,
    )


def test_the_embedded_model_has_two_feature_gates_in_each_layer(run: Run) -> None:
    found = [c.controller for c in run.variation.controllers]
    assert found == [f"blocks.{i}.{kind}_gate#0" for i in range(4) for kind in ("attention", "ffn")]


def test_baseline_equals_the_eager_model(run: Run) -> None:
    with torch.no_grad():
        expected = oracle.nll(run.model(run.ids), run.targets)
    assert torch.allclose(
        torch.tensor(run.dependence.baseline.per_input, dtype=torch.float64), expected, rtol=0, atol=1e-6
    )


def test_every_intervention_equals_intercepted_gates_on_every_input(run: Run) -> None:
    names = [c.controller for c in run.variation.controllers]
    positions = run.dependence.permutations.positions[run.ids.shape[1]]
    checked = 0
    for result in run.dependence.results:
        assert result.refused is None, result
        gates = oracle.intervened(
            result.intervention,
            result.level,
            run.own,
            run.calibration,
            [names.index(name) for name in result.controllers],
            run.dependence.permutations.donors,
            positions,
        )
        expected = oracle.nll(oracle.replay(run.model, run.ids, gates), run.targets)
        found = torch.tensor(result.per_input, dtype=torch.float64)
        assert float((found - expected).abs().max()) < 1e-6, (result.label, result.scope, result.controllers)
        checked += 1
    assert checked == 7 * (1 + 8)


def test_the_mean_effect_is_the_mean_of_paired_differences(run: Run) -> None:
    base = torch.tensor(run.dependence.baseline.per_input, dtype=torch.float64)
    for result in run.dependence.results:
        difference = torch.tensor(result.per_input, dtype=torch.float64) - base
        assert result.delta == pytest.approx(float(difference.mean()), abs=1e-12)


def test_identity_changes_no_bit_and_every_other_joint_intervention_does(run: Run) -> None:
    joint = {r.label: r.changed for r in run.dependence.results if r.scope == "joint"}
    assert joint.pop("identity") is False
    assert all(joint.values())


def test_no_input_is_its_own_donor(run: Run) -> None:
    donors = run.dependence.permutations.donors
    assert sorted(donors.tolist()) == list(range(INPUTS))
    assert not bool((donors == torch.arange(INPUTS)).any())


def test_permutations_move_positions_within_an_input(run: Run) -> None:
    positions = run.dependence.permutations.positions[run.ids.shape[1]]
    assert torch.equal(positions.sort(1).values, torch.arange(run.ids.shape[1]).expand_as(positions))


@pytest.mark.parametrize("level", LEVELS)
def test_layer_identity_equals_its_definition(run: Run, level: str) -> None:
    (pattern,) = run.variation.patterns
    assert pattern.layer_share[level] == pytest.approx(oracle.layer_share(run.own, level), abs=1e-9)


def test_shares_within_each_controller_equal_their_definition(run: Run) -> None:
    for controller, gate in zip(run.variation.controllers, run.own, strict=True):
        assert controller.shares == pytest.approx(oracle.shares(gate), abs=1e-9)


def test_means_and_extremes_are_those_of_the_gates(run: Run) -> None:
    for controller, gate in zip(run.variation.controllers, run.own, strict=True):
        wide = gate.double()
        found = (controller.mean, controller.std, controller.minimum, controller.maximum)
        expected = (wide.mean(), wide.std(correction=0), wide.min(), wide.max())
        assert found == pytest.approx(tuple(map(float, expected)), abs=1e-9)


def test_the_trained_model_depends_on_its_gates(run: Run) -> None:
    assert run.dependence.verdict == "DEPENDENT"

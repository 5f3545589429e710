"""`fxaudit replay` against hooks on the eager model, given the same permutations, in every scope and feedback."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor

from fxaudit.cli import main
from tests.oracles import hooks, models

INPUTS, CALIBRATION, TOLERANCE = 7, 6, 1e-6
FILE = Path(models.__file__).resolve()
KINDS = ("gated", "squeeze_excite", "routed")
INTERVENTIONS = {
    "gated": "identity reassign shuffle-tokens static:controller static:unit static:unit-position neutral resample "
    "permute-units swap-controllers reassign:each shuffle-tokens:each permute-units:each",
    "squeeze_excite": "reassign static:controller static:unit neutral resample permute-units swap-controllers",
    "routed": "reassign reassign:weights reassign:indices shuffle-tokens shuffle-tokens:weights shuffle-tokens:indices "
    "static:unit static:unit-position permute-units swap-controllers swap-controllers:weights swap-controllers:indices",
}


@dataclass(frozen=True)
class Case:
    kind: str
    found: dict[str, Any]
    hooked: hooks.Hooked
    interventions: hooks.Interventions
    inputs: Tensor
    targets: Tensor


def arrays(kind: str) -> tuple[str, Tensor, Tensor, Tensor]:
    """The name of the input, evaluation inputs, targets, calibration inputs."""
    generator = torch.Generator().manual_seed(4)
    if kind == "squeeze_excite":
        labels = torch.randint(0, models.CLASSES, (INPUTS,), generator=generator)
        return "image", models.images(INPUTS, 2), labels, models.images(CALIBRATION, 3)
    ids = models.tokens(INPUTS, 2)
    following = torch.randint(0, models.VOCABULARY, ids.shape, generator=generator)
    following[2, 1] = following[4, 3:] = -100
    return "ids", ids, following, models.tokens(CALIBRATION, 3)


def ids_of(kind: str) -> list[str]:
    count, name = {"gated": (3, "gate.linear"), "squeeze_excite": (2, "gate"), "routed": (2, "router.linear")}[kind]
    return [f"layers.{i}.{name}#0" for i in range(count)]


def drawn(kind: str) -> dict[str, np.ndarray]:
    """Permutations of our own, with donors that are not even a permutation: they only name sources."""
    generator = np.random.default_rng(8)
    units = {"gated": models.WIDTH, "squeeze_excite": 8, "routed": models.EXPERTS}[kind]
    found = {
        "donors": np.asarray([3, 0, 0, 6, 2, 1, 5]),
        "units": generator.permutation(units),
        "controllers": np.roll(np.arange(len(ids_of(kind))), 1),
    }
    for identifier in ids_of(kind):
        found[f"donors/{identifier}"] = generator.permutation(INPUTS)
        found[f"units/{identifier}"] = generator.permutation(units)
        if kind != "routed":
            found[f"resample/donors/{identifier}"] = generator.integers(0, INPUTS, (INPUTS, units))
    if kind == "squeeze_excite":
        return found

    def places() -> np.ndarray:
        return np.stack([generator.permutation(models.TOKENS) for _ in range(INPUTS)])

    found["positions"] = places()
    for identifier in ids_of(kind):
        found[f"positions/{identifier}"] = places()
        if kind != "routed":
            found[f"resample/positions/{identifier}"] = places()
    return found


def replayed(kind: str, place: Path, *options: str) -> dict[str, Any]:
    arguments = ["replay", f"{FILE}:{kind}", "--data", f"{place}/eval.safetensors", "--batch-size", "3", "--json"]
    result = CliRunner().invoke(main, [*arguments, "--calibration", f"{place}/cal.safetensors", *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """The replay of each kind of model, made once."""
    return functools.cache(lambda kind: made(kind, tmp_path_factory.mktemp(kind)))


def made(kind: str, place: Path) -> Case:
    name, inputs, targets, calibration = arrays(kind)
    save_file({name: inputs, "targets": targets}, place / "eval.safetensors")
    save_file({name: calibration}, place / "cal.safetensors")
    permutations = drawn(kind)
    if kind == "routed":
        save_file({n: torch.from_numpy(v) for n, v in permutations.items()}, place / "p.safetensors")
    else:
        np.savez(place / "p.npz", **permutations)
    file = f"{place}/p.{'safetensors' if kind == 'routed' else 'npz'}"
    listed = INTERVENTIONS[kind].replace(" ", ",")
    report = replayed(kind, place, "--permutations", file, "--interventions", listed, "--live")
    hooked = hooks.Hooked(getattr(models, kind)()[0], 1 if kind == "squeeze_excite" else models.TOKENS)
    scores = hooked.scores(calibration) if kind == "routed" else []
    interventions = hooks.Interventions(
        hooked.record(inputs), hooked.record(calibration), scores, permutations, ids_of(kind)
    )
    return Case(kind, report, hooked, interventions, inputs, targets)


def nll(case: Case, row: dict[str, Any]) -> Tensor:
    return hooks.nll(hooks.expected(case.hooked, case.inputs, case.interventions, row), case.targets)


@pytest.mark.parametrize("kind", KINDS)
def test_the_baseline_is_the_nll_of_the_eager_model(cases, kind):
    case = cases(kind)
    with torch.no_grad():
        expected = hooks.nll(case.hooked.model(case.inputs), case.targets)
    found = torch.tensor(case.found["baseline"]["per_input"], dtype=torch.float64)
    assert float((found - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize("feedback", ["frozen", "live", "in-flight"])
@pytest.mark.parametrize("scope", ["joint", "controller", "pattern", "cumulative"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_has_the_nll_of_the_hooked_model_on_every_input(cases, kind, scope, feedback):
    case = cases(kind)
    rows = [r for r in case.found["interventions"] if r["scope"] == scope and r["feedback"] == feedback]
    run = [row for row in rows if row["refused"] is None]
    for row in run:
        found = torch.tensor(row["per_input"], dtype=torch.float64)
        worst = float((found - nll(case, row)).abs().max())
        assert worst < TOLERANCE, (row["label"], row["controllers"], worst)
    asked = len([name for name in INTERVENTIONS[kind].split() if name != "identity"])
    if feedback == "frozen":
        counts = {"joint": 1, "pattern": 1, "controller": len(ids_of(kind)), "cumulative": len(ids_of(kind))}
        assert len(run) >= asked * counts[scope]
    elif feedback == "live":
        assert len(run) == asked * {"controller": len(ids_of(kind)), "cumulative": len(ids_of(kind)) - 1}.get(scope, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_intervention_moves_the_output(cases, kind):
    rows = [r for r in cases(kind).found["interventions"] if r["scope"] == "joint" and r["refused"] is None]
    assert all(row["changed"] for row in rows if row["name"] != "identity")


@pytest.mark.parametrize("kind", ["gated", "routed"])
def test_feedback_is_not_what_frozen_controllers_show(cases, kind):
    rows = [r for r in cases(kind).found["interventions"] if r["name"] == "reassign" and r["refused"] is None]
    by_feedback = {r["feedback"]: r["per_input"] for r in rows if r["controllers"] == [ids_of(kind)[0]]}
    assert by_feedback["live"] != by_feedback["frozen"]
    joint = {r["feedback"]: r["per_input"] for r in rows if r["scope"] == "joint"}
    assert joint["in-flight"] != joint["frozen"]


@pytest.mark.parametrize("kind", KINDS)
def test_with_every_controller_replaced_nothing_is_left_to_recompute(cases, kind):
    rows = [r for r in cases(kind).found["interventions"] if r["scope"] == "joint" and r["feedback"] == "live"]
    assert {r["refused"] for r in rows} == {"all controllers are replaced: nothing is left to recompute"}


def test_the_permutations_that_were_used_replay_the_same(cases, tmp_path):
    name, inputs, targets, calibration = arrays("gated")
    save_file({name: inputs, "targets": targets}, tmp_path / "eval.safetensors")
    save_file({name: calibration}, tmp_path / "cal.safetensors")
    file = tmp_path / "used.safetensors"
    asked = ["--interventions", "reassign,resample,permute-units", "--scope", "joint"]
    first = replayed("gated", tmp_path, *asked, "--seeds", "2", "--write-permutations", str(file))
    again = replayed("gated", tmp_path, *asked, "--permutations", str(file))
    effects = [[[s["per_input"] for s in r["seeds"]] for r in found["interventions"]] for found in (first, again)]
    assert effects[0] == effects[1]
    assert all(len(by_seed) == 2 and by_seed[0] != by_seed[1] for by_seed in effects[0])
    assert {n: v.tolist() for n, v in load_file(file).items()} == first["permutations"]

import copy
import re

import pytest

from fxaudit.report.claims import QUESTIONS, claims, percent

LEVELS = ("element", "mean_input_position", "mean_unit", "mean_unit_position")
SHARES = {"unit": 0.5, "position": 0.25, "input": 0.125, "residual": 0.125}
AUDIT = {
    "variation": {
        "layer_identity": [
            {
                "pattern": "feature-gate",
                "controllers": 8,
                "share": dict(zip(LEVELS, (0.11, 0.48, 0.54, 0.965), strict=True)),
            }
        ],
        "controllers": [{"shares": SHARES}, {"shares": SHARES}],
    },
    "dependence": {
        "margin": None,
        "inert": [],
        "baseline": {"metric": "nll", "mean": 1.23456},
        "interventions": [
            {"name": "reassign", "level": None, "delta": 0.5, "interval": [0.25, 0.75], "outcome": "DEPENDENT"},
            {"name": "static", "level": "controller", "delta": 0.3, "interval": [0.2, 0.4], "outcome": "DEPENDENT"},
            {"name": "static", "level": "unit", "delta": -0.01, "interval": [-0.03, 0.01], "outcome": "INCONCLUSIVE"},
            {"name": "neutral", "level": None, "delta": 9.0, "interval": [8.0, 10.0], "outcome": "DEPENDENT"},
        ],
    },
    "execution": {
        "inputs": 4,
        "exact": True,
        "forms": {"live": {"flops": [1200, 1200]}, "bound": {"flops": [1000, 1100]}},
        "removed": [{"nodes": 3, "parameters": 1000}, {"nodes": 2, "parameters": 234}],
    },
}
for row in AUDIT["dependence"]["interventions"]:
    row.update(scope="joint", feedback="frozen", discrete=None, refused=None)


@pytest.fixture
def audit():
    return copy.deepcopy(AUDIT)


def test_there_is_a_sentence_for_every_question(audit):
    assert list(claims(audit)) == list(QUESTIONS)


def tells(sentence: str, *facts: str) -> bool:
    """Whether a sentence holds all facts, in this order."""
    return re.search(".*?".join(map(re.escape, facts)), sentence, re.DOTALL) is not None


# --- variation ------------------------------------------------------------------------------------------------------


def test_variation_names_the_lowest_and_the_highest_level(audit):
    facts = ("8 feature-gate", "11 %", "single coefficients", "96.5 %", "means over units and positions", ";")
    assert tells(claims(audit)["variation"], *facts)


def test_variation_names_no_level_in_between(audit):
    assert "54 %" not in claims(audit)["variation"]


def test_variation_names_the_mean_shares_within_a_controller(audit):
    audit["variation"]["controllers"][1]["shares"] = {"unit": 0.7, "position": 0.05, "input": 0.025, "residual": 0.225}
    assert tells(
        claims(audit)["variation"], "; within a controller", "unit", "60 %", "position", "15 %", "input", "7.5 %"
    )


def test_a_single_controller_has_no_layer_identity_to_speak_of(audit):
    audit["variation"]["layer_identity"][0].update(controllers=1, share=dict.fromkeys(LEVELS))
    assert claims(audit)["variation"].startswith("within a controller")


def test_a_controller_that_never_varies_does_not_count_in_the_mean(audit):
    audit["variation"]["controllers"].append({"shares": None})
    assert tells(claims(audit)["variation"], "unit", "50 %", "position", "25 %", "input", "12.5 %")


def test_layer_identity_at_one_level_only_is_told_once(audit):
    audit["variation"]["layer_identity"][0]["share"] = {**dict.fromkeys(LEVELS), "element": 0.33}
    assert claims(audit)["variation"].count("33 %") == 1


def test_every_pattern_is_told(audit):
    (first,) = audit["variation"]["layer_identity"]
    audit["variation"]["layer_identity"].append({**first, "pattern": "se-gate", "controllers": 3})
    assert tells(claims(audit)["variation"], "8 feature-gate", ";", "3 se-gate", ";")


def test_constant_coefficients_are_told(audit):
    audit["variation"] = {
        "layer_identity": [{"pattern": "se-gate", "controllers": 1, "share": dict.fromkeys(LEVELS)}],
        "controllers": [{"shares": None}],
    }
    assert claims(audit)["variation"] == "the coefficients take one value"


# --- dependence -----------------------------------------------------------------------------------------------------


def test_dependence_without_a_margin(audit):
    expected = (
        "nll 1.235; reassign +0.5 [+0.25, +0.75] dependent,"
        " best static profile (unit) -0.01 [-0.03, +0.01] inconclusive"
    )
    assert claims(audit)["dependence"] == expected


def test_dependence_with_a_margin(audit):
    audit["dependence"]["margin"] = 0.05
    audit["dependence"]["interventions"][2]["outcome"] = "EQUIVALENT"
    expected = "best static profile (unit) -0.01 [-0.03, +0.01] equivalent (margin 0.05)"
    assert claims(audit)["dependence"].endswith(expected)


def test_neutral_is_no_evidence_of_an_assignment(audit):
    assert "neutral" not in claims(audit)["dependence"]


def test_controllers_alone_are_not_told(audit):
    audit["dependence"]["interventions"][0]["scope"] = "controller"
    assert "reassign" not in claims(audit)["dependence"]


def test_refused_interventions_are_not_told(audit):
    audit["dependence"]["interventions"][0].update(refused="reassignment needs two inputs", delta=None, interval=None)
    assert claims(audit)["dependence"].startswith("nll 1.235; best static profile (unit)")


def test_nothing_to_exchange_is_told(audit):
    for row in audit["dependence"]["interventions"]:
        row["refused"] = "the coefficient has no position axis"
    assert claims(audit)["dependence"] == "nll 1.235; nothing could be exchanged"


def test_an_effect_on_one_input_is_not_resolvable(audit):
    audit["dependence"]["interventions"] = audit["dependence"]["interventions"][:1]
    audit["dependence"]["interventions"][0].update(interval=None, outcome="INCONCLUSIVE")
    assert claims(audit)["dependence"] == "nll 1.235; reassign +0.5, not resolvable"


def test_inert_controllers_are_counted(audit):
    audit["dependence"]["inert"] = ["a#0", "b#0"]
    assert claims(audit)["dependence"].endswith("; 2 controllers move no bit of the output")


def test_one_inert_controller_is_told_in_the_singular(audit):
    audit["dependence"]["inert"] = ["a#0"]
    assert claims(audit)["dependence"].endswith("; 1 controller moves no bit of the output")


# --- execution ------------------------------------------------------------------------------------------------------


def test_execution_tells_counts_and_what_freezing_removes(audit):
    expected = (
        "1,200 FLOPs for each of 4 inputs on onnxruntime, equal to the traced graph's;"
        " freezing leaves 1,000 to 1,100, and removes 5 nodes and 1,234 parameters"
    )
    assert claims(audit)["execution"] == expected


def test_execution_says_where_its_figures_come_from(audit):
    count = {"provider": "CPUExecutionProvider", "level": "ORT_DISABLE_ALL", "precision": "float32"}
    time = {"provider": "CUDAExecutionProvider", "level": "ORT_ENABLE_ALL", "precision": "float16"}
    audit["execution"] |= {
        "roles": {"COUNT": count, "TIME": time},
        "time": [
            {"name": "controller cost", "outcome": "-2.6 %"},
            {"name": "specialisation gain", "outcome": "not resolvable"},
        ],
    }
    assert tells(
        claims(audit)["execution"],
        "1,200 FLOPs for each of 4 inputs on onnxruntime",
        "(role COUNT, CPUExecutionProvider, float32, graph as exported)",
        "in time (role TIME, CUDAExecutionProvider, float16, all optimisations)",
        "controller cost -2.6 %, specialisation gain not resolvable",
    )


def test_counts_that_could_not_be_compared_are_told(audit):
    audit["execution"]["exact"] = None
    assert "not compared with the traced graph's, as an op has no formula" in claims(audit)["execution"]


def test_counts_that_differ_from_the_traced_graphs_are_told(audit):
    audit["execution"]["exact"] = False
    assert "onnxruntime, different from the traced graph's" in claims(audit)["execution"]


def test_a_failed_export_is_told_by_the_first_line_of_its_error(audit):
    audit["execution"] = {
        "verdict": "INCOMPLETE(export)",
        "error": "grid_sampler has no ONNX form\n  where: model.py:3",
    }
    assert claims(audit)["execution"] == "grid_sampler has no ONNX form"


@pytest.mark.parametrize("error", [None, ""])
def test_an_execution_without_an_error_was_not_measured(audit, error):
    audit["execution"] = {"verdict": "INCOMPLETE(export)", "error": error}
    assert claims(audit)["execution"] == "not measured"


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0 %"), (1.0, "100 %"), (0.965, "96.5 %"), (0.12345, "12.3 %"), (0.00056789, "0.0568 %")]
)
def test_a_share_has_three_significant_digits(share, text):
    assert percent(share) == text


@pytest.mark.parametrize("share", [3.2e-9, -4e-17])
def test_a_share_that_is_rounding_has_no_exponent(share):
    assert "e-" not in percent(share)

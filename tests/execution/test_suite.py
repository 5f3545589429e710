"""The suite: each way in which compute may depend on the input gets its verdict, its exact counts, and its roots."""

from __future__ import annotations

import pytest
import torch

import fxaudit
from fxaudit import stages
from fxaudit.execution.checks import feed_of
from fxaudit.execution.export import export_graphs
from fxaudit.execution.profile import count_runs
from fxaudit.execution.verdict import execute, one_at_a_time
from fxaudit.model.load import subject
from fxaudit.model.settings import TraceOptions
from tests.execution.suite import CASES, INPUTS, PROVEN, Case


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name.replace(" ", "-")) for case in CASES])
def test_a_model_of_the_suite_has_its_verdict_counts_and_roots(case: Case, tmp_path) -> None:
    if case.keyword:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, inputs = case.build().eval(), case.inputs()
    example = {case.keyword: inputs[:2]} if case.keyword else (inputs[:2],)
    traced = stages.trace(subject(model, example), options=TraceOptions(**case.options))
    frozen = fxaudit.freeze(traced)
    exported = export_graphs(frozen, tmp_path, opset=case.opset)
    found = execute(frozen, exported, one_at_a_time(traced, [inputs]))
    with torch.no_grad():
        expected = [case.flops(model, inputs[i : i + 1]) for i in range(INPUTS)]
    assert [row["flops"]["live"] for row in found.per_input] == expected
    assert [row["fx"]["live"] for row in found.per_input] == expected
    assert found.unknown == []
    assert found.verdict == {"live": case.verdict, "bound": case.bound_verdict}
    roots = found.proof["live"]["roots"]
    assert [(root["op"], root["module"]) for root in roots] == [(op, module) for op, module, _ in case.roots]
    for root, (_, _, code) in zip(roots, case.roots, strict=True):
        assert code in root["source"]
    assert found.proof["live"]["static"] is (case.verdict == PROVEN)
    dense = [row["dense_flops"] for row in found.experts]
    assert dense == [[flops] * INPUTS if flops is not None else None for flops in case.dense]
    executed = count_runs(exported.live, [feed_of(exported, [inputs[:1]])]).runs[0].ops
    assert set(case.ops) <= set(executed)


def test_the_suite_tells_every_verdict_apart_and_counts_what_differs() -> None:
    assert len(CASES) >= 16
    assert {case.verdict for case in CASES} == {
        "PROVEN_STATIC",
        "OBSERVED_CONSTANT",
        "REDISTRIBUTED",
        "DATA_DEPENDENT_SHAPES",
        "DATA_DEPENDENT_KERNELS",
    }


@pytest.mark.parametrize("case", [c for c in CASES if c.verdict.startswith("DATA_DEPENDENT")], ids=lambda c: c.name)
def test_the_inputs_of_a_model_with_varying_work_vary_it(case: Case) -> None:
    torch.manual_seed(0)
    model, inputs = case.build().eval(), case.inputs()
    with torch.no_grad():
        assert len({case.flops(model, inputs[i : i + 1]) for i in range(INPUTS)}) > 1

"""The report page: its numbers, its gaps, its escaping, and what a real browser makes of it."""

import copy
import html
import itertools
import json
import math
import socket
import subprocess
import tempfile
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fxaudit.errors import DataError
from fxaudit.report.html import ROWS, render
from fxaudit.report.pictures import COLUMNS, LEVELS, change, interval, number, percent

ROOT = Path(__file__).resolve().parents[2]
INTERVENTIONS = (("reassign", None), ("shuffle-tokens", None), ("static", "controller"), ("static", "unit"))
LOADING_TAGS = {"script", "iframe", "object", "embed", "img", "image", "use", "a", "base", "audio", "video", "form"}


def identifier(i: int) -> str:
    return f"blocks.{i}.gate#0"


def controller(i: int) -> dict[str, Any]:
    domain = {"kind": "interval", "low": 0.0, "high": 1.0, "axis": None}
    return {
        "id": identifier(i),
        "pattern": "feature-gate",
        "module": f"blocks.{i}.gate",
        "call": 0,
        "coefficients": [{"name": "gate", "shape": ["inputs", 6, 5], "domain": domain}],
        "cone": {"nodes": 2 + i, "parameters": 1000 + i, "flops": 2_000_000 + i, "flops_unknown": []},
        "partially_frozen": False,
    }


def varied(i: int) -> dict[str, Any]:
    return {
        "id": identifier(i),
        "pattern": "feature-gate",
        "mean": 0.61234 + i / 1000,
        "std": 0.25,
        "min": 0.001,
        "max": 0.99,
        "saturated": 0.125,
        "shares": {"unit": 0.5, "position": 0.2, "input": 0.1, "residual": 0.2},
        "unit_means": [0.1 + 0.01 * u + i / 1000 for u in range(5)],
        "position_means": [0.3 + 0.0123 * t + i / 1000 for t in range(6)],
    }


def effect(name: str, level: str | None, scope: str, ids: list[str], delta: float) -> dict[str, Any]:
    return {
        "name": name,
        "level": level,
        "scope": scope,
        "controllers": ids,
        "feedback": "frozen",
        "discrete": None,
        "seed": 0,
        "metric": "nll",
        "delta": delta,
        "interval": [delta - 0.0213, delta + 0.0234],
        "p": 0.0123,
        "adjusted_p": 0.0456,
        "accuracy": 0.25,
        "changed": True,
        "outcome": "DEPENDENT",
        "refused": None,
        "per_input": [],
    }


def form(flops: int, nodes: int) -> dict[str, Any]:
    return {
        "verdict": "PROVEN_STATIC",
        "flops": [flops] * 3,
        "fx_flops": [flops] * 3,
        "setup_flops": 77,
        "elements": [4321] * 3,
        "bytes_read": [8_642] * 3,
        "bytes_written": [7_531] * 3,
        "executed_nodes": [nodes] * 3,
        "parameters": 500_000,
        "static": True,
        "roots": [],
        "opaque": [],
        "random": [],
        "unknown": [],
        "evidence": {
            "executed_nodes": nodes - 20,
            "flops_padded": flops + 1000,
            "flops_unknown": ["Mystery"],
            "sequences": 1,
            "difference": 2.5e-7,
            "mapped": {"name": 3, "value": 0, "region": 1, "lost": 0},
            "claimed": {"CPUExecutionProvider": 4},
            "providers": {"CPUExecutionProvider": 4},
            "kernels": [
                {
                    "op": "FusedConv",
                    "provider": "CPUExecutionProvider",
                    "count": 4,
                    "flops_padded": flops + 1000,
                    "modules": ["blocks.0", "blocks.1"],
                }
            ],
        },
    }


def work(flops: int) -> dict[str, Any]:
    return {"flops": [flops] * 3, "setup": [0] * 3, "elements": [11] * 3, "read": [22] * 3, "written": [33] * 3}


def sample(controllers: int = 3) -> dict[str, Any]:
    """The JSON of an audit with everything in it."""
    ids = [identifier(i) for i in range(controllers)]
    effects = []
    for k, (name, level) in enumerate(INTERVENTIONS):
        effects.append(effect(name, level, "joint", ids, 1.90671 + k))
        effects += [effect(name, level, "controller", [one], 0.01 * k - 0.02 * i) for i, one in enumerate(ids)]
    exact = {"max_abs_diff": 0.0, "bitwise": True, "comparisons": [{}, {}]}
    data = {"source": "data.txt", "inputs": 16, "digest": "d1", "targets": True}
    share = {"element": 0.1134, "mean_input_position": 0.482, "mean_unit": 0.543, "mean_unit_position": 0.9652}
    return {
        "schema": "fxaudit.audit/1",
        "model": {"source": "model.py:build", "class": "model.Gated", "parameters": 958_208, "fingerprint": "f1"},
        "graph": {"nodes": 261, "frontend": "torch.export", "seconds": 1.5},
        "fidelity": exact,
        "identity": exact,
        "counts": {"feature-gate": controllers, "se-gate": 0},
        "controllers": [controller(i) for i in range(controllers)],
        "findings": [{"kind": "inexact-trace", "text": "differs a little", "where": "model.py:12"}],
        "provenance": {
            "fxaudit": "0.1.0",
            "settings": {"mode": "eval"},
            "environment": {"python": "3.11.7", "cuda": None, "packages": {"torch": "2.14.1"}},
            "options": {"seed": 0, "margin": None, "interventions": ["reassign", "neutral"]},
            "seconds": {"trace": 4.55},
            "patterns": {"feature-gate": "p1"},
        },
        "verdict": {"variation": "VARYING", "dependence": "DEPENDENT", "execution": "PROVEN_STATIC"},
        "data": {"evaluation": data, "calibration": {**data, "digest": "d2"}, "batch_size": 8},
        "variation": {
            "verdict": "VARYING",
            "inputs": 16,
            "layer_identity": [
                {"pattern": "feature-gate", "controllers": controllers, "domain": "[0, 1]", "share": share}
            ],
            "layer_identity_overall": None,
            "controllers": [varied(i) for i in range(controllers)],
            "skipped": [],
        },
        "dependence": {
            "verdict": "DEPENDENT",
            "margin": None,
            "inert": [],
            "baseline": {
                "metric": "nll",
                "output": "logits",
                "form": "logits",
                "mean": 5.533245,
                "token_weighted": 5.431,
                "accuracy": 0.0469,
                "per_input": [],
            },
            "interventions": effects,
            "permutations": {},
        },
        "execution": {
            "verdict": "PROVEN_STATIC",
            "error": None,
            "inputs": 3,
            "exact": True,
            "forms": {"live": form(123_456, 90), "bound": form(111_222, 84), "baked": form(100_333, 80)},
            "removed": [{"module": f"blocks.{i}.gate", "nodes": 2, "parameters": 1000 + i} for i in range(controllers)],
            "agreement": {
                "live_bound_bitwise": True,
                "torch_max_rel": 3.21e-6,
                "torch_rel_l2": 4.56e-7,
                "limit": 1e-5,
                "referee": {
                    "heard": 3,
                    "torch_error": 1.25e-7,
                    "onnx_error": 2.25e-7,
                    "share_of_limit": 0.375,
                    "unheard": "",
                },
                "baked": {},
            },
            "roles": {
                "COUNT": {"provider": "CPUExecutionProvider", "level": "ORT_DISABLE_ALL", "precision": "float32"},
                "EVIDENCE": {"provider": "CUDAExecutionProvider", "level": "ORT_ENABLE_ALL", "precision": "float32"},
                "TIME": {"provider": "CPUExecutionProvider", "level": "ORT_ENABLE_ALL", "precision": "float32"},
            },
            "modules": [{"module": "blocks.0.gate", **{name: work(2468) for name in ("live", "bound", "baked")}}],
            "branches": [
                {
                    "node": "node_cond",
                    "op": "If",
                    "module": "blocks.0",
                    "source": "model.py:33   torch.cond(p, a, b, (h,))",
                    "bodies": {
                        "then_branch": {"inputs": [1, 1, 1], "probes": {"constant": 1}},
                        "else_branch": {"inputs": [0, 0, 0], "probes": {"constant": 0}},
                    },
                    "never": ["else_branch"],
                }
            ],
            "probes": [{"name": "constant", "flops": 123_456, "executed": "other shapes", "compared": True}],
            "experts": [
                {
                    "controller": "blocks.0.router#0",
                    "experts": 4,
                    "chosen": 2,
                    "load": [5, 0, 7, 12],
                    "activated": [3, 2, 3],
                    "never_used": [1],
                    "routed_flops": [6144] * 3,
                    "dense_flops": [19_200] * 3,
                }
            ],
            "time": [
                {
                    "name": "controller cost",
                    "first": "live",
                    "second": "bound",
                    "ratio": 0.974,
                    "interval": [0.972, 0.979],
                    "blocks": [0.974] * 10,
                    "control": {"ratio": 0.997, "interval": [0.987, 1.011], "blocks": [0.997] * 10},
                    "resolvable": True,
                    "outcome": "-2.6 %",
                    "microseconds": {"live": 14401.0, "bound": 14027.5},
                }
            ],
            "onnxruntime": "1.30.0",
        },
    }


class Page(HTMLParser):
    """The text, the tags and the tables (caption -> rows of cell texts) of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.titles: list[str] = []
        self.words = ""
        self._rows: list[list[str]] = []
        self._caption, self._within = "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("caption", "td", "th", "title", "style"):
            self._within = tag
        if tag == "table":
            self._rows, self._caption = [], ""
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
        elif tag == "title":
            self.titles.append("")
        elif tag == "br" and self._within in ("td", "th"):
            self._rows[-1][-1] += "\n"

    def handle_endtag(self, tag):
        if tag == self._within:
            self._within = ""
        if tag == "table":
            self.tables[self._caption] = self._rows

    def handle_data(self, data):
        if self._within == "caption":
            self._caption += data
        elif self._within in ("td", "th"):
            self._rows[-1][-1] += data
        elif self._within == "title":
            self.titles[-1] += data
        if self._within != "style":
            self.words += data

    def table(self, start: str) -> list[list[str]]:
        (found,) = [rows for caption, rows in self.tables.items() if caption.startswith(start)]
        return found

    def svg_labels(self) -> list[str]:
        return [attributes.get("aria-label") or "" for tag, attributes in self.tags if tag == "svg"]

    def has(self, identity: str) -> bool:
        return any(attributes.get("id") == identity for _, attributes in self.tags)


def test_the_controllers_table_holds_the_numbers_of_the_json():
    audit = sample()
    audit["controllers"][1]["partially_frozen"] = True
    rows = Page(render(audit)).table("Controllers, what")[1:]
    for row, c in zip(rows, audit["controllers"], strict=True):
        assert row[0].startswith(c["id"])
        assert row[2] == "gate [inputs, 6, 5]"
        assert row[3] == "[0, 1]"
        assert [int(cell.replace(",", "")) for cell in row[4:]] == list(c["cone"].values())[:3]
    assert ["partially frozen" in row[0] for row in rows] == [False, True, False]


def test_the_variation_tables_and_pictures_hold_the_numbers_of_the_json():
    audit = sample()
    page = Page(render(audit))
    found = audit["variation"]
    (row,) = page.table("Share of variance")[1:]
    shares = found["layer_identity"][0]["share"]
    assert row[3:] == ["11.3 %", "48.2 %", "54.3 %", "96.5 %"] == [percent(shares[level]) for level in LEVELS]
    for row, c in zip(page.table("Coefficients of each")[1:], found["controllers"], strict=True):
        assert row[0] == c["id"]
        for cell, name in zip(row[1:5], ("mean", "std", "min", "max"), strict=True):
            assert float(cell) == pytest.approx(c[name], rel=1e-3)
        assert row[6:] == [percent(share) for share in c["shares"].values()]
    for c in found["controllers"]:
        for t, mean in enumerate(c["position_means"]):
            assert f"{c['id']}, position {t}: {number(mean)}" in page.titles


def test_the_dependence_tables_and_pictures_hold_the_numbers_of_the_json():
    audit = sample()
    page = Page(render(audit))
    joint = [row for row in audit["dependence"]["interventions"] if row["scope"] == "joint"]
    for cells, row in zip(page.table("Interventions on all")[1:], joint, strict=True):
        assert float(cells[2]) == pytest.approx(row["delta"], abs=5e-5)
        assert json.loads(cells[3]) == pytest.approx(row["interval"], abs=5e-5)
        assert float(cells[4]) == row["adjusted_p"]
        assert any(f"{change(row)} {interval(row)}" in label for label in page.svg_labels())
    alone = page.table("Interventions on each")
    assert alone[0][1:] == ["reassign", "shuffle-tokens", "static:controller", "static:unit"]
    for cells in alone[1:]:
        for label, cell in zip(alone[0][1:], cells[1:], strict=True):
            name, _, level = label.partition(":")
            (row,) = [
                r
                for r in audit["dependence"]["interventions"]
                if (r["name"], r["level"] or "", r["controllers"]) == (name, level, [cells[0]])
            ]
            assert cell.split("\n") == [change(row), interval(row), "p 0.0456", "DEPENDENT"]
            assert f"{cells[0]}, {label}: {change(row)} {interval(row)}" in page.titles
    assert "mean nll of 5.5332 nats" in page.words


def test_the_execution_tables_hold_the_numbers_of_the_json():
    audit = sample()
    page = Page(render(audit))
    for cells, (name, found) in zip(
        page.table("The exported forms")[1:], audit["execution"]["forms"].items(), strict=True
    ):
        assert cells[0] == name
        numbers = [int(cell.replace(",", "")) for cell in cells[2:10]]
        assert numbers == [
            found["flops"][0],
            found["fx_flops"][0],
            77,
            4321,
            found["executed_nodes"][0],
            500_000,
            8_642,
            7_531,
        ]
    removed = page.table("What freezing removes")
    assert removed[-1] == ["all 3 modules", "6", "3,003"]
    for text in ("Counted by onnxruntime 1.30.0 for 3 inputs", "3.210e-06", "4.560e-07", "1.250e-07", "37.5 %"):
        assert text in page.words
    assert any("live 123,456; bound 111,222; baked 100,333" in label for label in page.svg_labels())


def test_work_that_differs_by_input_shows_its_range_its_roots_and_its_unknown_ops():
    audit = sample()
    live = audit["execution"]["forms"]["live"]
    root = {"node": "nonzero_1", "op": "NonZero", "reason": "its size is a count", "module": "blocks.0.moe"}
    root["source"] = "model.py:21   torch.where(chosen == e)"
    live.update(flops=[10_000, 30_000, 20_000], static=False, roots=[root], unknown=["com.microsoft.Foo"])
    page = Page(render(audit))
    assert page.table("The exported forms")[1][2] == "10,000 to 30,000"
    assert page.table("Where the input reaches")[1] == [
        "live",
        *(root[k] for k in ("node", "op", "module", "reason", "source")),
    ]
    assert "com.microsoft.Foo (live)" in page.words


COUNT = "role COUNT, CPUExecutionProvider, float32, graph as exported"
EVIDENCE = "role EVIDENCE, CUDAExecutionProvider, float32, all optimisations"
TIME = "role TIME, CPUExecutionProvider, float32, all optimisations"


@pytest.mark.parametrize(
    ("title", "role", "row"),
    [
        ("The exported forms", COUNT, None),
        ("Work by module", COUNT, ["blocks.0.gate", "2,468", "2,468", "2,468", "11", "22", "33"]),
        (
            "Routers: experts that were used",
            COUNT,
            ["blocks.0.router#0", "4", "2", "2 to 3", "5, 0, 7, 12", "1", "6,144", "19,200"],
        ),
        (
            "What onnxruntime makes of each form",
            EVIDENCE,
            ["live", "FusedConv", "CPUExecutionProvider", "4", "124,456", "blocks.0, blocks.1"],
        ),
        (
            "Time with and without controllers",
            TIME,
            [
                *("controller cost", "bound against live", "-2.6 %", "0.974", "[0.972, 0.979]", "0.997"),
                *("[0.987, 1.011]", "14401.0 to 14027.5"),
            ],
        ),
        ("Made-up inputs", COUNT, ["constant", "123,456", "other shapes", "equal"]),
        (
            "Branches and loops",
            COUNT,
            [
                *("node_cond", "If", "blocks.0", "then_branch 4, else_branch 0", "else_branch"),
                "model.py:33   torch.cond(p, a, b, (h,))",
            ],
        ),
    ],
)
def test_every_table_of_execution_says_which_role_provider_precision_and_level_it_is_from(title, role, row):
    page = Page(render(sample()))
    (caption,) = (caption for caption in page.tables if caption.startswith(title))
    assert role in caption
    if row is not None:
        assert page.table(title)[1] == row


def test_how_far_optimising_moves_outputs_is_on_the_page():
    assert "2.500e-07 (live), 2.500e-07 (bound), 2.500e-07 (baked)" in Page(render(sample())).words


def test_a_time_that_was_not_measured_says_how_it_would_be():
    audit = sample()
    audit["execution"]["time"] = []
    assert "Not measured; fxaudit audit --time measures it." in Page(render(audit)).words


def test_an_audit_of_a_version_that_recorded_less_is_still_rendered():
    audit = sample()
    for key in ("roles", "modules", "branches", "probes", "experts", "time"):
        del audit["execution"][key]
    del audit["execution"]["agreement"]["referee"]
    audit["execution"] |= {"role": "COUNT", "provider": "CPUExecutionProvider"}
    for one in audit["execution"]["forms"].values():
        for key in ("evidence", "bytes_read", "bytes_written"):
            del one[key]
    page = Page(render(audit))
    (caption,) = (caption for caption in page.tables if caption.startswith("The exported forms"))
    assert "role COUNT, CPUExecutionProvider, precision not recorded, graph as exported" in caption
    assert "not asked: by an earlier version" in page.words


def test_a_referee_that_was_not_heard_says_why():
    audit = sample()
    referee = {"heard": 0, "torch_error": None, "onnx_error": None, "share_of_limit": None, "unheard": "too large"}
    audit["execution"]["agreement"]["referee"] = referee
    page = Page(render(audit))
    assert "not asked: too large" in page.words
    assert "each allowed up to 1.000e-05" in page.words


def test_random_graphs_are_not_compared():
    audit = sample()
    audit["execution"]["agreement"] |= {"torch_max_rel": None, "torch_rel_l2": None, "referee": None}
    assert "random numbers, so outputs are not compared" in Page(render(audit)).words


def test_a_missing_baked_form_is_said():
    audit = sample()
    del audit["execution"]["forms"]["baked"]
    page = Page(render(audit))
    assert "There is no baked form" in page.words
    assert [row[0] for row in page.table("The exported forms")[1:]] == ["live", "bound"]


def test_a_failed_export_leaves_the_other_claims():
    audit = sample()
    audit["verdict"]["execution"] = "INCOMPLETE(export)"
    audit["execution"] = {"verdict": "INCOMPLETE(export)", "error": "no ONNX function for aten.foo"}
    page = Page(render(audit))
    assert "no ONNX function for aten.foo" in page.words
    assert page.words.count("INCOMPLETE(export)") == 2
    assert [page.has(f"picture-{i}") for i in (1, 2, 3, 4)] == [True, True, True, False]


def test_controllers_without_positions_are_drawn_by_unit():
    audit = sample()
    for c in audit["variation"]["controllers"]:
        c["position_means"] = [c["mean"]]
    page = Page(render(audit))
    assert "Units are ranked by their mean" in page.words
    ranked = sorted(audit["variation"]["controllers"][0]["unit_means"], reverse=True)
    for rank, mean in enumerate(ranked):
        assert f"{identifier(0)}, unit of rank {rank}: {number(mean)}" in page.titles


def test_long_rows_of_the_heat_map_show_means_of_neighbours():
    audit = sample(1)
    audit["variation"]["controllers"][0]["position_means"] = [float(t) for t in range(2 * COLUMNS)]
    page = Page(render(audit))
    assert f"Rows of more than {COLUMNS} columns show means of neighbours" in page.words
    assert f"{identifier(0)}, position 2 to 3: 2.500" in page.titles


def test_what_is_null_reads_as_not_resolvable_or_as_left_out():
    audit = sample()
    audit["identity"] = None
    audit["dependence"]["baseline"]["accuracy"] = None
    audit["variation"]["layer_identity"][0]["share"]["element"] = None
    for c in audit["variation"]["controllers"]:
        c["shares"], c["saturated"] = None, None
    for row in audit["dependence"]["interventions"]:
        row.update(interval=None, p=None, adjusted_p=None, accuracy=None)
    page = Page(render(audit))
    assert {row[3] for row in page.table("Interventions on all")[1:]} == {"not resolvable"}
    assert page.table("Share of variance")[1][3] == "not resolvable"
    assert {row[6] for row in page.table("Coefficients of each")[1:]} == {"never varies"}
    assert "not compared" in page.words
    assert "accuracy" not in page.words.split("Baseline:")[1].split("Effects")[0]
    assert sum(attributes.get("class") == "ring" for _, attributes in page.tags) > 0
    assert not any(attributes.get("class") == "dot" for _, attributes in page.tags)


def test_numbers_that_are_not_finite_are_written_and_not_drawn():
    audit = sample()
    audit["dependence"]["interventions"][0].update(delta=math.inf, interval=[math.nan, math.nan])
    audit["variation"]["controllers"][0]["position_means"][0] = math.nan
    text = render(audit)
    assert Page(text).table("Interventions on all")[1][2:4] == ["+inf", "[nan, nan]"]
    assert not any('"nan"' in part or '"inf"' in part for part in text.split("<svg")[1:])


def test_the_margin_is_a_band_and_inert_and_partly_frozen_rows_say_so():
    audit = sample()
    audit["dependence"].update(margin=0.05, inert=[identifier(2)])
    audit["controllers"][0]["partially_frozen"] = True
    page = Page(render(audit))
    assert "Effects within ±0.05 nats count as none" in page.words
    assert any(attributes.get("class") == "margin" for _, attributes in page.tags)
    rows = page.table("Interventions on each")[1:]
    assert "partially frozen" in rows[0][1]
    assert "inert" in rows[2][1]
    assert all("partially frozen" in row[0] for row in page.table("Interventions on all")[1:])


def test_refused_interventions_are_listed_with_their_reason():
    audit = sample()
    for row in audit["dependence"]["interventions"]:
        if row["name"] == "shuffle-tokens":
            row.update(
                delta=None,
                interval=None,
                p=None,
                adjusted_p=None,
                changed=None,
                outcome="REFUSED",
                refused="no position axis",
            )
    page = Page(render(audit))
    refused = page.table("Interventions that were refused")[1:]
    assert [row[:3] for row in refused] == [
        ["shuffle-tokens", "joint", "no position axis"],
        ["shuffle-tokens", "controller", "no position axis"],
    ]
    assert "shuffle-tokens" not in page.table("Interventions on each")[0]


def test_rows_of_one_intervention_are_told_apart():
    audit = sample()
    again = copy.deepcopy(audit["dependence"]["interventions"][0])
    audit["dependence"]["interventions"] += [
        {**again, "seed": 1},
        {**again, "feedback": "live"},
        {**again, "scope": "pattern", "controllers": again["controllers"][:1]},
        {**again, "scope": "cumulative"},  # too many for a page; audit.json has them
    ]
    labels = [row[0] for row in Page(render(audit)).table("Interventions on all")[1:]]
    assert len(set(labels)) == len(labels) == 7


def test_many_controllers_are_capped_and_the_rest_is_counted():
    page = Page(render(sample(100)))
    assert len(page.table("Controllers, what")) == ROWS + 1
    assert len(page.table("Interventions on each")) == ROWS + 1
    for what in ("controllers", "rows", "modules"):
        assert f"The first 64 of 100 {what} are shown; 36 more are left out here" in page.words
    assert not any(title.startswith(f"{identifier(64)},") for title in page.titles)


def hostile(value: Any, text: str) -> Any:
    """The JSON with `text` in every string that a model, a file or a user could have written."""
    fixed = {
        "schema",
        "verdict",
        "outcome",
        "scope",
        "kind",
        "feedback",
        "level",
        "name",
        "pattern",
        "id",
        "controllers",
    }
    if isinstance(value, dict):
        return {k: v if k in fixed and not isinstance(v, dict | list) else hostile(v, text) for k, v in value.items()}
    if isinstance(value, list):
        return [hostile(item, text) for item in value]
    return value + text if isinstance(value, str) else value


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "' onload='x", "\ud800"]
)
def test_strings_from_outside_stay_text(text):
    audit = hostile(sample(), text)
    for c in (*audit["controllers"], *audit["variation"]["controllers"]):
        c["id"] += text
    for row in audit["dependence"]["interventions"]:
        row["controllers"] = [one + text if not one.endswith(text) else one for one in row["controllers"]]
    page = render(audit)
    page.encode("utf-8")
    parsed = Page(page)
    assert not {tag for tag, _ in parsed.tags} & LOADING_TAGS
    assert not [name for _, attributes in parsed.tags for name in attributes if name.startswith("on")]
    assert parsed.words.count(text if text != "\ud800" else "?") > 20


def test_the_page_names_nothing_to_load():
    text = render(sample())
    page = Page(text)
    links = [v for _, a in page.tags for k, v in a.items() if k in ("src", "href", "data", "action", "xlink:href")]
    assert links == ["data:,"]
    assert "url(" not in text
    assert "@import" not in text
    (policy,) = [a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:")


def test_every_picture_and_table_has_words():
    page = Page(render(sample()))
    assert all(page.svg_labels())
    assert all(page.tables)
    levels = [int(tag[1]) for tag, _ in page.tags if tag in ("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))


def test_json_of_another_schema_is_refused():
    with pytest.raises(DataError, match="this is no audit") as caught:
        render({"schema": "fxaudit.trace/1"})
    assert caught.value.found == "fxaudit.trace/1"


@pytest.fixture(scope="module")
def browser() -> str:
    done = subprocess.run([ROOT / ".ci" / "browser"], capture_output=True, text=True, timeout=900)
    if done.returncode:
        pytest.fail(f"the report has to be opened in a browser, and there is none\n{done.stderr}")
    return done.stdout.strip()


def browse(browser: str, page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    quiet = ("gpu", "quic", "background-networking", "component-update", "sync")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [browser, "--headless", "--no-sandbox", "--no-first-run", f"--user-data-dir={profile}"]
        command += [*(f"--disable-{name}" for name in quiet), "--enable-logging=stderr", *options, page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def test_a_browser_loads_the_page_with_its_verdicts_and_pictures(browser, tmp_path):
    audit = sample()
    page = tmp_path / "report.html"
    page.write_text(render(audit), encoding="utf-8")
    done = browse(browser, page, "--dump-dom")
    loaded = Page(done.stdout)
    for claim, verdict in audit["verdict"].items():
        assert f"{claim.capitalize()}: {verdict}" in loaded.words
    for i in (1, 2, 3, 4):
        assert loaded.has(f"picture-{i}")
        assert "<svg" in done.stdout.split(f'id="picture-{i}"')[1].split("</figure>")[0]
    assert "CONSOLE" not in done.stderr, "the page made the browser complain"


@pytest.mark.parametrize("width", [400, 1400])
def test_a_browser_draws_the_page(browser, tmp_path, width):
    page, picture = tmp_path / "report.html", tmp_path / "report.png"
    page.write_text(render(sample()), encoding="utf-8")
    browse(browser, page, "--hide-scrollbars", f"--window-size={width},3000", f"--screenshot={picture}")
    with Image.open(picture) as image:
        colors = image.convert("RGB").getcolors(maxcolors=1 << 24)
    assert colors is not None
    assert len(colors) > 200
    background = max(colors)[0] / sum(n for n, _ in colors)
    assert 0.5 < background < 0.98


@pytest.mark.parametrize("width", [400, 760, 1400])
def test_the_page_never_scrolls_sideways(browser, tmp_path, width):
    # Only a script can ask for the width of what was laid out, and the policy of the page forbids scripts. A frame, as
    # the window of a headless browser has a smallest width.
    inner = render(hostile(sample(), "x" * 300)).replace("Content-Security-Policy", "nothing")
    script = "<script>parent.document.title = document.documentElement.scrollWidth</script>"
    page = tmp_path / "report.html"
    page.write_text(
        f'<!doctype html><title></title><iframe width="{width}" height="900" style="border: 0" scrolling="no"'
        f' srcdoc="{html.escape(inner + script)}"></iframe>',
        encoding="utf-8",
    )
    loaded = Page(browse(browser, page, "--dump-dom").stdout)
    assert loaded.titles[0] == str(width)


class Listener:
    """A port of this machine that counts who connects."""

    def __init__(self) -> None:
        self.connections = 0
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/x.png"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.connections += 1
            connection.close()


@pytest.fixture
def listener():
    found = Listener()
    yield found
    found.socket.close()


def test_the_page_connects_to_nothing_even_with_a_foreign_image_in_it(browser, tmp_path, listener):
    image = f'<img src="{listener.url}">'
    page = tmp_path / "report.html"
    text = render(hostile(sample(), image))
    page.write_text(text.replace("<main>", f"<main>{image}"), encoding="utf-8")
    done = browse(browser, page, "--dump-dom")
    assert listener.connections == 0
    assert "Content Security Policy" in done.stderr, "the policy should have refused the image"
    # Without the policy the listener hears of it, so that silence above means something.
    page.write_text(f"<!doctype html>{image}", encoding="utf-8")
    browse(browser, page, "--dump-dom")
    assert listener.connections > 0

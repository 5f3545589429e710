"""Results as text for a terminal."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fxaudit import ops
from fxaudit.controllers.controller import Controller
from fxaudit.controllers.examples import Outcome
from fxaudit.controllers.explain import Explained
from fxaudit.controllers.pattern import Pattern
from fxaudit.controllers.scaffold import Draft
from fxaudit.model.compare import Comparison, Comparisons
from fxaudit.model.trace import Finding, TracedModel
from fxaudit.ops import source_line
from fxaudit.replay.results import Dependence, ReplayResult
from fxaudit.replay.run import IdentityReplay, Recording
from fxaudit.report.as_json import size_text
from fxaudit.report.claims import claims
from fxaudit.stages import Discovery, TraceReport

_ROWS = 40


def trace(report: TraceReport, console: Console) -> None:
    """What `fxaudit trace` prints."""
    traced, matched = report.traced, report.matched
    batch = "any batch size" if traced.is_batch_dynamic else f"batch of {traced.sample}"
    _line(console, "model", f"{traced.subject.source}, {traced.subject.parameter_count:,} parameters")
    _line(
        console, "graph", f"{len(traced.graph.nodes):,} nodes by {traced.frontend} in {traced.seconds:.1f} s, {batch}"
    )
    if traced.settings:
        _line(console, "settings", ", ".join(f"{key}={value}" for key, value in traced.settings.items()))
    _line(console, "fidelity", _exactness(traced.fidelity, "equal to the eager model"))
    if report.identity is not None:
        _line(console, "identity", _exactness(report.identity, "frozen equal to live"))
    counts = {name: count for name, count in matched.counts.items() if count}
    unseen = f" in what can be seen; not in {', '.join(leaf.path for leaf in traced.unseen)}" if traced.unseen else ""
    _line(console, "controllers", (", ".join(f"{n} {name}" for name, n in counts.items()) or "none") + unseen)
    if other := ", ".join(f"{n} {name}" for name, n in matched.other.items() if n):
        _line(console, "other", other)
    if matched.controllers:
        console.print(_controllers(matched.controllers, traced))
    else:
        _misses(report, console)
    findings(report.findings, console)


def _exactness(found: Comparisons, what: str) -> str:
    if not found.is_measured:
        return "not measured: there are no values"
    runs = len(found.comparisons)
    if found.bitwise:
        return f"{what} bit for bit in {runs} runs"
    return f"not bitwise: up to {found.max_abs_diff:.3g} in {runs} runs"


def _line(console: Console, label: str, text: str) -> None:
    console.print(Text(f"{label:<12}", style="bold") + Text(text), soft_wrap=True)


def _controllers(controllers: tuple[Controller, ...], traced: TracedModel) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("controller", overflow="fold")
    table.add_column("pattern", no_wrap=True)
    table.add_column("coefficients", overflow="fold")
    table.add_column("domain", no_wrap=True)
    for name in ("sites", "nodes", "parameters"):
        table.add_column(name, justify="right", no_wrap=True)
    for controller in controllers[:_ROWS]:
        shapes = [
            f"{c.name} [{', '.join(str(size_text(s, traced)) for s in c.shape)}]" for c in controller.coefficients
        ]
        mark = " (partly frozen)" if controller.is_partially_frozen else ""
        table.add_row(
            Text(controller.id + mark),
            controller.pattern,
            Text("\n".join(shapes)),
            Text(str(controller.coefficients[0].domain)),
            str(len(controller.applies)),
            str(sum(node.op == "call_function" for node in controller.cone)),
            f"{controller.parameters:,}",
        )
    if len(controllers) > _ROWS:
        table.add_row(f"and {len(controllers) - _ROWS} more, all in --json", *[""] * 6)
    return table


def discover(discovery: Discovery, drafts: Sequence[Draft], directory: Path | None, console: Console) -> None:
    """What `fxaudit discover` prints."""
    traced, unclaimed = discovery.matched.traced, discovery.unclaimed
    claimed = len(discovery.candidates) - len(unclaimed)
    _line(console, "model", f"{traced.subject.source}, {traced.subject.parameter_count:,} parameters")
    _line(console, "candidates", f"{len(discovery.candidates)}, of which patterns describe {claimed}")
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("module", overflow="fold")
    table.add_column("coefficients", overflow="fold")
    table.add_column("axes", overflow="fold")
    for name in ("sites", "repeats", "nodes", "parameters"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in unclaimed[:_ROWS]:
        sizes = [[str(size_text(s, traced)) for s in ops.sizes(node) or ()] for node in one.coefficients]
        table.add_row(
            Text(f"{one.module}#{one.call}"),
            Text("\n".join(f"{n.name} [{', '.join(s)}]" for n, s in zip(one.coefficients, sizes, strict=True))),
            Text("\n".join(", ".join(axes) for axes in one.axes)),
            str(len(one.applies)),
            str(one.repeats),
            str(sum(node.op == "call_function" for node in one.cone)),
            f"{one.parameters:,}",
        )
    if len(unclaimed) > _ROWS:
        table.add_row(f"and {len(unclaimed) - _ROWS} more, all in --json", *[""] * 6)
    if unclaimed:
        console.print(table)
    for drafted in drafts:
        also = f", which also matches {len(drafted.beyond)} other sites" if drafted.beyond else ""
        _line(console, "draft", f"{directory}/{drafted.name}.toml{also}")
    left = discovery.undrafted(drafts) if directory is not None else ()
    if left:
        names = [f"{one.module}#{one.call}" for one in left[:_ROWS]]
        more = f" and {len(left) - len(names)} more" if len(left) > len(names) else ""
        _line(console, "no draft", f"no single pattern covers {', '.join(names)}{more}: see docs/patterns.md")
    findings(traced.findings, console)


def _misses(report: TraceReport, console: Console) -> None:
    for result in report.matched.results:
        for miss in result.near_misses[:1]:
            console.print(Text(f"  {result.pattern.name}: {miss.reason}"), soft_wrap=True)
            if miss.source:
                console.print(Text(f"      {miss.source}", style="dim"), soft_wrap=True)


def findings(found: tuple[Finding, ...], console: Console) -> None:
    for finding in found:
        console.print(Text(f"{finding.kind:<12}", style="yellow") + Text(f" {finding.text}"), soft_wrap=True)
        if finding.where:
            console.print(Text(f"      {finding.where}", style="dim"), soft_wrap=True)


def record(recording: Recording, replayed: IdentityReplay, console: Console) -> None:
    store = recording.store
    _line(console, "store", f"{store.directory}, {store.size_bytes:,} bytes")
    kept = len(store.batches) - recording.recorded
    batches = f"{len(store.batches)} batches of {store.manifest['batch_size']}"
    _line(
        console, "inputs", f"{store.manifest['count']:,} in {batches}" + (f", {kept} recorded before" if kept else "")
    )
    identity(replayed, console)
    findings(recording.findings, console)


def identity(replayed: IdentityReplay, console: Console) -> None:
    _line(console, "identity", _exactness(replayed, "replayed from disk, equal to live"))


def replay(replayed: IdentityReplay, found: Dependence | None, console: Console) -> None:
    """What `fxaudit replay` prints."""
    identity(replayed, console)
    if found is None:
        return
    base = found.baseline
    accuracy = f", accuracy {base.accuracy:.4f}" if base.accuracy is not None else ""
    _line(console, "baseline", f"{base.metric} {base.mean:.6f} over {len(base.per_input)} inputs{accuracy}")
    for scope in dict.fromkeys(result.scope for result in found.results):
        console.print(Text(f"\n{SCOPES[scope]}", style="bold"))
        console.print(_effects([r for r in found.results if r.scope == scope], found))


SCOPES = {
    "joint": "all controllers together",
    "controller": "each controller, the others keeping their records",
    "pattern": "all controllers of a pattern",
    "cumulative": "the first controllers, by depth",
}


def _effects(results: list[ReplayResult], found: Dependence) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("intervention", no_wrap=True)
    table.add_column("controllers", overflow="fold")
    table.add_column("effect", justify="right", no_wrap=True)
    table.add_column("95 % interval", overflow="fold")
    table.add_column("adjusted p", justify="right", no_wrap=True)
    table.add_column("outcome", overflow="fold")
    for result in results:
        many = len(result.controllers)
        who = f"all {many}" if result.scope == "joint" else f"{many}" if many > 1 else result.controllers[0]
        name = result.label if result.feedback == "frozen" else f"{result.label}, {result.feedback}"
        if result.refused is not None and result.feedback != "frozen":
            continue  # for the reasons of the row itself, or because nothing is left to recompute
        if result.refused is not None:
            table.add_row(name, Text(who), "refused", Text(result.refused), "", "")
            continue
        low_high = result.interval
        interval = "not resolvable" if low_high is None else f"[{low_high[0]:+.4g}, {low_high[1]:+.4g}]"
        p = "" if result.adjusted_p is None else f"{result.adjusted_p:.4f}"
        said = found.outcome(result)
        if said == "INCONCLUSIVE" and result.needed is not None:
            said += f", needs about {result.needed:,} inputs"
        elif said == "INCONCLUSIVE" and found.baseline.metric == "kl" and found.margin is None:
            said += ", needs a --margin"
        if found.is_non_causal(result):
            said += ", non-causal"
        if result.left_out:
            said += f", {result.left_out} inputs left out"
        table.add_row(name, Text(who), f"{result.delta:+.4g}", Text(interval), p, said)
    return table


def audit(found: dict[str, Any], report: Path, console: Console) -> None:
    """The three claims, from the JSON of an audit."""
    _line(console, "model", f"{found['model']['source']}, {found['model']['parameters']:,} parameters")
    counts = {name: count for name, count in found["counts"].items() if count}
    _line(console, "controllers", ", ".join(f"{count} {name}" for name, count in counts.items()))
    replayed = found["identity"]["comparisons"]
    # An infinite difference is null in JSON.
    rows = (
        Comparison(r["inputs"], r["max_abs_diff"] if r["max_abs_diff"] is not None else inf, r["bitwise"])
        for r in replayed
    )
    identity(IdentityReplay(tuple(rows)), console)
    for claim, sentence in claims(found).items():
        _line(console, claim, f"{found['verdict'][claim]}: {sentence}")
    findings(tuple(Finding(f["kind"], f["text"], f["where"]) for f in found["findings"]), console)
    _line(console, "report", str(report))


def export(described: dict[str, Any], console: Console) -> None:
    """What `fxaudit export` prints."""
    for form, path in (*described["files"].items(), *described["programs"].items()):
        _line(console, form, path or "no torch program")
    removed = described["removed"]
    nodes, parameters, size = (sum(row[key] for row in removed) for key in ("nodes", "parameters", "bytes"))
    _line(console, "removed", f"{nodes} nodes and {parameters:,} parameters ({size:,} bytes) in {len(removed)} modules")
    for fold in described["folded"]:
        what = f"into {', '.join(fold['into'])}" if fold["folded"] else f"stays: {fold['reason']}"
        _line(console, "folded" if fold["folded"] else "kept", f"{fold['coefficient']} {what}")
    findings(tuple(Finding(f["kind"], f["text"], f["where"]) for f in described["findings"]), console)
    if described["verified"] is not None:
        verify(described["verified"], console)


def verify(found: dict[str, Any], console: Console) -> None:
    """What `fxaudit verify` prints: a line for each check."""
    labels = {True: ("ok", "green"), False: ("FAILED", "bold red"), None: ("not checked", "yellow")}
    for check in found["checks"]:
        label, style = labels[check["passed"]]
        text = Text(f"{label:<12}", style=style) + Text(f"{check['file']}: {check['name']}: {check['detail']}")
        console.print(text, soft_wrap=True)
    for form, verdict in found["verdict"].items():
        _line(console, form, f"{verdict} on {found['provider']}, unoptimised")


def explain(found: Explained, console: Console) -> None:
    """What `fxaudit explain` prints."""
    pattern, misses = found.pattern, found.explanations
    sites = collections.Counter(source_line(match.apply) for match in found.matches)
    _line(console, pattern.name, f"{len(found.matches)} sites match" if sites else "no match")
    for source, count in sites.items():
        console.print(Text(f"  {count} at {source or 'a node without a source line'}"), soft_wrap=True)
    for number, explanation in enumerate(misses, 1):
        miss = explanation.miss
        alike = f" ({explanation.sites} sites alike)" if explanation.sites > 1 else ""
        at = f" at `{miss.anchor.name}`" if miss.anchor is not None else ""
        console.print(Text(f"\nnear miss {number}{at}{alike}", style="bold"), soft_wrap=True)
        width = max((len(name) for name, _ in explanation.captures), default=0)
        for name, described in explanation.captures:
            console.print(Text(f"  {name:<{width}} = {described}"), soft_wrap=True)
        line = f"{pattern.where_in_file(miss.line)}: " if miss.line else ""
        console.print(Text(f"  {line}{miss.reason}", style="red"), soft_wrap=True)
        if miss.source:
            console.print(Text(f"      {miss.source}", style="dim"), soft_wrap=True)
        if (edit := explanation.edit) is not None:
            console.print(Text(f"  to accept it, in {pattern.path}:{edit.line}"), soft_wrap=True)
            console.print(Text(f"    - {edit.before}\n    + {edit.after}", style="green"), soft_wrap=True)
    if not misses and not sites:
        console.print(Text("  nothing in the graph is like it"), soft_wrap=True)


def pattern_list(patterns: list[Pattern], console: Console) -> None:
    names, classes = (
        max(map(len, column)) for column in zip(*((p.name, p.family_class) for p in patterns), strict=True)
    )
    for pattern in patterns:
        label = Text(f"{pattern.name:<{names}}", style="bold") + Text(f"  {pattern.family_class:<{classes}}")
        console.print(label + Text(f"  {pattern.summary}"), soft_wrap=True)


def outcome(pattern: Pattern, result: Outcome, console: Console) -> None:
    """One example of a pattern, as a test result."""
    style = "green" if result.label == "ok" else "red"
    counts = f"{result.example.expect} expected, {result.found} found"
    console.print(
        Text(f"{result.label:<8}", style=style) + Text(f"{pattern.name}: {result.example.why} ({counts})"),
        soft_wrap=True,
    )
    if result.label == "Missing" and result.near_miss is not None:
        console.print(Text(f"        {result.near_miss.reason}"), soft_wrap=True)
        if result.near_miss.source:
            console.print(Text(f"        {result.near_miss.source}", style="dim"), soft_wrap=True)

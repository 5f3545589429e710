"""One function for each verb, composing the packages; the public calls of fxaudit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fxaudit.controllers.controller import Controller, build_controllers
from fxaudit.controllers.discover import Candidate
from fxaudit.controllers.discover import discover as find_candidates
from fxaudit.controllers.explain import Explained
from fxaudit.controllers.explain import explain as explain_matches
from fxaudit.controllers.graphs import Dataflow
from fxaudit.controllers.hidden import hidden_sites
from fxaudit.controllers.library import available_patterns
from fxaudit.controllers.match import MatchResult, find_matches
from fxaudit.controllers.pattern import DEFAULT, DETECT_ONLY, EXTERNAL, OPT_IN, Pattern, load_pattern, load_patterns
from fxaudit.controllers.rewrite import FrozenModel, with_observed_domains
from fxaudit.controllers.scaffold import Draft, scaffold, scaffold_for
from fxaudit.errors import ExportError, NoControllerError, TraceError, UsageError, nearest
from fxaudit.execution.options import ExecutionOptions
from fxaudit.model import load as loading
from fxaudit.model import trace as tracing
from fxaudit.model.compare import Comparison, compare
from fxaudit.model.data import DataSet, load_data
from fxaudit.model.inputs import resampled
from fxaudit.model.load import Subject
from fxaudit.model.settings import TraceOptions, exact_numerics
from fxaudit.model.trace import Finding, TracedModel, other_batches, run_flat
from fxaudit.replay import intervene, profiles
from fxaudit.replay.run import IdentityReplay, Progress, Recording, replay_identity, require_identity
from fxaudit.replay.run import record as record_into
from fxaudit.replay.store import CoefficientStore, open_store

if TYPE_CHECKING:  # importing them for real would import onnx with `import fxaudit`
    from fxaudit.execution.bundle import Bundle, Run
    from fxaudit.execution.export import ExportedGraphs
    from fxaudit.execution.verdict import ExecutionProfile
    from fxaudit.execution.verification import Verification

load = loading.load
FORMS = ("live", "bound", "baked")
SAMPLES = 4


@dataclass(frozen=True, slots=True)
class Matched:
    """The controllers of a traced model, and for each pattern its matches and near misses.

    `controllers` are audited; `others` are only counted, since their family is not in the default set and not enabled.
    """

    traced: TracedModel
    patterns: tuple[Pattern, ...]
    results: tuple[MatchResult, ...]
    controllers: tuple[Controller, ...]
    findings: tuple[Finding, ...]
    others: tuple[Controller, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Controllers of the default set by pattern, every pattern that can have some named."""
        found = Counter(c.pattern for c in self.controllers if c.family_class == DEFAULT)
        return {p.name: found[p.name] for p in self.patterns if p.family_class in (DEFAULT, EXTERNAL)}

    @property
    def other(self) -> dict[str, int]:
        """The rest by pattern: opt-in, report-only, external and detect-only controllers, audited or not."""
        found = Counter(c.pattern for c in (*self.controllers, *self.others) if c.family_class != DEFAULT)
        return {p.name: found[p.name] for p in self.patterns if p.family_class != DEFAULT}


@dataclass(frozen=True, slots=True)
class TraceReport:
    """What `fxaudit trace` shows. `identity` is None when there is no controller to freeze."""

    matched: Matched
    identity: IdentityReplay | None

    @property
    def traced(self) -> TracedModel:
        return self.matched.traced

    @property
    def findings(self) -> tuple[Finding, ...]:
        return (*self.traced.findings, *self.matched.findings)


def trace(
    model: Subject | nn.Module | str, inputs: Any = None, *, seed: int = 0, options: TraceOptions | None = None
) -> TracedModel:
    """`model` as one flat ATen graph, compared with the model itself.

    Args:
        model: a loaded subject, a module (with `inputs`), or what `load` takes.
        inputs: example inputs: a tensor, a tuple of arguments, or a dict of keyword arguments.
        options: implementations of attention and experts, ops to decompose, dynamic sequence; chosen where left out.

    Raises:
        LoadError, TraceError: see the errors' own text.
    """
    if isinstance(model, str):
        model = load(model, inputs=inputs, seed=seed)
    elif isinstance(model, nn.Module):
        model = loading.subject(model, inputs, seed=seed)
    elif inputs is not None:
        raise UsageError(
            "a loaded subject has inputs already", expected="no `inputs`", found="inputs", remedy="pass them to `load`"
        )
    return tracing.trace(model, seed=seed, options=options)


def match(
    traced: TracedModel, patterns: Sequence[Pattern | str | Path] | None = None, *, enable: Collection[str] = ()
) -> Matched:
    """The controllers of `traced`: matches of `patterns` (files, folders or loaded ones; by default the shipped
    library).

    Args:
        enable: families outside the default set to audit, too: opt-in ones are not even searched for otherwise.

    Raises:
        PatternError: a broken pattern file.
        UsageError: `enable` names no pattern, or one that can only be detected.
    """
    loaded = _patterns(patterns)
    _check_enabled(enable, loaded)
    loaded = [p for p in loaded if p.family_class != OPT_IN or p.name in enable]
    dataflow = Dataflow(traced.graph_module)
    results = tuple(find_matches(pattern, dataflow, traced.sample) for pattern in loaded)
    found, findings = build_controllers(results, dataflow, enable)
    controllers = tuple(controller for controller in found if controller.is_audited)
    others = tuple(controller for controller in found if not controller.is_audited)
    if controllers:
        controllers = with_observed_domains(traced, controllers)
    findings = (*findings, *hidden_sites(loaded, dataflow))
    return Matched(traced, tuple(loaded), results, controllers, findings, others)


def explain(traced: TracedModel, pattern: Pattern | str | Path) -> Explained:
    """Where `pattern` (a loaded one, or a file) matches in `traced`, where it nearly does, and what would let it.

    Raises:
        PatternError: a broken pattern file, or a pattern that is too ambiguous.
    """
    chosen = pattern if isinstance(pattern, Pattern) else load_pattern(pattern)
    return explain_matches(chosen, Dataflow(traced.graph_module), traced.sample)


def draft(traced: TracedModel, target: str, name: str) -> str:
    """The text of a pattern file called `name` that matches at `target`, a module path or a node of the graph.

    Raises:
        UsageError: there is no such module or node.
        PatternError: nothing there looks like a controller.
    """
    return scaffold(name, target, Dataflow(traced.graph_module), traced.sample)


def _check_enabled(enable: Collection[str], patterns: Sequence[Pattern]) -> None:
    classes = {pattern.name: pattern.family_class for pattern in patterns}
    for name in enable:
        if classes.get(name, DETECT_ONLY) == DETECT_ONLY:
            reason = "is only ever detected" if name in classes else f"is no pattern{nearest(name, set(classes))}"
            known = sorted(n for n, family_class in classes.items() if family_class not in (DEFAULT, DETECT_ONLY))
            raise UsageError(
                f"`{name}` cannot be enabled: it {reason}",
                expected=f"one of {', '.join(known)}" if known else "no --enable: every family here is on by default",
                found=name,
                remedy="`fxaudit pattern list` shows every pattern with its class",
            )


@dataclass(frozen=True, slots=True)
class Discovery:
    """What may be controllers, beside those that patterns found."""

    matched: Matched
    candidates: tuple[Candidate, ...]

    @property
    def unclaimed(self) -> tuple[Candidate, ...]:
        """The candidates that no pattern describes."""
        return tuple(candidate for candidate in self.candidates if candidate.claimed_by is None)

    def undrafted(self, drafts: Collection[Draft]) -> tuple[Candidate, ...]:
        """The candidates that neither a pattern nor any of `drafts` describes in full."""
        covered = {node for draft in drafts for node in draft.covers}
        return tuple(candidate for candidate in self.unclaimed if not covered.issuperset(candidate.coefficients))


def discover(
    model: Matched | TracedModel | Subject | nn.Module | str,
    inputs: Any = None,
    *,
    patterns: Sequence[Pattern | str | Path] | None = None,
    enable: Collection[str] = (),
    seed: int = 0,
) -> Discovery:
    """What may be controllers, found from dataflow alone; those that a pattern of `patterns` finds are marked.

    Raises:
        LoadError, TraceError, PatternError: see the errors' own text.
    """
    if not isinstance(model, Matched):
        traced = model if isinstance(model, TracedModel) else trace(model, inputs, seed=seed)
        model = match(traced, patterns, enable=enable)
    dataflow = Dataflow(model.traced.graph_module)
    known = (*model.controllers, *model.others)
    return Discovery(model, find_candidates(dataflow, known))


def draft_discovered(discovery: Discovery) -> tuple[Draft, ...]:
    """Pattern files for the candidates that no pattern describes: one for each form and coefficient of it.

    A draft says which coefficients it covers and what else it matches. For a form that one pattern does not cover there
    is none.
    """
    traced = discovery.matched.traced
    dataflow = Dataflow(traced.graph_module)
    by_form: dict[str, list[Candidate]] = {}
    for candidate in discovery.unclaimed:
        by_form.setdefault(candidate.form, []).append(candidate)
    drafts: list[Draft] = []
    for alike in by_form.values():
        for coefficients in zip(*(candidate.coefficients for candidate in alike), strict=False):
            step = alike[0].module.rpartition(".")[2].replace("_", "-").lower()
            name = f"draft-{len(drafts) + 1}-{step}" if step.replace("-", "").isalnum() else f"draft-{len(drafts) + 1}"
            applies = [apply for candidate in alike for apply in candidate.applies]
            drafted = scaffold_for(name, coefficients, applies, dataflow, traced.sample)
            if drafted is not None:
                drafts.append(drafted)
    return tuple(drafts)


def _patterns(patterns: Sequence[Pattern | str | Path] | None) -> list[Pattern]:
    if patterns is None:
        return available_patterns()
    loaded = [pattern for pattern in patterns if isinstance(pattern, Pattern)]
    places = [place for place in patterns if not isinstance(place, Pattern)]
    return loaded + (load_patterns(*places) if places else [])


def freeze(
    model: Matched | TracedModel | Subject | nn.Module | str,
    inputs: Any = None,
    *,
    patterns: Sequence[Pattern | str | Path] | None = None,
    enable: Collection[str] = (),
    seed: int = 0,
) -> FrozenModel:
    """`model` with the coefficients of all its controllers as inputs.

    Raises:
        LoadError, TraceError, PatternError: see the errors' own text.
        NoControllerError: no pattern matches.
    """
    if not isinstance(model, Matched):
        traced = model if isinstance(model, TracedModel) else trace(model, inputs, seed=seed)
        model = match(traced, patterns, enable=enable)
    if not model.controllers:
        raise _no_controller(model)
    return FrozenModel(model.traced, model.controllers, model.patterns)


def _no_controller(matched: Matched) -> NoControllerError:
    misses = [
        f"{result.pattern.name}: {miss.reason}" + (f"\n  {miss.source}" if miss.source else "")
        for result in matched.results
        for miss in result.near_misses[:1]
    ]
    return NoControllerError(
        f"no controller found in {matched.traced.subject.source}",
        expected=f"a match of one of {', '.join(p.name for p in matched.patterns)}",
        found="nearest misses:\n" + "\n".join(misses) if misses else "nothing like them",
        remedy=f"--enable {matched.others[0].pattern} audits what was only counted"
        if any(c.family_class != DETECT_ONLY for c in matched.others[:1])
        else "--patterns FILE adds a family of your own; docs/patterns.md shows how to write one",
    )


def inspect(
    model: TracedModel | Subject | nn.Module | str,
    inputs: Any = None,
    *,
    patterns: Sequence[Pattern | str | Path] | None = None,
    enable: Collection[str] = (),
    seed: int = 0,
) -> TraceReport:
    """Trace, match and, where there are controllers, replay identity: everything that `fxaudit trace` shows.

    Raises:
        SelfCheckError: the frozen model does not reproduce the live one.
    """
    traced = model if isinstance(model, TracedModel) else trace(model, inputs, seed=seed)
    matched = match(traced, patterns, enable=enable)
    if not matched.controllers or not traced.fidelity.is_measured:
        return TraceReport(matched, None)
    frozen = FrozenModel(matched.traced, matched.controllers)
    replayed = identity(frozen, seed=seed)
    require_identity(replayed, matched.traced.subject.source)
    return TraceReport(matched, replayed)


def identity(frozen: FrozenModel, *, seed: int = 0) -> IdentityReplay:
    """The frozen model fed its own coefficients, against the live one: example, other inputs, other batches."""
    traced = frozen.traced
    example = traced.subject.arguments
    cases = [("example", example), ("resampled", resampled(example, seed + 1))]
    cases += other_batches(traced, seed)
    comparisons: list[Comparison] = []
    with exact_numerics():
        for name, arguments in cases:
            leaves = traced.flatten(arguments)
            live = run_flat(traced.graph_module, leaves, traced.initial_state)
            _, values = frozen.run_tapped(leaves)
            replayed = frozen.run_frozen(leaves, values[: len(frozen.coefficients)])
            comparisons.append(compare(name, live, replayed))
    return IdentityReplay(tuple(comparisons))


def record(
    frozen: FrozenModel,
    data: DataSet | str | Path | Mapping[str, Any],
    directory: str | Path,
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Recording:
    """Record the coefficients of `frozen` on `data` into a store in `directory`; a store begun there is continued.

    Args:
        data: a dict of tensors by input name, or what `--data` takes.

    Raises:
        DataError: data that does not fit the model.
        StoreError: the directory holds another recording, or the disk is too small.
    """
    loaded = data if isinstance(data, DataSet) else load_data(data, frozen.traced)
    return record_into(frozen, loaded, Path(directory), batch_size=batch_size, progress=progress)


def replay(
    frozen: FrozenModel, data: DataSet | str | Path | Mapping[str, Any], store: CoefficientStore | str | Path
) -> IdentityReplay:
    """Replay `frozen` with its own recorded coefficients and compare with the live model's outputs.

    Raises:
        DataError: data that does not fit the model.
        StoreError: the store is incomplete, damaged, or was recorded from something else.
    """
    loaded = data if isinstance(data, DataSet) else load_data(data, frozen.traced)
    opened = store if isinstance(store, CoefficientStore) else open_store(store)
    return replay_identity(frozen, loaded, opened)


def verify_recording(frozen: FrozenModel, data: DataSet, recording: Recording) -> IdentityReplay:
    """Identity replay of a recording from disk, bitwise unless the live model differs from itself.

    Raises:
        SelfCheckError: it is not bitwise although the live model agrees with itself.
        StoreError: the store is incomplete, damaged, or was recorded from something else.
    """
    replayed = replay(frozen, data, recording.store)
    if not any(finding.kind == "nondeterministic" for finding in recording.findings):
        require_identity(replayed, frozen.traced.subject.source)
    return replayed


def execute(
    frozen: FrozenModel,
    data: DataSet,
    calibration: CoefficientStore | None,
    directory: str | Path,
    *,
    inputs: int,
    options: ExecutionOptions | None = None,
) -> ExecutionProfile:
    """Export live, bound and baked graphs, run them on onnxruntime, and compare counts with the traced graph.

    Baked graphs hold the calibration mean of each unit, where every controller has one. `directory` then holds a
    bundle, as after `export`.

    Raises:
        ExportError: the model cannot be exported.
        RunError: onnxruntime cannot run it, or died on it.
        ProviderError: the provider asked for does not run the work.
        SelfCheckError: counts or outputs contradict each other.
    """
    from fxaudit.execution import verdict

    bundle = export(frozen, directory, calibration, data=data)
    batch = bundle.exported.fixed_batch or 1
    leaves = [data.leaves(bundle.frozen.traced, i, batch)[0] for i in range(min(inputs, data.count))]
    return verdict.execute(bundle.frozen, bundle.exported, leaves, options=options)


def export(
    frozen: FrozenModel,
    directory: str | Path,
    calibration: CoefficientStore | str | Path | None = None,
    *,
    forms: Collection[str] = FORMS,
    opset: int | None = None,
    fold: bool = False,
    external: bool | None = None,
    data: DataSet | str | Path | Mapping[str, Any] | None = None,
    samples: int = SAMPLES,
    seed: int = 0,
) -> Bundle:
    """A bundle in `directory`: ONNX graphs, torch programs, samples and a manifest; see docs/export.md.

    Args:
        calibration: the store whose means per unit are baked in; without it there is no baked graph.
        forms: of ``live``, ``bound`` and ``baked``.
        opset: the version of the ONNX operators, 20 by default.
        fold: fold the baked coefficients into weights where that is exact up to rounding.
        external: whether all graphs share one file for their weights; by default where they exceed 1 GiB.
        data: inputs of the samples; by default the example and others made from it, in several batch sizes.
        samples: at most this many inputs of `data`.

    Raises:
        ExportError: the model cannot be exported.
        DataError: data or profile that do not fit the model.
        SelfCheckError: the exported graphs contradict the frozen model.
    """
    from fxaudit.execution import bundle
    from fxaudit.execution.export import export_graphs
    from fxaudit.execution.translation import OPSET

    directory = Path(directory)
    store = open_store(calibration) if isinstance(calibration, str | Path) else calibration
    findings = _without_profile(frozen, store) if "baked" in forms else []
    if set(forms) == {"baked"} and (store is None or findings):
        raise ExportError(
            f"there is no baked graph of {frozen.traced.subject.source}",
            expected="a store of coefficients that have means",
            found=findings[0].text if findings else "no store",
            remedy="export live and bound, or give a store recorded on calibration data",
        )
    wanted = {*forms, *(["tapped"] if {"live", "bound"} <= set(forms) else [])}
    bundle.clear(directory)

    def write(model: FrozenModel) -> ExportedGraphs:
        profile = _unit_means(model, store) if store is not None and "baked" in forms and not findings else None
        return export_graphs(
            model, directory, profile, graphs=wanted, opset=opset or OPSET, external=external, fold=fold
        )

    try:
        exported = write(frozen)
    except ExportError as error:
        other = _traced_for_export(frozen, seed)
        if other is None:
            raise
        try:
            frozen, exported = other, write(other)
        except ExportError:
            raise error from None
    described = {}
    if exported.profile is not None and store is not None:
        described = {"store": str(store.directory), "level": "unit", "inputs": store.manifest["count"]}
        findings += _foreign_profile(frozen, store)
    loaded = load_data(data, frozen.traced) if data is not None and not isinstance(data, DataSet) else data
    runs = _sample_runs(frozen.traced, exported.fixed_batch, loaded, samples, seed)
    return bundle.write_bundle(frozen, exported, directory, runs, described, findings)


def _unit_means(frozen: FrozenModel, store: CoefficientStore) -> dict[str, Tensor]:
    stored = profiles.static_profiles(store, frozen.coefficients, "unit")
    return {c.key: profiles.in_graph_order(stored[c.key], c) for c in frozen.coefficients}


def _without_profile(frozen: FrozenModel, store: CoefficientStore | None) -> list[Finding]:
    """Why there is no baked graph, although there is a store: a choice has no mean that could be baked in."""
    static = intervene.Intervention("static", "unit")
    for controller in frozen.controllers if store is not None else ():
        reason = "it makes a choice" if intervene.is_discrete(controller) else intervene.refusal(static, controller, 2)
        if reason:
            return [Finding("no-baked-graph", f"{controller.id} has no mean that could be baked in: {reason}")]
    return []


def _foreign_profile(frozen: FrozenModel, store: CoefficientStore) -> list[Finding]:
    recorded = store.manifest.get("model", {}).get("fingerprint")
    if recorded == frozen.traced.fingerprint:
        return []
    text = "the profile was recorded from other weights than those that are exported (or in another precision)"
    return [Finding("foreign-profile", text, str(store.directory))]


def _traced_for_export(frozen: FrozenModel, seed: int) -> FrozenModel | None:
    """The same model frozen in a trace of the code that it has for export; None where that is not at hand, or has
    other coefficients."""
    traced = frozen.traced
    if traced.options.code is not None or traced.settings.get("code") == "export" or not frozen.patterns:
        return None
    enable = {k.pattern for k in frozen.controllers if k.family_class not in (DEFAULT, EXTERNAL)}
    try:
        other = trace(traced.subject, seed=seed, options=replace(traced.options, code="export"))
        if other.graph_digest() == traced.graph_digest():
            return None
        found = freeze(match(other, frozen.patterns, enable=enable))
    except (TraceError, NoControllerError):
        return None
    same = [(c.key, c.dtype) for c in found.coefficients] == [(c.key, c.dtype) for c in frozen.coefficients]
    return found if same else None


def _sample_runs(traced: TracedModel, batch: int | None, data: DataSet | None, count: int, seed: int) -> list[Run]:
    """The inputs of the samples of a bundle; `batch` is how many its graphs take at a time, None for any number."""
    from fxaudit.execution.bundle import Run

    if data is not None:
        return [
            Run(f"input {i} of the data", data.leaves(traced, i, batch or 1)[0]) for i in range(min(count, data.count))
        ]
    example = traced.subject.arguments
    if batch is not None and batch != traced.sample_count:
        cases = [(f"resampled, {i}", resampled(example, seed + i, batch)) for i in range(2)]
    else:
        cases = [("example", example), ("resampled", resampled(example, seed + 1, batch))]
    others = other_batches(traced, seed) if batch is None else []
    return [Run(kind, traced.flatten(arguments)) for kind, arguments in (*cases, *others)]


def discard(directory: str | Path) -> None:
    """Remove a bundle; what else lies in `directory` stays."""
    from fxaudit.execution import bundle

    bundle.clear(Path(directory))


def verify(directory: str | Path) -> Verification:
    """Check a bundle that `export` wrote from its files alone: no model is needed, and nothing is unpickled unseen.

    The report of an audit has its bundle in ``onnx``.

    Raises:
        DataError: it is no bundle, a file was changed, or one refers to something outside of it.
        LoadError: a .pt2 file could run code that it carries.
        ExportError: onnxruntime cannot run a graph.
    """
    from fxaudit.execution.bundle import MANIFEST
    from fxaudit.execution.verification import verify_bundle

    directory = Path(directory)
    inner = directory / "onnx"
    is_report = not (directory / MANIFEST).exists() and (inner / MANIFEST).exists()
    return verify_bundle(inner if is_report else directory)

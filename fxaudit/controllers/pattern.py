"""A pattern file: TOML around a match block, checked completely when it is read.

`docs/patterns.md` is the guide. Every key that is not known is an error, with the nearest known one; so is every axis
without a role and every name that nothing defines. Code in `[[example]]` runs only under `fxaudit pattern test`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fxaudit import axes
from fxaudit.controllers import language
from fxaudit.controllers.document import Document
from fxaudit.controllers.language import MatchSyntaxError, Name, Op, Term
from fxaudit.controllers.predicates import Predicate, PredicateSyntaxError, parse_predicate
from fxaudit.errors import PatternError, nearest
from fxaudit.provenance import json_digest

SCHEMA = 1
KEYS = tuple(
    "schema name summary cite class priority requires waives match shape where exclude claims intervene example".split()
)
REQUIRED = ("schema", "name", "summary", "match", "shape", "intervene")
INTERVENE_KEYS = ("axes", "acts", "neutral", "range", "domain", "sums_to", "coupled", "optional", "taps")
EXAMPLE_KEYS = ("why", "expect", "inputs", "code")
ROLES = ("sample", "position", "unit", "slot")
ACTS = ("multiply", "add", "lerp", "mix", "convolve", "select", "step", "decay", "bias")
TAPS = ("scores",)
# What `class` may say of a family: searched for and audited; searched for and audited only with --enable; searched
# for and counted, audited only with --enable; the same where no input reaches both the coefficient and what it acts
# on, and audited elsewhere; counted, never audited.
DEFAULT, OPT_IN, REPORT_ONLY, EXTERNAL, DETECT_ONLY = "default", "opt-in", "report-only", "external", "detect-only"
FAMILY_CLASSES = (DEFAULT, OPT_IN, REPORT_ONLY, EXTERNAL, DETECT_ONLY)
# A neutral value that the apply site decides: 1 where the coefficient multiplies, 0 where it is added.
BY_APPLY = "by-apply"
# Domains that a range or a sum does not tell: what a decay is averaged as, and what stays so when it is averaged.
DOMAINS = ("log-decay", "doubly-stochastic")
# Structural tests that a family outside the default set may waive, since failing them is why it is outside.
WAIVABLE = ("T2", "T3", "T4", "T5", "T6")
# Settings of a trace that a family may need to be visible at all: {setting: values}.
REQUIREMENTS = {"attention": ("eager",), "decompose": ("lstm",)}


@dataclass(frozen=True, slots=True)
class Intervene:
    """How the coefficient acts and what may be done to it.

    `axes` gives each axis name its role. `coupled` are captures that travel with the coefficient and are bound together
    with it, save those in `optional` that a member lacks; `taps` are captures that are recorded beside it and never
    bound. `low` and `high` bound its values; along `simplex_axis` they sum to `simplex_sum`. Where the family's members
    multiply or add, `is_neutral_by_apply`, and `at` says which neutral value a member has.
    """

    axes: Mapping[str, str]
    acts: str
    neutral: float | None
    low: float | None
    high: float | None
    simplex_axis: str | None
    simplex_sum: float | None
    coupled: tuple[str, ...]
    taps: Mapping[str, str]
    optional: tuple[str, ...] = ()
    # What the coupled captures have of their own, by capture.
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    neutrals: Mapping[str, float] = field(default_factory=dict)
    domains: Mapping[str, str] = field(default_factory=dict)
    is_neutral_by_apply: bool = False

    def at(self, apply: str) -> Intervene:
        """The same for one member, whose apply site is an op called `apply`."""
        if not self.is_neutral_by_apply:
            return self
        adds = apply in ("add", "sub")
        return replace(self, acts="add" if adds else "multiply", neutral=0.0 if adds else 1.0)

    def range_of(self, name: str) -> tuple[float, float] | None:
        """The lowest and highest value of a bound capture, None where the pattern states none."""
        if name == "coefficient":
            return None if self.low is None or self.high is None else (self.low, self.high)
        return self.ranges.get(name)

    def neutral_of(self, name: str) -> float | None:
        """The value of a bound capture at which it does nothing, None where the pattern states none."""
        return self.neutral if name == "coefficient" else self.neutrals.get(name)


@dataclass(frozen=True, slots=True)
class Example:
    """An inline test: code that defines `model`, its inputs, and how many controllers must be found in it."""

    why: str
    expect: int
    inputs: tuple[str, ...]
    code: str


@dataclass(frozen=True, slots=True)
class Pattern:
    """One controller family."""

    name: str
    summary: str
    cite: str
    path: Path
    equations: Mapping[str, Term]
    shapes: Mapping[str, axes.Shape]
    where: tuple[Predicate, ...]
    exclude: tuple[tuple[str, str, Term], ...]
    intervene: Intervene
    examples: tuple[Example, ...]
    match_line: int
    digest: str
    family_class: str = DEFAULT
    priority: int = 0
    requires: Mapping[str, str] = field(default_factory=dict)
    waives: frozenset[str] = frozenset()
    claims: tuple[str, ...] = ()

    @property
    def bound(self) -> tuple[str, ...]:
        """The captures that become inputs of the frozen graph: the coefficient and what is coupled with it."""
        return ("coefficient", *self.intervene.coupled)

    @property
    def sample_axis(self) -> str:
        return next(axis for axis, role in self.intervene.axes.items() if role == "sample")

    def where_in_file(self, line: int) -> str:
        """``file:line`` of a line of the match block."""
        return f"{self.path}:{self.match_line + line}"


def library_path() -> Path:
    """The folder of the patterns that ship with fxaudit: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "patterns"
    return installed if installed.is_dir() else package.parent / "patterns"


def load_patterns(*places: Path | str) -> list[Pattern]:
    """The patterns in files and folders, the shipped library when none is given, sorted by name.

    Raises:
        PatternError: a place that does not exist, a broken file, or two patterns of one name.
    """
    files: list[Path] = []
    for place in map(Path, places or (library_path(),)):
        if place.is_dir():
            files += sorted(place.glob("*.toml"))
        elif place.exists():
            files.append(place)
        else:
            raise PatternError(
                f"{place} does not exist",
                expected="a pattern file, or a folder of pattern files",
                found="no such file",
                remedy="check --patterns; `fxaudit pattern list` shows the shipped ones",
            )
    patterns = sorted((load_pattern(file) for file in files), key=lambda pattern: pattern.name)
    for first, second in itertools.pairwise(patterns):
        if first.name == second.name:
            raise PatternError(
                f"two patterns are called `{first.name}`",
                where=f"{first.path}\n{second.path}",
                expected="one file for each name",
                found="the same name twice",
                remedy="rename one of them",
            )
    if not patterns:
        raise PatternError(
            "there is no pattern file",
            where=", ".join(str(place) for place in places or (library_path(),)),
            expected="files that end in .toml",
            found="none",
            remedy="name a folder that holds some",
        )
    return patterns


def load_pattern(path: Path | str) -> Pattern:
    """The pattern in one file, completely checked.

    Raises:
        PatternError: naming file, line and key, with the nearest valid spelling.
    """
    return _Reader.read(Path(path)).pattern()


def parse_pattern(path: Path, text: str) -> Pattern:
    """The pattern that a text is, as if it stood in `path`; completely checked.

    Raises:
        PatternError: as `load_pattern` does.
    """
    return _Reader.parse(path, text).pattern()


class _Reader(Document):
    """Checks one pattern file."""

    def pattern(self) -> Pattern:
        document = self.document
        self.known_keys(document, KEYS, "a pattern")
        for key in REQUIRED:
            if key not in document:
                raise self.error(f"`{key}` is missing", "", f"the keys {', '.join(REQUIRED)}", ", ".join(document))
        if document["schema"] != SCHEMA:
            raise self.error(
                f"schema {document['schema']!r} is not known", "schema", f"schema = {SCHEMA}", repr(document["schema"])
            )
        name = self.typed("name", str)
        if name != self.path.stem:
            raise self.error("the name of a pattern is the name of its file", "name", self.path.stem, name)
        equations = self.equations()
        with self.within("shape"):
            shapes = self.shapes(equations)
        with self.within("intervene"):
            intervene = self.intervene(equations, shapes)
        axis_names = set().union(*(shape.names for shape in shapes.values()))
        captures = set(equations) | {n for term in equations.values() for n in language.names_in(term)}
        exclude = tuple(self.exclusion(text, equations) for text in self.strings("exclude"))
        self.check_over([*equations.values(), *(term for _, _, term in exclude)], shapes)
        return Pattern(
            name=name,
            summary=self.typed("summary", str),
            cite=self.typed("cite", str) if "cite" in document else "",
            path=self.path,
            equations=equations,
            shapes=shapes,
            where=tuple(self.predicate(text, axis_names, captures) for text in self.strings("where")),
            exclude=exclude,
            intervene=intervene,
            examples=self.examples(),
            match_line=self.match_line(),
            digest=json_digest({key: value for key, value in document.items() if key != "example"}),
            family_class=self.family_class(),
            priority=self.typed("priority", int) if "priority" in document else 0,
            requires=self.requirements(),
            waives=frozenset(self.waivers()),
            claims=self.claims(equations),
        )

    def family_class(self) -> str:
        found: str = self.typed("class", str) if "class" in self.document else DEFAULT
        if found not in FAMILY_CLASSES:
            raise self.error(
                f"`class` is unknown{nearest(found, FAMILY_CLASSES)}", "class", ", ".join(FAMILY_CLASSES), found
            )
        return found

    def requirements(self) -> Mapping[str, str]:
        table: dict[str, str] = self.typed("requires", dict) if "requires" in self.document else {}
        for setting, value in table.items():
            if value not in REQUIREMENTS.get(setting, ()):
                known = [f'{name} = "{option}"' for name, options in REQUIREMENTS.items() for option in options]
                raise self.error(
                    f"`requires` names no setting of a trace{nearest(setting, set(REQUIREMENTS))}",
                    "requires",
                    " or ".join(known),
                    f"{setting} = {value!r}",
                )
        return table

    def waivers(self) -> list[str]:
        waived = self.strings("waives")
        for test in waived:
            if test not in WAIVABLE:
                raise self.error(f"`{test}` cannot be waived", "waives", ", ".join(WAIVABLE), test)
        if waived and self.family_class() == DEFAULT:
            raise self.error(
                "a default family passes every structural test",
                "waives",
                f'class = "{OPT_IN}", "{REPORT_ONLY}" or "{DETECT_ONLY}"',
                f'class = "{DEFAULT}"',
            )
        return waived

    def claims(self, equations: Mapping[str, Term]) -> tuple[str, ...]:
        claimed = self.strings("claims")
        for name in claimed:
            if name not in equations:
                raise self.error(
                    f"`claims` speaks of `{name}`, which `match` does not define{nearest(name, set(equations))}",
                    "claims",
                    ", ".join(equations),
                    name,
                )
        return tuple(claimed)

    def equations(self) -> dict[str, Term]:
        try:
            equations = language.parse_match(self.typed("match", str))
        except MatchSyntaxError as error:
            line = self.match_line() + error.line
            raise self.error(str(error), "match", "an equation `name = expression`", "see above", line) from error
        for needed in ("coefficient", "apply"):
            if needed not in equations:
                raise self.error(f"`match` never defines `{needed}`", "match", f"{needed} = ...", ", ".join(equations))
        return equations

    def match_line(self) -> int:
        """The line of the file before line 1 of the match block."""
        # After `match = '''` TOML drops the newline: line 1 of the block is the line after the key.
        opens_alone = re.search(r"^\s*match\s*=\s*('''|\"\"\")[ \t]*$", self.text, re.MULTILINE)
        return self.line_of("match") - (0 if opens_alone else 1)

    def shapes(self, equations: Mapping[str, Term]) -> dict[str, axes.Shape]:
        table = self.table("shape")
        captures = set(equations) | {n for term in equations.values() for n in language.names_in(term)}
        shapes = {}
        for name, text in table.items():
            if name not in captures:
                raise self.error(
                    f"[shape] speaks of `{name}`, which `match` does not name{nearest(name, captures)}",
                    name,
                    ", ".join(sorted(captures)),
                    name,
                )
            try:
                shapes[name] = axes.parse_shape(self.typed(name, str, table))
            except axes.ShapeSyntaxError as error:
                raise self.error(
                    str(error), name, 'axes separated by spaces, such as "batch token feature"', text
                ) from error
        return shapes

    def intervene(self, equations: Mapping[str, Term], shapes: Mapping[str, axes.Shape]) -> Intervene:
        table = self.table("intervene")
        self.known_keys(table, INTERVENE_KEYS, "[intervene]")
        roles = self.typed("axes", dict, table)
        for axis, role in roles.items():
            if role not in ROLES:
                raise self.error(
                    f"axis `{axis}` has no such role{nearest(str(role), ROLES)}", "axes", ", ".join(ROLES), str(role)
                )
        if list(roles.values()).count("sample") != 1:
            raise self.error(
                "one axis must have the role `sample`", "axes", 'axes = { batch = "sample", ... }', str(roles)
            )
        acts = self.typed("acts", str, table)
        if acts not in ACTS:
            raise self.error(f"`acts` is unknown{nearest(acts, ACTS)}", "acts", ", ".join(ACTS), acts)
        coupled = tuple(self.strings("coupled", table))
        optional = tuple(self.strings("optional", table))
        for name in optional:
            if name not in coupled:
                raise self.error(
                    f"`{name}` is optional but not coupled{nearest(name, coupled)}",
                    "optional",
                    ", ".join(coupled) or "names that `coupled` lists",
                    name,
                )
        taps = self.typed("taps", dict, table) if "taps" in table else {}
        for tap in taps:
            if tap not in TAPS:
                raise self.error(f"unknown tap `{tap}`{nearest(tap, TAPS)}", "taps", ", ".join(TAPS), tap)
        for name in ("coefficient", *coupled, *taps.values()):
            if name not in equations:
                raise self.error(
                    f"`match` never defines `{name}`{nearest(name, set(equations))}",
                    "coupled" if name in coupled else "taps",
                    f"{name} = ...",
                    ", ".join(equations),
                )
            with self.within("shape"):
                self.check_bound(name, shapes, roles)
        bound = ("coefficient", *coupled)
        ranges = {name: self.bounds(value) for name, value in self.by_capture("range", table, bound)}
        by_apply = table.get("neutral") == BY_APPLY
        given = {**table, "neutral": None} if by_apply else table
        neutrals = {name: self.number("neutral", value) for name, value in self.by_capture("neutral", given, bound)}
        domains = dict(self.by_capture("domain", table, bound))
        for domain in domains.values():
            if domain not in DOMAINS:
                raise self.error(
                    f"`domain` is unknown{nearest(str(domain), DOMAINS)}", "domain", ", ".join(DOMAINS), str(domain)
                )
        low, high = ranges.pop("coefficient", (None, None))
        sums = table.get("sums_to")
        if sums is not None and not (
            isinstance(sums, dict) and sums.get("axis") in roles and isinstance(sums.get("value"), int | float)
        ):
            raise self.error("`sums_to` cannot be read", "sums_to", 'sums_to = { axis = "k", value = 1.0 }', str(sums))
        return Intervene(
            axes=roles,
            acts=acts,
            neutral=neutrals.pop("coefficient", None),
            low=low,
            high=high,
            simplex_axis=sums["axis"] if sums else None,
            simplex_sum=float(sums["value"]) if sums else None,
            coupled=coupled,
            optional=optional,
            taps=taps,
            ranges=ranges,
            neutrals=neutrals,
            domains=domains,
            is_neutral_by_apply=by_apply,
        )

    def by_capture(self, key: str, table: Mapping[str, Any], bound: tuple[str, ...]) -> list[tuple[str, Any]]:
        """What a key says, by bound capture: a value of its own is the coefficient's."""
        value = table.get(key)
        if value is None:
            return []
        found = value if isinstance(value, dict) else {"coefficient": value}
        for name in found:
            if name not in bound:
                raise self.error(
                    f"`{key}` speaks of `{name}`, which is not bound{nearest(name, set(bound))}",
                    key,
                    ", ".join(bound),
                    name,
                )
        return list(found.items())

    def number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            wanted = f'a number, or "{BY_APPLY}"' if key == "neutral" else "a number"
            raise self.error(f"`{key}` has the wrong type", key, wanted, repr(value))
        return float(value)

    def bounds(self, value: Any) -> tuple[float, float]:
        if not (isinstance(value, list) and len(value) == 2 and all(isinstance(v, int | float) for v in value)):
            raise self.error("`range` cannot be read", "range", "range = [0.0, 1.0]; inf is a number", str(value))
        return float(value[0]), float(value[1])

    def check_bound(self, name: str, shapes: Mapping[str, axes.Shape], roles: Mapping[str, str]) -> None:
        """A tensor that is bound or recorded must have a shape, and each of its axes a name and a role."""
        if name not in shapes:
            raise self.error(
                f"[shape] says nothing of `{name}`, which is recorded", "shape", f'{name} = "..."', ", ".join(shapes)
            )
        for layout in shapes[name].layouts:
            if (axes.REST,) in layout.axes or (axes.ANY,) in layout.axes:
                raise self.error(
                    f"`{name}` is recorded, so each of its axes needs a name", name, "no `...` and no `_`", str(layout)
                )
            for axis in layout.names:
                if axis not in roles:
                    what = f"axis `{axis}` of `{name}` has no role{nearest(axis, set(roles))}"
                    with self.within("intervene"):
                        raise self.error(what, "axes", ", ".join(ROLES), str(dict(roles)))
            if "sample" not in {roles[axis] for axis in layout.names}:
                raise self.error(
                    f"`{name}` has no sample axis in `{layout}`", name, "an axis with the role `sample`", str(layout)
                )

    def check_over(self, terms: Sequence[Term], shapes: Mapping[str, axes.Shape]) -> None:
        for term in terms:
            for inner in language.walk(term):
                if not isinstance(inner, Op) or inner.over is None:
                    continue
                operand = inner.operands[0]
                line = self.match_line() + inner.line
                if not isinstance(operand, Name) or operand.name not in shapes:
                    raise self.error(
                        "`over` needs an operand with a [shape]", "match", "pool(input, over=[...])", "see above", line
                    )
                known = shapes[operand.name].names | ({axes.REST} if shapes[operand.name].has_rest else set())
                for axis in inner.over:
                    if axis not in known:
                        raise self.error(
                            f"`over` names `{axis}`, no axis of `{operand.name}`{nearest(axis, known)}",
                            "match",
                            ", ".join(sorted(known)),
                            axis,
                            line,
                        )

    def predicate(self, text: str, axis_names: set[str], captures: set[str]) -> Predicate:
        try:
            return parse_predicate(text, axis_names, captures)
        except PredicateSyntaxError as error:
            raise self.error(
                str(error), "where", "a predicate such as `channel > 1` or `depends(value, input)`", text
            ) from error

    def exclusion(self, text: str, equations: Mapping[str, Term]) -> tuple[str, str, Term]:
        try:
            name, term = language.parse_statement(text)
        except MatchSyntaxError as error:
            raise self.error(str(error), "exclude", "an equation such as `coefficient = softmax(_)`", text) from error
        if name not in equations:
            raise self.error(
                f"`exclude` speaks of `{name}`, which `match` does not define{nearest(name, set(equations))}",
                "exclude",
                ", ".join(equations),
                name,
            )
        return text, name, term

    def examples(self) -> tuple[Example, ...]:
        tables = self.document.get("example", [])
        if not isinstance(tables, list):
            raise self.error("`example` has the wrong type", "example", "[[example]], with two brackets", "[example]")
        examples = []
        for number, table in enumerate(tables):
            with self.within("example", number):
                examples.append(self.example(table))
        return tuple(examples)

    def example(self, table: Mapping[str, Any]) -> Example:
        self.known_keys(table, EXAMPLE_KEYS, "[[example]]")
        inputs = self.strings("inputs", table)
        for text in inputs:
            if not re.fullmatch(r"(int )?\d+( \d+)*", text):
                raise self.error("`inputs` cannot be read", "inputs", '"2 16 8 8", or "int 2 6" for token ids', text)
        return Example(
            self.typed("why", str, table),
            self.typed("expect", int, table),
            tuple(inputs),
            self.typed("code", str, table),
        )

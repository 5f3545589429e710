"""Which replays are run: every intervention in every scope, with the reason where one has no meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fxaudit.controllers.controller import Controller
from fxaudit.errors import UsageError, nearest
from fxaudit.replay import intervene
from fxaudit.replay.intervene import Intervention
from fxaudit.replay.results import ReplayResult
from fxaudit.replay.values import Treatment

SCOPES = ("joint", "controller", "pattern", "cumulative")
# Those whose values come from the coefficients of the run itself, so that they can be made in flight.
IN_FLIGHT = ("reassign", "shuffle-tokens", "permute-units")
Refusal = Callable[[Intervention, Controller], str | None]


@dataclass(frozen=True, slots=True)
class Row:
    """One result to be, and the controllers that are intervened on."""

    result: ReplayResult
    intervention: Intervention
    controllers: tuple[Controller, ...]

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(c.key for k in self.controllers for c in k.coefficients)

    def treatment(self, seed: int) -> Treatment | None:
        """What is done to the coefficients of this row's controllers; None when they keep their records."""
        if self.intervention.name == "identity":
            return None
        flight = " ".join(k.id for k in self.controllers) if self.result.feedback == "in-flight" else None
        return Treatment(self.intervention, seed, f"{self.intervention} {flight}" if flight else None)


def parse_scopes(text: str) -> tuple[str, ...]:
    """The scopes that a comma-separated list names.

    Raises:
        UsageError: an unknown scope.
    """
    found = [part.strip() for part in text.split(",")]
    for scope in found:
        if scope not in SCOPES:
            raise UsageError(
                f"unknown scope `{scope}`{nearest(scope, SCOPES)}",
                expected=", ".join(SCOPES),
                found=scope,
                remedy="name them separated by commas",
            )
    return tuple(dict.fromkeys(found))


def plan_rows(
    controllers: Sequence[Controller],
    interventions: Sequence[Intervention],
    scopes: Sequence[str],
    refusal: Refusal,
    *,
    metric: str,
    seed: int,
    live: bool = False,
) -> list[Row]:
    """One row for each intervention, scope and feedback; refused ones with their reason."""
    rows = []
    for intervention in interventions:
        reasons = {k.id: refusal(intervention, k) for k in controllers}
        legal = [k for k in controllers if reasons[k.id] is None]
        for scope in scopes:
            for chosen in _chosen(scope, controllers, legal):
                refused = None if all(reasons[k.id] is None for k in chosen) else reasons[chosen[0].id]
                result = _result(intervention, scope, chosen, metric, seed, refused)
                row = Row(result, intervention, tuple(chosen))
                rows.append(row)
                if live and intervention.name != "identity":
                    rows += _with_feedback(row, len(controllers))
    return rows


def _chosen(scope: str, controllers: Sequence[Controller], legal: Sequence[Controller]) -> Iterator[list[Controller]]:
    """The controllers of each row of a scope; those that refuse, only where no other is left."""
    match scope:
        case "joint":
            yield list(legal or controllers)
        case "controller":
            yield from ([controller] for controller in controllers)
        case "pattern":
            for pattern in dict.fromkeys(k.pattern for k in controllers):
                own = [k for k in controllers if k.pattern == pattern]
                yield [k for k in own if k in legal] or own
        case "cumulative":
            for depth in range(1, len(legal) + 1):
                yield list(legal[:depth])
            if not legal:
                yield list(controllers)


def _result(
    intervention: Intervention,
    scope: str,
    controllers: Sequence[Controller],
    metric: str,
    seed: int,
    refused: str | None,
) -> ReplayResult:
    discrete = None
    if any(map(intervene.is_discrete, controllers)):
        discrete = "static" if intervention.name == "static" else intervention.part
    return ReplayResult(
        intervention=intervention.name,
        level=intervention.level,
        scope=scope,
        controllers=tuple(k.id for k in controllers),
        discrete=discrete,
        seed=seed if intervention.is_random else None,
        metric=metric,
        each=intervention.each,
        refused=refused,
    )


def _with_feedback(row: Row, every: int) -> Iterator[Row]:
    """The row with the other controllers recomputed, and with values made in flight."""
    refused = row.result.refused
    if refused is None and len(row.controllers) == every:
        refused = "all controllers are replaced: nothing is left to recompute"
    yield replace(row, result=replace(row.result, feedback="live", refused=refused))
    if row.result.scope not in ("joint", "pattern"):
        return
    refused = row.result.refused
    if refused is None and row.intervention.name not in IN_FLIGHT:
        refused = "its values do not come from the run that they perturb"
    yield replace(row, result=replace(row.result, feedback="in-flight", refused=refused))

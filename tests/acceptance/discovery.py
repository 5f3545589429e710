"""What `discover` finds with the library switched off, beside the controllers that the library finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxaudit import stages
from fxaudit.controllers.discover import stands_for
from fxaudit.controllers.pattern import DEFAULT, DETECT_ONLY, Pattern
from fxaudit.model.trace import TracedModel


@dataclass(frozen=True, slots=True)
class Discovered:
    """Of `controllers` controllers of default families, how many a candidate stands for.

    `missed` are the ids of the others. `false` are candidates that stand for no controller of any family: those of
    opt-in, report-only and external families count neither way.
    """

    controllers: int
    missed: tuple[str, ...]
    false: tuple[str, ...]


def discovered(traced: TracedModel, patterns: Sequence[Pattern]) -> Discovered:
    candidates = stages.discover(traced, patterns=[]).candidates
    optional = [p.name for p in patterns if p.family_class not in (DEFAULT, DETECT_ONLY)]
    default = stages.match(traced, patterns)
    every = stages.match(traced, patterns, enable=optional)
    known = (*default.controllers, *default.others, *every.controllers, *every.others)
    return Discovered(
        len(default.controllers),
        tuple(k.id for k in default.controllers if not any(stands_for(c, k) for c in candidates)),
        tuple(f"{c.module}#{c.call}" for c in candidates if not any(stands_for(c, k) for k in known)),
    )

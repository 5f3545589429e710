"""The exceptions of fxaudit.

    AuditError
    ├── ExpectationError    1  a result is not what --expect states
    ├── UsageError          2  an option or argument that has no meaning here
    ├── LoadError           3  the model could not be loaded
    ├── TraceError          3  the model could not be traced faithfully
    ├── PatternError        4  a pattern file is wrong
    │   └── NoControllerError  4  a verb that needs controllers found none
    ├── SelfCheckError      5  a result contradicts what must hold
    ├── DataError           6  inputs do not fit the model
    │   └── StoreError      6  a coefficient store is damaged or belongs to something else
    └── ExportError         7  a graph could not be exported
        ├── RunError        7  onnxruntime could not load or run an exported graph, or died on it
        └── ProviderError   7  a requested execution provider did not run it

Each error has four parts (what failed, where, expected and found, what to do next), keeps them as attributes, and
carries the exit code that the command line ends with.
"""

from __future__ import annotations


class AuditError(Exception):
    """Something the user can act on; never a mistake of fxaudit's own."""

    exit_code = 1

    def __init__(
        self, what: str, *, where: str = "", expected: str = "", found: str = "", remedy: str = "", **facts: object
    ) -> None:
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.remedy = remedy
        self.facts = facts
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        for label in ("where", "expected", "found"):
            if text := getattr(self, label):
                lines.append(_labelled(label, text))
        if self.remedy:
            lines.append(_labelled("next", self.remedy))
        return "\n".join(lines)

    def __getattr__(self, name: str) -> object:
        # Facts read as attributes: `error.node`. Only called when the normal lookup has failed.
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; its facts are {sorted(facts)}")


def _labelled(label: str, text: str) -> str:
    indent = " " * 12
    return f"  {label + ':':<10}" + text.replace("\n", "\n" + indent)


class ExpectationError(AuditError):
    """A result is not what the user stated that it must be."""

    exit_code = 1


class UsageError(AuditError):
    """An option or argument that has no meaning here."""

    exit_code = 2


class LoadError(AuditError):
    """The model could not be loaded."""

    exit_code = 3


class TraceError(AuditError):
    """The model could not be traced, or the trace does not compute what the model computes."""

    exit_code = 3


class PatternError(AuditError):
    """A pattern file is wrong."""

    exit_code = 4


class NoControllerError(PatternError):
    """A verb that needs controllers found none."""


class SelfCheckError(AuditError):
    """A result contradicts something that must hold, so no number is reported."""

    exit_code = 5


class DataError(AuditError):
    """Inputs do not fit the model."""

    exit_code = 6


class StoreError(DataError):
    """A coefficient store is damaged, incomplete, or was recorded from something else."""


class ExportError(AuditError):
    """A graph could not be exported, or not be run once it was."""

    exit_code = 7


class RunError(ExportError):
    """onnxruntime could not load or run an exported graph, or died on it."""


class ProviderError(ExportError):
    """A requested execution provider did not run a graph, or not all of its work."""


def nearest(word: str, known: list[str] | tuple[str, ...] | set[str] | frozenset[str]) -> str:
    """A suggestion such as ``; did you mean `linear`?``, or the empty string when nothing is near."""
    import difflib

    close = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean `{close[0]}`?" if close else ""

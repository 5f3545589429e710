"""fxaudit: find the controllers of a PyTorch model, replace their coefficients by inputs, replay."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("fxaudit")
except PackageNotFoundError:  # a checkout that is on the path but not installed
    __version__ = "0.1.0"

from fxaudit.controllers.controller import Coefficient, Controller
from fxaudit.controllers.pattern import Pattern, load_patterns
from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.errors import AuditError
from fxaudit.model.load import Subject
from fxaudit.model.trace import Finding, TracedModel
from fxaudit.replay.store import CoefficientStore, open_store
from fxaudit.stages import discover, export, freeze, inspect, load, match, record, replay, trace, verify

__all__ = [
    "AuditError",
    "Coefficient",
    "CoefficientStore",
    "Controller",
    "Finding",
    "FrozenModel",
    "Pattern",
    "Subject",
    "TracedModel",
    "__version__",
    "discover",
    "export",
    "freeze",
    "inspect",
    "load",
    "load_patterns",
    "match",
    "open_store",
    "record",
    "replay",
    "trace",
    "verify",
]

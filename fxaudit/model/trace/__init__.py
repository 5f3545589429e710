"""A `Subject` becomes a `TracedModel`: one flat graph that computes what the eager model computes."""

from fxaudit.model.trace.traced import (
    Fidelity,
    Finding,
    TracedModel,
    other_batches,
    restore_state,
    run_flat,
    written_buffers,
    written_inputs,
)
from fxaudit.model.trace.tracing import trace

__all__ = [
    "Fidelity",
    "Finding",
    "TracedModel",
    "other_batches",
    "restore_state",
    "run_flat",
    "trace",
    "written_buffers",
    "written_inputs",
]

"""A `Subject` becomes a `TracedModel`: one flat graph that computes what the eager model computes."""

from fxaudit.model.trace.traced import (
    Fidelity,
    Finding,
    RandomStates,
    TracedModel,
    fresh_inputs,
    is_random,
    other_batches,
    random_ops,
    random_states,
    restore_state,
    run_flat,
    run_from,
    written_buffers,
    written_inputs,
)
from fxaudit.model.trace.tracing import trace

__all__ = [
    "Fidelity",
    "Finding",
    "RandomStates",
    "TracedModel",
    "fresh_inputs",
    "is_random",
    "other_batches",
    "random_ops",
    "random_states",
    "restore_state",
    "run_flat",
    "run_from",
    "trace",
    "written_buffers",
    "written_inputs",
]

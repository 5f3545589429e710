"""Sites that exporting hides: attention in one fused op, recurrent layers in another, whatever a custom op computes."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

from fxaudit import ops
from fxaudit.controllers.graphs import Dataflow
from fxaudit.controllers.pattern import Pattern
from fxaudit.model.trace import Finding

# What `requires` asks for -> the ops that stand in the graph where the trace was made without it.
_FUSED = {
    ("attention", "eager"): ("scaled_dot_product_attention",),
    ("decompose", "lstm"): ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell"),
}


def hidden_sites(patterns: Sequence[Pattern], dataflow: Dataflow) -> Iterator[Finding]:
    """A finding for each pattern that cannot see its sites in this trace, and for each custom op of the graph."""
    for pattern in patterns:
        for setting, value in pattern.requires.items():
            fused = [n for name in _FUSED[setting, value] for n in dataflow.nodes_of(name)]
            if fused:
                name = ops.op_name(fused[0])
                text = f"`{pattern.name}` sees nothing inside {len(fused)} `{name}`: trace with --{setting} {value}"
                yield Finding("hidden", text, ops.source_line(fused[0]))
    custom = collections.Counter(
        name for node in dataflow.nodes if "::" in (name := ops.op_name(node)) and not name.startswith("python::")
    )
    for name, count in sorted(custom.items()):
        text = f"{count} `{name}`: what a custom op computes is not searched for controllers"
        yield Finding("hidden", text, ops.source_line(dataflow.nodes_of(name)[0]))

"""What matching costs, beside torch's SubgraphMatcher and networkx VF2 on the same graphs, in one run.

    make bench

The graphs are transformer-like, with one gated attention output in each layer. The peers look for that gate alone, and
only the gate: `linear -> sigmoid -> mul`, in one operand order for SubgraphMatcher. fxaudit looks for it with a pattern
file (with shapes and structural tests), and for the whole shipped library; its last column makes controllers of what
the library found. Times are CPU seconds, one core.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import networkx as nx
import torch
from networkx.algorithms.isomorphism import DiGraphMatcher
from torch import fx
from torch.fx.passes.utils.matcher_utils import SubgraphMatcher

from fxaudit import ops
from fxaudit.controllers.controller import build_controllers
from fxaudit.controllers.graphs import Dataflow
from fxaudit.controllers.match import find_matches
from fxaudit.controllers.pattern import load_pattern, load_patterns
from tests.controllers.generated import transformer

LAYERS = (18, 180, 540, 2000)
PEERS_UP_TO = 540
GATE = """
schema  = 1
name    = "gate"
summary = "A gate on the attention output."
match = '''
coefficient = sigmoid(linear(input))
apply       = value * coefficient
'''
[shape]
coefficient = "batch token feature"
[intervene]
axes = { batch = "sample", token = "position", feature = "unit" }
acts = "multiply"
"""
Result = TypeVar("Result")


def timed(work: Callable[[], Result]) -> tuple[float, Result]:
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def subgraph_matcher(module: fx.GraphModule) -> int:
    """The number of gates that torch's SubgraphMatcher finds."""
    graph = fx.Graph()
    value, x, weight = (graph.placeholder(name) for name in ("value", "x", "weight"))
    linear = graph.call_function(torch.ops.aten.linear.default, (x, weight))
    gate = graph.call_function(torch.ops.aten.sigmoid.default, (linear,))
    graph.output(graph.call_function(torch.ops.aten.mul.Tensor, (value, gate)))
    matcher = SubgraphMatcher(graph, match_output=False, match_placeholder=False, remove_overlapping_matches=False)
    return len(matcher.match(module.graph))


def vf2(module: fx.GraphModule) -> int:
    """The number of gates that networkx VF2 finds."""
    whole = nx.DiGraph()
    for node in module.graph.nodes:
        whole.add_node(node.name, op=ops.op_name(node))
        whole.add_edges_from((source.name, node.name) for source in node.all_input_nodes)
    gate = nx.DiGraph([("linear", "sigmoid"), ("sigmoid", "mul")])
    nx.set_node_attributes(gate, {name: {"op": name} for name in gate})
    same = DiGraphMatcher(whole, gate, node_match=lambda a, b: a["op"] == b["op"])
    return sum(1 for _ in same.subgraph_monomorphisms_iter())


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    library = load_patterns()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gate.toml"
        path.write_text(GATE, encoding="utf-8")
        gate = load_pattern(path)
    print(f"{len(library)} shipped patterns, torch {torch.__version__}, networkx {nx.__version__}, CPU seconds")
    columns = ("nodes", "gates", "index", "one pattern", "SubgraphMatcher", "VF2", "library", "visits", "controllers")
    print("".join(f"{column:>16}" for column in columns))
    for layers in LAYERS:
        module = transformer(layers)
        index, dataflow = timed(lambda: Dataflow(module))  # noqa: B023
        alone, found = timed(lambda: find_matches(gate, dataflow, 2))  # noqa: B023
        peers = ["", ""]
        if layers <= PEERS_UP_TO:
            for i, peer in enumerate((subgraph_matcher, vf2)):
                seconds, count = timed(lambda: peer(module))  # noqa: B023
                peers[i] = f"{seconds:.2f} ({count})"
        whole, results = timed(lambda: [find_matches(pattern, dataflow, 2) for pattern in library])  # noqa: B023
        building, _ = timed(lambda: build_controllers(results, dataflow))  # noqa: B023
        visits = sum(result.visits for result in results)
        row = (f"{len(dataflow.nodes):,}", str(len({m.coefficient for m in found.matches})), f"{index:.2f}")
        row += (f"{alone:.2f}", *peers, f"{whole:.2f}", f"{visits:,}", f"{building:.2f}")
        print("".join(f"{cell:>16}" for cell in row))


if __name__ == "__main__":
    main()

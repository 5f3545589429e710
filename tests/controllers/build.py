"""What the controller tests start from: graphs of ATen ops written node by node, and patterns written as text."""

import operator
import tempfile
from pathlib import Path

import torch
from torch import fx, nn

from fxaudit.controllers.graphs import Dataflow
from fxaudit.controllers.match import find_matches
from fxaudit.controllers.pattern import load_pattern
from fxaudit.controllers.unify import Unifier
from fxaudit.model.load import subject
from fxaudit.model.trace import trace


class Build:
    """An fx graph under construction. Sizes and dtypes come from running each op on meta tensors."""

    def __init__(self):
        self.root, self.graph, self.count = nn.Module(), fx.Graph(), 0

    def input(self, *sizes, dtype=torch.float32):
        self.count += 1
        return self._with(self.graph.placeholder(f"input_{self.count}"), torch.empty(sizes, dtype=dtype, device="meta"))

    def parameter(self, *sizes):
        self.count += 1
        name = f"parameter_{self.count}"
        self.root.register_parameter(name, nn.Parameter(torch.zeros(sizes)))
        return self._with(self.graph.get_attr(name), torch.empty(sizes, device="meta"))

    def buffer(self, *sizes):
        self.count += 1
        name = f"buffer_{self.count}"
        self.root.register_buffer(name, torch.zeros(sizes))
        return self._with(self.graph.get_attr(name), torch.empty(sizes, device="meta"))

    def __call__(self, op, *args, **kwargs):
        name, _, overload = op.partition(".")
        target = getattr(getattr(torch.ops.aten, name), overload or "default")
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        return self._with(node, target(*_values(args), **_values(kwargs)))

    def item(self, node, index):
        return self._with(self.graph.call_function(operator.getitem, (node, index)), node.meta["val"][index])

    def linear(self, x, width):
        return self("linear", x, self.parameter(width, x.meta["val"].shape[-1]))

    def mul(self, a, b):
        return self("mul.Tensor", a, b)

    def add(self, a, b):
        return self("add.Tensor", a, b)

    def module(self, *outputs):
        self.graph.output(tuple(outputs))
        return fx.GraphModule(self.root, self.graph)

    def dataflow(self, *outputs):
        return Dataflow(self.module(*outputs))

    @staticmethod
    def _with(node, value):
        node.meta["val"] = value
        return node


def _values(arguments):
    return fx.node.map_arg(arguments, lambda node: node.meta["val"])


SHAPE = {"coefficient": "batch feature"}
AXES = {"batch": "sample", "feature": "unit", "token": "position", "k": "slot"}


def pattern_text(
    match, *, name="family", shape=SHAPE, where=(), exclude=(), axes=AXES, head="", intervene="", examples=""
):
    """A pattern file, whole but for what a test is about."""
    shapes = "\n".join(f'{key} = "{value}"' for key, value in shape.items())
    roles = ", ".join(f'{axis} = "{role}"' for axis, role in axes.items())
    return (
        f'schema  = 1\nname    = "{name}"\nsummary = "A family."\n{head}\n'
        f"match = '''\n{match.strip()}\n'''\n"
        f"where   = {_toml_list(where)}\nexclude = {_toml_list(exclude)}\n"
        f"[shape]\n{shapes}\n"
        f'[intervene]\naxes = {{ {roles} }}\nacts = "multiply"\n{intervene}\n{examples}'
    )


def _toml_list(items):
    return "[" + ", ".join(f"'{item}'" for item in items) + "]"


def pattern(match, *, name="family", **parts):
    """The pattern that `pattern_text` describes, read through a file as every pattern is."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.toml"
        path.write_text(pattern_text(match, name=name, **parts), encoding="utf-8")
        return load_pattern(path)


def readings(chosen, dataflow, anchor):
    """Every way in which the equations of a pattern read an anchor: no shapes, predicates or structural tests."""
    found = Unifier(chosen, dataflow, anchor).readings()
    return [{name: node for name, node in reading.items() if not name.startswith("#")} for reading in found]


def reads(match, dataflow, anchor, **parts):
    return bool(readings(pattern(match, **parts), dataflow, anchor))


def traced(module, *inputs):
    return trace(subject(module.eval(), inputs, source=type(module).__name__))


def matched(chosen, graph):
    """The result of one pattern in one traced model."""
    return find_matches(chosen, Dataflow(graph.graph_module), graph.sample)

"""Static coefficients that scale a value become part of the weights of the op before or after it.

A coefficient folds where it multiplies a value feature by feature (or by one number), and the way from there to an op
with weights passes only ops that such a scale commutes with, read by nobody else. Before the product: linear,
convolution, batch and layer norm, or a product with a parameter, whose output features are scaled. After it: the input
features of every linear, convolution and batch norm that reads the value. Scales are multiplied in float64 and rounded
once. A weight that another node reads, too, is copied; no tensor of the model is ever written to.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from fxaudit import ops
from fxaudit.errors import SelfCheckError
from fxaudit.execution.closeness import closeness
from fxaudit.execution.flops import input_dependent
from fxaudit.execution.numerics import ask
from fxaudit.model.settings import exact_numerics

# Ops that move elements and change none.
_LAYOUT = frozenset(
    "view reshape permute transpose t unsqueeze squeeze flatten unflatten contiguous clone alias detach".split()
)
# f(s x) = s f(x) for every s, and for every s >= 0; those that look along axes of their own have their number.
_ELEMENTWISE = {"dropout": False, "neg": False, "relu": True, "leaky_relu": True, "abs": True}
_REDUCTIONS = {"mean": False, "sum": False, "amax": True, "amin": True}
_POOLS = {
    "avg_pool1d": (1, False),
    "avg_pool2d": (2, False),
    "adaptive_avg_pool1d": (1, False),
    "adaptive_avg_pool2d": (2, False),
    "max_pool1d": (1, True),
    "max_pool2d": (2, True),
}
_CONVOLUTIONS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
# The weight of a matrix product lies the other way round than that of `linear`.
_PRODUCTS = {"addmm": ("mat1", "mat2", "self"), "mm": ("self", "mat2", ""), "matmul": ("self", "other", "")}


@dataclass(frozen=True, slots=True)
class Fold:
    """What became of one use of a static coefficient.

    `into` names the weights that took it, of ops `direction` (``before`` or ``after``) the product at `node`, past the
    ops in `crossed`. Where it stays, `reason` says why. `copied` are the weights that something else reads, too.
    """

    coefficient: str
    node: str
    module: str
    folded: bool
    direction: str = ""
    into: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    crossed: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Folding:
    """A graph with what could be folded, folded, and what became of every use of every coefficient.

    `equivalence` says how far the folded graph is from the other on an example.
    """

    module: GraphModule
    folds: tuple[Fold, ...]
    equivalence: str = ""


class _Stays(Exception):
    """A product cannot be folded; the text says why."""


def fold(module: GraphModule, coefficients: Mapping[str, str], leaves: Sequence[Tensor]) -> Folding:
    """`module` with its static coefficients folded into weights where that is exact up to rounding.

    Args:
        coefficients: by the name of the buffer that holds a profile, the key of the coefficient.
        leaves: inputs for which the graph is run once, for the sizes of its values.
    """
    work = _Work(module, set(coefficients), leaves)
    done: dict[Node, Fold] = {}
    folds = []
    for name, key in coefficients.items():
        found = []
        for node in dict.fromkeys(use for source in work.readers_of(name) for use in work.uses(source)):
            done[node] = replace(done[node], coefficient=key) if node in done else work.fold(node, key)
            found.append(done[node])
        folds += found or [Fold(key, "", "", False, reason="nothing that the input reaches reads it")]
    return Folding(work.finished(), tuple(folds))


def fold_checked(module: GraphModule, coefficients: Mapping[str, str], leaves: Sequence[Tensor]) -> Folding:
    """The same, compared with `module` on `leaves`.

    Raises:
        SelfCheckError: the two differ by more than rounding.
    """
    folding = fold(module, coefficients, leaves)
    with exact_numerics():
        expected, found = module(*leaves), folding.module(*leaves)
        referee = ask(module, {}, leaves).outputs
    worst = None
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        wide = referee[i].numpy() if referee is not None else None
        close = closeness(a.double().numpy(), b.double().numpy(), str(a.dtype).removeprefix("torch."), wide)
        if not close.holds:
            raise SelfCheckError(
                "the folded graph does not compute what the baked graph computes",
                where=f"output {i} of the example",
                expected=f"relative errors of at most {close.limit:g}",
                found=str(close),
                remedy="report this model, and export it without --fold",
            )
        worst = close if worst is None or close.largest > worst.largest else worst
    return replace(folding, equivalence=str(worst))


# --- scales ---------------------------------------------------------------------------------------------------------


def _core(scale: Tensor) -> Tensor:
    """A scale with size 1 along every axis that it does not vary on."""
    for axis in range(scale.ndim):
        first = scale.narrow(axis, 0, 1)
        if scale.shape[axis] > 1 and (scale.stride(axis) == 0 or bool((scale == first).all())):
            scale = first
    return scale


def _axes(scale: Tensor) -> list[int]:
    return [axis for axis, size in enumerate(scale.shape) if size > 1]


def _along(scale: Tensor, axis: int, op: str) -> Tensor:
    """The scale as a vector along the axis of an op's features: one number, or one for each."""
    if any(varying != axis for varying in _axes(scale)):
        raise _Stays(f"it varies along another axis than the features of `{op}`")
    return scale.reshape(-1)


@dataclass(slots=True)
class _Change:
    """New values for weights of one node, by the name of the argument."""

    node: Node
    tensors: dict[str, Tensor] = field(default_factory=dict)


class _Observer(Interpreter):
    """Keeps the size of every value, every size that is computed, and the values of `kept` nodes."""

    def __init__(self, module: GraphModule, kept: set[Node]) -> None:
        super().__init__(module)
        self.kept = kept
        self.shapes: dict[Node, tuple[int, ...]] = {}
        self.values: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.shapes[n] = tuple(result.shape)
        if n in self.kept or not isinstance(result, Tensor):
            self.values[n] = result
        return result


class _Work:
    """A copy of a graph while it is folded: over the same tensors, which are replaced and never changed."""

    def __init__(self, module: GraphModule, profiles: set[str], leaves: Sequence[Tensor]) -> None:
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        self.module = GraphModule(module, graph, class_name="Folded").eval()
        self.graph = self.module.graph
        self.profiles = profiles
        self.dynamic = input_dependent(self.graph)
        observer = _Observer(self.module, set(self.graph.nodes) - self.dynamic)
        with exact_numerics():
            observer.run(*leaves)
        self.shapes, self.values = observer.shapes, observer.values

    def readers_of(self, name: str) -> list[Node]:
        return [node for node in self.graph.nodes if node.op == "get_attr" and node.target == name]

    def uses(self, source: Node) -> Iterator[Node]:
        """The nodes at which a static value meets one that the input reaches."""
        for user in list(source.users):
            if user in self.dynamic or user.op == "output":
                yield user
            else:
                yield from self.uses(user)

    def finished(self) -> GraphModule:
        """The folded graph with the tensors that it still reads."""
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return GraphModule(self.module, self.graph, class_name="Folded").eval()

    # --- one product

    def fold(self, node: Node, key: str) -> Fold:
        path = ops.module_path(node)
        entry = Fold(key, node.name, path[-1].partition("@")[0] if path else "", False)
        reasons = []
        try:
            value, scale = self._product(node)
        except _Stays as stays:
            return replace(entry, reason=str(stays))
        for direction, attempt in (("before", self._before), ("after", self._after)):
            crossed: list[str] = []
            try:
                changes = attempt(node, value, scale, crossed)
            except _Stays as stays:
                reasons.append(f"{direction}: {stays}")
                continue
            node.replace_all_uses_with(value)
            into, copied = self._install(changes)
            self.graph.erase_node(node)
            return replace(entry, folded=True, direction=direction, into=into, copied=copied, crossed=tuple(crossed))
        return replace(entry, reason="; ".join(reasons))

    def _product(self, node: Node) -> tuple[Node, Tensor]:
        """The value that a static coefficient multiplies, and the scale."""
        if node.op == "output":
            raise _Stays("it is an output of the graph")
        if ops.op_name(node) != "mul":
            raise _Stays(f"it is read by `{ops.op_name(node)}`, which does not multiply a value with it")
        operands = [arg for arg in node.args if isinstance(arg, Node)]
        values = [arg for arg in operands if arg in self.dynamic]
        if len(operands) != 2 or len(values) != 1:
            raise _Stays("it does not multiply one value that depends on the input")
        (value,) = values
        (static,) = (arg for arg in operands if arg is not value)
        if self.shapes[value] != self.shapes[node]:
            raise _Stays("the product is larger than the value")
        scale = _core(self.values[static].double().expand(self.shapes[node]))
        if len(_axes(scale)) > 1:
            raise _Stays("it varies along more than one axis of the value")
        return value, scale

    # --- before the product

    def _before(self, product: Node, value: Node, scale: Tensor, crossed: list[str]) -> list[_Change]:
        reader, node = product, value
        while True:
            if set(node.users) != {reader}:
                raise _Stays(f"`{node.name}` is read by something else, too")
            if node.op != "call_function":
                raise _Stays("the value is an input")
            name = ops.op_name(node)
            if (change := self._scaled_output(node, name, scale)) is not None:
                return [change]
            source = self._operand(node)
            if name in _LAYOUT:
                moved = self._moved(node, source)
                whole = torch.empty(moved.numel(), dtype=scale.dtype)
                whole[moved.reshape(-1)] = scale.expand(self.shapes[node]).reshape(-1)
                scale = _core(whole.reshape(self.shapes[source]))
            else:
                reduced = self._commutes(node, name, scale, source)
                if reduced is not None:
                    shape = [1] * len(self.shapes[source])
                    kept = [axis for axis in range(len(shape)) if axis not in reduced]
                    sizes = list(scale.shape) if scale.ndim == len(kept) else [scale.shape[axis] for axis in kept]
                    for axis, size in zip(kept, sizes, strict=True):
                        shape[axis] = size
                    scale = scale.reshape(shape)
            crossed.append(name)
            reader, node = node, source

    def _scaled_output(self, node: Node, name: str, scale: Tensor) -> _Change | None:
        """The weights with which a node gives its result scaled; None for an op without weights.

        Raises:
            _Stays: the scale varies along another axis than its features, or it has no weight to take it.
        """
        last = scale.ndim - 1
        if name == "linear":
            factor = _along(scale, last, name)
            return self._changed(node, {"weight": lambda w: w * factor[:, None], "bias": lambda b: b * factor})
        if name in _PRODUCTS and self._is_weight(node, _PRODUCTS[name][1]):
            _, weight, bias = _PRODUCTS[name]
            factor = _along(scale, last, name)
            return self._changed(node, {weight: lambda w: w * factor, bias: lambda b: b * factor})
        if name in _CONVOLUTIONS:
            factor = _along(scale, last - _CONVOLUTIONS[name], name)
            column = factor.reshape(-1, *[1] * (_CONVOLUTIONS[name] + 1))
            return self._changed(node, {"weight": lambda w: w * column, "bias": lambda b: b * factor})
        if name in ("batch_norm", "layer_norm"):
            norm = _norm(node)
            if set(norm.users) - {node} and norm is not node:
                raise _Stays(f"other outputs of `{norm.name}` are read, too")
            factor = _along(scale, 1 if name == "batch_norm" else last, name)
            changes = {"weight": lambda w: w * factor, "bias": lambda b: b * factor}
            return self._changed(norm, changes, required=("weight",))
        if name == "mul":
            for place in ("self", "other"):
                if self._is_weight(node, place) and ops.attributes(node)[place].target not in self.profiles:
                    return self._changed(node, {place: lambda w: _broadcast(w, scale)})
        return None

    # --- after the product

    def _after(self, product: Node, _: Node, scale: Tensor, crossed: list[str]) -> list[_Change]:
        if not product.users:
            raise _Stays("nothing reads it")
        return [change for user in product.users for change in self._reader(user, product, scale, crossed)]

    def _reader(self, node: Node, source: Node, scale: Tensor, crossed: list[str]) -> list[_Change]:
        """The weights with which a node, or what reads it, undoes that its operand is no longer scaled."""
        if node.op != "call_function":
            raise _Stays("the product is an output")
        name = ops.op_name(node)
        last = scale.ndim - 1
        if node.all_input_nodes.count(source) != 1 or list(node.all_input_nodes).index(source) < 0:
            raise _Stays(f"`{name}` reads it twice")
        given = ops.attributes(node)
        if name == "linear" and given["input"] is source:
            factor = _along(scale, last, name)
            return [self._changed(node, {"weight": lambda w: w * factor[None, :]})]
        if name in _PRODUCTS and given[_PRODUCTS[name][0]] is source and self._is_weight(node, _PRODUCTS[name][1]):
            factor = _along(scale, last, name)
            return [self._changed(node, {_PRODUCTS[name][1]: lambda w: w * factor[:, None]})]
        if name in _CONVOLUTIONS and given["input"] is source:
            if not isinstance(given["padding"], list | tuple):
                raise _Stays(f"`{name}` has padding that is named, not counted")
            factor = _along(scale, last - _CONVOLUTIONS[name], name)
            groups = int(given["groups"])
            return [self._changed(node, {"weight": lambda w: _scaled_inputs(w, factor, groups)})]
        if "batch_norm" in name and given.get("input") is source:
            return [self._scaled_norm(node, given, _along(scale, 1, name))]
        if name in _LAYOUT:
            moved = self._moved(node, source)
            whole = scale.expand(self.shapes[source]).reshape(-1)[moved.reshape(-1)]
            scale = _core(whole.reshape(self.shapes[node]))
        else:
            if self._operand(node) is not source:
                raise _Stays(f"`{name}` reads it as something else than its value")
            reduced = self._commutes(node, name, scale, source)
            if reduced is not None and len(self.shapes[node]) != scale.ndim:
                scale = scale.reshape([size for axis, size in enumerate(scale.shape) if axis not in reduced])
        crossed.append(name)
        if not node.users:
            raise _Stays("nothing reads it")
        return [change for user in node.users for change in self._reader(user, node, scale, crossed)]

    def _scaled_norm(self, node: Node, given: Mapping[str, Any], factor: Tensor) -> _Change:
        """A batch norm of scaled inputs: g (s x - m) / d + b is s g (x - m) / d + b + (s - 1) g m / d."""
        if given.get("training"):
            raise _Stays("`batch_norm` uses the statistics of its batch")
        weight, mean, variance = (self._weight(given[n]).double() for n in ("weight", "running_mean", "running_var"))
        shift = (factor - 1) * weight * mean / torch.sqrt(variance + float(given["eps"]))
        changes = {"weight": lambda w: w * factor, "bias": lambda b: b + shift}
        return self._changed(node, changes, required=("weight", "bias"))

    # --- what a scale commutes with

    def _operand(self, node: Node) -> Node:
        operands = [n for n in ops.operands(node) if n in self.dynamic]
        if len(operands) != 1:
            raise _Stays(f"`{ops.op_name(node)}` does not commute with a scale of one operand")
        return operands[0]

    def _commutes(self, node: Node, name: str, scale: Tensor, source: Node) -> list[int] | None:
        """The axes that a node sums over or picks from, None for one that keeps all axes.

        Raises:
            _Stays: it does not give a scaled result for a scaled operand.
        """
        if name in _ELEMENTWISE:
            positive, reduced = _ELEMENTWISE[name], None
            if name == "leaky_relu" and float(ops.attributes(node)["negative_slope"]) < 0:
                raise _Stays("`leaky_relu` has a negative slope")
            if name == "dropout" and ops.attributes(node)["train"]:
                raise _Stays("`dropout` is active")
        elif name in _POOLS:
            count, positive = _POOLS[name]
            reduced = None
            if any(axis >= scale.ndim - count for axis in _axes(scale)):
                raise _Stays(f"`{name}` pools along the axis that it varies on")
        elif name in _REDUCTIONS:
            positive = _REDUCTIONS[name]
            reduced = _reduced_axes(node, len(self.shapes[source]))
            own = _axes(scale) if scale.ndim == len(self.shapes[source]) else []
            if set(own) & set(reduced):
                raise _Stays(f"`{name}` reduces the axis that it varies on")
        else:
            raise _Stays(f"`{name}` does not commute with a scale")
        if positive and bool((scale < 0).any()):
            raise _Stays(f"`{name}` commutes with scales that are not negative, and this one is")
        return reduced

    def _moved(self, node: Node, source: Node) -> Tensor:
        """For each element of a layout op's result, the number of the element of its operand that it is."""
        numbers = torch.arange(torch.Size(self.shapes[source]).numel()).reshape(self.shapes[source])
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: numbers if n is source else self.values[n])
        assert callable(node.target)
        moved: Tensor = node.target(*args, **kwargs)
        return moved

    # --- weights

    def _is_weight(self, node: Node, name: str) -> bool:
        argument = ops.attributes(node).get(name)
        return isinstance(argument, Node) and argument.op == "get_attr"

    def _weight(self, argument: Any) -> Tensor:
        if not isinstance(argument, Node) or argument.op != "get_attr":
            raise _Stays("a weight of the op is missing or computed")
        weight: Tensor = operator.attrgetter(str(argument.target))(self.module)
        return weight.detach()

    def _changed(
        self, node: Node, changes: Mapping[str, Callable[[Tensor], Tensor]], required: Sequence[str] = ()
    ) -> _Change:
        given = ops.attributes(node)
        change = _Change(node)
        for name, function in changes.items():
            if not name or (given.get(name) is None and name not in required):
                continue
            weight = self._weight(given.get(name))
            change.tensors[name] = function(weight.double()).to(weight.dtype)
        return change

    def _install(self, changes: Sequence[_Change]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Give nodes their new weights: under the old names, or under new ones where something else reads the old."""
        into: list[str] = []
        copied: list[str] = []
        for change in changes:
            for name, tensor in change.tensors.items():
                old = ops.attributes(change.node)[name]
                target = str(old.target)
                readers = {reader for node in self.readers_of(target) for reader in node.users}
                if readers != {change.node} or self._has_other_name(target):
                    copied.append(target)
                    target = self._new_name(target)
                self._set(target, tensor, str(old.target))
                if target != str(old.target):
                    with self.graph.inserting_before(old):
                        new = self.graph.get_attr(target)
                    new.meta = dict(old.meta)
                    change.node.replace_input_with(old, new)
                into.append(target)
        return tuple(into), tuple(copied)

    def _has_other_name(self, name: str) -> bool:
        """Whether the graph reads the same tensor under another name, as tied weights are."""
        tensor = operator.attrgetter(name)(self.module)
        others = {str(node.target) for node in self.graph.nodes if node.op == "get_attr"} - {name}
        return any(operator.attrgetter(other)(self.module) is tensor for other in others)

    def _new_name(self, name: str) -> str:
        taken = {str(node.target) for node in self.graph.nodes if node.op == "get_attr"}
        base = f"{name}_folded"
        return next(n for n in (base, *(f"{base}_{i}" for i in range(2, len(taken) + 3))) if n not in taken)

    def _set(self, name: str, tensor: Tensor, like: str) -> None:
        path, _, leaf = name.rpartition(".")
        owner = self.module.get_submodule(path)
        is_parameter = isinstance(operator.attrgetter(like)(self.module), torch.nn.Parameter)
        owner._parameters.pop(leaf, None)
        owner._buffers.pop(leaf, None)
        if is_parameter:
            owner.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))
        else:
            owner.register_buffer(leaf, tensor)


def _norm(node: Node) -> Node:
    """The node that holds the weights of a norm: itself, or the one of whose outputs it is the first."""
    source = node.args[0]
    return source if isinstance(source, Node) and ops.is_norm_of_several_outputs(source) else node


def _scaled_inputs(weight: Tensor, factor: Tensor, groups: int) -> Tensor:
    """The weight of a convolution, [outputs, inputs of a group, ...], for inputs scaled by `factor`."""
    if factor.numel() == 1:
        return weight * factor
    each = factor.reshape(groups, 1, -1).expand(-1, weight.shape[0] // groups, -1).reshape(weight.shape[0], -1)
    return weight * each.reshape(*each.shape, *[1] * (weight.ndim - 2))


def _broadcast(weight: Tensor, scale: Tensor) -> Tensor:
    """A parameter that multiplies a value, times a scale of the result."""
    rank = max([weight.ndim, *(scale.ndim - axis for axis in _axes(scale)[:1])])
    return weight * scale.reshape(scale.shape[scale.ndim - rank :])


def _reduced_axes(node: Node, rank: int) -> list[int]:
    given = ops.attributes(node)
    dims = given.get("dim")
    if dims is None or dims == []:
        return list(range(rank))
    return [axis % rank for axis in ([dims] if isinstance(dims, int) else dims)]

"""A first pattern file for a site that the user points at: it is written, read back, and tried before it is shown."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.fx import Node

from fxaudit import ops
from fxaudit.axes import Size, divide, same_size
from fxaudit.controllers import structure
from fxaudit.controllers.graphs import Dataflow
from fxaudit.controllers.match import find_matches
from fxaudit.controllers.pattern import parse_pattern
from fxaudit.errors import PatternError, UsageError, nearest

_APPLIES = ("mul", "lerp", "matmul", "bmm", "einsum", "add", "sub", "div", "addcmul")
_RANGES = {"sigmoid": "[0.0, 1.0]", "hardsigmoid": "[0.0, 1.0]", "softmax": "[0.0, 1.0]", "tanh": "[-1.0, 1.0]"}
_RANGES["softplus"] = "[0.0, inf]"
_NAMES = {1: (), 2: ("feature",), 3: ("token", "feature"), 4: ("channel", "height", "width")}
_POSITIONS = ("token", "height", "width")
_MOST_NODES = 64


@dataclass(frozen=True, slots=True)
class Site:
    """A place where one operand of a node looks like a coefficient."""

    coefficient: Node
    apply: Node


def scaffold(name: str, target: str, dataflow: Dataflow, sample: Size | None) -> str:
    """The text of a pattern file called `name` that matches at `target`, a node or a module path of the graph.

    Raises:
        UsageError: the graph has neither a node nor a module of that name.
        PatternError: nothing there looks like a coefficient, or no pattern can be drafted for it.
    """
    refusals: list[str] = []
    for site in _sites(target, dataflow):
        reason = structure.refusal(dataflow, site.coefficient, site.apply)
        if reason is not None:
            refusals.append(f"{site.coefficient.name} at {site.apply.name}: {reason}")
            continue
        for expression in _expressions(site.coefficient, dataflow):
            text = _text(name, expression, site, dataflow, sample)
            if text is not None and _matches(name, text, site, dataflow, sample):
                return text
        refusals.append(f"{site.coefficient.name} at {site.apply.name}: no axis of it holds the inputs")
    raise PatternError(
        f"nothing at `{target}` can be drafted as a controller",
        where=_first_source(target, dataflow),
        expected="a learned function of an input that is applied to another value",
        found="\n".join(refusals[:3]) or "no product, sum or mixing of two values",
        remedy="point at the node where the coefficient is applied: `fxaudit trace MODEL --json` lists apply sites",
    )


@dataclass(frozen=True, slots=True)
class Draft:
    """The text of a pattern file for the coefficients in `covers`; `beyond` are coefficients that it also matches."""

    name: str
    text: str
    covers: tuple[Node, ...]
    beyond: tuple[Node, ...]


def scaffold_for(
    name: str, coefficients: Collection[Node], applies: Collection[Node], dataflow: Dataflow, sample: Size | None
) -> Draft | None:
    """A pattern file called `name` that matches at all of `coefficients` and, where that is possible, nowhere else.

    The exact computation of the first coefficient, and its way to one of `applies`, is written down, narrowed by its
    module path where that is too wide. None where one pattern does not cover them all.
    """
    wanted = set(coefficients)
    first = min(wanted, key=dataflow.order.__getitem__)
    best: Draft | None = None
    for apply in dict.fromkeys((*_applies_behind(first), *(n for n in applies if ops.op_name(n) in _APPLIES))):
        site = Site(first, apply)
        if structure.refusal(dataflow, first, apply) is not None:
            continue
        for expression in _expressions(first, dataflow):
            for glob in ("", _common_glob(wanted)):
                text = _text(name, expression, site, dataflow, sample, glob)
                if text is None:
                    continue
                matches = find_matches(parse_pattern(Path(f"{name}.toml"), text), dataflow, sample).matches
                found = {match.coefficient for match in matches}
                if not wanted <= found:
                    continue
                beyond = tuple(sorted(found - wanted, key=dataflow.order.__getitem__))
                if best is None or len(beyond) < len(best.beyond):
                    best = Draft(name, text, tuple(coefficients), beyond)
                if not beyond:
                    return best
    return best


def _common_glob(nodes: Collection[Node]) -> str:
    """A glob over the module paths of nodes: steps that differ, or count, become `*`; empty at the root."""
    paths = [ops.module_path(node)[-1].partition("@")[0].split(".") if ops.module_path(node) else [] for node in nodes]
    if not all(paths) or len({len(path) for path in paths}) != 1:
        return ""
    return ".".join(
        steps[0] if len(set(steps)) == 1 and not steps[0].isdigit() else "*" for steps in zip(*paths, strict=True)
    )


def _matches(name: str, text: str, site: Site, dataflow: Dataflow, sample: Size | None) -> bool:
    drafted = parse_pattern(Path(f"{name}.toml"), text)
    found = find_matches(drafted, dataflow, sample, anchors=[site.apply])
    return any(match.coefficient is site.coefficient for match in found.matches)


# --- where ----------------------------------------------------------------------------------------------------------


def _sites(target: str, dataflow: Dataflow) -> Iterator[Site]:
    by_name = {node.name: node for node in dataflow.nodes if node.op == "call_function"}
    if target in by_name:
        node = by_name[target]
        yield from _sites_at(node, dataflow)
        # Not an apply site itself: then the coefficient, or on the way to it.
        inside = [node]
        yield from (Site(node, apply) for apply in _applies_behind(node))
        yield from (Site(n, apply) for n in _onward(inside, dataflow) for apply in _applies_behind(n))
        return
    inside = [node for node in by_name.values() if _is_in(node, target)]
    if not inside:
        modules = {step.partition("@")[0] for node in by_name.values() for step in ops.module_path(node)}
        raise UsageError(
            f"there is no node and no module `{target}`{nearest(target, modules | set(by_name))}",
            expected="a module path of the model, or a node of its graph",
            found=target,
            remedy="module paths are those of `model.named_modules()`",
        )
    # A bounded head inside the module first, applied there or by its parent; then any apply site inside; then what is
    # computed from the module's result.
    heads = [node for node in reversed(inside) if ops.in_class(node, "squash")]
    yield from (Site(node, apply) for node in heads for apply in _applies_behind(node))
    for node in reversed(inside):
        yield from _sites_at(node, dataflow)
    for node in (*_onward(inside, dataflow), *reversed(inside)):
        yield from (Site(node, apply) for apply in _applies_behind(node))


def _onward(nodes: Sequence[Node], dataflow: Dataflow) -> list[Node]:
    """What is computed from `nodes` alone, one operand at a time, the nearest first."""
    found: list[Node] = []
    queue, seen = list(nodes), set(nodes)
    while queue and len(found) < _MOST_NODES:
        for user in queue.pop(0).users:
            if user not in seen and len(dataflow.data_operands(user)) == 1 and user.op == "call_function":
                seen.add(user)
                found.append(user)
                queue.append(user)
    return found


def _is_in(node: Node, module: str) -> bool:
    return any(step.partition("@")[0] == module for step in ops.module_path(node))


def _sites_at(apply: Node, dataflow: Dataflow) -> Iterator[Site]:
    """The readings of a node as an apply site, a bounded coefficient first."""
    if ops.op_name(apply) not in _APPLIES:
        return
    found = [Site(_behind_layout(n, dataflow), apply) for n in dataflow.operands(apply) if dataflow.is_dynamic(n)]
    yield from sorted(found, key=lambda site: not ops.in_class(site.coefficient, "squash"))


def _behind_layout(node: Node, dataflow: Dataflow) -> Node:
    while ops.in_class(node, "layout") and len(sources := dataflow.data_operands(node)) == 1:
        node = sources[0]
    return node


def _applies_behind(node: Node) -> Iterator[Node]:
    queue, seen = [node], {node}
    while queue and len(seen) < _MOST_NODES:
        for user in queue.pop(0).users:
            if user in seen:
                continue
            seen.add(user)
            if ops.op_name(user) in _APPLIES and len(ops.operands(user)) > 1:
                yield user
            elif ops.in_class(user, "layout"):
                queue.append(user)


def _first_source(target: str, dataflow: Dataflow) -> str:
    node = next((n for n in dataflow.nodes if n.name == target or _is_in(n, target)), None)
    return ops.source_line(node) if node is not None else ""


# --- what -----------------------------------------------------------------------------------------------------------


def _expressions(coefficient: Node, dataflow: Dataflow) -> Iterator[str]:
    """How the coefficient is computed, as exactly as one path can say, then ever more loosely."""
    name = ops.op_name(coefficient)
    if not name.isidentifier():
        return
    data = dataflow.data_operands(coefficient)
    arithmetic = ops.arithmetic_operands(coefficient) if name in ops.ARITHMETIC else None
    path = _path(data[0], dataflow) if len(data) == 1 else []
    kinds = list(dict.fromkeys(_kind(node, dataflow) for node in path))
    inner = f"chain({' | '.join(kinds)})(input)" if kinds else "input"
    for expression in dict.fromkeys((inner, "input")):
        if arithmetic is not None:
            yield f"{name}({', '.join(expression if side in data[:1] else '_' for side in arithmetic)})"
        else:
            yield f"{name}({expression})"


def _path(node: Node, dataflow: Dataflow) -> list[Node]:
    """The nodes along one path of data, up to the last learned op before the path branches or is shared."""
    path: list[Node] = []
    learned = 0
    while node.op == "call_function" and ops.op_name(node).isidentifier() and len(path) < 12:
        path.append(node)
        if dataflow.is_learned_op(node):
            learned = len(path)
        sources = dataflow.data_operands(node)
        if len(sources) != 1 or (learned and len(sources[0].users) > 1):
            break
        node = sources[0]
    return path[:learned]


def _kind(node: Node, dataflow: Dataflow) -> str:
    classes = ("linear", "norm", "activation", "squash", "pool", "layout", "gather")
    return next((kind for kind in classes if dataflow.is_a(node, kind)), ops.op_name(node))


def _text(
    name: str, expression: str, site: Site, dataflow: Dataflow, sample: Size | None, glob: str = ""
) -> str | None:
    axes = _axes(site.coefficient, sample)
    if axes is None:
        return None
    names = [factor for axis in axes for factor in axis.split("*") if not factor.isdigit()]
    roles = ", ".join(f'{axis} = "{_role(axis)}"' for axis in dict.fromkeys(names))
    apply, acts, neutral = _apply(site, dataflow)
    limits = _RANGES.get(ops.op_name(site.coefficient))
    shares = _shares(site.coefficient, axes)
    source = ops.source_line(site.apply)
    lines = [
        "schema  = 1",
        f'name    = "{name}"',
        'summary = "Say in one sentence what the coefficient does."',
        'cite    = "Say where the family comes from."',
        "",
        *([f"# {source}"] if source else []),
        "match = '''",
        f"coefficient = {expression}",
        f"apply       = {apply}",
        "'''",
        *([f"""where   = ['module(coefficient, "{glob}")']"""] if glob else []),
        "",
        "[shape]",
        f'coefficient = "{" ".join(axes)}"',
        "",
        "[intervene]",
        f"axes    = {{ {roles} }}",
        f'acts    = "{acts}"',
        *([f"neutral = {neutral}"] if neutral and not shares else []),
        *([f"range   = {limits}"] if limits else []),
        *([f'sums_to = {{ axis = "{shares}", value = 1.0 }}'] if shares else []),
        "",
        "# Two examples that match, and two near misses with `expect = 0`; `fxaudit pattern test` runs them.",
        "# [[example]]",
        '# why    = "one block"',
        "# expect = 1",
        '# inputs = ["2 5 16"]',
        "# code   = '''",
        "# class M(nn.Module):",
        "#     ...",
        "# model = M()",
        "# '''",
    ]
    return "\n".join(lines) + "\n"


def _axes(coefficient: Node, sample: Size | None) -> list[str] | None:
    """Axis names for a tensor: the inputs first, the rest by rank; None where no axis holds the inputs."""
    sizes = ops.sizes(coefficient)
    if not sizes:
        return None
    names = _NAMES.get(len(sizes), tuple(f"axis{i}" for i in range(1, len(sizes))))
    if sample is None or same_size(sizes[0], sample):
        first = "batch"
    elif divide(sizes[0], sample) is not None:
        first = "batch*token"
        names = tuple("part" if axis == "token" else axis for axis in names)
    else:
        return None
    return [first, *("1" if size == 1 else axis for axis, size in zip(names, sizes[1:], strict=True))]


def _shares(coefficient: Node, axes: Sequence[str]) -> str:
    """The axis along which a softmax sums to one; empty for what is none."""
    if ops.op_name(coefficient) != "softmax":
        return ""
    axis = axes[int(ops.attributes(coefficient)["dim"])]
    return axis if axis.isidentifier() else ""


def _role(axis: str) -> str:
    return "sample" if axis == "batch" else "position" if axis in _POSITIONS else "unit"


def _apply(site: Site, dataflow: Dataflow) -> tuple[str, str, str]:
    """The equation of the apply site, how the coefficient acts there, and its neutral value."""
    carried, is_itself = _carried(site, dataflow)
    match ops.op_name(site.apply):
        case "mul":
            return f"value * {carried}", "multiply", "1.0" if is_itself else ""
        case "add":
            return f"value + {carried}", "add", "0.0" if is_itself else ""
        case "einsum":
            return f"einsum(value, {carried})", "mix", ""
        case name:
            operands = ops.arithmetic_operands(site.apply) if name in ops.ARITHMETIC else dataflow.operands(site.apply)
            values = structure.value_operands(dataflow, site.coefficient, site.apply)
            sides = [carried if isinstance(n, Node) and n not in values else "_" for n in operands]
            acts = {"lerp": "lerp", "sub": "add", "div": "multiply", "addcmul": "multiply"}.get(name, "mix")
            return f"{name}({', '.join(sides)})", acts, ""


def _carried(site: Site, dataflow: Dataflow) -> tuple[str, bool]:
    """The coefficient on its way to the apply site, as a chain of the kinds of nodes that it passes; and whether it
    arrives there as it was, not as a function of itself."""
    way = [n for n in structure.way_to(dataflow, site.coefficient, site.apply) if n is not site.coefficient]
    kinds = dict.fromkeys(["layout", *(_kind(n, dataflow) for n in way)])
    most = f", most={len(way)}" if len(way) > 12 else ""
    return f"chain({' | '.join(kinds)}, least=0{most})(coefficient)", len(kinds) == 1

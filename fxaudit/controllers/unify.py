"""Backward unification of a pattern's equations with the nodes around one anchor.

Names are consistent (one name, one node) but not injective (two names may be one node). Bindings are threaded through
generators; the deepest failure is kept, as what was expected, what was found, and where. `chain` is a maximal munch,
`region` stops at captures that are bound already, `fold` walks a tree whose interior nodes have one user each.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from fxaudit import axes, ops
from fxaudit.controllers.anchors import Plan
from fxaudit.controllers.anchors import plan as make_plan
from fxaudit.controllers.graphs import Dataflow
from fxaudit.controllers.language import Anything, Chain, Either, Fold, Item, Literal, Name, Op, Region, Term, children
from fxaudit.controllers.pattern import Pattern
from fxaudit.errors import PatternError

# Visits that one anchor may take. The shipped patterns need fewer than a hundred; what needs more is ambiguous.
BUDGET = 10_000
# Nodes that closures may look at, and readings that may be judged, for one anchor.
STEPS, READINGS = 20 * BUDGET, 500
# Nodes that the search for an equation that the apply site does not reach may look at.
FORWARD_REACH = 1024

Bindings = Mapping[str, Any]

# Kept among the bindings, under keys that no name can have: reductions whose axes are checked once shapes are known,
# and the number of ops matched on the way here.
OVERS = "#over"
DEPTH = "#depth"


@dataclass(frozen=True, slots=True)
class Failure:
    """Where unification stopped: the template is filled only when somebody reads it, since most failures are not read.

    `line` is the line of the match block, 0 when a shape, a predicate or a structural test failed. `about` says which
    part of the pattern, for whoever wants to edit it: ``("op", term)``, ``("attribute", term, key, found)``, ``("over",
    term, axes)``, ``("shape", capture, sizes)``, ``("where", text)``, ``("exclude", text)``; None for the rest.
    """

    progress: tuple[int, int]
    node: Node | None
    line: int
    template: str
    values: tuple[Any, ...]
    nodes: Mapping[str, Any]
    about: tuple[Any, ...] | None

    @property
    def bound(self) -> tuple[str, ...]:
        """The names that were bound by then."""
        return tuple(self.nodes)

    @property
    def reason(self) -> str:
        return self.template.format(*(describe(value) for value in self.values))


class Unifier:
    """Unification from one anchor.

    `admits` says whether what is bound once the coefficient is may become a match: no more is sought where it may not.
    """

    def __init__(
        self,
        pattern: Pattern,
        dataflow: Dataflow,
        anchor: Node,
        plan: Plan | None = None,
        admits: Callable[[Unifier, Bindings], bool] = lambda unifier, bindings: True,
    ) -> None:
        self.pattern, self.dataflow, self.anchor, self.admits = pattern, dataflow, anchor, admits
        self.equations = pattern.equations
        self.plan = plan or make_plan(pattern, dataflow)
        self.visits = 0
        self.steps = 0
        # How far the deepest failure got, None before the first one, and what `Failure` is made of.
        self.progress: tuple[int, int] | None = None
        self._deepest: tuple[Node | None, int, str, tuple[Any, ...], Bindings, tuple[Any, ...] | None]

    @property
    def failure(self) -> Failure | None:
        """The deepest failure so far, the first of those that are equally deep."""
        if self.progress is None:
            return None
        node, line, template, values, bindings, about = self._deepest
        nodes = {name: bound for name, bound in bindings.items() if not name.startswith("#")}
        return Failure(self.progress, node, line, template, values, nodes, about)

    def readings(self) -> Iterator[Bindings]:
        """Every way to read the anchor as `apply` such that all equations that the pattern needs hold."""
        count = 0
        for bindings in self.unify(Name(0, "apply"), self.anchor, {}):
            if "coefficient" in bindings and not self.admits(self, bindings):
                continue
            for reading in self._forward(bindings, self._pending(bindings)):
                count += 1
                if count > READINGS:
                    raise self._too_ambiguous(self.equations["apply"], f"{READINGS:,} readings")
                yield reading

    def fail(
        self,
        bindings: Bindings,
        node: Node | None,
        line: int,
        template: str,
        *values: Any,
        depth: int = 0,
        about: tuple[Any, ...] | None = None,
    ) -> None:
        """Keep this failure if it is deeper than the deepest so far; `depth` counts tests passed after unification."""
        names = len(bindings) - (DEPTH in bindings) - (OVERS in bindings)
        progress = (names + depth, bindings.get(DEPTH, 0))
        if self.progress is None or progress > self.progress:
            self.progress, self._deepest = progress, (node, line, template, values, bindings, about)

    def unify(self, term: Term, node: Any, bindings: Bindings) -> Iterator[Bindings]:
        """Every way in which `node` is what `term` describes, as extended bindings.

        Raises:
            PatternError: the anchor's visits exceed `BUDGET`.
        """
        self._visit(term)
        return _WAYS[type(term)](self, term, node, bindings)

    def _visit(self, term: Term) -> None:
        self.visits += 1
        if self.visits > BUDGET:
            raise self._too_ambiguous(term, f"{BUDGET:,} visits")

    def _walked(self, term: Term, steps: int) -> None:
        self.steps += steps
        if self.steps > STEPS:
            raise self._too_ambiguous(term, f"{STEPS:,} steps along its closures")

    def _too_ambiguous(self, term: Term, spent: str) -> PatternError:
        return PatternError(
            f"`{self.pattern.name}` is too ambiguous: one anchor took more than {spent}",
            where=f"{self.pattern.where_in_file(term.line)}\n{ops.source_line(self.anchor)}".strip(),
            expected="few ways to read each equation",
            found=f"anchor `{self.anchor}` was still open",
            remedy="name what lies between with narrower classes, or lower `most=`",
        )

    def _is_any(self, node: Node, names: tuple[str, ...]) -> bool:
        return not self.dataflow.kinds(node).isdisjoint(names)

    # What the kinds of term unify with. Where no search is needed these are no generators: most nodes are refused.

    def _name(self, term: Name, node: Any, bindings: Bindings) -> Iterator[Bindings]:
        if not isinstance(node, Node):
            return iter(())
        name = term.name
        if name in bindings:
            if bindings[name] is node:
                return iter((bindings,))
            self.fail(bindings, node, term.line, "`{}` is {}, cannot also be {}", name, bindings[name], node)
            return iter(())
        if name in self.equations:
            return self._equation(name, node, bindings)
        return iter(({**bindings, name: node},))

    def _equation(self, name: str, node: Node, bindings: Bindings) -> Iterator[Bindings]:
        for extended in self.unify(self.equations[name], node, bindings):
            yield {**extended, name: node}

    def _anything(self, term: Anything, node: Any, bindings: Bindings) -> Iterator[Bindings]:
        return iter((bindings,))

    def _literal(self, term: Literal, node: Any, bindings: Bindings) -> Iterator[Bindings]:
        return iter((bindings,) if not isinstance(node, Node) and node == term.value else ())

    def _either(self, term: Either, node: Any, bindings: Bindings) -> Iterator[Bindings]:
        for option in self.plan.options[term]:
            yield from self.unify(option, node, bindings)

    def _item(self, term: Item, node: Any, bindings: Bindings) -> Iterator[Bindings]:
        if not isinstance(node, Node):
            return iter(())
        if self.dataflow.name(node) == "getitem" and node.args[1] == term.index:
            return self.unify(term.source, node.args[0], bindings)
        template = "expected output [{}] of a multi-output op, found {}"
        self.fail(bindings, node, term.line, template, term.index, node)
        return iter(())

    def _op(self, term: Op, node: Any, bindings: Bindings) -> Iterator[Bindings]:
        if not isinstance(node, Node):
            return iter(())
        if not self._is_any(node, term.names):
            self.fail(bindings, node, term.line, "expected {}, found {}", term, node, about=("op", term))
            return iter(())
        bindings = {**bindings, DEPTH: bindings.get(DEPTH, 0) + 1}
        for key, expected in term.attributes.items():
            found = attribute(node, key)
            if plain(found) != plain(absolute(node, expected) if key == "dim" else expected):
                template, about = "expected {}={}, found {}={} in {}", ("attribute", term, key, found)
                self.fail(bindings, node, term.line, template, key, expected, key, found, node, about=about)
                return iter(())
        alpha = self.dataflow.factor(node)
        if alpha != 1 and "alpha" not in term.attributes:
            # `add(a, b, alpha=2)` is a + 2 * b, which `a + b` does not say.
            self.fail(bindings, node, term.line, "expected no factor, found alpha={} in {}", alpha, node)
            return iter(())
        if term.over is not None:
            bindings[OVERS] = (*bindings.get(OVERS, ()), (term, node))
        operands, count = self.dataflow.written_operands(node), len(term.operands)
        if count > len(operands):
            template = "expected {} data operands, found {} in {}"
            self.fail(bindings, node, term.line, template, count, len(operands), node)
            return iter(())
        if self.dataflow.name(node) in ops.UNORDERED:
            return self._in_any_order(term, operands, bindings)
        terms, places = self.plan.closures_last[term]
        return self._all(terms, [operands[i] for i in places], bindings)

    def _in_any_order(self, term: Op, operands: Sequence[Any], bindings: Bindings) -> Iterator[Bindings]:
        terms, places = self.plan.closures_last[term]
        for order in itertools.permutations(operands, len(places)):
            yield from self._all(terms, [order[i] for i in places], bindings)

    def _all(self, terms: Sequence[Term], nodes: Sequence[Any], bindings: Bindings, i: int = 0) -> Iterator[Bindings]:
        """Every way in which all terms, from the one at `i` on, unify with their nodes."""
        while i < len(terms):
            term, node = terms[i], nodes[i]
            i += 1
            if isinstance(node, Node):
                if self._is_rejected(term, node):
                    self._reject(term, node, bindings)
                    return iter(())
                if type(term) is Name and not (term.name in bindings or term.name in self.equations):
                    self._visit(term)  # any node: nothing to unify
                    bindings = {**bindings, term.name: node}
                    continue
            ways = self.unify(term, node, bindings)
            return ways if i == len(terms) else self._rest(ways, terms, nodes, i)
        return iter((bindings,))

    def _rest(
        self, ways: Iterator[Bindings], terms: Sequence[Term], nodes: Sequence[Any], i: int
    ) -> Iterator[Bindings]:
        for extended in ways:
            yield from self._all(terms, nodes, extended, i)

    def _is_rejected(self, term: Term, node: Node) -> bool:
        """Whether a node is of none of the kinds that a term's node may have: known without unifying anything."""
        roots = self.plan.roots[term]
        return roots is not None and roots.isdisjoint(self.dataflow.kinds(node))

    def _reject(self, term: Term, node: Node, bindings: Bindings) -> None:
        match term:
            case Name(name=name) if name in bindings:
                self.fail(bindings, node, term.line, "`{}` is {}, cannot also be {}", name, bindings[name], node)
            case Name(name=name):
                self._reject(self.equations[name], node, bindings)
            case Either(options=options):
                self._reject(options[0], node, bindings)
            case Item(index=index):
                template = "expected output [{}] of a multi-output op, found {}"
                self.fail(bindings, node, term.line, template, index, node)
            case Op():
                self.fail(bindings, node, term.line, "expected {}, found {}", term, node, about=("op", term))
            case Fold():
                self.fail(bindings, node, term.line, "expected the root of a fold of {}, found {}", term, node)
            case Chain(least=0, source=source):
                self._reject(source, node, bindings)
            case Chain():
                template = "expected a chain of {}, broken by {}"
                self.fail(bindings, node, term.line, template, term, node, about=("op", term))

    def _chain(self, term: Chain, node: Any, bindings: Bindings) -> Iterator[Bindings]:
        if not isinstance(node, Node):
            return
        walk = self.dataflow.walk(node, term.names, term.least, term.most, STEPS)
        self._walked(term, walk.steps)
        if walk.broken is not None:
            template = "expected a chain of {}, broken by {}"
            self.fail(bindings, walk.broken, term.line, template, term, walk.broken, about=("op", term))
        source, is_filtered = term.source, term in self.plan.filtered
        for end in walk.ends:
            if is_filtered and self._is_rejected(source, end):
                self._visit(source)
                self._reject(source, end, bindings)
            else:
                yield from self.unify(source, end, bindings)

    def _region(self, term: Region, node: Any, bindings: Bindings) -> Iterator[Bindings]:
        if not isinstance(node, Node):
            return
        stops = {bindings[s.name] for s in term.sources if isinstance(s, Name) and s.name in bindings}
        seen: set[Node] = set()
        border: list[Node] = []
        queue = [node]
        while queue:
            self._walked(term, 1)
            current = queue.pop()
            if current in seen:
                continue
            seen.add(current)
            if current in stops or not self._is_any(current, term.names):
                if current is node and current not in stops:
                    self.fail(bindings, node, term.line, "expected a region of {}, found {}", term, node)
                    return
                border.append(current)
            elif len(seen) > term.most:
                self.fail(bindings, current, term.line, "the region has more than {} nodes", term.most)
                return
            else:
                queue.extend(self.dataflow.data_operands(current))
        matched = False
        for extended in self._assign(border, term.sources, bindings):
            matched = True
            yield extended
        if not matched:
            first = border[0] if border else node
            self.fail(bindings, first, term.line, "the region also reaches {}", tuple(border))

    def _assign(self, border: list[Node], sources: tuple[Term, ...], bindings: Bindings) -> Iterator[Bindings]:
        if not border:
            yield bindings
            return
        for source in sources:
            for extended in self.unify(source, border[0], bindings):
                yield from self._assign(border[1:], sources, extended)

    def _fold(self, term: Fold, node: Any, bindings: Bindings) -> Iterator[Bindings]:
        if not isinstance(node, Node):
            return
        # Interior nodes are read once and only a maximal node is a root: linear, and the only reading that is meant.
        inside = _is_read_once(node) and self._is_any(next(iter(node.users)), term.names)
        if not self._is_any(node, term.names) or inside:
            self.fail(bindings, node, term.line, "expected the root of a fold of {}, found {}", term, node)
            return
        terms: list[Node] = []
        stack = [node]
        while stack:
            current = stack.pop()
            self._visit(term)
            if self._is_any(current, term.names) and (current is node or _is_read_once(current)):
                stack.extend(reversed([a for a in current.args if isinstance(a, Node)]))
            else:
                terms.append(current)
        if len(terms) < term.least:
            template = "expected a fold of at least {} terms, found {}"
            self.fail(bindings, node, term.line, template, term.least, len(terms))
            return
        # The coefficient and what it is made of is one node for all terms; what else each term binds becomes a tuple.
        shared = self.plan.behind["coefficient"]
        collected: dict[str, tuple[Node, ...]] = {}
        for part in terms:
            extended = next(self.unify(term.term, part, bindings), None)
            if extended is None:
                return
            new = {key: value for key, value in extended.items() if key not in bindings}
            bindings = {**bindings, **{key: value for key, value in new.items() if key in shared}}
            for key, value in new.items():
                if key not in shared:
                    collected[key] = (*collected.get(key, ()), value)
        yield {**bindings, **collected}

    def _mentioned_by(self, name: str, settled: Collection[str] = ()) -> frozenset[str]:
        """A name and every name that its equation mentions, directly or through equations of names not `settled`."""
        if not settled:
            return self.plan.behind[name]
        names, queue = {name}, [name]
        while queue:
            current = queue.pop()
            if current in self.equations and current not in settled:
                new = self.plan.mentions[current] - names
                names |= new
                queue.extend(new)
        return frozenset(names)

    # --- equations that the apply site does not reach ---------------------------------------------------------------

    def _pending(self, bindings: Bindings) -> list[str]:
        """Equations left over once `apply` is unified: what travels with the coefficient, and conditions on it.

        Names of an alternative that was not taken are left unbound, unless the pattern binds or records them.
        """
        pending = self._open(self.equations, "apply", bindings)
        if not pending:
            return pending
        # What another of them, or an optional capture, is made of is found with it.
        certain = {name for name in pending if not self._mentions_optional(name)} | set(self.pattern.intervene.optional)
        inner = set().union(*(self._mentioned_by(name) - {name} for name in certain)) - self.plan.needed
        return [name for name in pending if name not in inner]

    def _open(self, names: Iterable[str], unified: str, bindings: Bindings) -> list[str]:
        """Those of `names` that still have to be found once the equation of `unified` holds."""
        # An optional capture that another equation mentions is found with it, or is not there.
        needed, reached, settled = self.plan.needed, self._mentioned_by(unified), self.plan.optional
        return [
            name
            for name in names
            if name not in bindings and name not in settled and (name in needed or name not in reached)
        ]

    def _forward(self, bindings: Bindings, pending: list[str]) -> Iterator[Bindings]:
        """Unify the pending equations on the nodes they mention and on what is computed from those, the nearest first.

        An equation that mentions an optional capture may hold nowhere.
        """
        if not pending:
            yield bindings
            return
        for name in self.plan.absent.intersection(pending):  # no search would find it
            if not (self._may_lack(name) or self._speaks_of_another_alternative(name, bindings)):
                line = self.equations[name].line
                self.fail(bindings, self.anchor, line, "nothing in the graph is `{}`", name)
                return
        known = {name for name, node in bindings.items() if isinstance(node, Node)}
        # What the pattern binds before conditions, which hold in many ways; of these, what mentions a known node first.
        # What mentions no known node even by way of others is found with what mentions it.
        name = min(
            pending,
            key=lambda n: (
                not self._mentioned_by(n) & known,
                n not in self.plan.needed,
                not self.plan.mentions[n] & known,
            ),
        )
        rest = [other for other in pending if other != name]
        if self._speaks_of_another_alternative(name, bindings):
            yield from self._forward(bindings, rest)
            return
        term = self.equations[name]
        names = (self.plan.mentions[name] & known) or (self._mentioned_by(name) & known)
        mentioned = sorted({bindings[n] for n in names}, key=self.dataflow.order.__getitem__)
        found = False
        for candidates in (
            mentioned,
            self._downstream(mentioned, self.plan.roots[term], self._between(term, names) or frozenset()),
        ):
            if found:  # it is another name of a node that it mentions
                break
            for candidate in candidates:
                for extended in self.unify(Name(term.line, name), candidate, bindings):
                    found = True
                    if name != "coefficient" or self.admits(self, extended):
                        yield from self._forward(extended, self._open(rest, name, extended))
        if not found and self._may_lack(name):
            yield from self._forward(bindings, rest)
        elif not found:
            self.fail(
                bindings, mentioned[0] if mentioned else self.anchor, term.line, "nothing in the graph is `{}`", name
            )

    def _may_lack(self, name: str) -> bool:
        """Whether an equation may hold nowhere: it is an optional capture's own, or mentions one."""
        return name in self.pattern.intervene.optional or self._mentions_optional(name)

    def _mentions_optional(self, name: str) -> bool:
        return not self.plan.mentions[name].isdisjoint(self.pattern.intervene.optional)

    def _speaks_of_another_alternative(self, name: str, bindings: Bindings) -> bool:
        """Whether an equation is about nodes of an alternative that `apply` did not take: then it is no condition."""
        if name in self.plan.needed:
            return False
        absent = self._mentioned_by("apply").difference(bindings, self.pattern.intervene.optional)
        return not absent.isdisjoint(self._mentioned_by(name, bindings))

    def _between(self, term: Term, names: Collection[str], is_root: bool = True) -> frozenset[str] | None:
        """The kinds of node that may stand between the root of a term and the nodes of `names`; None without any."""
        match term:
            case Name(name=name) if name in names:
                return frozenset()
            case Name(name=name) if name in self.equations:
                return self._between(self.equations[name], names, is_root)
        found = [kinds for inner in children(term) if (kinds := self._between(inner, names, False)) is not None]
        if isinstance(term, Either):  # its options may be roots of their own
            options = [self._between(option, names, is_root) for option in term.options]
            found = [kinds for kinds in options if kinds is not None]
        if not found:
            return None
        own: tuple[str, ...] = ()
        match term:
            case Chain() | Region() | Fold():
                own = term.names
            case Op() if not is_root:
                own = term.names
            case Item() if not is_root:
                own = ("getitem",)
        return frozenset(own).union(*found)

    def _downstream(
        self, known: Sequence[Node], kinds: frozenset[str] | None, between: frozenset[str]
    ) -> Iterator[Node]:
        """Nodes of one of `kinds` that read those that are known, directly or past `between`, the nearest first."""
        seen, queue = set(known), deque(known)
        while queue and len(seen) <= FORWARD_REACH + len(known):
            for user in queue.popleft().users:
                if user not in seen:
                    seen.add(user)
                    own = self.dataflow.kinds(user)
                    if not between.isdisjoint(own) or ops.is_norm_of_several_outputs(user):
                        queue.append(user)
                    if user.op == "call_function" and (kinds is None or not kinds.isdisjoint(own)):
                        yield user


_WAYS: Mapping[type[Term], Callable[..., Iterator[Bindings]]] = {
    Name: Unifier._name,
    Anything: Unifier._anything,
    Literal: Unifier._literal,
    Either: Unifier._either,
    Item: Unifier._item,
    Op: Unifier._op,
    Chain: Unifier._chain,
    Region: Unifier._region,
    Fold: Unifier._fold,
}


def _is_read_once(node: Node) -> bool:
    """Whether one node reads this one, and reads it once: `x + x` reads twice."""
    return len(node.users) == 1 and list(next(iter(node.users)).args).count(node) == 1


def attribute(node: Node, key: str) -> Any:
    """An argument of a node by schema name; a `dim` counted from the front."""
    value = ops.attributes(node).get(key)
    return absolute(node, value) if key == "dim" else value


def plain(value: Any) -> Any:
    """A value in one spelling: a number in a list of its own is that number, a tuple is a list."""
    if isinstance(value, list | tuple):
        return plain(value[0]) if len(value) == 1 else [plain(item) for item in value]
    return value


def absolute(node: Node, dim: Any) -> Any:
    """A `dim`, or a list of them, counted from the front of the operand, so that -1 and rank-1 are the same."""
    rank = len(ops.sizes(node) or ()) if ops.op_name(node) in ("unsqueeze", "stack") else ops.operand_rank(node)
    if isinstance(dim, int) and not isinstance(dim, bool) and rank:
        return dim % rank
    return [absolute(node, d) for d in dim] if isinstance(dim, list | tuple) else dim


def describe(value: Any) -> str:
    """A node as ``op `name` [sizes]``, a term as the op names and classes that it admits; the rest as it prints."""
    if isinstance(value, tuple):
        return ", ".join(map(describe, value)) or "nothing"
    if isinstance(value, Op | Chain | Region | Fold):
        return " | ".join(value.names)
    if not isinstance(value, Node):
        return str(value)
    sizes = ops.sizes(value)
    shape = f" [{axes.format_sizes(sizes)}]" if sizes is not None else ""
    return f"{ops.op_name(value)} `{value.name}`{shape}"

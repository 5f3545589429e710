import contextlib
import itertools

import pytest

from fxaudit import ops
from fxaudit.controllers.graphs import Dataflow
from fxaudit.controllers.unify import BUDGET, FORWARD_REACH, Unifier, describe
from fxaudit.errors import PatternError

from .build import Build, pattern, readings, reads

# Each test below reads `apply` at one node; the gate is there because every pattern needs a coefficient.
GATE = "coefficient = sigmoid(_)\n"


def gated(build, x):
    return build("sigmoid", x)


def applied(expression):
    return f"{GATE}apply = {expression}"


# --- operand order --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["mul.Tensor", "add.Tensor", "maximum"])
@pytest.mark.parametrize("swapped", [False, True], ids=["gate left", "gate right"])
def test_a_commutative_op_matches_in_both_operand_orders(op, swapped):
    build = Build()
    x = build.input(2, 4)
    operands = (build("sigmoid", x), build("relu", x))
    node = build(op, *(reversed(operands) if swapped else operands))
    name = op.split(".")[0]
    assert reads(applied(f"{name}(coefficient, relu(_))"), build.dataflow(node), node)


@pytest.mark.parametrize(("op", "sign"), [("sub.Tensor", "-"), ("div.Tensor", "/")])
def test_an_op_that_is_not_commutative_matches_in_one_operand_order(op, sign):
    build = Build()
    x = build.input(2, 4)
    gate, value = build("sigmoid", x), build("relu", x)
    first, second = build(op, gate, value), build(op, value, gate)
    dataflow = build.dataflow(first, second)
    found = [reads(applied(f"coefficient {sign} relu(_)"), dataflow, node) for node in (first, second)]
    assert found == [True, False]


def test_a_contraction_matches_in_both_operand_orders():
    build = Build()
    x, gate = build.input(2, 4), build("sigmoid", build.input(2, 4))
    node = build("einsum", "bd,bd->bd", [x, gate])
    assert reads(applied("einsum(coefficient, value)"), build.dataflow(node), node)


# --- names ----------------------------------------------------------------------------------------------------------


def self_gate():
    """x * sigmoid(linear(x))."""
    build = Build()
    x = build.input(2, 4)
    node = build.mul(x, build("sigmoid", build.linear(x, 4)))
    return build.dataflow(node), node, x


def test_two_names_may_be_one_node():
    dataflow, node, x = self_gate()
    chosen = pattern("coefficient = sigmoid(linear(input))\napply = value * coefficient")
    assert [(r["input"], r["value"]) for r in readings(chosen, dataflow, node)] == [(x, x)]


def test_one_name_twice_is_one_node():
    dataflow, node, _ = self_gate()
    assert reads("coefficient = sigmoid(linear(input))\napply = input * coefficient", dataflow, node)


def test_one_name_twice_is_not_two_nodes():
    build = Build()
    x, y = build.input(2, 4), build.input(2, 4)
    node = build.mul(y, build("sigmoid", build.linear(x, 4)))
    match = "coefficient = sigmoid(linear(input))\napply = input * coefficient"
    assert not reads(match, build.dataflow(node), node)


def test_an_underscore_twice_may_be_two_nodes():
    build = Build()
    x, y = build.input(2, 4), build.input(2, 4)
    node = build.mul(y, build("sigmoid", x))
    assert reads("coefficient = sigmoid(_)\napply = _ * coefficient", build.dataflow(node), node)


def test_an_underscore_is_not_captured():
    dataflow, node, _ = self_gate()
    (found,) = readings(pattern("coefficient = sigmoid(_)\napply = _ * coefficient"), dataflow, node)
    assert set(found) == {"coefficient", "apply"}


def test_a_square_is_both_operands_at_once():
    build = Build()
    gate = build("sigmoid", build.input(2, 4))
    node = build.mul(gate, gate)
    assert reads("coefficient = sigmoid(_)\napply = coefficient * coefficient", build.dataflow(node), node)


def test_an_equation_that_two_others_mention_is_one_node():
    build = Build()
    x = build.input(2, 4)
    node = build.mul(build("sigmoid", build("relu", x)), build("tanh", build("relu", x)))
    match = "hidden = relu(_)\ncoefficient = sigmoid(hidden)\napply = coefficient * tanh(hidden)"
    assert not reads(match, build.dataflow(node), node)


# --- literals and attributes ----------------------------------------------------------------------------------------


def scaled(number):
    build = Build()
    gate = build("sigmoid", build.input(2, 4))
    node = build("mul.Tensor", gate, number)
    return build.dataflow(node), node


@pytest.mark.parametrize(
    ("pattern_number", "graph_number", "same"), [("2", 2, True), ("2", 2.0, True), ("2", 3, False)]
)
def test_a_number_matches_an_equal_number(pattern_number, graph_number, same):
    dataflow, node = scaled(graph_number)
    assert reads(applied(f"coefficient * {pattern_number}"), dataflow, node) is same


def test_a_number_does_not_match_a_node():
    build = Build()
    x = build.input(2, 4)
    node = build.mul(build("sigmoid", x), x)
    assert not reads(applied("coefficient * 2"), build.dataflow(node), node)


def test_a_name_does_not_match_a_number():
    dataflow, node = scaled(2)
    assert not reads(applied("coefficient * value"), dataflow, node)


def test_an_underscore_matches_a_number():
    dataflow, node = scaled(2)
    assert reads(applied("coefficient * _"), dataflow, node)


def test_a_parameter_is_an_operand_of_arithmetic():
    build = Build()
    node = build.mul(build("sigmoid", build.input(2, 4)), build.parameter(4))
    assert reads(applied("coefficient * scale"), build.dataflow(node), node)


def test_a_parameter_is_no_operand_of_a_linear():
    build = Build()
    node = build.linear(build("sigmoid", build.input(2, 4)), 4)
    assert not reads(applied("linear(coefficient, weight)"), build.dataflow(node), node)


@pytest.mark.parametrize(("dim", "same"), [(-1, True), (2, True), (1, False), (0, False), (-2, False)])
def test_the_last_dimension_is_minus_one_and_rank_minus_one(dim, same):
    build = Build()
    node = build("softmax.int", build("sigmoid", build.input(2, 3, 4)), dim)
    assert reads(applied("softmax(coefficient, dim=-1)"), build.dataflow(node), node) is same


@pytest.mark.parametrize(("dim", "same"), [(-1, True), (2, True), (1, False), (0, False), (-3, False)])
@pytest.mark.parametrize("op", ["cumsum", "unsqueeze", "select.int", "topk", "argmax"])
def test_the_dimension_of_an_op_is_counted_on_its_operand(op, dim, same):
    build = Build()
    gate = build("sigmoid", build.input(2, 3, 4))
    arguments = {"topk": (gate, 2, dim), "select.int": (gate, dim, 0)}.get(op, (gate, dim))
    node = build(op, *arguments)
    # `unsqueeze` alone counts on its result: -1 is then axis 3, and -2 axis 2.
    written = {"unsqueeze": -2}.get(op, -1)
    if op == "unsqueeze":
        same = dim in (2, -2)
    name = op.split(".")[0]
    assert reads(applied(f"{name}(coefficient, dim={written})"), build.dataflow(node), node) is same


@pytest.mark.parametrize(("dims", "same"), [([-1], True), ([2], True), ([1], False), ([1, 2], False)])
@pytest.mark.parametrize("keepdim", [False, True], ids=["dropped", "kept"])
def test_one_reduced_dimension_may_be_written_as_a_number(dims, same, keepdim):
    build = Build()
    node = build("sum.dim_IntList", build("sigmoid", build.input(2, 3, 4)), dims, keepdim)
    assert reads(applied("sum(coefficient, dim=-1)"), build.dataflow(node), node) is same


@pytest.mark.parametrize(("dims", "same"), [([-2, -1], True), ([1, 2], True), ([1, -1], True), ([0, 1], False)])
@pytest.mark.parametrize("keepdim", [False, True], ids=["dropped", "kept"])
def test_several_reduced_dimensions_are_counted_from_either_end(dims, same, keepdim):
    build = Build()
    node = build("mean.dim", build("sigmoid", build.input(2, 3, 4)), dims, keepdim)
    assert reads(applied("mean(coefficient, dim=[1, 2])"), build.dataflow(node), node) is same


@pytest.mark.parametrize(("written", "same"), [("[1, 1]", True), ("(1, 1)", True), ("[2, 2]", False)])
def test_a_list_may_be_written_as_a_tuple(written, same):
    build = Build()
    node = build("adaptive_avg_pool2d", build("sigmoid", build.input(2, 3, 4, 4)), [1, 1])
    match = applied(f"adaptive_avg_pool2d(coefficient, output_size={written})")
    assert reads(match, build.dataflow(node), node) is same


def test_an_attribute_that_the_graph_leaves_to_its_default_is_compared():
    build = Build()
    node = build("topk", build("sigmoid", build.input(2, 4)), 2)
    assert reads(applied("topk(coefficient, largest=True)"), build.dataflow(node), node)


def test_an_attribute_that_the_op_does_not_have_does_not_match():
    build = Build()
    node = build("relu", build("sigmoid", build.input(2, 4)))
    assert not reads(applied("relu(coefficient, dim=1)"), build.dataflow(node), node)


def test_more_operands_than_the_node_has_do_not_match():
    build = Build()
    node = build("relu", build("sigmoid", build.input(2, 4)))
    assert not reads(applied("relu(coefficient, value)"), build.dataflow(node), node)


def test_a_scaled_sum_is_not_a_sum():
    build = Build()
    x = build.input(2, 4)
    node = build("add.Tensor", build("sigmoid", x), x, alpha=2)
    assert not reads(applied("coefficient + value"), build.dataflow(node), node)


def test_one_minus_a_gate_is_read_as_a_difference():
    # torch exports `1 - g` as `rsub(g, 1)`.
    build = Build()
    node = build("rsub.Scalar", build("sigmoid", build.input(2, 4)), 1)
    assert reads(applied("1 - coefficient"), build.dataflow(node), node)


# --- alternatives, items --------------------------------------------------------------------------------------------


def test_alternatives_are_tried_in_the_order_they_are_written():
    build = Build()
    node = build.mul(build("sigmoid", build("relu", build.input(2, 4))), build.input(2, 4))
    dataflow = build.dataflow(node)

    def first(alternatives):
        chosen = pattern(f"coefficient = {alternatives}\napply = coefficient * _")
        return set(readings(chosen, dataflow, node)[0]) - {"apply", "coefficient"}

    assert (first("sigmoid(a) | sigmoid(relu(b))"), first("sigmoid(relu(b)) | sigmoid(a)")) == ({"a"}, {"b"})


def test_a_later_alternative_is_taken_when_the_first_does_not_match():
    build = Build()
    node = build.mul(build("tanh", build.input(2, 4)), build.input(2, 4))
    assert reads("coefficient = sigmoid(_) | tanh(_)\napply = coefficient * _", build.dataflow(node), node)


def test_an_alternative_may_be_a_number():
    dataflow, node = scaled(1.702)
    assert reads(applied("coefficient * (2 | 1.702)"), dataflow, node)


@pytest.mark.parametrize(("index", "same"), [(0, True), (1, False)])
def test_an_item_is_one_output_of_its_op(index, same):
    build = Build()
    node = build("neg", build.item(build("topk", build("sigmoid", build.input(2, 4)), 2), index))
    assert reads(applied("neg(topk(coefficient)[0])"), build.dataflow(node), node) is same


# --- chains ---------------------------------------------------------------------------------------------------------


def stacked(*ops):
    """The sigmoid of an input, then `ops`, each on the one before."""
    build = Build()
    nodes = [build("sigmoid", build.input(2, 4))]
    for op in ops:
        nodes.append(build.linear(nodes[-1], 4) if op == "linear" else build(op, nodes[-1]))
    return build.dataflow(nodes[-1]), nodes


def chain_ends(term, *ops):
    """Where `start` ends up for each reading of `neg(term(start))`, as a distance from the last op."""
    dataflow, nodes = stacked(*ops, "neg")
    found = readings(pattern(f"coefficient = start\napply = neg({term}(coefficient))"), dataflow, nodes[-1])
    backward = nodes[-2::-1]
    return [backward.index(r["coefficient"]) for r in found if r["coefficient"] in backward]


def test_a_chain_takes_the_longest_way_first():
    assert chain_ends("chain(activation)", "relu", "relu", "relu")[0] == 3


def test_a_chain_gives_shorter_ways_after_the_longest():
    assert chain_ends("chain(activation)", "relu", "relu", "relu") == [3, 2, 1]


def test_a_chain_may_have_no_member_when_least_is_zero():
    assert chain_ends("chain(activation, least=0)", "relu") == [1, 0]


def test_a_chain_has_at_least_as_many_members_as_it_must():
    assert chain_ends("chain(activation, least=2)", "relu", "relu", "relu") == [3, 2]


def test_a_chain_has_at_most_as_many_members_as_it_may():
    assert chain_ends("chain(activation, most=2)", "relu", "relu", "relu") == [2, 1]


def test_a_chain_has_at_most_twelve_members_unless_it_says_so():
    assert chain_ends("chain(activation)", *["relu"] * 15)[0] == 12


def test_a_chain_ends_at_the_first_op_outside_its_classes():
    assert chain_ends("chain(activation)", "neg", "relu", "relu") == [2, 1]


def test_a_chain_of_several_classes_mixes_them():
    assert chain_ends("chain(activation | linear)", "linear", "relu", "linear")[0] == 3


def test_a_chain_without_a_member_does_not_match():
    assert chain_ends("chain(norm)", "relu") == []


def test_a_chain_shortens_until_what_it_starts_from_matches():
    dataflow, nodes = stacked("relu", "tanh", "relu", "neg")
    assert reads(applied("neg(chain(relu | tanh)(tanh(relu(coefficient))))"), dataflow, nodes[-1])


def test_maybe_takes_the_op_when_it_is_there():
    assert chain_ends("maybe(activation)", "relu")[0] == 1


def test_maybe_takes_nothing_when_it_is_not_there():
    assert chain_ends("maybe(norm)", "relu") == [0]


def test_a_chain_follows_either_operand_of_a_sum():
    build = Build()
    gate = build("sigmoid", build.input(2, 4))
    node = build("neg", build.add(build.input(2, 4), gate))
    assert reads(applied("neg(chain(add)(coefficient))"), build.dataflow(node), node)


# --- regions --------------------------------------------------------------------------------------------------------


def region(*, outside=None, parameters=False):
    """neg(tanh(x) + relu(x) [+ outside]), gated: every path leads back to x."""
    build = Build()
    x = build.input(2, 4)
    total = build.add(build("tanh", x), build("relu", x))
    if parameters:
        total = build.add(total, build.parameter(4))
    if outside:
        total = build.add(total, build(outside, build.input(2, 4)))
    node = build.mul(build("sigmoid", x), total)
    return build.dataflow(node), node


REGION = "coefficient = sigmoid(x)\napply = coefficient * region(x, via=pointwise)"


def test_a_region_leads_back_to_its_capture_on_every_path():
    assert reads(REGION, *region())


def test_a_region_may_read_parameters():
    assert reads(REGION, *region(parameters=True))


def test_a_region_that_reaches_something_else_does_not_match():
    assert not reads(REGION, *region(outside="relu"))


def test_a_region_may_lead_back_to_several_captures():
    match = "coefficient = sigmoid(x)\napply = coefficient * region(x, y, via=pointwise)"
    assert reads(match, *region(outside="relu"))


def test_a_region_that_passes_through_another_class_does_not_match():
    assert not reads("coefficient = sigmoid(x)\napply = coefficient * region(x, via=add | relu)", *region())


def test_a_region_with_more_nodes_than_it_may_have_does_not_match():
    assert not reads("coefficient = sigmoid(x)\napply = coefficient * region(x, via=pointwise, most=2)", *region())


def test_a_region_stops_at_a_capture_that_is_in_its_classes_itself():
    build = Build()
    hidden = build("relu", build.input(2, 4))
    node = build.mul(build("sigmoid", hidden), build("tanh", hidden))
    assert reads(REGION, build.dataflow(node), node)


def test_a_region_may_be_its_own_capture():
    build = Build()
    x = build.input(2, 4)
    node = build.mul(build("sigmoid", x), x)
    assert reads(REGION, build.dataflow(node), node)


# --- folds ----------------------------------------------------------------------------------------------------------

FOLD = "coefficient = sigmoid(_)\napply = fold(add)(value * coefficient)"


def weighed_sum(count, build=None):
    build = build or Build()
    gate = build("sigmoid", build.input(2, 4))
    values = [build.input(2, 4) for _ in range(count)]
    terms = [build.mul(value, gate) for value in values]
    return build, gate, values, terms


def test_a_fold_reads_a_sum_from_its_left():
    build, _, values, terms = weighed_sum(4)
    root = build.add(build.add(build.add(terms[0], terms[1]), terms[2]), terms[3])
    (found,) = readings(pattern(FOLD), build.dataflow(root), root)
    assert found["value"] == tuple(values)


def test_a_fold_reads_a_balanced_sum_in_the_same_order():
    build, _, values, terms = weighed_sum(4)
    root = build.add(build.add(terms[0], terms[1]), build.add(terms[2], terms[3]))
    (found,) = readings(pattern(FOLD), build.dataflow(root), root)
    assert found["value"] == tuple(values)


def test_the_coefficient_of_a_fold_is_one_node_not_a_tuple():
    build, gate, _, terms = weighed_sum(3)
    root = build.add(build.add(terms[0], terms[1]), terms[2])
    (found,) = readings(pattern(FOLD), build.dataflow(root), root)
    assert found["coefficient"] is gate


def test_a_fold_over_two_coefficients_does_not_match():
    build, _, _, terms = weighed_sum(2)
    other = build.mul(build.input(2, 4), build("sigmoid", build.input(2, 4)))
    root = build.add(build.add(terms[0], terms[1]), other)
    assert not readings(pattern(FOLD), build.dataflow(root), root)


def test_an_inner_sum_is_not_the_root_of_a_fold():
    build, _, _, terms = weighed_sum(3)
    inner = build.add(terms[0], terms[1])
    root = build.add(inner, terms[2])
    assert not readings(pattern(FOLD), build.dataflow(root), inner)


def test_a_sum_that_is_read_twice_is_a_term_of_its_own():
    build, _, _, terms = weighed_sum(3)
    inner = build.add(terms[0], terms[1])
    root = build.add(inner, terms[2])
    # `inner` is no `value * coefficient`, and is not opened because something else reads it.
    assert not readings(pattern(FOLD), build.dataflow(root, build("neg", inner)), root)


def test_a_sum_that_is_read_twice_is_a_root():
    build, _, values, terms = weighed_sum(3)
    inner = build.add(terms[0], terms[1])
    root = build.add(inner, terms[2])
    (found,) = readings(pattern(FOLD), build.dataflow(root, build("neg", inner)), inner)
    assert found["value"] == tuple(values[:2])


@pytest.mark.parametrize(("least", "same"), [(2, True), (3, True), (4, False)])
def test_a_fold_has_at_least_as_many_terms_as_it_must(least, same):
    build, _, _, terms = weighed_sum(3)
    root = build.add(build.add(terms[0], terms[1]), terms[2])
    match = f"coefficient = sigmoid(_)\napply = fold(add, least={least})(value * coefficient)"
    assert reads(match, build.dataflow(root), root) is same


def test_a_fold_in_which_one_term_differs_does_not_match():
    build, _, _, terms = weighed_sum(2)
    root = build.add(build.add(terms[0], terms[1]), build.input(2, 4))
    assert not readings(pattern(FOLD), build.dataflow(root), root)


class CountingFlow(Dataflow):
    tests = 0

    def is_a(self, node, name):
        type(self).tests += 1
        return super().is_a(node, name)


def test_a_fold_over_repeated_doubling_stays_linear():
    # x + x, and that plus itself, and so on: 2**14 terms when written out, 14 nodes in the graph.
    build = Build()
    node = build.mul(build.input(2, 4), build("sigmoid", build.input(2, 4)))
    for _ in range(14):
        node = build.add(node, node)
    CountingFlow.tests = 0
    with contextlib.suppress(PatternError):
        readings(pattern(FOLD), CountingFlow(build.module(node)), node)
    assert CountingFlow.tests < 14 * 100


# --- what `apply` does not reach ------------------------------------------------------------------------------------

ROUTER = """
scores      = softmax(_)
chosen      = topk(scores)
coefficient = chosen[0]
indices     = chosen[1]
apply       = expert * coefficient
"""


def router():
    build = Build()
    scores = build("softmax.int", build.input(2, 4), -1)
    chosen = build("topk", scores, 2)
    weights, indices = build.item(chosen, 0), build.item(chosen, 1)
    node = build.mul(build.input(2, 2), weights)
    return build.dataflow(node, indices), node, indices


def test_what_travels_with_the_coefficient_is_found_forward():
    dataflow, node, indices = router()
    chosen = pattern(
        ROUTER,
        shape={"coefficient": "batch k", "indices": "batch k"},
        axes={"batch": "sample", "k": "slot"},
        intervene='coupled = ["indices"]',
    )
    assert [r["indices"] for r in readings(chosen, dataflow, node)] == [indices]


def test_a_pattern_whose_coupled_output_is_not_there_does_not_match():
    build = Build()
    chosen_node = build("topk", build("softmax.int", build.input(2, 4), -1), 2)
    node = build.mul(build.input(2, 2), build.item(chosen_node, 0))
    chosen = pattern(
        ROUTER,
        shape={"coefficient": "batch k", "indices": "batch k"},
        axes={"batch": "sample", "k": "slot"},
        intervene='coupled = ["indices"]',
    )
    assert not readings(chosen, build.dataflow(node), node)


TWO_GATES = """
hidden      = relu(_)
coefficient = sigmoid(linear(hidden))
apply       = input * coefficient
mapped      = linear(chain(layout, least=0)(apply))
second      = sigmoid(chain(linear | layout)(hidden))
applied     = chain(layout, least=0)(mapped) * second
"""


def two_gates(has_second, is_viewed=False):
    """One gate before a linear layer, and perhaps another, from the same hidden state, after it."""
    build = Build()
    x = build.input(2, 4)
    hidden = build("relu", x)
    node = build.mul(x, build("sigmoid", build.linear(hidden, 4)))
    mapped = build.linear(build("view", node, [2, 4]) if is_viewed else node, 3)
    mapped = build("view", mapped, [2, 3]) if is_viewed else mapped
    second = build("sigmoid", build.linear(hidden, 3))
    return build.dataflow(build.mul(mapped, second) if has_second else mapped, second), node, second


def optional_second(intervene='optional = ["second"]'):
    return pattern(
        TWO_GATES,
        shape={"coefficient": "batch feature", "second": "batch other"},
        axes={"batch": "sample", "feature": "unit", "other": "unit"},
        intervene=f'coupled = ["second"]\n{intervene}',
    )


@pytest.mark.parametrize("is_viewed", [False, True])
def test_an_optional_capture_is_bound_where_it_is_there(is_viewed):
    dataflow, node, second = two_gates(True, is_viewed)
    assert [r["second"] for r in readings(optional_second(), dataflow, node)] == [second]


def test_an_optional_capture_is_left_out_where_it_is_not_there():
    dataflow, node, _ = two_gates(False)
    (found,) = readings(optional_second(), dataflow, node)
    assert ("second" in found, ops.op_name(found["mapped"])) == (False, "linear")


def test_a_coupled_capture_that_is_not_optional_must_be_there():
    dataflow, node, _ = two_gates(False)
    assert not readings(optional_second(""), dataflow, node)


def test_an_equation_of_an_alternative_that_was_not_taken_stays_unbound():
    build = Build()
    node = build.mul(build.input(2, 4), build("tanh", build.input(2, 4)))
    match = "hidden = relu(_)\ncoefficient = sigmoid(hidden) | tanh(_)\napply = coefficient * value"
    (found, *_) = readings(pattern(match), build.dataflow(node), node)
    assert "hidden" not in found


CONDITION = """
plain       = tanh(other)
gate        = sigmoid(linear(hidden))
companion   = exp(linear(hidden))
coefficient = plain | gate
apply       = value * coefficient
"""


def sibling(companion):
    build = Build()
    x = build.input(2, 4)
    node = build.mul(build.input(2, 4), build("sigmoid", build.linear(x, 4)))
    return build.dataflow(node, build(companion, build.linear(x, 4))), node


def test_a_condition_holds_where_what_it_describes_is_computed_from_a_named_node():
    dataflow, node = sibling("exp")
    assert readings(pattern(CONDITION), dataflow, node)


def test_a_condition_fails_where_what_it_describes_is_missing():
    dataflow, node = sibling("relu")
    assert not readings(pattern(CONDITION), dataflow, node)


def test_an_equation_about_an_alternative_that_was_not_taken_is_no_condition():
    build = Build()
    node = build.mul(build.input(2, 4), build("tanh", build.input(2, 4)))
    assert readings(pattern(CONDITION), build.dataflow(node), node)


def test_a_condition_may_hold_of_a_node_that_it_names():
    build = Build()
    gate = build("sigmoid", build.linear(build.input(2, 4), 4))
    node = build.mul(build.input(2, 4), gate)
    match = "gate = sigmoid(linear(_))\ncoefficient = gate | tanh(_)\napply = value * gate"
    assert [r["coefficient"] for r in readings(pattern(match), build.dataflow(node), node)] == [gate]


def test_the_search_for_a_condition_is_bounded():
    build = Build()
    x = build.input(2, 4)
    node = build.mul(build.input(2, 4), build("sigmoid", build.linear(x, 4)))
    others = [build("relu", x) for _ in range(FORWARD_REACH + 1)]
    far = build("exp", build.linear(x, 4))
    assert not readings(pattern(CONDITION), build.dataflow(node, *others, far), node)


def test_no_condition_is_sought_where_what_is_bound_already_is_no_match():
    dataflow, node = sibling("exp")
    refusing = Unifier(pattern(CONDITION), dataflow, node, admits=lambda unifier, bindings: False)
    assert not list(refusing.readings())
    willing = Unifier(pattern(CONDITION), dataflow, node)
    assert list(willing.readings())
    assert refusing.visits < willing.visits


def test_an_einsum_shows_its_parameters():
    build = Build()
    coefficient = build("sigmoid", build.linear(build.input(2, 4), 4))
    node = build("einsum", "bf,fg->bg", [coefficient, build.parameter(4, 3)])
    match = "coefficient = sigmoid(_)\napply = einsum(bank, coefficient)"
    assert readings(pattern(match), build.dataflow(node), node)


# --- bounds ---------------------------------------------------------------------------------------------------------


def ladder(height):
    """Two adds on each rung, each over both of the rung below: 2**height paths."""
    build = Build()
    left, right = build.input(2, 4), build.input(2, 4)
    for _ in range(height):
        left, right = build.add(left, right), build.add(right, left)
    node = build.mul(build("sigmoid", left), right)
    return build.dataflow(node), node


AMBIGUOUS = "coefficient = sigmoid({})\napply = coefficient * _".format("chain(add)(" * 6 + "cos(_)" + ")" * 6)


def test_a_pattern_that_takes_too_many_visits_is_an_error_not_a_hang():
    dataflow, node = ladder(40)
    with pytest.raises(PatternError, match=r"`family` is too ambiguous: one anchor took more than 10,000 visits"):
        readings(pattern(AMBIGUOUS), dataflow, node)


def test_the_budget_is_not_overrun():
    dataflow, node = ladder(40)
    unifier = Unifier(pattern(AMBIGUOUS), dataflow, node)
    with pytest.raises(PatternError):
        list(unifier.readings())
    assert unifier.visits == BUDGET + 1


def test_one_chain_over_a_ladder_takes_no_more_visits_than_it_has_nodes():
    dataflow, node = ladder(11)
    unifier = Unifier(pattern("coefficient = sigmoid(chain(add)(cos(_)))\napply = coefficient * _"), dataflow, node)
    list(unifier.readings())
    # 22 adds, each an end of the chain once or twice; 2**11 paths.
    assert unifier.visits < 22 * 2 * 2 * 2


def test_the_number_of_visits_does_not_depend_on_the_run():
    dataflow, node = ladder(6)
    chosen = pattern("coefficient = sigmoid(chain(add)(_))\napply = coefficient * _")
    counts = []
    for _ in range(2):
        unifier = Unifier(chosen, dataflow, node)
        list(unifier.readings())
        counts.append(unifier.visits)
    assert counts[0] == counts[1]


# --- failures -------------------------------------------------------------------------------------------------------


def failure(match, dataflow, node):
    unifier = Unifier(pattern(match), dataflow, node)
    assert list(unifier.readings()) == []
    return unifier.failure


@pytest.mark.parametrize("swapped", [False, True], ids=["gate right", "gate left"])
def test_the_deepest_failure_is_kept_whichever_operand_order_is_tried_last(swapped):
    build = Build()
    operands = (build.input(2, 4), build("sigmoid", build("relu", build("cos", build.input(2, 4)))))
    node = build.mul(*(reversed(operands) if swapped else operands))
    found = failure("coefficient = sigmoid(relu(tanh(_)))\napply = value * coefficient", build.dataflow(node), node)
    assert found.reason == "expected tanh, found cos `cos` [2, 4]"


# The gate stands left of the value, so that the order in which it is read as the gate is the last one tried.


def test_a_failure_knows_its_line_in_the_match_block():
    build = Build()
    node = build.mul(build("sigmoid", build("relu", build.input(2, 4))), build.input(2, 4))
    match = "hidden = tanh(_)\ncoefficient = sigmoid(hidden)\napply = value * coefficient"
    assert failure(match, build.dataflow(node), node).line == 1


def test_a_wrong_attribute_is_reported_with_both_values():
    build = Build()
    node = build.mul(build("softmax.int", build.input(2, 3), 0), build.input(2, 3))
    found = failure("coefficient = softmax(_, dim=-1)\napply = value * coefficient", build.dataflow(node), node)
    assert found.reason == "expected dim=-1, found dim=0 in softmax `softmax` [2, 3]"


def test_a_broken_chain_is_reported_with_what_broke_it():
    build = Build()
    node = build.mul(build("sigmoid", build("cos", build.input(2, 4))), build.input(2, 4))
    match = "coefficient = sigmoid(chain(linear | norm)(_))\napply = value * coefficient"
    found = failure(match, build.dataflow(node), node)
    assert found.reason == "expected a chain of linear | norm, broken by cos `cos` [2, 4]"


def test_a_node_is_described_by_op_name_and_sizes():
    build = Build()
    assert describe(build("relu", build.input(2, 4))) == "relu `relu` [2, 4]"


def test_a_node_with_several_outputs_is_described_without_sizes():
    build = Build()
    assert describe(build("topk", build.input(2, 4), 2)) == "topk `topk`"


def test_several_nodes_are_described_in_order():
    build = Build()
    x = build.input(2)
    assert describe((build("relu", x), build("tanh", x))) == "relu `relu` [2], tanh `tanh` [2]"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_the_terms_of_a_fold_may_stand_in_any_order(order):
    build, _, values, terms = weighed_sum(3)
    root = build.add(build.add(terms[order[0]], terms[order[1]]), terms[order[2]])
    (found,) = readings(pattern(FOLD), build.dataflow(root), root)
    assert found["value"] == tuple(values[i] for i in order)

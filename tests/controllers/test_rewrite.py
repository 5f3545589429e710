import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxaudit
from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.errors import DataError, NoControllerError
from fxaudit.provenance import state_fingerprint

WIDTH, TOKENS = 8, 5


class Block(nn.Module):
    """A gate, a squash that hooks can see, and a buffer and a norm around them."""

    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.squash = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Sigmoid()
        self.value = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("offset", torch.randn(WIDTH))

    def forward(self, x):
        h = self.norm(x) + self.offset
        return x + self.squash(self.gate(h)) * self.value(h)


class Routed(nn.Module):
    def __init__(self, renormalise):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4, WIDTH, WIDTH))
        self.renormalise = renormalise

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        weights, indices = self.router(flat).softmax(-1).topk(2, -1)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        outputs = (flat[:, None, None] @ self.experts[indices]).squeeze(2)
        return (outputs * weights.unsqueeze(-1)).sum(1).view_as(x)


class Model(nn.Module):
    """Two gate blocks (one called twice) and a router."""

    def __init__(self, renormalise=True):
        super().__init__()
        self.first, self.shared = Block(), Block()
        self.routed, self.head = Routed(renormalise), nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.shared(self.first(x))
        return self.head(self.shared(x) + self.routed(x))


def inputs(batch, seed=0):
    return torch.randn(batch, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture(scope="module")
def frozen(model):
    return fxaudit.freeze(model, inputs(2))


GATES = ["first.gate#0", "shared.gate#0", "shared.gate#1"]


def eager(model, x):
    with torch.no_grad():
        return model(x)


def hooked(model, x):
    """What the squashes of the eager model return, in call order."""
    seen = []
    handles = [
        m.register_forward_hook(lambda _m, _i, output: seen.append(output.clone()))
        for m in (model.first.squash, model.shared.squash)
    ]
    eager(model, x)
    for handle in handles:
        handle.remove()
    return seen


def overridden(model, x, values):
    """The eager model with its squashes' outputs replaced, in call order."""
    queue = list(values)
    handles = [
        m.register_forward_hook(lambda _m, _i, _output: queue.pop(0)) for m in (model.first.squash, model.shared.squash)
    ]
    output = eager(model, x)
    for handle in handles:
        handle.remove()
    return output


def test_each_call_of_a_gate_and_the_router_is_a_controller(frozen):
    assert [c.id for c in frozen.controllers] == [*GATES, "routed.router#0"]


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_tapped_coefficient_is_what_a_hook_on_the_eager_module_sees(model, frozen, position, batch):
    live = frozen.live(inputs(batch, seed=batch))
    seen = hooked(model, inputs(batch, seed=batch))[position]
    assert torch.equal(live.coefficients[f"{GATES[position]}/coefficient"], seen)


def test_the_tapped_weights_and_indices_are_those_of_the_eager_router(model, frozen):
    x = inputs(3, seed=3)
    seen = []
    handle = model.routed.router.register_forward_hook(lambda _m, _i, output: seen.append(output))
    eager(model, x)
    handle.remove()
    weights, indices = seen[0].softmax(-1).topk(2, -1)
    live = frozen.live(x).coefficients
    assert torch.equal(live["routed.router#0/indices"], indices)
    assert torch.equal(live["routed.router#0/coefficient"], weights / weights.sum(-1, keepdim=True))


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_the_tapped_model_returns_what_eager_returns(model, frozen, batch):
    x = inputs(batch, seed=10 + batch)
    assert torch.equal(frozen.live(x).output, eager(model, x))


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_frozen_fed_its_own_coefficients_is_eager_bit_for_bit(model, frozen, batch):
    x = inputs(batch, seed=20 + batch)
    assert torch.equal(frozen(x, coefficients=frozen.live(x).coefficients), eager(model, x))


def test_replaying_the_coefficients_of_another_input_is_what_overriding_the_gates_does(model, frozen):
    x, other = inputs(3, seed=30), inputs(3, seed=31)
    coefficients = dict(frozen.live(x).coefficients)
    for name in GATES:
        coefficients[f"{name}/coefficient"] = frozen.live(other).coefficients[f"{name}/coefficient"]
    # The router sees another state when its gates are overridden in eager, so it is pinned to what it does there.
    expected = overridden_with_router(model, x, hooked(model, other), coefficients)
    assert torch.equal(frozen(x, coefficients=coefficients), expected)


def overridden_with_router(model, x, gates, coefficients):
    def route(_module, args, _output):
        flat = args[0].reshape(-1, WIDTH)
        chosen = model.routed.experts[coefficients["routed.router#0/indices"]]
        outputs = (flat[:, None, None] @ chosen).squeeze(2)
        weights = coefficients["routed.router#0/coefficient"]
        return (outputs * weights.unsqueeze(-1)).sum(1).view_as(args[0])

    handle = model.routed.register_forward_hook(route)
    output = overridden(model, x, gates)
    handle.remove()
    return output


def test_replaying_the_coefficients_of_another_input_changes_the_output(model, frozen):
    x = inputs(3, seed=30)
    replayed = frozen(x, coefficients=frozen.live(inputs(3, seed=31)).coefficients)
    assert not torch.allclose(replayed, eager(model, x))


def test_gates_of_one_leave_the_value_as_it_is(model, frozen):
    x = inputs(2, seed=40)
    live = frozen.live(x).coefficients
    coefficients = {k: torch.ones_like(v) if k.split("/")[0] in GATES else v for k, v in live.items()}
    ones = [torch.ones(2, TOKENS, WIDTH)] * 3
    assert torch.equal(frozen(x, coefficients=coefficients), overridden_with_router(model, x, ones, live))


def test_feeding_coefficients_does_not_change_them(frozen):
    x = inputs(2)
    coefficients = frozen.live(x).coefficients
    before = {key: value.clone() for key, value in coefficients.items()}
    frozen(x, coefficients=coefficients)
    assert all(torch.equal(before[key], value) for key, value in coefficients.items())


CONE = {
    *(f"{block}.gate.{name}" for block in ("first", "shared") for name in ("weight", "bias")),
    "routed.router.weight",
    "routed.router.bias",
}


def test_the_frozen_graph_has_lost_the_parameters_of_the_cones_and_nothing_else(model, frozen):
    assert set(frozen.frozen.state_dict()) == set(model.state_dict()) - CONE


def test_the_parameters_that_are_kept_have_their_values(model, frozen):
    own = model.state_dict()
    assert all(torch.equal(value, own[name]) for name, value in frozen.frozen.state_dict().items())


def test_the_tapped_graph_keeps_every_parameter(model, frozen):
    assert set(frozen.tapped.state_dict()) == set(model.state_dict())


def test_the_frozen_graph_has_no_op_left_that_only_a_controller_needed(frozen):
    names = {str(node.target) for node in frozen.frozen.graph.nodes if node.op == "call_function"}
    assert not names & {"aten.sigmoid.default", "aten.topk.default", "aten.softmax.int"}


def test_every_coefficient_is_used_by_the_frozen_graph(frozen):
    placeholders = [n for n in frozen.frozen.graph.nodes if n.op == "placeholder"]
    assert [n.name for n in placeholders if not n.users] == []


def test_the_frozen_graph_takes_the_inputs_then_the_coefficients(frozen):
    placeholders = [n for n in frozen.frozen.graph.nodes if n.op == "placeholder"]
    assert len(placeholders) == 1 + len(frozen.coefficients)


# --- the user's module ----------------------------------------------------------------------------------------------


def mixed():
    """A model as a user may hold it: partly in train mode, with hooks, a frozen parameter and a gradient."""
    torch.manual_seed(1)
    model = nn.Sequential(Block(), nn.BatchNorm1d(TOKENS), nn.Dropout(0.5), nn.Linear(WIDTH, 2))
    model.train()
    model[0].eval()
    model[3].weight.requires_grad_(False)
    model[3].bias.grad = torch.ones(2)
    model[0].register_forward_hook(lambda *_: None)
    model[3].register_forward_pre_hook(lambda *_: None)
    return model


def state_of(model):
    return {
        "values": state_fingerprint(model),
        "identities": [id(p) for p in model.parameters()],
        "training": [m.training for m in model.modules()],
        "hooks": [(list(m._forward_hooks.values()), list(m._forward_pre_hooks.values())) for m in model.modules()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "gradients": [None if p.grad is None else p.grad.clone().tolist() for p in model.parameters()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "names": sorted(model.state_dict()),
    }


@pytest.fixture(scope="module")
def before_and_after():
    model = mixed()
    before = state_of(model)
    frozen = fxaudit.freeze(model, inputs(2))
    frozen(inputs(3), coefficients=frozen.live(inputs(3)).coefficients)
    return before, state_of(model)


@pytest.mark.parametrize(
    "what", ["values", "identities", "training", "hooks", "requires_grad", "gradients", "attributes", "names"]
)
def test_the_users_module_is_as_it_was(before_and_after, what):
    before, after = before_and_after
    assert before[what] == after[what]


def test_the_random_state_is_as_it_was(model):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    fxaudit.freeze(model, inputs(2))
    assert torch.equal(before, torch.random.get_rng_state())


# --- what does not fit ----------------------------------------------------------------------------------------------

KEY = "first.gate#0/coefficient"


def refused(frozen, change, batch=2):
    coefficients = dict(frozen.live(inputs(batch)).coefficients)
    change(coefficients)
    with pytest.raises(DataError) as raised:
        frozen(inputs(batch), coefficients=coefficients)
    return raised.value


def test_a_missing_coefficient_is_named(frozen):
    assert refused(frozen, lambda c: c.pop(KEY)).found == f"missing {KEY}; unknown none"


def test_an_unknown_coefficient_is_named(frozen):
    assert refused(frozen, lambda c: c.update(more=c[KEY])).found == "missing none; unknown more"


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3, TOKENS, WIDTH),
        torch.zeros(2, TOKENS, 1),
        torch.zeros(2, WIDTH, TOKENS),
        torch.zeros(2 * TOKENS, WIDTH),
        torch.zeros(2, TOKENS, WIDTH, dtype=torch.float64),
        torch.zeros(2, TOKENS, WIDTH, dtype=torch.int64),
    ],
    ids=["another batch", "one feature", "axes swapped", "flat", "double", "whole numbers"],
)
def test_a_coefficient_of_another_shape_or_dtype_is_refused(frozen, value):
    assert refused(frozen, lambda c: c.update({KEY: value})).what == f"`{KEY}` does not fit"


def test_indices_of_another_dtype_are_refused(frozen):
    key = "routed.router#0/indices"
    assert refused(frozen, lambda c: c.update({key: c[key].int()})).what == f"`{key}` does not fit"


def test_coefficients_of_another_batch_are_refused(frozen):
    with pytest.raises(DataError):
        frozen(inputs(2), coefficients=frozen.live(inputs(3)).coefficients)


def test_inputs_of_another_shape_are_refused(frozen):
    with pytest.raises(DataError, match="has a shape that the trace does not cover"):
        frozen.live(torch.randn(2, TOKENS + 1, WIDTH))


def test_a_model_without_controllers_cannot_be_frozen():
    with pytest.raises(NoControllerError):
        fxaudit.freeze(nn.Linear(WIDTH, 2), inputs(2))


def test_a_frozen_model_needs_a_controller(frozen):
    with pytest.raises(NoControllerError, match="has no controller to freeze"):
        FrozenModel(frozen.traced, [])


# --- domains --------------------------------------------------------------------------------------------------------


def domain(frozen):
    return next(c.domain for c in frozen.coefficients if c.key == "routed.router#0/coefficient")


def test_a_router_that_renormalises_is_a_simplex(frozen):
    assert domain(frozen).kind == "simplex"


def test_a_router_that_does_not_renormalise_is_not_called_a_simplex():
    torch.manual_seed(0)
    assert domain(fxaudit.freeze(Model(renormalise=False).eval(), inputs(2))).kind == "interval"


class Scaled(nn.Module):
    """A squeeze-excite block with a head that leaves [0, 1]: softplus."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Conv2d(4, 4, 1)
        nn.init.constant_(self.fc.bias, 3.0)

    def forward(self, x):
        return x * F.softplus(self.fc(x.mean((2, 3), keepdim=True)))


def test_a_coefficient_that_leaves_the_range_of_its_family_is_real():
    (coefficient,) = fxaudit.freeze(Scaled().eval(), torch.randn(2, 4, 3, 3)).coefficients
    assert coefficient.domain.kind == "real"


class Returning(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        gate = torch.sigmoid(self.gate(x))
        return {"y": gate * self.value(x), "gate": gate}


def test_a_coefficient_that_the_model_returns_is_returned_as_it_was_bound():
    frozen = fxaudit.freeze(Returning().eval(), inputs(2))
    bound = torch.full((2, TOKENS, WIDTH), 0.25)
    assert torch.equal(frozen(inputs(2), coefficients={"gate#0/coefficient": bound})["gate"], bound)


class Keywords(Block):
    def forward(self, *, x, scale):
        return super().forward(x) * scale


def test_inputs_by_keyword_go_in_by_keyword():
    model = Keywords().eval()
    given = {"x": inputs(2), "scale": torch.full((2, 1, 1), 2.0)}
    frozen = fxaudit.freeze(model, given)
    with torch.no_grad():
        expected = model(**given)
    assert torch.equal(frozen(**given, coefficients=frozen.live(**given).coefficients), expected)

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special
from torch import nn
from torch.nn import functional as F

from fxaudit import stages
from fxaudit.errors import DataError
from fxaudit.replay.metrics import choose_output, metric_name, output_form, score

CLASSES = 6
seeds = st.integers(0, 2**31)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def logits(seed: int, *shape: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(*shape, CLASSES, generator=generator(seed))


def some_targets(seed: int, inputs: int, positions: int) -> torch.Tensor:
    """Targets of which about a third do not count, but the first one of each input does."""
    found = torch.randint(0, CLASSES, (inputs, positions), generator=generator(seed))
    ignored = torch.rand(inputs, positions, generator=generator(seed + 1)) < 0.3
    ignored[:, 0] = False
    return found.masked_fill(ignored, -100)


def close(found, expected, tolerance=1e-12):
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


# --- against targets ------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(seed=seeds, inputs=st.integers(1, 5), positions=st.integers(1, 7), scale=st.sampled_from([0.1, 3.0, 1e3]))
def test_the_nll_of_each_input_is_the_mean_cross_entropy_over_its_valid_positions(seed, inputs, positions, scale):
    values, targets = logits(seed, inputs, positions, scale=scale), some_targets(seed, inputs, positions)
    expected = torch.stack([F.cross_entropy(v.double(), t) for v, t in zip(values, targets, strict=True)])
    close(score(values, targets).values, expected, 1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=seeds, inputs=st.integers(1, 9))
def test_the_cross_entropy_of_each_input_is_that_of_torch(seed, inputs):
    values, targets = logits(seed, inputs), torch.randint(0, CLASSES, (inputs,), generator=generator(seed))
    close(score(values, targets).values, F.cross_entropy(values.double(), targets, reduction="none"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scores_of_narrow_logits_are_computed_in_float64(dtype):
    values, targets = logits(0, 4).to(dtype), torch.arange(4)
    assert torch.equal(score(values, targets).values, F.cross_entropy(values.double(), targets, reduction="none"))


def test_equal_logits_score_the_logarithm_of_the_number_of_classes():
    found = score(torch.zeros(2, 3, CLASSES), torch.zeros(2, 3, dtype=torch.int64))
    close(found.values, torch.full((2,), math.log(CLASSES), dtype=torch.float64))


def test_accuracy_is_the_share_of_valid_positions_whose_largest_logit_is_the_target():
    values = torch.eye(3)[torch.tensor([[0, 1, 2, 1], [2, 2, 2, 2]])]
    targets = torch.tensor([[0, 1, 0, -100], [2, -100, -100, -100]])
    found = score(values, targets).accuracy
    assert found.tolist() == pytest.approx([2 / 3, 1.0])


def test_accuracy_of_a_classification_is_one_or_zero_for_each_input():
    assert score(torch.eye(3), torch.tensor([0, 2, 2])).accuracy.tolist() == [1.0, 0.0, 1.0]


def test_the_weight_of_an_input_is_its_number_of_valid_targets():
    targets = torch.tensor([[1, -100, 2], [-100, 3, -100]])
    assert score(logits(0, 2, 3), targets).weight.tolist() == [2.0, 1.0]


def test_the_weight_of_a_classified_input_is_one():
    assert score(logits(0, 2), torch.tensor([1, 2])).weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_targets_of_any_integer_type_score_alike(dtype):
    values, targets = logits(0, 3), torch.tensor([1, 2, 5])
    close(score(values, targets.to(dtype)).values, F.cross_entropy(values.double(), targets, reduction="none"))


def test_a_class_that_is_ruled_out_changes_nothing_at_positions_that_do_not_count():
    values, targets = logits(0, 1, 3), torch.tensor([[1, -100, 2]])
    values[..., 0] = -math.inf
    close(score(values, targets).values, F.cross_entropy(values[0].double(), targets[0]).reshape(1))


def test_a_ruled_out_target_has_an_infinite_nll():
    values = torch.tensor([[0.0, -math.inf]])
    assert score(values, torch.tensor([1])).values.tolist() == [math.inf]


# --- against the live outputs ---------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(seed=seeds, inputs=st.integers(1, 5), positions=st.integers(1, 7))
def test_without_targets_the_score_is_the_mean_divergence_from_live_to_replayed(seed, inputs, positions):
    live, replayed = logits(seed, inputs, positions), logits(seed + 1, inputs, positions)
    p, q = (F.log_softmax(v.double(), -1) for v in (live, replayed))
    expected = F.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean(1)
    close(score(replayed, None, live).values, expected, 1e-11)


def test_the_divergence_of_an_output_without_positions_is_that_of_scipy():
    live, replayed = logits(0, 4), logits(1, 4)
    p, q = (special.softmax(v.double().numpy(), -1) for v in (live, replayed))
    close(score(replayed, None, live).values, torch.from_numpy(special.rel_entr(p, q).sum(-1)))


def test_an_output_does_not_diverge_from_itself():
    live = logits(0, 3, 4)
    assert score(live, None, live).values.tolist() == [0.0] * 3


@settings(max_examples=60, deadline=None)
@given(seed=seeds, distance=st.sampled_from([0.0, 1e-9, 1e-7, 1e-4]))
def test_a_divergence_is_never_negative(seed, distance):
    live = logits(seed, 3, 4)
    found = score(live + distance * logits(seed + 1, 3, 4), None, live).values
    assert bool((found >= 0).all())


def test_without_targets_there_is_no_accuracy():
    assert score(logits(0, 3), None, logits(1, 3)).accuracy is None


def test_without_targets_every_position_counts():
    assert score(logits(0, 3, 4), None, logits(1, 3, 4)).weight.tolist() == [4.0] * 3


def test_a_class_that_both_outputs_rule_out_adds_nothing_to_the_divergence():
    live, replayed = logits(0, 4), logits(1, 4)
    live[:, 2] = replayed[:, 2] = -math.inf
    p, q = (special.softmax(v.double().numpy(), -1) for v in (live, replayed))
    close(score(replayed, None, live).values, torch.from_numpy(special.rel_entr(p, q).sum(-1)))


def test_a_class_that_only_the_live_output_rules_out_adds_nothing_to_the_divergence():
    live, replayed = logits(0, 4), logits(1, 4)
    live[:, 2] = -math.inf
    p, q = (special.softmax(v.double().numpy(), -1) for v in (live, replayed))
    close(score(replayed, None, live).values, torch.from_numpy(special.rel_entr(p, q).sum(-1)))


# --- forms of outputs -----------------------------------------------------------------------------------------------

FORMS = {"probabilities": F.softmax, "log-probabilities": F.log_softmax}


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_other_forms_of_an_output_score_like_its_logits_against_targets(form, seed):
    values, targets = logits(seed, 3, 4).double(), some_targets(seed, 3, 4)
    expected = torch.stack([F.cross_entropy(v, t) for v, t in zip(values, targets, strict=True)])
    close(score(FORMS[form](values, -1), targets, form=form).values, expected)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_other_forms_of_an_output_score_like_its_logits_against_the_live_output(form, seed):
    live, replayed = logits(seed, 3).double(), logits(seed + 1, 3).double()
    expected = F.kl_div(F.log_softmax(replayed, -1), F.softmax(live, -1), reduction="none").sum(-1)
    found = score(FORMS[form](replayed, -1), None, FORMS[form](live, -1), form).values
    close(found, expected)


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_an_output_have_the_accuracy_of_its_logits(form):
    values, targets = logits(0, 50), torch.arange(50) % CLASSES
    expected = (values.numpy().argmax(-1) == targets.numpy()).astype(float)
    assert score(FORMS[form](values, -1), targets, form=form).accuracy.tolist() == expected.tolist()


def test_a_probability_that_has_underflowed_counts_as_the_smallest_normal_number():
    found = score(torch.tensor([[1.0, 0.0]]), torch.tensor([1]), form="probabilities")
    assert found.values.item() == pytest.approx(126 * math.log(2), abs=1e-9)


class Shaped(nn.Module):
    """A linear layer, and whatever a test does to its output."""

    def __init__(self, then, width=CLASSES) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(4, width), then

    def forward(self, x):
        return self.then(self.linear(x))


def form_of(then, *shape, width=CLASSES):
    traced = stages.trace(Shaped(then, width), torch.randn(*shape, 4))
    return output_form(traced.output_leaves()[0])


PLAIN = {
    "logits": lambda y: y,
    "probabilities": lambda y: y.softmax(-1),
    "log-probabilities": lambda y: y.log_softmax(-1),
}


@pytest.mark.parametrize("form", PLAIN)
def test_the_last_op_tells_what_an_output_holds(form):
    assert form_of(PLAIN[form], 2, 5) == form


LAYOUTS = {
    "a view": lambda y: y.flatten(0, 1).softmax(-1).view(y.shape),
    "a positive axis": lambda y: y.softmax(2),
    "the last position": lambda y: y.softmax(-1)[:, -1],
    "a slice of positions": lambda y: y.softmax(-1)[:, 1:],
    "positions swapped": lambda y: y.unflatten(1, (5, 1)).softmax(-1).transpose(1, 2),
    "an axis of one left out": lambda y: y.unflatten(1, (5, 1)).softmax(-1).squeeze(2),
    "inputs and positions permuted": lambda y: y.permute(1, 0, 2).softmax(-1).permute(1, 0, 2),
    "another dtype": lambda y: y.softmax(-1, dtype=torch.float64).float(),
    "a copy": lambda y: y.softmax(-1).transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_probabilities_that_only_change_their_layout_stay_probabilities(layout):
    assert form_of(LAYOUTS[layout], 2, 5) == "probabilities"


NOT_OVER_CLASSES = {
    "softmax over positions": lambda y: y.softmax(1),
    "softmax over inputs": lambda y: y.softmax(0),
    "scaled probabilities": lambda y: y.softmax(-1) * 2,
    "some classes of a softmax": lambda y: y.softmax(-1)[..., :3],
    "a softmax cut into heads": lambda y: y.softmax(-1).unflatten(-1, (2, 3)),
    "two softmaxes joined": lambda y: y.unflatten(-1, (2, 3)).softmax(-1).flatten(-2),
    "a sigmoid": torch.sigmoid,
}


@pytest.mark.parametrize("made", NOT_OVER_CLASSES)
def test_what_does_not_sum_to_one_over_the_classes_is_taken_for_logits(made):
    assert form_of(NOT_OVER_CLASSES[made], 2, 5) == "logits"


def test_a_softmax_whose_axis_is_moved_away_is_no_distribution_over_classes():
    # As many positions as classes, so that sizes alone do not tell.
    assert form_of(lambda y: y.softmax(-1).transpose(1, 2), 2, CLASSES) == "logits"


@pytest.mark.parametrize("positions", [5, CLASSES])
def test_a_softmax_whose_axis_is_moved_to_the_end_holds_probabilities(positions):
    assert form_of(lambda y: y.transpose(1, 2).softmax(1).transpose(1, 2), 2, positions) == "probabilities"


def test_one_column_of_square_probabilities_is_no_distribution():
    assert form_of(lambda y: y.softmax(-1)[..., 0], 2, CLASSES) == "logits"


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2,), (2, 4), (3, 3), (2, 3, 1)])
def test_targets_of_another_shape_than_the_output_are_refused(shape):
    with pytest.raises(DataError, match="do not fit the output"):
        score(logits(0, 2, 3), torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("target", [CLASSES, CLASSES + 100, -1, -99, -101])
def test_a_target_that_is_no_class_is_refused(target):
    with pytest.raises(DataError, match="no class of the output"):
        score(logits(0, 2, 2), torch.tensor([[0, 1], [target, 1]]))


@pytest.mark.parametrize("target", [0, CLASSES - 1])
def test_the_first_and_last_class_are_targets(target):
    assert score(logits(0, 1), torch.tensor([target])).values.isfinite().all()


@pytest.mark.parametrize("targets", [[[0, 1], [-100, -100]], [[-100, -100], [-100, -100]]])
def test_an_input_without_a_valid_target_is_refused(targets):
    with pytest.raises(DataError, match="no valid target"):
        score(logits(0, 2, 2), torch.tensor(targets))


def test_a_classified_input_without_a_valid_target_is_refused():
    with pytest.raises(DataError, match="no valid target"):
        score(logits(0, 2), torch.tensor([1, -100]))


def test_a_score_without_anything_to_compare_with_is_refused():
    with pytest.raises(DataError, match="nothing to compare with"):
        score(logits(0, 2), None)


# --- the metric and the output --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "name"), [(None, "kl"), (torch.zeros(2), "cross-entropy"), (torch.zeros(2, 3), "nll")]
)
def test_the_targets_tell_the_metric(targets, name):
    assert metric_name(targets) == name


LEAVES = [
    torch.zeros(2, 3),
    torch.zeros((), dtype=torch.float32),
    torch.zeros(2, 3, dtype=torch.int64),
    torch.ones(2, 5),
]
NAMES = ["hidden", "loss", "tokens", "logits"]


def test_an_output_called_logits_is_chosen():
    assert choose_output(LEAVES, NAMES) == 3


def test_without_one_called_logits_the_first_floating_point_output_with_classes_is_chosen():
    assert choose_output([LEAVES[1], LEAVES[2], LEAVES[0], LEAVES[3]], ["loss", "tokens", "a", "b"]) == 2


@pytest.mark.parametrize(("asked", "position"), [("hidden", 0), ("0", 0), ("3", 3), ("logits", 3)])
def test_an_output_is_asked_for_by_name_or_position(asked, position):
    assert choose_output(LEAVES, NAMES, asked) == position


@pytest.mark.parametrize("asked", ["loss", "1", "tokens", "2", "4", "-1", "", "²"])
def test_an_output_that_cannot_hold_logits_is_refused(asked):
    with pytest.raises(DataError, match="no output"):
        choose_output(LEAVES, NAMES, asked)


def test_a_misspelled_output_gets_a_suggestion():
    with pytest.raises(DataError, match="did you mean `logits`"):
        choose_output(LEAVES, NAMES, "logit")


def test_a_refused_output_lists_those_that_can_be_asked_for():
    with pytest.raises(DataError) as caught:
        choose_output(LEAVES, NAMES, "loss")
    assert caught.value.expected == "hidden (0), logits (3)"


def test_a_model_without_an_output_for_logits_is_refused():
    with pytest.raises(DataError, match="no output that can hold logits"):
        choose_output([LEAVES[1], LEAVES[2], None], ["loss", "tokens", "cache"])


def test_an_output_that_is_no_tensor_is_passed_over():
    assert choose_output([None, 3, np.zeros((2, 3)), LEAVES[0]], ["a", "b", "c", "d"]) == 3

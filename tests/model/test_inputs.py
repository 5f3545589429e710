import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxaudit.errors import LoadError
from fxaudit.model.inputs import as_arguments, batch_of, cloned, resampled, tensors_of, with_batch_of_two

X = torch.arange(12.0).reshape(3, 4)


def test_a_tensor_is_one_positional_argument():
    assert as_arguments(X) == ((X,), {})


@pytest.mark.parametrize("form", [tuple, list])
def test_a_sequence_is_several_positional_arguments(form):
    assert as_arguments(form([X, 2])) == ((X, 2), {})


def test_a_dict_is_keyword_arguments():
    assert as_arguments({"x": X, "flag": True}) == ((), {"x": X, "flag": True})


def test_a_dict_in_a_tuple_is_one_positional_argument():
    inputs = ({"x": X},)
    assert as_arguments(inputs) == (({"x": X},), {})


def test_inputs_of_another_form_are_refused_by_their_type():
    with pytest.raises(LoadError) as caught:
        as_arguments({1, 2})
    assert caught.value.found == "builtins.set"


def test_the_batch_is_the_first_axis_that_all_tensors_share():
    assert batch_of(((X, [X[:, 0]]), {"mask": X.bool()})) == 3


def test_a_tensor_without_axes_has_no_say_in_the_batch():
    assert batch_of(((X, torch.tensor(7.0)), {})) == 3


def test_tensors_that_differ_in_their_first_axis_share_no_batch():
    assert batch_of(((X, X.T), {})) is None


def test_inputs_without_a_tensor_have_no_batch():
    assert batch_of(((1, "a"), {})) is None


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 4), columns=st.integers(1, 5), batch=st.integers(1, 7), seed=st.integers(0, 9))
def test_resampled_values_all_come_from_the_tensor_itself(rows, columns, batch, seed):
    tensor = torch.arange(rows * columns, dtype=torch.int64).reshape(rows, columns) * 3
    ((drawn,), _) = resampled(((tensor,), {}), seed, batch)
    assert drawn.shape == (batch, columns)
    assert set(drawn.flatten().tolist()) <= set(tensor.flatten().tolist())


def test_resampling_keeps_the_dtype():
    ((drawn,), _) = resampled(((X.half(),), {}), 0)
    assert drawn.dtype == torch.float16


def test_resampling_changes_the_values():
    ((drawn,), _) = resampled(((X,), {}), 0)
    assert not torch.equal(drawn, X)


def test_resampling_leaves_the_original_alone():
    original = X.clone()
    resampled(((original,), {}), 0)
    assert torch.equal(original, X)


def test_one_seed_draws_the_same_inputs():
    first, second = resampled(((X,), {}), 5), resampled(((X,), {}), 5)
    assert torch.equal(first[0][0], second[0][0])


def test_another_seed_draws_other_inputs():
    first, second = resampled(((X,), {}), 5), resampled(((X,), {}), 6)
    assert not torch.equal(first[0][0], second[0][0])


def test_resampling_does_not_touch_the_global_generator():
    state = torch.get_rng_state()
    resampled(((X,), {}), 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_mask_repeats_its_rows_and_never_mixes_them():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    ((drawn,), _) = resampled(((mask,), {}), 3, batch=5)
    assert torch.equal(drawn, mask[[0, 1, 0, 1, 0]])


def test_a_flag_without_axes_keeps_its_value():
    ((_, flag), _) = resampled(((X, torch.tensor(0.5)), {}), 3, batch=2)
    assert flag.item() == 0.5


def test_one_input_is_joined_by_a_second():
    ((x,), _) = with_batch_of_two(((X[:1],), {}), seed=0)
    assert x.shape == (2, 4)


def test_the_input_that_was_given_stays_the_first():
    ((x,), _) = with_batch_of_two(((X[:1],), {}), seed=0)
    assert torch.equal(x[0], X[0])


def test_the_joined_input_is_made_of_the_given_one():
    ((x,), _) = with_batch_of_two(((X[:1],), {}), seed=0)
    assert set(x[1].tolist()) <= set(X[0].tolist())


def test_more_than_one_input_is_left_as_it_is():
    arguments = ((X,), {})
    assert with_batch_of_two(arguments, seed=0) is arguments


def test_one_input_beside_a_tensor_without_axes_is_joined_by_a_second():
    ((x, time), _) = with_batch_of_two(((X[:1], torch.tensor(0.5)), {}), seed=0)
    assert (x.shape, time.shape) == ((2, 4), ())


def test_writes_to_a_clone_do_not_reach_the_original():
    x = X.clone()
    ((copy,), _) = cloned(((x,), {}))
    copy.zero_()
    assert torch.equal(x, X)


def test_a_clone_keeps_the_memory_format():
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    ((copy,), _) = cloned(((image,), {}))
    assert copy.stride() == image.stride()


def test_tensors_are_found_in_nested_inputs():
    found = tensors_of((({"a": [X]},), {"b": (X, 1)}))
    assert [id(tensor) for tensor in found] == [id(X), id(X)]

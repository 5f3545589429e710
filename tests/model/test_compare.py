import pytest
import torch

from fxaudit.model.compare import compare, same_bits

X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.25, -1.0]])


def test_equal_tensors_have_the_same_bits():
    assert same_bits(X, X.clone())


def test_equal_nans_have_the_same_bits():
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))


def test_zero_and_negative_zero_have_different_bits():
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_strides_are_not_bits():
    assert same_bits(X.T.contiguous().T, X)


@pytest.mark.parametrize("other", [X.double(), X.reshape(3, 2)], ids=["dtype", "shape"])
def test_tensors_of_another_form_have_different_bits(other):
    assert not same_bits(X, other)


def test_a_comparison_finds_the_largest_difference():
    found = compare("x", [X, X], [X + torch.tensor([0.0, 0.0, 0.5]), X])
    assert found.max_abs_diff == pytest.approx(0.5, abs=1e-6)
    assert not found.bitwise


@pytest.mark.parametrize(
    ("expected", "found"),
    [([X], [X, X]), ([X], [X.double()]), ([X], [None]), ([1], [2]), ([X], [X / 0])],
    ids=["number of outputs", "dtype", "kind", "number", "infinity"],
)
def test_what_cannot_be_subtracted_differs_without_bound(expected, found):
    assert compare("x", expected, found).max_abs_diff == float("inf")


def test_equal_infinities_do_not_differ():
    infinite = X / 0
    assert compare("x", [infinite], [infinite.clone()]).bitwise

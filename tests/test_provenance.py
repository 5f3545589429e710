import hashlib
import json

import pytest
import torch
from torch import nn

from fxaudit import provenance

X = torch.arange(6.0).reshape(2, 3)


def test_a_digest_is_sha256_over_dtype_shape_and_values():
    expected = hashlib.sha256(b"torch.float32(2, 3);" + X.numpy().tobytes()).hexdigest()
    assert provenance.tensor_digest([X]) == expected


def test_strides_do_not_change_a_digest():
    transposed = X.T.contiguous().T
    assert transposed.stride() != X.stride()
    assert provenance.tensor_digest([transposed]) == provenance.tensor_digest([X])


@pytest.mark.parametrize(
    "other",
    [X.double(), X.reshape(3, 2), X + 1, X.flatten()],
    ids=["dtype", "shape", "values", "rank"],
)
def test_a_digest_tells_apart(other):
    assert provenance.tensor_digest([other]) != provenance.tensor_digest([X])


def test_a_digest_depends_on_the_order():
    y = X + 1
    assert provenance.tensor_digest([X, y]) != provenance.tensor_digest([y, X])


def test_a_digest_tells_nothing_from_an_empty_list():
    assert provenance.tensor_digest([None]) != provenance.tensor_digest([])


def test_a_digest_tells_zero_from_negative_zero():
    assert provenance.tensor_digest([torch.tensor([0.0])]) != provenance.tensor_digest([torch.tensor([-0.0])])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.complex64])
def test_the_bytes_of_a_tensor_are_its_row_major_memory(dtype):
    tensor = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype)
    expected = b"".join(bytes(element.untyped_storage()) for row in tensor for element in (e.clone() for e in row))
    assert bytes(provenance.tensor_bytes(tensor.T.contiguous().T)) == expected


def test_an_empty_tensor_has_no_bytes():
    assert bytes(provenance.tensor_bytes(torch.empty(0, 3))) == b""


def test_a_single_number_has_the_bytes_of_its_dtype():
    assert bytes(provenance.tensor_bytes(torch.tensor(1, dtype=torch.int32))) == b"\x01\x00\x00\x00"


def test_equal_models_have_one_fingerprint():
    model = nn.BatchNorm1d(3)
    other = nn.BatchNorm1d(3)
    other.load_state_dict(model.state_dict())
    assert provenance.state_fingerprint(model) == provenance.state_fingerprint(other)


def test_one_bit_of_a_parameter_changes_the_fingerprint():
    model = nn.Linear(3, 3)
    before = provenance.state_fingerprint(model)
    with torch.no_grad():
        model.weight[0, 0] = torch.nextafter(model.weight[0, 0], torch.tensor(10.0))
    assert provenance.state_fingerprint(model) != before


def test_a_buffer_that_is_not_saved_changes_the_fingerprint():
    model = nn.Linear(3, 3)
    model.register_buffer("table", torch.zeros(2), persistent=False)
    before = provenance.state_fingerprint(model)
    model.table += 1
    assert provenance.state_fingerprint(model) != before


def test_the_name_of_a_parameter_is_part_of_the_fingerprint():
    a, b = nn.Module(), nn.Module()
    a.left = b.right = nn.Parameter(X)
    assert provenance.state_fingerprint(a) != provenance.state_fingerprint(b)


def test_tied_and_equal_parameters_have_different_fingerprints():
    tied, equal = nn.Module(), nn.Module()
    tied.a = tied.b = nn.Parameter(X)
    equal.a, equal.b = nn.Parameter(X), nn.Parameter(X.clone())
    assert provenance.state_fingerprint(tied) != provenance.state_fingerprint(equal)


def test_a_fingerprint_can_be_taken_on_the_meta_device():
    with torch.device("meta"):
        a, b = nn.Linear(3, 3), nn.Linear(3, 4)
    assert provenance.state_fingerprint(a) != provenance.state_fingerprint(b)


def test_the_order_of_keys_does_not_change_a_json_digest():
    assert provenance.json_digest({"a": 1, "b": 2}) == provenance.json_digest({"b": 2, "a": 1})


def test_a_json_digest_is_sha256_of_the_canonical_text():
    assert provenance.json_digest({"b": [1, None], "a": "x"}) == hashlib.sha256(b'{"a":"x","b":[1,null]}').hexdigest()


def test_equal_mappings_do_not_differ():
    assert provenance.differences({"a": {"b": 1}}, {"a": {"b": 1}}) == []


def test_each_difference_names_its_key_and_both_values():
    expected = {"model": {"fingerprint": "x", "source": "s"}, "count": 3}
    found = {"model": {"fingerprint": "y", "source": "s"}, "count": 4}
    assert provenance.differences(expected, found) == ["count: 3 -> 4", "model.fingerprint: x -> y"]


def test_a_key_on_one_side_only_is_a_difference():
    assert provenance.differences({"a": 1}, {"b": 2}) == ["a: 1 -> None", "b: None -> 2"]


def test_the_environment_names_the_version_of_torch():
    assert provenance.environment()["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_the_environment_names_the_number_of_threads():
    assert provenance.environment()["threads"] == torch.get_num_threads()


def test_the_environment_survives_a_round_trip_through_json():
    environment = provenance.environment()
    assert json.loads(json.dumps(environment)) == environment

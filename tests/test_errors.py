import pickle

import pytest

from fxaudit import errors
from fxaudit.errors import AuditError, DataError, PatternError, nearest

# The exit codes that the README promises.
EXIT_CODES = {
    "ExpectationError": 1,
    "UsageError": 2,
    "LoadError": 3,
    "TraceError": 3,
    "PatternError": 4,
    "NoControllerError": 4,
    "SelfCheckError": 5,
    "DataError": 6,
    "StoreError": 6,
    "ExportError": 7,
    "RunError": 7,
    "ProviderError": 7,
}


@pytest.mark.parametrize(("name", "code"), EXIT_CODES.items())
def test_each_error_carries_its_exit_code(name, code):
    assert getattr(errors, name)("it failed").exit_code == code


def test_every_error_class_has_a_documented_exit_code():
    defined = {
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, AuditError)
    }
    assert defined - {"AuditError"} == set(EXIT_CODES)


@pytest.mark.parametrize("name", EXIT_CODES)
def test_every_error_can_be_caught_as_an_audit_error(name):
    with pytest.raises(AuditError):
        raise getattr(errors, name)("it failed")


def test_finding_no_controller_is_a_pattern_error():
    assert issubclass(errors.NoControllerError, PatternError)


def test_a_store_error_is_a_data_error():
    assert issubclass(errors.StoreError, DataError)


def test_the_four_parts_print_in_order():
    error = AuditError("it failed", where="m.py:3", expected="one", found="two", remedy="try three")
    assert [line.split(":")[0].strip() for line in str(error).splitlines()] == [
        "it failed",
        "where",
        "expected",
        "found",
        "next",
    ]


def test_a_part_that_is_empty_is_left_out():
    assert str(AuditError("it failed", found="two")) == "it failed\n  found:    two"


def test_further_lines_of_a_part_are_indented_under_the_first():
    first, second = str(AuditError("it failed", where="a.toml:1\nb.toml:2")).splitlines()[1:]
    assert first.index("a.toml") == second.index("b.toml")


def test_facts_are_attributes():
    assert AuditError("it failed", node="mul_3").node == "mul_3"


def test_the_parts_are_attributes():
    error = AuditError("it failed", where="here", expected="one", found="two", remedy="three")
    assert (error.what, error.where, error.expected, error.found, error.remedy) == (
        "it failed",
        "here",
        "one",
        "two",
        "three",
    )


def test_a_fact_that_was_not_given_is_an_attribute_error_naming_those_that_were():
    with pytest.raises(AttributeError, match=r"no attribute 'line'; its facts are \['node'\]"):
        _ = AuditError("it failed", node="mul_3").line


def test_an_error_survives_a_process_boundary_with_its_parts_and_facts():
    error = pickle.loads(pickle.dumps(PatternError("it failed", where="a.toml:1", key="axes")))
    assert (type(error), str(error), error.key) == (PatternError, "it failed\n  where:    a.toml:1", "axes")


def test_the_nearest_word_is_suggested():
    assert nearest("linaer", {"linear", "norm"}) == "; did you mean `linear`?"


def test_a_word_that_is_near_nothing_gets_no_suggestion():
    assert nearest("xyz", {"linear", "norm"}) == ""

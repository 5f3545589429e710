import pytest
from click.testing import CliRunner

from fxaudit.cli import main
from fxaudit.controllers.examples import run_example
from fxaudit.controllers.pattern import load_pattern, load_patterns
from fxaudit.errors import PatternError

from .build import pattern_text

EXAMPLES = [
    pytest.param(chosen, example, id=f"{chosen.name}-{number}")
    for chosen in load_patterns()
    for number, example in enumerate(chosen.examples)
]

MATCH = "coefficient = sigmoid(linear(input))\napply = value * coefficient"
GATE = "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.fc = nn.Linear(4, 4)\n"
GATE += "    def forward(self, x):\n        return x * torch.sigmoid(self.fc(x))\nmodel = M()\n"


@pytest.mark.parametrize(("chosen", "example"), EXAMPLES)
def test_every_example_of_a_shipped_pattern_gives_what_it_expects(chosen, example):
    outcome = run_example(chosen, example)
    assert outcome.label == "ok", f"{example.why}: expected {example.expect}, found {outcome.found}"


@pytest.fixture
def gate(tmp_path):
    """A pattern file with one example: its path, for code and a number to expect."""

    def write(code=GATE, expect=1, inputs="2 4"):
        examples = f"[[example]]\nwhy = \"one\"\nexpect = {expect}\ninputs = [\"{inputs}\"]\ncode = '''\n{code}'''\n"
        path = tmp_path / "gate.toml"
        path.write_text(pattern_text(MATCH, name="gate", examples=examples), encoding="utf-8")
        return path

    return write


def outcome(path):
    chosen = load_pattern(path)
    return run_example(chosen, chosen.examples[0])


@pytest.mark.parametrize(("expect", "label"), [(0, "Noisy"), (1, "ok"), (2, "Missing")])
def test_an_outcome_is_labelled_by_what_was_expected(gate, expect, label):
    assert outcome(gate(expect=expect)).label == label


def test_an_outcome_counts_controllers(gate):
    assert outcome(gate(GATE.replace("model = M()", "model = nn.Sequential(M(), M(), M())"))).found == 3


def test_a_missing_controller_comes_with_the_nearest_miss(gate):
    # The pattern wants `linear(input)` inside the sigmoid.
    missed = outcome(gate(GATE.replace("self.fc(x)", "self.fc(x).relu()")))
    assert missed.near_miss is not None


def test_an_example_is_the_same_each_time(gate):
    # The number of gates is drawn; outside an example the two draws would differ in most runs.
    code = GATE.replace("model = M()", "model = nn.Sequential(*(M() for _ in range(int(torch.randint(1, 9, ())))))")
    path = gate(code)
    assert outcome(path).found == outcome(path).found


def test_running_an_example_leaves_the_random_state_alone(gate):
    import torch

    path = gate()
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    outcome(path)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_example_that_fails_is_a_pattern_error_with_the_reason(gate):
    with pytest.raises(PatternError) as raised:
        outcome(gate("model = undefined\n"))
    assert raised.value.found == "NameError: name 'undefined' is not defined"


def test_an_example_without_a_model_is_a_pattern_error(gate):
    with pytest.raises(PatternError, match="an example of `gate` fails"):
        outcome(gate("other = nn.Identity()\n"))


def test_an_example_whose_model_is_no_module_is_a_pattern_error(gate):
    with pytest.raises(PatternError, match="defines no model"):
        outcome(gate("model = 3\n"))


def test_token_ids_may_be_an_input(gate):
    code = GATE.replace("self.fc = nn.Linear(4, 4)", "self.fc, self.e = nn.Linear(4, 4), nn.Embedding(8, 4)")
    code = code.replace("return x", "x = self.e(x).mean(1)\n        return x")
    assert outcome(gate(code, inputs="int 2 6")).label == "ok"


def side_effect(target):
    return f"{GATE}open({str(target)!r}, 'w').close()\n"


@pytest.mark.parametrize("command", [["pattern", "list"], ["pattern", "show", "gate"]], ids=" ".join)
def test_example_code_does_not_run_when_patterns_are_looked_at(gate, tmp_path, command):
    target = tmp_path / "made"
    path = gate(side_effect(target))
    result = CliRunner().invoke(main, [*command, "--patterns", str(path)])
    assert (result.exit_code, target.exists()) == (0, False)


def test_example_code_does_not_run_when_a_pattern_is_used(gate, tmp_path):
    import torch
    from torch import nn

    import fxaudit

    target = tmp_path / "made"
    fxaudit.inspect(nn.Linear(4, 4), torch.randn(2, 4), patterns=[gate(side_effect(target))])
    assert not target.exists()


def test_example_code_runs_when_a_pattern_is_tested(gate, tmp_path):
    target = tmp_path / "made"
    result = CliRunner().invoke(main, ["pattern", "test", "--patterns", str(gate(side_effect(target)))])
    assert (result.exit_code, target.exists()) == (0, True)


@pytest.mark.parametrize(("expect", "label"), [(0, "Noisy"), (2, "Missing")])
def test_testing_a_pattern_that_fails_its_example_exits_with_the_code_of_pattern_errors(gate, expect, label):
    result = CliRunner().invoke(main, ["pattern", "test", "--patterns", str(gate(expect=expect))])
    assert (result.exit_code, f"{label}: one" in result.output) == (4, True)


def test_a_pattern_without_examples_is_not_said_to_have_passed_them(tmp_path):
    (tmp_path / "gate.toml").write_text(pattern_text(MATCH, name="gate"), encoding="utf-8")
    result = CliRunner().invoke(main, ["pattern", "test", "--patterns", str(tmp_path)])
    assert (result.exit_code, "no example in gate" in result.output) == (4, True)

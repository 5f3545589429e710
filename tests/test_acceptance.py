"""The issue's own lines: what `fxaudit trace` counts, and that frozen coefficients do what the eager model's would."""

import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from fxaudit import stages
from fxaudit.cli import main

ROOT = Path(__file__).resolve().parent.parent

MIXTRAL = """
import torch
import transformers


def build(layers):
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4,
    )
    return transformers.MixtralForCausalLM(config), {"input_ids": torch.randint(0, 64, (2, 6))}


def one_layer():
    return build(1)


def three_layers():
    return build(3)
"""

ZERO = {"se-gate": 0, "moe-topk": 0, "feature-gate": 0}


@pytest.fixture(scope="session")
def mixtral_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("mixtral") / "model.py"
    path.write_text(MIXTRAL)
    return path


# --- fxaudit trace --json -------------------------------------------------------------------------------------------

COUNTS = {
    "torchvision:mobilenet_v3_small": {"se-gate": 9},
    "torchvision:efficientnet_b0": {"se-gate": 16},
    "timm:seresnet50": {"se-gate": 16},
    "torchvision:resnet18": {},
    "one_layer": {"moe-topk": 1},
    "three_layers": {"moe-topk": 3},
}


@pytest.fixture(scope="session")
def traces(mixtral_file, tmp_path_factory, worker_id):
    """The JSON of `fxaudit trace MODEL`, by model, each traced once, however many processes run the tests."""
    own = tmp_path_factory.mktemp("traces")
    shared = own if worker_id == "master" else tmp_path_factory.getbasetemp().parent

    def of(model: str) -> dict:
        path = shared / f"trace-{model.replace(':', '-')}.json"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                named = [f"{mixtral_file}:{model}"] if ":" not in model else [model, "--random-init"]
                result = CliRunner().invoke(main, ["trace", *named, "--json"])
                path.write_text(json.dumps([result.exit_code, result.stdout, result.stderr or repr(result.exception)]))
        code, stdout, stderr = json.loads(path.read_text())
        assert code == 0, stderr
        return json.loads(stdout)

    return of


# Of module scope, so that the tests of one model run one after the other, in one process.
@pytest.fixture(scope="module", params=COUNTS)
def model(request):
    return request.param


@pytest.fixture(scope="module", params=[name for name in COUNTS if COUNTS[name]])
def controlled(request):
    return request.param


def test_the_controllers_of_a_model_are_counted(traces, model):
    found = traces(model)["counts"]
    assert {name: found[name] for name in ZERO} == {**ZERO, **COUNTS[model]}


def test_there_is_one_entry_for_each_controller(traces, model):
    assert len(traces(model)["controllers"]) == sum(COUNTS[model].values())


def test_the_trace_is_bitwise_equal_to_the_eager_model(traces, model):
    fidelity = traces(model)["fidelity"]
    assert (fidelity["bitwise"], fidelity["max_abs_diff"]) == (True, 0.0)


def test_the_trace_is_compared_in_another_batch_size_too(traces, model):
    assert "batch of 3" in [comparison["inputs"] for comparison in traces(model)["fidelity"]["comparisons"]]


def test_frozen_is_bitwise_equal_to_live(traces, controlled):
    identity = traces(controlled)["identity"]
    assert (identity["bitwise"], identity["max_abs_diff"]) == (True, 0.0)


def test_frozen_is_compared_in_other_batch_sizes_too(traces, controlled):
    compared = [comparison["inputs"] for comparison in traces(controlled)["identity"]["comparisons"]]
    assert {"example", "resampled", "batch of 1", "batch of 3"} <= set(compared)


def test_a_model_without_controllers_has_no_identity(traces):
    assert traces("torchvision:resnet18")["identity"] is None


def test_a_model_without_controllers_shows_its_nearest_misses(traces):
    assert traces("torchvision:resnet18")["near_misses"]


def test_the_parameters_of_a_squeeze_excite_cone_are_those_of_its_two_layers(traces):
    from torchvision.models import mobilenet_v3_small
    from torchvision.ops import SqueezeExcitation

    gates = [m for m in mobilenet_v3_small(weights=None).modules() if isinstance(m, SqueezeExcitation)]
    expected = [sum(p.numel() for p in gate.parameters()) for gate in gates]
    found = traces("torchvision:mobilenet_v3_small")["controllers"]
    assert [controller["cone"]["parameters"] for controller in found] == expected


def test_the_flops_of_a_squeeze_excite_cone_are_those_of_its_two_layers(traces):
    from torchvision.models import mobilenet_v3_small
    from torchvision.ops import SqueezeExcitation

    gates = [m for m in mobilenet_v3_small(weights=None).modules() if isinstance(m, SqueezeExcitation)]
    # A 1x1 convolution on one position is a matrix product: one multiply-add for each weight.
    expected = [2 * (gate.fc1.weight.numel() + gate.fc2.weight.numel()) for gate in gates]
    found = traces("torchvision:mobilenet_v3_small")["controllers"]
    assert [controller["cone"]["flops"] for controller in found] == expected


def test_a_process_of_its_own_counts_the_same(mixtral_file, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "fxaudit", "trace", f"{mixtral_file}:one_layer", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["counts"]["moe-topk"], found["identity"]["bitwise"]) == (1, True)


# --- coefficients that matter ---------------------------------------------------------------------------------------


class Case:
    """A model whose controllers matter, its frozen form, and two batches of inputs."""

    def __init__(self, module: nn.Module, gates: str, cone: str, first, second) -> None:
        self.module = module.eval()
        self.gates = [m for name, m in module.named_modules() if re.fullmatch(gates, name)]
        self.cone = {name for name in module.state_dict() if re.fullmatch(cone, name)}
        self.first, self.second = first, second
        self.frozen = stages.freeze(module, first)

    def eager(self, inputs, override=None) -> tuple[torch.Tensor, list]:
        """The eager model's output and what its gates returned; `override` replaces what they hand on."""
        seen, handles = [], []
        for i, gate in enumerate(self.gates):

            def hook(_, __, output, i=i):
                seen.append(clone(output))
                return None if override is None else clone(override[i])

            handles.append(gate.register_forward_hook(hook))
        try:
            with torch.no_grad():
                return self.output(self.module(*inputs)), seen
        finally:
            for handle in handles:
                handle.remove()

    def output(self, returned) -> torch.Tensor:
        return returned

    def coefficients(self, seen: list) -> list[torch.Tensor]:
        """What the gates returned, in the order of the frozen model's coefficients."""
        return seen


class MixtralCase(Case):
    def output(self, returned) -> torch.Tensor:
        return returned.logits

    def coefficients(self, seen: list) -> list[torch.Tensor]:
        return [tensor for _, weights, indices in seen for tensor in (weights, indices)]


def clone(value):
    return tuple(v.clone() for v in value) if isinstance(value, tuple) else value.clone()


def images(seed: int) -> tuple[torch.Tensor]:
    return (torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(seed)),)


def seresnet18() -> Case:
    import timm

    torch.manual_seed(0)
    module = timm.create_model("seresnet18", pretrained=False, zero_init_last=False)
    for name, parameter in module.named_parameters():
        if ".se.fc2.weight" in name:
            nn.init.normal_(parameter, std=3.0)
    return Case(module, r"layer\d\.\d\.se\.gate", r"layer\d\.\d\.se\.fc[12]\.(weight|bias)", images(1), images(2))


def mobilenet() -> Case:
    from torchvision.models import mobilenet_v3_small

    torch.manual_seed(0)
    module = mobilenet_v3_small(weights=None)
    for name, parameter in module.named_parameters():
        if re.search(r"block\.\d\.fc2\.weight", name):
            nn.init.normal_(parameter, std=3.0)
    gates = r"features\.\d+\.block\.\d\.scale_activation"
    return Case(module, gates, r"features\.\d+\.block\.\d\.fc[12]\.(weight|bias)", images(1), images(2))


def mixtral() -> Case:
    import transformers

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    config._experts_implementation = "batched_mm"
    module = transformers.MixtralForCausalLM(config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            # Larger than the initialisation, so that routing decides what the model returns.
            parameter.normal_(std=1.0 if name.endswith("mlp.gate.weight") else 0.2)
    tokens = [torch.randint(0, 64, (2, 6), generator=torch.Generator().manual_seed(s)) for s in (1, 2)]
    gates = r"model\.layers\.\d\.mlp\.gate"
    return MixtralCase(module, gates, gates + r"\.weight", *((ids,) for ids in tokens))


class FeatureGateBlock(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.project1, self.gate1 = nn.Linear(width, width), nn.Sigmoid()
        self.project2, self.gate2 = nn.Linear(width, width), nn.Sigmoid()

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = self.qkv(h).chunk(3, -1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.gate1(self.project1(h)) * self.out(attended)
        h = self.norm2(x)
        return x + self.gate2(self.project2(h)) * self.down(nn.functional.gelu(self.up(h)))


def feature_gate() -> Case:
    torch.manual_seed(0)
    module = nn.Sequential(*(FeatureGateBlock() for _ in range(3)))
    x, y = (torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    return Case(module, r"\d\.gate[12]", r"\d\.project[12]\.(weight|bias)", (x,), (y,))


CASES = {
    "seresnet18": (seresnet18, 8),
    "mobilenet": (mobilenet, 9),
    "mixtral": (mixtral, 3),
    "feature-gate": (feature_gate, 6),
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    build, count = CASES[request.param]
    built = build()
    assert len(built.gates) == count  # the expressions above name every gate
    return built


def test_every_gate_is_a_controller(case):
    assert len(case.frozen.controllers) == len(case.gates)


def test_recorded_coefficients_are_what_hooks_see_in_the_eager_model_bit_for_bit(case):
    _, seen = case.eager(case.second)
    found = list(case.frozen.live(*case.second).coefficients.values())
    expected = case.coefficients(seen)
    assert len(found) == len(expected)
    assert all(torch.equal(a.reshape(b.shape), b) for a, b in zip(found, expected, strict=True))


def test_live_output_is_the_eager_output_bit_for_bit(case):
    expected, _ = case.eager(case.second)
    assert torch.equal(case.output(case.frozen.live(*case.second).output), expected)


def test_an_inputs_own_coefficients_reproduce_the_eager_output_bit_for_bit(case):
    expected, _ = case.eager(case.second)
    own = case.frozen.live(*case.second).coefficients
    assert torch.equal(case.output(case.frozen(*case.second, coefficients=own)), expected)


def test_coefficients_of_another_input_change_the_output(case):
    own, _ = case.eager(case.first)
    other = case.frozen.live(*case.second).coefficients
    moved = case.output(case.frozen(*case.first, coefficients=other))
    assert (moved - own).abs().max() > 1e-2 * own.abs().max()


def test_coefficients_of_another_input_do_what_they_do_in_the_eager_model(case):
    _, seen = case.eager(case.second)
    expected, _ = case.eager(case.first, override=seen)
    other = case.frozen.live(*case.second).coefficients
    found = case.output(case.frozen(*case.first, coefficients=other))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_the_frozen_graph_lacks_exactly_the_parameters_of_its_controllers(case):
    assert case.cone
    parameters = {name for name, _ in case.module.named_parameters(remove_duplicate=False)}
    held = set(case.frozen.frozen.state_dict())
    assert parameters - held == case.cone


def test_the_frozen_graph_does_not_run_the_controllers(case):
    # NaN in every controller parameter reaches the live output and not the frozen one.
    own = case.frozen.live(*case.first).coefficients
    state = dict(case.module.named_parameters())
    saved = {name: state[name].detach().clone() for name in case.cone}
    try:
        with torch.no_grad():
            for name in case.cone:
                state[name].fill_(float("nan"))
        assert case.output(case.frozen(*case.first, coefficients=own)).isfinite().all()
    finally:
        with torch.no_grad():
            for name, value in saved.items():
                state[name].copy_(value)

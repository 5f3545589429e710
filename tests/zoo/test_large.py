"""A model of 1.4 billion parameters is traced in little more memory than it takes itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The configuration of EleutherAI/pythia-1.4b.
CHILD = """
import json, resource
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from fxaudit import stages

config = GPTNeoXConfig(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=24, num_attention_heads=16, vocab_size=50304,
    max_position_embeddings=2048, rotary_pct=0.25, use_parallel_residual=True, use_cache=False,
)
module = GPTNeoXForCausalLM(config).eval()
traced = stages.trace(module, {"input_ids": torch.randint(0, 50304, (2, 16))})
own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
held = [parameter.untyped_storage().data_ptr() for parameter in traced.graph_module.parameters()]
print(json.dumps({
    "parameters": sum(parameter.numel() for parameter in module.parameters()),
    "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "bitwise": traced.fidelity.bitwise,
    "held": len(held),
    "copied": sum(pointer not in own for pointer in held),
}))
"""


@pytest.fixture(scope="module")
def facts() -> dict[str, int]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_model_of_more_than_a_billion_parameters_is_traced_bit_for_bit_in_less_than_20_gb(facts) -> None:
    assert facts["parameters"] > 1.4e9
    assert facts["bitwise"]
    assert facts["peak"] < 20e9


@pytest.mark.slow
def test_the_traced_weights_are_the_models_own(facts) -> None:
    assert facts["held"] >= 24 * 12
    assert facts["copied"] == 0

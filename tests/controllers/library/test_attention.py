"""Families on request inside attention, bound to what transformers itself says that its attention computed."""

import pytest
import torch

from fxaudit import stages
from fxaudit.controllers.rewrite import FrozenModel
from fxaudit.model.load import subject
from tests.third_party import OWN, transformers


def matched(build, *families):
    model, inputs = build()
    return model, inputs, stages.match(stages.trace(subject(model, inputs)), enable=families)


def replays(found):
    """Recorded coefficients, whether identity replay is bitwise, and whether exchanged inputs change the output."""
    frozen = FrozenModel(found.traced, found.controllers)
    leaves = found.traced.flatten(found.traced.subject.arguments)
    recorded = frozen.run_tapped(leaves)[1][: len(frozen.coefficients)]
    live, swapped = frozen.run_frozen(leaves, recorded), frozen.run_frozen(leaves, [v.flip(0) for v in recorded])
    return recorded, stages.identity(frozen).bitwise, not all(map(torch.equal, live, swapped))


@pytest.fixture(scope="module")
def written_out():
    return matched(transformers("gemma2", attention="eager", num_hidden_layers=2), "attention-probs")


def test_attention_probabilities_are_those_that_the_model_returns(written_out):
    model, inputs, found = written_out
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True).attentions
    recorded, _, _ = replays(found)
    assert [torch.equal(a, b) for a, b in zip(recorded, expected, strict=True)] == [True, True]


def test_attention_probabilities_replay_bitwise_and_matter(written_out):
    assert replays(written_out[2])[1:] == (True, True)


def test_attention_probabilities_are_not_looked_for_unasked(written_out):
    assert "attention-probs" not in {c.pattern for c in stages.match(written_out[2].traced).controllers}


def test_a_fused_attention_hides_its_probabilities_and_the_finding_names_the_flag():
    _, _, found = matched(transformers("llama", num_hidden_layers=1), "attention-probs")
    (finding,) = [finding for finding in found.findings if finding.kind == "hidden"]
    assert "scaled_dot_product_attention" in finding.text
    assert "--attention eager" in finding.text


@pytest.fixture(scope="module")
def indexed():
    sizes = dict(index_topk=4, index_head_dim=16, index_n_heads=2, num_hidden_layers=1)  # noqa: C408
    return matched(transformers("deepseek_v32", head_dim=OWN, num_key_value_heads=4, **sizes), "sparse-index")


def test_sparse_indices_are_what_the_indexer_returns(indexed):
    model, inputs, found = indexed
    returned = []
    (indexer,) = [module for module in model.modules() if type(module).__name__ == "DeepseekV32Indexer"]
    handle = indexer.register_forward_hook(lambda m, _, out: returned.append(out))
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    (recorded,), _, _ = replays(found)
    assert torch.equal(recorded, returned[0].to(recorded.dtype))


def test_sparse_indices_replay_bitwise_and_matter(indexed):
    assert replays(indexed[2])[1:] == (True, True)

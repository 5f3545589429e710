import logging
import warnings

import pytest
import torch
from torch import nn

from fxaudit.model.settings import exact_numerics, quiet_torch, traceable


def mixed() -> nn.Sequential:
    """A model of which one part is in eval mode already."""
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(4))
    model.train()
    model[1].eval()
    return model


@pytest.fixture(scope="module")
def mixtral():
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config).eval()


def test_a_model_is_in_eval_mode_while_it_is_traced():
    model = mixed()
    with traceable(model):
        assert not any(module.training for module in model.modules())


def test_every_training_flag_is_restored():
    model = mixed()
    with traceable(model):
        pass
    assert [module.training for module in model.modules()] == [True, True, False]


def test_training_flags_are_restored_after_an_error():
    model = mixed()
    with pytest.raises(RuntimeError, match="inside"), traceable(model):
        raise RuntimeError("inside")
    assert [module.training for module in model.modules()] == [True, True, False]


def test_a_change_of_mode_is_recorded():
    with traceable(mixed()) as applied:
        assert applied == {"mode": "eval"}


def test_a_model_in_eval_mode_needs_no_setting():
    with traceable(mixed().eval()) as applied:
        assert applied == {}


def test_experts_run_as_batched_products_while_traced(mixtral):
    with traceable(mixtral):
        assert mixtral.config._experts_implementation == "batched_mm"


def test_the_experts_implementation_is_restored(mixtral):
    before = mixtral.config._experts_implementation
    with traceable(mixtral):
        pass
    assert before != "batched_mm"
    assert mixtral.config._experts_implementation == before


def test_the_cache_is_off_while_traced(mixtral):
    with traceable(mixtral):
        assert mixtral.config.use_cache is False


def test_the_cache_is_restored(mixtral):
    with traceable(mixtral):
        pass
    assert mixtral.config.use_cache is True


def test_the_settings_of_a_transformers_model_are_recorded(mixtral):
    with traceable(mixtral) as applied:
        assert applied == {"use_cache": "False", "experts_implementation": "batched_mm"}


def test_a_transformers_model_inside_a_wrapper_is_found(mixtral):
    with traceable(nn.Sequential(mixtral).eval()):
        assert mixtral.config.use_cache is False


def numerics() -> tuple[bool, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.backends.mha.get_fastpath_enabled(),
        torch.is_grad_enabled(),
    )


def test_exact_numerics_are_deterministic_without_shortcuts_or_gradients():
    with exact_numerics():
        assert numerics() == (True, True, False, False, False, False, False)


def test_exact_numerics_restore_every_switch():
    try:
        torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
        before = numerics()
        with exact_numerics():
            pass
        assert numerics() == before
    finally:
        torch.backends.cudnn.benchmark = False


def test_exact_numerics_restore_every_switch_after_an_error():
    before = numerics()
    with pytest.raises(RuntimeError, match="inside"), exact_numerics():
        raise RuntimeError("inside")
    assert numerics() == before


def test_torch_is_quiet_inside(caplog):
    with quiet_torch():
        logging.getLogger("torch.export").error("noise")
    assert not caplog.records


def test_logging_works_again_afterwards(caplog):
    with quiet_torch():
        pass
    logging.getLogger("another").error("signal")
    assert [record.message for record in caplog.records] == ["signal"]


def test_warnings_are_quiet_inside():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with quiet_torch():
            warnings.warn("noise", stacklevel=1)
    assert caught == []

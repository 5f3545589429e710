"""Directories as transformers writes them, with models small enough to be made here."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn

from fxaudit import stages
from fxaudit.errors import AuditError, DataError, LoadError, UsageError
from fxaudit.model.data import batched_inputs, load_data
from fxaudit.model.hugging_face import tokenizer_directory
from fxaudit.model.load import load, subject
from fxaudit.model.trace import trace

VOCABULARY = 50
IDS = torch.arange(24).reshape(2, 12) * 7 % VOCABULARY
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 32}
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 2}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **HEADS, num_key_value_heads=1))


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        **SMALL, **HEADS, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
    )
    return transformers.MixtralForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(hidden_size=16, intermediate_size=24, image_size=16, patch_size=8, **HEADS)
    return transformers.ViTForImageClassification(config)


PIXELS = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
MODELS = {
    "llama": (llama, {"input_ids": IDS}),
    "mixtral": (mixtral, {"input_ids": IDS}),
    "gpt2": (gpt2, {"input_ids": IDS}),
    "vit": (vit, {"pixel_values": PIXELS}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory and the in-memory model of each of `MODELS`."""
    made = {}
    for name, (build, _) in MODELS.items():
        torch.manual_seed(3)
        directory, module = tmp_path_factory.mktemp(name), build().eval()
        module.save_pretrained(directory)
        made[name] = (directory, module)
    return made


@pytest.fixture
def directory(saved, tmp_path) -> Path:
    """A copy of the Llama directory, to be spoilt."""
    return shutil.copytree(saved["llama"][0], tmp_path / "model")


def changed_config(directory: Path, **entries: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **entries}))


def refused(directory: Path, **options) -> LoadError:
    with pytest.raises(LoadError) as caught:
        load(str(directory), **options)
    require_all_parts(caught.value)
    return caught.value


def require_all_parts(error: AuditError) -> None:
    assert all([error.what, error.where or error.found, error.expected, error.found, error.remedy]), str(error)


# --- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_directory_gives_the_logits_of_the_model_that_was_saved(saved, name):
    directory, module = saved[name]
    inputs = MODELS[name][1]
    loaded = load(str(directory)).module.eval()
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, module(**inputs).logits)


@pytest.mark.parametrize("name", MODELS)
def test_a_directory_gives_the_class_that_was_saved(saved, name):
    directory, module = saved[name]
    assert type(load(str(directory)).module) is type(module)


def test_tied_weights_that_are_saved_once_stay_tied(saved):
    directory, _ = saved["gpt2"]
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")
    module = load(str(directory)).module
    assert module.lm_head.weight is module.transformer.wte.weight


def test_weights_that_are_not_tied_stay_apart(saved):
    module = load(str(saved["mixtral"][0])).module
    assert not torch.equal(module.lm_head.weight, module.model.embed_tokens.weight)


def test_random_init_has_the_shapes_of_the_model_and_none_of_its_weights(saved):
    directory, module = saved["llama"]
    drawn = load(str(directory), random_init=True).module.state_dict()
    assert {n: t.shape for n, t in drawn.items()} == {n: t.shape for n, t in module.state_dict().items()}
    assert not torch.equal(drawn["lm_head.weight"], module.lm_head.weight)


def test_random_init_needs_no_weights(directory):
    (directory / "model.safetensors").unlink()
    assert isinstance(load(str(directory), random_init=True).module, transformers.LlamaForCausalLM)


def test_weights_of_the_users_own_replace_those_of_the_directory(directory, saved, tmp_path):
    state = {name: tensor + 1 for name, tensor in saved["llama"][1].state_dict().items()}
    save_file(state, tmp_path / "own.safetensors")
    module = load(str(directory), weights=tmp_path / "own.safetensors").module
    assert torch.equal(module.lm_head.weight, state["lm_head.weight"])


def test_a_text_model_comes_with_two_inputs_of_token_ids_up_to_its_positions(saved):
    _, inputs = load(str(saved["llama"][0])).arguments
    assert {name: tensor.shape for name, tensor in inputs.items()} == {"input_ids": (2, 32)}
    assert 0 <= inputs["input_ids"].min() < inputs["input_ids"].max() < VOCABULARY


def test_an_image_model_comes_with_two_images_of_its_own_size(saved):
    _, inputs = load(str(saved["vit"][0])).arguments
    assert {name: tensor.shape for name, tensor in inputs.items()} == {"pixel_values": (2, 3, 16, 16)}


@pytest.mark.parametrize("window", [5, 48])
def test_a_window_sets_the_number_of_tokens(saved, window):
    _, inputs = load(str(saved["llama"][0]), window=window).arguments
    assert inputs["input_ids"].shape == (2, window)


def test_a_window_for_an_image_model_has_no_meaning(saved):
    with pytest.raises(UsageError) as caught:
        load(str(saved["vit"][0]), window=5)
    require_all_parts(caught.value)


def test_the_routers_of_a_mixtral_directory_are_found(saved):
    found = stages.inspect(load(str(saved["mixtral"][0]), window=8))
    assert found.matched.counts["moe-topk"] == 2
    assert found.identity.bitwise


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_directory_without_a_configuration_is_refused(directory):
    (directory / "config.json").unlink()
    error = refused(directory)
    assert "no model directory" in error.what
    assert error.where == str(directory / "config.json")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"architectures": []}', '{"architectures": null}'])
def test_a_configuration_that_names_no_class_is_refused(directory, content):
    (directory / "config.json").write_text(content)
    assert "`architectures`" in refused(directory).expected


@pytest.mark.parametrize("options", [{}, {"random_init": True}])
@pytest.mark.parametrize("name", ["NoSuchModelForAnything", "pipeline", "LlamaConfig", "AutoModel", "__version__"])
def test_a_name_that_is_no_model_class_of_transformers_is_refused(directory, name, options):
    changed_config(directory, architectures=[name])
    error = refused(directory, **options)
    assert error.found == name
    assert transformers.__version__ in error.expected


@pytest.mark.parametrize("options", [{}, {"random_init": True}])
@pytest.mark.parametrize("architecture", ["OwnModel", "LlamaForCausalLM"])
def test_code_in_a_directory_is_refused_and_never_run(directory, tmp_path, architecture, options):
    marker = tmp_path / "executed"
    (directory / "own.py").write_text(
        f"open({str(marker)!r}, 'w').close()\nclass OwnModel: pass\nclass OwnConfig: pass\n"
    )
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    changed_config(directory, architectures=[architecture], model_type="own", auto_map=auto_map)
    error = refused(directory, **options)
    assert "own.OwnModel" in error.found
    assert not marker.exists()


class Hostile:
    """Unpickling it creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_weights_in_a_pickle_are_refused_and_never_unpickled(directory, tmp_path):
    marker = tmp_path / "executed"
    (directory / "model.safetensors").unlink()
    torch.save({"weight": Hostile(marker)}, directory / "pytorch_model.bin")
    error = refused(directory)
    assert "safetensors" in error.remedy
    assert not marker.exists()


def test_a_directory_without_weights_is_refused(directory):
    (directory / "model.safetensors").unlink()
    assert "--random-init" in refused(directory).remedy


@pytest.mark.parametrize("content", [b"", b"garbage" * 20])
def test_weights_that_are_no_safetensors_are_refused(directory, content):
    (directory / "model.safetensors").write_bytes(content)
    refused(directory)


def test_a_weight_that_is_not_in_the_file_is_never_drawn_at_random(directory):
    state = load_file(directory / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    assert refused(directory).found == "missing model.layers.1.mlp.up_proj.weight"


def test_weights_of_another_shape_are_refused(directory):
    changed_config(directory, intermediate_size=20)
    refused(directory)


def test_a_model_over_inputs_of_another_kind_is_refused_by_their_name(tmp_path):
    config = transformers.PatchTSTConfig(d_model=16, ffn_dim=24, num_hidden_layers=1, num_attention_heads=2)
    transformers.PatchTSTForPrediction(config).save_pretrained(tmp_path)
    error = refused(tmp_path)
    assert "`past_values`" in error.found
    assert "--inputs" in error.remedy


# --- tokenizers and texts -------------------------------------------------------------------------------------------

LINES = ["the cat sat on the mat", "the dog sat on the log", "a cat and a dog sat", "on a mat and on a log"]
TEXT = " ".join(LINES * 3)


def trained_tokenizer(directory: Path) -> Tokenizer:
    """A byte-pair tokenizer trained on `LINES`, saved beside the model in the form that transformers writes."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=40, special_tokens=["[UNK]", "[BOS]"]))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "bos_token": "[BOS]"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def text_refused(text: Path, directory: Path) -> DataError:
    with pytest.raises(DataError) as caught:
        load_data(text, trace(load(str(directory), window=6)))
    require_all_parts(caught.value)
    return caught.value


def test_a_directory_with_a_tokenizer_is_its_own_tokenizer_directory(directory):
    trained_tokenizer(directory)
    assert load(str(directory)).tokenizer == directory


def test_a_directory_without_a_tokenizer_has_none(directory):
    assert load(str(directory)).tokenizer is None


@pytest.mark.parametrize("name", ["vocab.txt", "vocab.json", "tokenizer.model", "spiece.model"])
def test_older_forms_of_tokenizers_are_recognised(tmp_path, name):
    (tmp_path / name).touch()
    assert tokenizer_directory(tmp_path) == tmp_path


def test_a_text_becomes_windows_of_the_tokenizers_own_ids(directory, text):
    ids = trained_tokenizer(directory).encode(TEXT).ids
    count = (len(ids) - 1) // 6
    assert count > 5
    traced = trace(load(str(directory), window=6))
    data = load_data(text, traced)
    (name,) = batched_inputs(traced)
    assert data.columns[name].rows(0, data.count).tolist() == [ids[6 * i : 6 * i + 6] for i in range(count)]
    assert data.targets_of(0, data.count).tolist() == [ids[6 * i + 1 : 6 * i + 7] for i in range(count)]


def test_a_text_for_a_model_with_neither_a_tokenizer_nor_256_classes_is_refused(directory, text):
    error = text_refused(text, directory)
    assert f"{VOCABULARY} classes" in error.found
    assert "tokenizer" in error.what


def test_a_text_for_an_image_model_is_refused(saved, text):
    with pytest.raises(DataError) as caught:
        load_data(text, trace(load(str(saved["vit"][0]))))
    require_all_parts(caught.value)
    assert caught.value.found == "pixel_values"


def test_a_text_shorter_than_a_window_is_refused(directory, text):
    count = len(trained_tokenizer(directory).encode("the cat").ids)
    text.write_text("the cat")
    assert text_refused(text, directory).found == f"{count} tokens"


def test_a_tokenizer_that_is_damaged_is_refused(directory, text):
    trained_tokenizer(directory)
    (directory / "tokenizer.json").write_text("{")
    assert "tokenizer" in text_refused(text, directory).what


def test_code_of_a_tokenizer_is_refused_and_never_run(directory, text, tmp_path):
    trained_tokenizer(directory)
    marker = tmp_path / "executed"
    (directory / "own.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass OwnTokenizer: pass\n")
    config = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    try:
        load_data(text, trace(load(str(directory), window=6)))
    except DataError as error:
        require_all_parts(error)
    assert not marker.exists()


def test_a_text_that_is_not_utf8_is_refused_when_it_goes_through_a_tokenizer(directory, text):
    trained_tokenizer(directory)
    text.write_bytes(b"\xff\xfe\x00the cat")
    assert "UTF-8" in text_refused(text, directory).remedy


def test_bytes_are_the_tokens_of_a_model_over_256_classes_without_a_tokenizer(text):
    traced = trace(subject(nn.Sequential(nn.Embedding(256, 4), nn.Linear(4, 256)), torch.randint(256, (2, 5))))
    (name,) = batched_inputs(traced)
    assert load_data(text, traced).columns[name].rows(0, 1).tolist() == [list(TEXT[:5].encode())]

"""What may lie in a Hugging Face directory: shards, torch files, code, links, lies; and the cache of the hub."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from fxaudit.errors import LoadError
from fxaudit.model.load import load
from fxaudit.stages import trace
from tests.model.hostile import CONTAINERS, header, require_refusal

CONFIG = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 20,
}


def llama(**more: object) -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG, **more)).eval()


@pytest.fixture(scope="module")
def original() -> nn.Module:
    return llama()


@pytest.fixture(scope="module")
def whole(original, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    original.save_pretrained(directory)
    return directory


@pytest.fixture
def directory(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "model")


def changed_config(directory: Path, **entries: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **entries}))


def refused(directory: Path, marker: Path | None = None, **options: object) -> LoadError:
    return require_refusal(lambda: load(str(directory), **options), marker)


def same(loaded: nn.Module, original: nn.Module) -> bool:
    ours, theirs = loaded.state_dict(), original.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def pickled(directory: Path, original: nn.Module, shards: int = 1) -> None:
    """Put the weights into torch files in the place of safetensors."""
    (directory / "model.safetensors").unlink()
    state = dict(original.state_dict())
    names = list(state)
    if shards == 1:
        torch.save(state, directory / "pytorch_model.bin")
        return
    index = {}
    for i in range(shards):
        file = f"pytorch_model-{i + 1:05}-of-{shards:05}.bin"
        torch.save({name: state[name] for name in names[i::shards]}, directory / file)
        index |= dict.fromkeys(names[i::shards], file)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


# --- weights --------------------------------------------------------------------------------------------------------


def test_sharded_safetensors_load(original, tmp_path):
    original.save_pretrained(tmp_path, max_shard_size="4KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert same(load(str(tmp_path)).module, original)


@pytest.mark.parametrize("shards", [1, 3])
def test_weights_in_torch_files_load_without_running_them(directory, original, shards):
    pickled(directory, original, shards)
    assert same(load(str(directory)).module, original)


def test_tied_weights_stay_tied(tmp_path):
    llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    module = load(str(tmp_path)).module
    assert module.lm_head.weight is module.model.embed_tokens.weight


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_bomb_in_the_weights_is_never_executed(directory, original, tmp_path, container, sharded):
    marker = tmp_path / "executed"
    pickled(directory, original, 2 if sharded else 1)
    name = "pytorch_model-00002-of-00002.bin" if sharded else "pytorch_model.bin"
    (directory / name).write_bytes(CONTAINERS[container](marker))
    refused(directory, marker)


@pytest.mark.parametrize("name", ["../../evil.safetensors", "/etc/passwd", "sub/evil.safetensors", "..\\evil", ""])
def test_an_index_that_leads_out_of_the_directory_is_refused(original, tmp_path, name):
    original.save_pretrained(tmp_path / "m", max_shard_size="4KB")
    index = tmp_path / "m" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][next(iter(content["weight_map"]))] = name
    index.write_text(json.dumps(content))
    error = refused(tmp_path / "m")
    assert "beside it" in error.expected or "no such file" in error.found or "names" in error.expected


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "[" * 100_000])
def test_an_index_of_another_form_is_refused(directory, content):
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(content)
    refused(directory)


def test_a_missing_shard_is_named(original, tmp_path):
    original.save_pretrained(tmp_path, max_shard_size="4KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    error = refused(tmp_path)
    assert shard.name in error.where
    assert error.found == "no such file"


def test_a_link_out_of_the_directory_is_refused(directory, tmp_path):
    shutil.move(directory / "model.safetensors", tmp_path / "elsewhere.safetensors")
    (directory / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    assert "link" in refused(directory).found


def test_a_safetensors_file_that_lies_is_refused(directory):
    (directory / "model.safetensors").write_bytes(
        header(b'{"w":{"dtype":"F32","shape":[9,9],"data_offsets":[0,24]}}') + bytes(24)
    )
    refused(directory)


# --- configuration --------------------------------------------------------------------------------------------------


def test_a_huge_configuration_is_not_read(directory):
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "x": "' + "a" * 11_000_000 + '"}')
    assert "bytes" in refused(directory).found


@pytest.mark.parametrize("options", [{}, {"random_init": True}])
def test_a_deeply_nested_configuration_is_refused(directory, options):
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "x": ' + "[" * 200_000 + "}")
    refused(directory, **options)


@pytest.mark.parametrize("options", [{}, {"random_init": True}])
def test_absurd_sizes_in_a_configuration_are_refused_before_they_are_allocated(directory, options):
    changed_config(directory, vocab_size=1 << 40)
    refused(directory, **options)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("value", ["evil/kernel", "evil/kernel@main:forward", {"": "evil/kernel"}])
def test_a_kernel_of_the_hub_is_never_fetched(directory, key, value):
    changed_config(directory, **{key: value})
    assert "kernel" in refused(directory).what


# --- code -----------------------------------------------------------------------------------------------------------

CONFIGURATION = """
from transformers import PretrainedConfig

class GatedConfig(PretrainedConfig):
    model_type = "fxaudit_gated"

    def __init__(self, dim=8, layers=2, vocab_size=20, block_size=16, **more):
        self.dim, self.layers, self.vocab_size, self.block_size = dim, layers, vocab_size, block_size
        super().__init__(**more)
"""
MODELLING = """
from collections import namedtuple
from pathlib import Path
import torch
from torch import nn
from transformers import PreTrainedModel
from .configuration_gated import GatedConfig

Path({marker!r}).mkdir(exist_ok=True)
Output = namedtuple("Output", ["loss", "logits"])

class Gated(PreTrainedModel):
    config_class = GatedConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.gates = nn.ModuleList(nn.Linear(config.dim, config.dim) for _ in range(config.layers))
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, idx, targets=None):
        x = self.embedding(idx)
        for gate in self.gates:
            x = x + torch.sigmoid(gate(x)) * x
        return Output(None, self.head(x))
"""


@pytest.fixture
def custom(tmp_path, remote_code) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """A directory with code of its own: configuration, modelling file, two shards; and what the code creates."""
    directory, marker = tmp_path / "gated", tmp_path / "executed"
    directory.mkdir()
    (directory / "configuration_gated.py").write_text(CONFIGURATION)
    (directory / "modeling_gated.py").write_text(MODELLING.format(marker=str(marker)))
    classes = {"AutoConfig": "configuration_gated.GatedConfig", "AutoModelForCausalLM": "modeling_gated.Gated"}
    config = {"architectures": ["Gated"], "model_type": "fxaudit_gated", "auto_map": classes, "dim": 8, "layers": 2}
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    shapes = {"embedding.weight": (20, 8), "head.weight": (20, 8)}
    shapes |= {f"gates.{i}.{name}": size for i in range(2) for name, size in (("weight", (8, 8)), ("bias", (8,)))}
    state = {name: torch.randn(shape) for name, shape in shapes.items()}
    index = {}
    for i in range(2):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        index |= dict.fromkeys(list(state)[i::2], file)
        save_file({name: state[name] for name in list(state)[i::2]}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return directory, marker, state


@pytest.mark.parametrize("options", [{}, {"random_init": True}, {"device": "meta"}])
def test_code_of_a_directory_is_not_run_and_the_refusal_names_the_command_that_runs_it(custom, options):
    directory, marker, _ = custom
    error = refused(directory, marker, **options)
    assert f"fxaudit trace {directory} --trust-remote-code" in error.remedy


def test_code_of_a_directory_runs_on_demand_with_its_weights(custom):
    directory, marker, state = custom
    loaded = load(str(directory), trust_remote_code=True)
    assert marker.exists()
    assert {name: tensor.tolist() for name, tensor in loaded.module.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in state.items()
    }
    assert list(loaded.arguments[1]) == ["idx"]
    traced = trace(loaded)
    assert traced.fidelity.bitwise
    assert traced.output_names == ("loss", "logits")


def test_code_of_a_directory_runs_without_weights_too(custom):
    directory, _, state = custom
    module = load(str(directory), trust_remote_code=True, random_init=True).module
    assert not torch.equal(module.head.weight, state["head.weight"])


def test_a_weight_that_custom_code_needs_and_the_shards_lack_is_named(custom):
    directory, _, state = custom
    shard = directory / "model-00001-of-00002.safetensors"
    save_file({"embedding.weight": state["embedding.weight"]}, shard)
    assert "missing" in refused(directory, trust_remote_code=True).found


def test_an_error_in_code_of_a_directory_is_reported_at_its_line(custom):
    directory, _, _ = custom
    file = directory / "modeling_gated.py"
    file.write_text(file.read_text().replace("super().__init__(config)", "raise ValueError('broken on purpose')"))
    error = refused(directory, trust_remote_code=True)
    assert "broken on purpose" in error.found
    assert "modeling_gated.py" in error.where


def test_a_directory_without_code_loads_the_same_with_the_flag(directory, original):
    assert same(load(str(directory), trust_remote_code=True).module, original)


# --- hub ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(whole, tmp_path, monkeypatch) -> Path:
    """The cache of the hub with one repository in it, laid out as its client does: snapshots of links to blobs."""
    folder = tmp_path / "hub" / "models--somebody--tiny"
    revision = "0123456789abcdef0123456789abcdef01234567"
    (folder / "refs").mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "snapshots" / revision).mkdir(parents=True)
    (folder / "refs" / "main").write_text(revision)
    for file in whole.iterdir():
        shutil.copy(file, folder / "blobs" / f"blob-of-{file.name}")
        (folder / "snapshots" / revision / file.name).symlink_to(f"../../blobs/blob-of-{file.name}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return folder


@pytest.mark.parametrize("name", ["somebody/tiny", "somebody/tiny@main"])
def test_a_repository_in_the_cache_of_the_hub_loads_by_its_name(cache, original, name):
    loaded = load(name)
    assert loaded.source == name
    assert same(loaded.module, original)


@pytest.mark.parametrize("name", ["somebody/other", "somebody/tiny@v2"])
def test_a_repository_that_cannot_be_had_is_refused_with_how_to_get_it(cache, name):
    error = require_refusal(lambda: load(name))
    assert "neither a directory here nor" in error.what
    assert "hf download somebody/" in error.remedy
    assert "HF_HUB_OFFLINE" in error.found


def test_code_of_a_repository_is_not_run(cache, tmp_path):
    config = next(cache.glob("blobs/*config.json"))
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "auto_map": {"AutoModel": "modeling_evil.Evil"}}))
    error = require_refusal(lambda: load("somebody/tiny"))
    assert "fxaudit trace somebody/tiny --trust-remote-code" in error.remedy


# --- placement ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"random_init": True}])
def test_a_directory_loads_in_the_dtype_that_was_asked_for(directory, options):
    assert load(str(directory), dtype="bfloat16", **options).module.lm_head.weight.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


def test_a_directory_on_meta_needs_no_weights(directory):
    (directory / "model.safetensors").unlink()
    loaded = load(str(directory), device="meta")
    assert {tensor.device.type for tensor in loaded.module.parameters()} == {"meta"}
    assert loaded.arguments[1]["input_ids"].device.type == "meta"

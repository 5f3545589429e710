"""Writes a Hugging Face directory with code of its own, of the form that the public MUDDPythia repositories have.

    python -m examples.mudd.directory OUT       the trained tiny model, in two shards

prepare.py has the function that `--prepare` names: the module needs caches before its first call.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from examples.mudd.model import HERE, TINY, Config, trained

HUB = HERE / "hub"
CODE = ("configuration_muddpythia.py", "modeling_muddpythia.py")


def settings(config: Config) -> dict[str, object]:
    """`config.json` under the names of the public checkpoints."""
    return {
        "architectures": ["MUDDPythia"],
        "auto_map": {
            "AutoConfig": "configuration_muddpythia.MUDDPythiaConfig",
            "AutoModelForCausalLM": "modeling_muddpythia.MUDDPythia",
        },
        "model_type": "muddpythia",
        "n_layer": config.layers,
        "dim": config.width,
        "n_head": config.heads,
        "intermediate_size": config.hidden,
        "vocab_size": config.vocabulary,
        "block_size": config.context,
        "norm_eps": config.eps,
        "rope_base": config.rotary_base,
        "rotary_pct": config.rotary_fraction,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def write(directory: Path, config: Config, state: dict[str, torch.Tensor], shards: int = 2) -> None:
    """Configuration, code, and the weights in `shards` files with their index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(settings(config), indent=2), encoding="utf-8")
    for name in CODE:
        shutil.copy(HUB / name, directory / name)
    placed: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: state[name].contiguous() for name in list(state)[i::shards]}
        save_file(part, directory / file)
        placed |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(v.nbytes for v in state.values())}, "weight_map": placed}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the trained tiny model as a directory with code of its own.")
    parser.add_argument("out", type=Path)
    model, _ = trained()
    write(parser.parse_args().out, TINY, model.state_dict())


if __name__ == "__main__":
    main()

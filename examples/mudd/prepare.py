"""What `--prepare` names for the public MUDDPythia checkpoints and their like: caches, without which they do not run.

The module writes every key and value into buffers that are made for one number of inputs. That number is the batch of
the audit, so it is that of the example, too; a last batch that is smaller is filled up.
"""

from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH = 8, 128


def caches(model: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model with caches for 8 inputs of 128 tokens, in the dtype of its weights, and 8 random inputs."""
    # No longer than need be: those of the 1.4B model for its whole context take 6 GB, and are kept several times.
    model.setup_caches(BATCH, LENGTH, dtype=model.output.weight.dtype)
    return model, {"idx": torch.randint(model.config.vocab_size, (BATCH, LENGTH))}

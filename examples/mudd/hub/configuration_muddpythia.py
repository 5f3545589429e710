"""The configuration of a MUDDPythia directory, under the names that the public checkpoints use."""

from typing import Any

from transformers import PretrainedConfig


class MUDDPythiaConfig(PretrainedConfig):
    model_type = "muddpythia"

    def __init__(
        self,
        n_layer: int = 24,
        dim: int = 2048,
        n_head: int = 16,
        intermediate_size: int = 8192,
        vocab_size: int = 50432,
        block_size: int = 2048,
        norm_eps: float = 1e-5,
        rope_base: float = 10000.0,
        rotary_pct: float = 0.25,
        tie_word_embeddings: bool = False,
        **others: Any,
    ) -> None:
        self.n_layer, self.dim, self.n_head, self.intermediate_size = n_layer, dim, n_head, intermediate_size
        self.vocab_size, self.block_size = vocab_size, block_size
        self.norm_eps, self.rope_base, self.rotary_pct = norm_eps, rope_base, rotary_pct
        super().__init__(tie_word_embeddings=tie_word_embeddings, **others)

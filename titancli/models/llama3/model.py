"""Llama 3: the model, and its Hugging Face form.

Source: The Llama 3 Herd of Models (arXiv 2407.21783).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from titancli.models.blocks.attention import Attention
from titancli.models.blocks.decoder import Block, Decoder
from titancli.models.blocks.feed_forward import FeedForward
from titancli.models.blocks.hf import (
    DecoderHF,
    llama3_rope_json,
)
from titancli.models.blocks.rope import inverse_frequencies
from titancli.models.llama3 import Llama3


class Llama3Model(Decoder):
    """Dense, with grouped-query attention, RoPE and SwiGLU."""

    def __init__(self, config: Llama3) -> None:
        def block(number: int) -> Block:
            attention = Attention(config.dim, config.n_heads, config.kv_heads, config.head_width)
            return Block(config.dim, config.norm_eps, attention, FeedForward(config.dim, config.hidden_dim))

        def frequencies() -> Tensor:
            return inverse_frequencies(config.head_width, config.rope_theta, config.rope_scaling)

        super().__init__(config, block, frequencies)


def build(config: Llama3, *, seq_len: int) -> Llama3Model:
    """The model on the current device, without initial values."""
    return Llama3Model(config)


class LlamaHF(DecoderHF):
    """transformers' LlamaForCausalLM. Names differ; values do not: both rotate pairs (i, i + head_dim/2)."""

    model_type = "llama"

    def config_json(self) -> dict[str, Any]:
        config = self.config
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": self.model_type,
            **self.decoder_json(),
            "intermediate_size": config.hidden_dim,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_width,
            "rope_scaling": llama3_rope_json(config.rope_scaling),
            "attention_bias": False,
            "mlp_bias": False,
        }

    from_config_json = staticmethod(Llama3.from_config_json)

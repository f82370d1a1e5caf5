"""Llama 3. Source: The Llama 3 Herd of Models (arXiv 2407.21783)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from annotated_types import Gt

from titancli.models.config_json import GROUPED, NO_BIAS, ROPE_SCALING, Key, RopeKeys, Table, decoder
from titancli.models.sections import BUILD, FORM, DecoderConfig, RopeScaling, sizes
from titancli.protocols.shape import Block
from titancli.registry.component import component

_LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}
_31: dict[str, Any] = {"vocab_size": 128256, "rope_scaling": _LLAMA31}
_32: dict[str, Any] = {"vocab_size": 128256, "rope_scaling": {**_LLAMA31, "factor": 32.0}}


@component("model", "llama3", target=BUILD, hf=FORM)
class Llama3(DecoderConfig):
    """Llama 3, 3.1 and 3.2: dense decoder, grouped-query attention, RoPE, SwiGLU."""

    hidden_dim: Annotated[int, Gt(0)]
    """Hidden dimension of the feed-forward block."""
    max_seq_len: Annotated[int, Gt(0)] = 131072
    rope_theta: Annotated[float, Gt(0)] = 500000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: Annotated[float, Gt(0)] = 1e-5

    hf_tables: ClassVar = {
        "llama": Table(
            "LlamaForCausalLM",
            *decoder(2048),
            *GROUPED,
            Key("hidden_dim", "intermediate_size"),
            RopeKeys(10000.0, "rope_scaling", "llama3", ROPE_SCALING),
            NO_BIAS,
            Key(None, "mlp_bias", only=False),
        )
    }
    model_types: ClassVar[tuple[str, ...]] = ("llama",)
    flavors: ClassVar[dict[str, dict[str, Any]]] = {
        "debugmodel": dict(
            dim=256, n_layers=6, n_heads=16, hidden_dim=768, vocab_size=2048, rope_scaling=_LLAMA31
        ),
        "1B": sizes(2048, 16, 32, 8, 8192, **_32, tied=True),
        "3B": sizes(3072, 28, 24, 8, 8192, **_32, tied=True),
        "8B": sizes(4096, 32, 32, 8, 14336, **_31),
        "70B": sizes(8192, 80, 64, 8, 28672, **_31),
        "405B": sizes(16384, 126, 128, 8, 53248, **_31),
    }

    def layer(self, number: int) -> Block:
        attention = self.attention(scaling=self.rope_scaling)
        return self.block(attention, self.feed_forward(self.hidden_dim))

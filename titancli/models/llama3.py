"""Llama 3. Source: The Llama 3 Herd of Models (arXiv 2407.21783)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from annotated_types import Gt

from titancli.models.config_json import GROUPED, NO_BIAS, ROPE_SCALING, Key, RopeKeys, Table, decoder
from titancli.models.sections import BUILD, FORM, DecoderConfig, RopeScaling
from titancli.models.shape import Block
from titancli.registry.component import component

_LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}
_LLAMA32 = {**_LLAMA31, "factor": 32.0}


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
        "1B": dict(
            dim=2048,
            n_layers=16,
            n_heads=32,
            n_kv_heads=8,
            hidden_dim=8192,
            vocab_size=128256,
            tied=True,
            rope_scaling=_LLAMA32,
        ),
        "3B": dict(
            dim=3072,
            n_layers=28,
            n_heads=24,
            n_kv_heads=8,
            hidden_dim=8192,
            vocab_size=128256,
            tied=True,
            rope_scaling=_LLAMA32,
        ),
        "8B": dict(
            dim=4096,
            n_layers=32,
            n_heads=32,
            n_kv_heads=8,
            hidden_dim=14336,
            vocab_size=128256,
            rope_scaling=_LLAMA31,
        ),
        "70B": dict(
            dim=8192,
            n_layers=80,
            n_heads=64,
            n_kv_heads=8,
            hidden_dim=28672,
            vocab_size=128256,
            rope_scaling=_LLAMA31,
        ),
        "405B": dict(
            dim=16384,
            n_layers=126,
            n_heads=128,
            n_kv_heads=8,
            hidden_dim=53248,
            vocab_size=128256,
            rope_scaling=_LLAMA31,
        ),
    }

    def layer(self, number: int) -> Block:
        attention = self.attention(scaling=self.rope_scaling)
        return self.block(attention, self.feed_forward(self.hidden_dim))

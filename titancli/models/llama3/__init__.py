"""Llama 3's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from annotated_types import Gt

from titancli.models.sections import DecoderConfig
from titancli.models.shape import Decoder, block, grouped_query, swiglu
from titancli.registry.component import component, section


@section
class RopeScaling:
    """RoPE scaling of Llama 3.1, for sequences beyond the original context length."""

    factor: Annotated[float, Gt(0)] = 8.0
    """Factor by which low frequencies are divided."""
    low_freq_factor: Annotated[float, Gt(0)] = 1.0
    """Wavelengths above original_max_position / this are scaled by the whole factor."""
    high_freq_factor: Annotated[float, Gt(0)] = 4.0
    """Wavelengths below original_max_position / this are left unchanged."""
    original_max_position: Annotated[int, Gt(0)] = 8192
    """Original context length, in tokens."""


_LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}
_LLAMA32 = {**_LLAMA31, "factor": 32.0}


@component(
    "model", "llama3", target="titancli.models.llama3.model:build", hf="titancli.models.llama3.model:LlamaHF"
)
class Llama3(DecoderConfig):
    """Llama 3, 3.1 and 3.2: dense decoder, grouped-query attention, RoPE, SwiGLU."""

    hidden_dim: Annotated[int, Gt(0)]
    """Hidden dimension of the feed-forward block."""
    max_seq_len: Annotated[int, Gt(0)] = 131072
    rope_theta: Annotated[float, Gt(0)] = 500000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: Annotated[float, Gt(0)] = 1e-5

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

    @staticmethod
    def from_config_json(config_json: Mapping[str, Any]) -> dict[str, Any]:
        """See `titancli.models.llama3.config_json`."""
        from titancli.models.llama3.config_json import read

        return read(config_json)

    def shape(self) -> Decoder:
        """The sizes of it all; see `titancli.models.shape`."""
        attention = grouped_query(self.dim, self.n_heads, self.kv_heads, self.head_width)
        one = block(self.dim, attention, swiglu(self.dim, self.hidden_dim))
        return Decoder(self.dim, self.vocab_size, (one,) * self.n_layers, tied=self.tied)

"""Granite 3 and 4.1, dense. Source: IBM's releases, as in transformers' GraniteForCausalLM.

A Llama with multipliers for embeddings, residual branches, attention and logits (in the manner of arXiv
2203.03466).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar

from annotated_types import Gt

from titancli.models.config_json import GROUPED, NO_BIAS, Key, RopeKeys, Table, alike, decoder
from titancli.models.sections import BUILD, FORM, DecoderConfig, sizes
from titancli.protocols.shape import Block, Decoder
from titancli.registry.component import component

_RELEASED: dict[str, Any] = {"tied": True, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
_3: dict[str, Any] = {**_RELEASED, "vocab_size": 49159}
_41: dict[str, Any] = {**_RELEASED, "vocab_size": 100352}
_64: dict[str, Any] = {"attention_multiplier": 0.015625}
_128: dict[str, Any] = {"attention_multiplier": 0.0078125, "logits_scaling": 16.0}
_30B: dict[str, Any] = {**_41, **_128, "residual_multiplier": 0.175, "rope_theta": 50000000.0}


@component("model", "granite", target=BUILD, hf=FORM)
class Granite(DecoderConfig):
    """Granite 3 and 4.1, dense: a Llama with multipliers for embeddings, branches, attention and logits."""

    hidden_dim: Annotated[int, Gt(0)]
    """Hidden dimension of the feed-forward block."""
    embedding_multiplier: Annotated[float, Gt(0)] = 1.0
    """Factor of embeddings."""
    residual_multiplier: Annotated[float, Gt(0)] = 1.0
    """Factor of the outputs of attention and feed-forward in the residual stream."""
    attention_multiplier: Annotated[float, Gt(0)] = 1.0
    """Factor of the products of queries and keys."""
    logits_scaling: Annotated[float, Gt(0)] = 1.0
    """Divisor of logits."""
    max_seq_len: Annotated[int, Gt(0)] = 131072
    rope_theta: Annotated[float, Gt(0)] = 10000000.0
    norm_eps: Annotated[float, Gt(0)] = 1e-5

    hf_tables: ClassVar = {
        "granite": Table(
            "GraniteForCausalLM",
            *decoder(2048),
            *GROUPED,
            Key("hidden_dim", "intermediate_size"),
            *alike(
                embedding_multiplier=1.0,
                residual_multiplier=1.0,
                attention_multiplier=1.0,
                logits_scaling=1.0,
            ),
            RopeKeys(10000.0),
            NO_BIAS,
            Key(None, "mlp_bias", only=False),
        )
    }
    model_types: ClassVar[tuple[str, ...]] = ("granite",)
    flavors: ClassVar[dict[str, dict[str, Any]]] = {
        "debugmodel": sizes(256, 4, 16, 4, 768, **_RELEASED, vocab_size=2048, attention_multiplier=0.0625),
        "3.3-2B": sizes(2048, 40, 32, 8, 8192, **_3, **_64, logits_scaling=8.0),
        "3.3-8B": sizes(4096, 40, 32, 8, 12800, **_3, **_128),
        "4.1-3B": sizes(2560, 40, 40, 8, 8192, **_41, **_64, logits_scaling=10.0),
        "4.1-8B": sizes(4096, 40, 32, 8, 12800, **_41, **_128),
        "4.1-30B": sizes(4096, 64, 32, 8, 32768, **_30B),
    }

    def layer(self, number: int) -> Block:
        return self.block(
            self.attention(scale=self.attention_multiplier),
            self.feed_forward(self.hidden_dim),
            residual_scale=self.residual_multiplier,
        )

    def shape(self) -> Decoder:
        scale = 1 / self.logits_scaling
        return replace(super().shape(), embedding_scale=self.embedding_multiplier, logit_scale=scale)

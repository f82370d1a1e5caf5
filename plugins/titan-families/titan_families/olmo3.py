"""OLMo 3. Source: Olmo 3 (Ai2, 2025), as in transformers' Olmo3ForCausalLM.

Unlike Llama 3, it has norms after attention and feed-forward (OLMo 2, arXiv 2501.00656), QK norms over all
heads together, a sliding window in three of four layers, and YaRN only in the fourth.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from annotated_types import Gt

from titancli.models.config_json import GROUPED, NO_BIAS, Key, RopeKeys, Table, decoder, windows, yarn_keys
from titancli.models.names import LAYER, QK_NORM, Names
from titancli.models.sections import BUILD, FORM, DecoderConfig, Yarn
from titancli.protocols.shape import Block
from titancli.registry.component import component

_RELEASED: dict[str, Any] = {
    "vocab_size": 100278,
    "rope_scaling": {"factor": 8.0, "original_max_position": 8192},
}


_FACTOR = Key(None, "attention_factor", only=lambda ours: Yarn(factor=ours["rope_scaling.factor"]).length)


@component("model", "olmo3", target=BUILD, hf=FORM)
class Olmo3(DecoderConfig):
    """OLMo 3: dense decoder with norms after its layers, sliding windows in three of four, SwiGLU."""

    hidden_dim: Annotated[int, Gt(0)]
    """Hidden dimension of the feed-forward block."""
    sliding_window: Annotated[int, Gt(0)] = 4096
    """Size of the sliding window, in tokens, in all layers but every fourth: a token attends to at most
    this many, itself included."""
    max_seq_len: Annotated[int, Gt(0)] = 65536
    rope_theta: Annotated[float, Gt(0)] = 500000.0
    rope_scaling: Yarn | None = None
    """RoPE scaling of the layers without a window; None: no scaling."""
    norm_eps: Annotated[float, Gt(0)] = 1e-6

    hf_tables: ClassVar = {
        "olmo3": Table(
            "Olmo3ForCausalLM",
            *decoder(2048, 1e-5),
            *GROUPED,
            RopeKeys(
                500000.0,
                "rope_scaling",
                "yarn",
                (*yarn_keys("rope_scaling"), _FACTOR),
                by_layer=True,
            ),
            # layers with a window use the default base, whatever config.json has
            Key("rope_theta", "rope_theta", read=lambda there, ours: ours["rope_theta"], only=500000.0),
            Key("hidden_dim", "intermediate_size"),
            Key("sliding_window", "sliding_window", 4096),
            windows(4),
            NO_BIAS,
        )
    }
    model_types: ClassVar[tuple[str, ...]] = ("olmo3",)
    flavors: ClassVar[dict[str, dict[str, Any]]] = {
        "debugmodel": dict(dim=256, n_layers=4, n_heads=16, n_kv_heads=4, hidden_dim=768, vocab_size=2048),
        "7B": dict(_RELEASED, dim=4096, n_layers=32, n_heads=32, hidden_dim=11008),
        "32B": dict(_RELEASED, dim=5120, n_layers=64, n_heads=40, n_kv_heads=8, hidden_dim=27648),
    }

    def hf_names(self) -> Names:
        norms = {
            "attention_norm.weight": "post_attention_layernorm.weight",
            "ffn_norm.weight": "post_feedforward_layernorm.weight",
        }
        return {**LAYER, **QK_NORM, **norms}

    def layer(self, number: int) -> Block:
        if (number + 1) % 4:
            attention = self.attention(qk_norm="whole", window=self.sliding_window)
        else:
            yarn = self.rope_scaling
            length = 1.0 if yarn is None else yarn.length
            attention = self.attention(qk_norm="whole", scaling=yarn, length=length)
        return self.block(attention, self.feed_forward(self.hidden_dim), norms="after")

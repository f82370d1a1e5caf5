"""Gemma 3, text only. Source: Gemma 3 Technical Report (arXiv 2503.19786), as in transformers.

Unlike Llama 3, it has norms with the factor 1 + weight before and after attention and feed-forward, GELU,
embeddings scaled by √dim, and in five of six layers a sliding window with its own RoPE base.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar

from annotated_types import Gt

from titancli.models.config_json import NO_BIAS, Key, RopeKeys, Table, alike, decoder, windows
from titancli.models.names import LAYER, QK_NORM, Names
from titancli.models.sections import BUILD, FORM, DecoderConfig, LinearScaling, sizes
from titancli.protocols.shape import Block, Decoder, Norm
from titancli.registry.component import component

_SMALL: dict[str, Any] = {"vocab_size": 262144, "sliding_window": 512}
_LARGE: dict[str, Any] = {"vocab_size": 262208, "max_seq_len": 131072, "rope_scaling": {"factor": 8.0}}
_GELU = ("hidden_activation", "gelu_pytorch_tanh")
_SCALING, _LOCAL = (
    Key("rope_scaling.factor", "factor"),
    Key("rope_local_theta", "rope_local_base_freq", 10000.0),
)


@component("model", "gemma3", target=BUILD, hf=FORM)
class Gemma3(DecoderConfig):
    """Gemma 3, text only: dense decoder with sliding windows in five of six layers, GeGLU."""

    head_dim: Annotated[int, Gt(0)] = 256
    """Dimension of a head."""
    hidden_dim: Annotated[int, Gt(0)]
    """Hidden dimension of the feed-forward block."""
    query_pre_attn_scalar: Annotated[int, Gt(0)] = 256
    """Products of queries and keys are divided by the square root of this."""
    sliding_window: Annotated[int, Gt(0)] = 1024
    """Size of the sliding window, in tokens, in all layers but every sixth: a token attends to at most
    this many, itself included."""
    logit_cap: Annotated[float, Gt(0)] | None = None
    """Logits are capped at ± this value with tanh; None: no cap."""
    max_seq_len: Annotated[int, Gt(0)] = 32768
    rope_theta: Annotated[float, Gt(0)] = 1000000.0
    rope_local_theta: Annotated[float, Gt(0)] = 10000.0
    """Base of the rotary frequencies in layers with a window."""
    rope_scaling: LinearScaling | None = None
    """RoPE scaling of the layers without a window; None: no scaling."""
    norm_eps: Annotated[float, Gt(0)] = 1e-6
    tied: bool = True

    hf_tables: ClassVar = {
        "gemma3_text": Table(
            "Gemma3ForCausalLM",
            *decoder(131072, activation=_GELU, tied=True, n_heads=8, vocab_size=262208),
            Key("n_kv_heads", "num_key_value_heads", 4),
            Key("hidden_dim", "intermediate_size"),
            *alike(head_dim=256, query_pre_attn_scalar=256, sliding_window=4096),
            windows(6),
            RopeKeys(1000000.0, "rope_scaling", "linear", (_SCALING,), by_layer=True, local=_LOCAL),
            Key(None, "sliding_window_pattern", only=6, written=False),
            Key("logit_cap", "final_logit_softcapping", None, nullable=True),
            Key(None, "attn_logit_softcapping", only=None),
            Key(None, "use_bidirectional_attention", only=False),
            NO_BIAS,
        )
    }
    model_types: ClassVar[tuple[str, ...]] = ("gemma3_text", "gemma3")
    text_part: ClassVar[str] = "language_model."
    other_parts: ClassVar[tuple[str, ...]] = ("vision_tower.", "multi_modal_projector.")
    flavors: ClassVar[dict[str, dict[str, Any]]] = {
        "debugmodel": sizes(256, 6, 4, 2, 768, head_dim=64, query_pre_attn_scalar=64, vocab_size=2048),
        "270M": sizes(640, 18, 4, 1, 2048, **_SMALL),
        "1B": sizes(1152, 26, 4, 1, 6912, **_SMALL),
        "4B": sizes(2560, 34, 8, 4, 10240, **_LARGE),
        "12B": sizes(3840, 48, 16, 8, 15360, **_LARGE),
        "27B": sizes(5376, 62, 32, 16, 21504, head_dim=128, query_pre_attn_scalar=168, **_LARGE),
    }

    def hf_names(self) -> Names:
        norms = {"attention_post_norm": "post_attention", "ffn_norm": "pre_feedforward"}
        norms |= {"ffn_post_norm": "post_feedforward"}
        return {**LAYER, **QK_NORM, **{f"{k}.weight": f"{v}_layernorm.weight" for k, v in norms.items()}}

    @property
    def norm(self) -> Norm:
        return Norm(self.norm_eps, zero_centred=True)

    def layer(self, number: int) -> Block:
        kind: dict[str, Any] = {"scaling": self.rope_scaling}
        if (number + 1) % 6:
            kind = {"theta": self.rope_local_theta, "window": self.sliding_window}
        attention = self.attention(qk_norm="head", scale=self.query_pre_attn_scalar**-0.5, **kind)
        return self.block(attention, self.feed_forward(self.hidden_dim, activation="gelu_tanh"), norms="both")

    def shape(self) -> Decoder:
        scale = {"embedding_scale": self.dim**0.5, "scales_within_embedding": True}
        return replace(super().shape(), **scale, logit_cap=self.logit_cap)

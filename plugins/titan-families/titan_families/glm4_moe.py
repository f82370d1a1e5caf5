"""GLM-4-MoE (GLM-4.5 and 4.6). Source: GLM-4.5 (arXiv 2508.06471), as in transformers' Glm4MoeForCausalLM.

DeepSeek-V3's experts with grouped-query attention, in which half of every head is rotated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le

from titan_families.mtp import MTP, MTP_KEY
from titancli.models.config_json import (
    GROUPED,
    SHARED_EXPERTS,
    STORED_BIAS,
    Key,
    RopeKeys,
    Table,
    decoder,
    expert_groups,
    routing,
)
from titancli.models.names import BIASES, EXPERT_BIAS, EXPERTS, LAYER, MTP_LAYER, QK_NORM, SHARED, Names
from titancli.models.sections import BUILD, FORM, DecoderConfig, MoE
from titancli.protocols.shape import Block
from titancli.registry.component import component

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe

_SIGMOID = {"score_func": "sigmoid", "route_norm": True, "score_before_experts": False}
_ROUTING = {**_SIGMOID, "top_k": 8, "num_shared_experts": 1, "load_balance_coeff": 1e-3}
_DEBUG: dict[str, Any] = {"dim": 256, "n_layers": 4, "n_heads": 16, "n_kv_heads": 4, "vocab_size": 2048}
_RELEASED: dict[str, Any] = {"n_heads": 96, "n_kv_heads": 8, "head_dim": 128, "vocab_size": 151552}
_ROWS: tuple[Any, ...] = (
    *routing(groups=True, score_func="sigmoid"),
    *decoder(131072, 1e-5),
    *GROUPED,
    RopeKeys(beside=(Key("partial_rotary_factor", "partial_rotary_factor", 0.5),)),
    Key("hidden_dim", "intermediate_size"),
    Key("n_dense_layers", "first_k_dense_replace", 1),
    *SHARED_EXPERTS,
    *expert_groups(1, 2),
    Key("moe.route_norm", "norm_topk_prob", True),
    Key("moe.route_scale", "routed_scaling_factor", 1.0),
    MTP_KEY,
    STORED_BIAS,
)


@component("model", "glm4_moe", target=BUILD, hf=FORM)
class Glm4Moe(DecoderConfig, MTP):
    """GLM-4.5 and 4.6: shared and routed experts, grouped-query attention with partial RoPE."""

    hidden_dim: Annotated[int, Gt(0)]
    """Hidden dimension of the feed-forward in the dense blocks, which come first."""
    n_dense_layers: Annotated[int, Ge(0)] = 1
    """Number of dense blocks."""
    moe: MoE
    """The mixture-of-experts layers of the other blocks."""
    qk_norm: bool = False
    """Apply RMS norm to every head's query and key."""
    attention_bias: bool = True
    """Add a bias to the projections of queries, keys and values."""
    partial_rotary_factor: Annotated[float, Gt(0), Le(1)] = 0.5
    """Fraction of a head's dimensions that RoPE rotates."""
    max_seq_len: Annotated[int, Gt(0)] = 131072
    rope_theta: Annotated[float, Gt(0)] = 1000000.0
    norm_eps: Annotated[float, Gt(0)] = 1e-5

    hf_tables: ClassVar = {
        "glm4_moe": Table(
            "Glm4MoeForCausalLM",
            *_ROWS,
            Key("qk_norm", "use_qk_norm", False),
            Key("attention_bias", "attention_bias", False),
        ),
        # GLM-4.5V: for text, the three positions of a token are equal.
        "glm4v_moe_text": Table(
            "Glm4MoeForCausalLM",
            *_ROWS,
            Key("qk_norm", "use_qk_norm", False, only=False),
            Key("attention_bias", "attention_bias", True),
            ignoring=("mrope_section",),
        ),
    }
    model_types: ClassVar[tuple[str, ...]] = (*hf_tables, "glm4v_moe")
    text_part: ClassVar[str] = "model.language_model."
    other_parts: ClassVar[tuple[str, ...]] = ("model.visual.",)
    flavors: ClassVar[dict[str, dict[str, Any]]] = {
        "debugmodel": dict(
            _DEBUG, hidden_dim=768, moe=dict(_ROUTING, num_experts=8, top_k=2, hidden_dim=256)
        ),
        "106B-A12B": dict(
            _RELEASED,
            dim=4096,
            n_layers=46,
            hidden_dim=10944,
            moe=dict(_ROUTING, num_experts=128, hidden_dim=1408),
        ),
        "355B-A32B": dict(
            _RELEASED,
            dim=5120,
            n_layers=92,
            hidden_dim=12288,
            n_dense_layers=3,
            qk_norm=True,
            moe=dict(_ROUTING, num_experts=160, hidden_dim=1536, route_scale=2.5),
        ),
    }

    def hf_names(self) -> Names:
        bias = {EXPERT_BIAS: "mlp.gate.e_score_correction_bias"}
        return {**LAYER, **BIASES, **QK_NORM, **EXPERTS, **SHARED, **MTP_LAYER, **bias}

    def layer(self, number: int) -> Block:
        attention = self.attention(
            share=self.partial_rotary_factor,
            bias="qkv" if self.attention_bias else "",
            qk_norm="head" if self.qk_norm else "",
        )
        dense = number < self.n_dense_layers
        return self.block(attention, self.feed_forward(self.hidden_dim) if dense else self.experts(self.moe))

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        rotated = int(self.head_width * self.partial_rotary_factor)
        if rotated % 2 or not rotated:
            message = f"RoPE rotates pairs, and partial_rotary_factor of head_dim is {rotated}"
            yield "partial_rotary_factor", message
        if self.n_dense_layers >= self.n_layers:
            yield "n_dense_layers", f"it leaves none of the {self.n_layers} layers with experts"

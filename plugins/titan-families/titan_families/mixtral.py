"""Mixtral. Source: Mixtral of Experts (arXiv 2401.04088).

A Llama with experts as feed-forward layers.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from annotated_types import Gt

from titancli.models.config_json import GROUPED, Key, RopeKeys, Table, decoder, routing
from titancli.models.names import GATE, LAYER, Names
from titancli.models.sections import BUILD, FORM, DecoderConfig, MoE
from titancli.protocols.shape import Block
from titancli.registry.component import component

_ROUTING = {"top_k": 2, "score_func": "softmax", "route_norm": True, "score_before_experts": False}
_8X: dict[str, Any] = {"n_kv_heads": 8, "vocab_size": 32000}


@component("model", "mixtral", target=BUILD, hf=FORM)
class Mixtral(DecoderConfig):
    """Mixtral: mixture of experts with grouped-query attention, RoPE and SwiGLU."""

    moe: MoE
    """The mixture-of-experts layers. The flavors do not set load_balance_coeff, because the Hugging Face
    format cannot store the bias that it updates."""
    sliding_window: Annotated[int, Gt(0)] | None = None
    """Size of the sliding window, in tokens: a token attends to at most this many, itself included; None:
    no window."""
    max_seq_len: Annotated[int, Gt(0)] = 32768
    rope_theta: Annotated[float, Gt(0)] = 1000000.0
    norm_eps: Annotated[float, Gt(0)] = 1e-5

    hf_tables: ClassVar = {
        "mixtral": Table(
            "MixtralForCausalLM",
            *decoder(131072, 1e-5),
            *GROUPED,
            RopeKeys(1000000.0),
            Key("sliding_window", "sliding_window", None, nullable=True),
            Key("moe.num_experts", "num_local_experts", also=("num_experts",)),
            Key("moe.top_k", "num_experts_per_tok", 2),
            Key("moe.hidden_dim", "intermediate_size"),
            Key(None, "output_router_logits", only=False),
            *routing(score_func="softmax", route_norm=True, num_shared_experts=0),
        )
    }
    model_types: ClassVar[tuple[str, ...]] = ("mixtral",)
    flavors: ClassVar[dict[str, dict[str, Any]]] = {
        "debugmodel": dict(
            dim=256,
            n_layers=4,
            n_heads=16,
            n_kv_heads=4,
            vocab_size=2048,
            moe=dict(_ROUTING, num_experts=8, hidden_dim=256),
        ),
        "8x7B": dict(
            _8X, dim=4096, n_layers=32, n_heads=32, moe=dict(_ROUTING, num_experts=8, hidden_dim=14336)
        ),
        "8x22B": dict(
            _8X,
            dim=6144,
            n_layers=56,
            n_heads=48,
            max_seq_len=65536,
            moe=dict(_ROUTING, num_experts=8, hidden_dim=16384),
        ),
    }

    def hf_names(self) -> Names:
        gate, experts = "block_sparse_moe.gate.weight", "block_sparse_moe.experts.{}.w%d.weight"
        return {**LAYER, GATE: gate, **{f"moe.experts.w{n}": experts % n for n in (1, 2, 3)}}

    def layer(self, number: int) -> Block:
        return self.block(self.attention(window=self.sliding_window), self.experts(self.moe))

"""Qwen 3, dense and mixture of experts: the model, and its Hugging Face form.

Source: Qwen3 Technical Report (arXiv 2505.09388). What it has beside Llama 3 is a norm of every head's query
and key, a head_dim apart from dim, and experts.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from titancli.models.blocks.attention import Attention
from titancli.models.blocks.decoder import Block, Decoder
from titancli.models.blocks.feed_forward import FeedForward
from titancli.models.blocks.hf import (
    LAYER,
    UnbalancedHF,
    refuse_other_routing,
)
from titancli.models.blocks.moe import MoE
from titancli.models.blocks.rope import inverse_frequencies
from titancli.models.qwen3 import Qwen3


class Qwen3Model(Decoder):
    """Dense, or with experts in every block."""

    def __init__(self, config: Qwen3) -> None:
        def block(number: int) -> Block:
            attention = Attention(
                config.dim,
                config.n_heads,
                config.kv_heads,
                config.head_dim,
                qk_norm_eps=config.norm_eps,
            )
            if config.moe is not None:
                return Block(config.dim, config.norm_eps, attention, MoE(config.dim, config.moe))
            dense = FeedForward(config.dim, config.hidden_dim or 0)
            return Block(config.dim, config.norm_eps, attention, dense)

        def frequencies() -> Tensor:
            return inverse_frequencies(config.head_dim, config.rope_theta, None)

        super().__init__(config, block, frequencies)


def build(config: Qwen3, *, seq_len: int) -> Qwen3Model:
    """The model on the current device, without initial values."""
    return Qwen3Model(config)


class Qwen3HF(UnbalancedHF):
    """transformers' Qwen3ForCausalLM and Qwen3MoeForCausalLM, whose files have every expert apart."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3", "qwen3_moe")
    layer: ClassVar = {
        **LAYER,
        "attention.q_norm.weight": "self_attn.q_norm.weight",
        "attention.k_norm.weight": "self_attn.k_norm.weight",
        "moe.router.gate.weight": "mlp.gate.weight",
    }
    expert: ClassVar = {
        "moe.experts.w1": "mlp.experts.{}.gate_proj.weight",
        "moe.experts.w2": "mlp.experts.{}.down_proj.weight",
        "moe.experts.w3": "mlp.experts.{}.up_proj.weight",
    }

    @property
    def model_type(self) -> str:
        return "qwen3" if self.config.moe is None else "qwen3_moe"

    def config_json(self) -> dict[str, Any]:
        config = self.config
        common = {
            "model_type": self.model_type,
            **self.decoder_json(),
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "rope_scaling": None,
            "attention_bias": False,
            "use_sliding_window": False,
        }
        if config.moe is None:
            return {
                "architectures": ["Qwen3ForCausalLM"],
                **common,
                "intermediate_size": config.hidden_dim,
            }
        return {"architectures": ["Qwen3MoeForCausalLM"], **common, **_experts_json(config)}

    from_config_json = staticmethod(Qwen3.from_config_json)


def _experts_json(config: Qwen3) -> dict[str, Any]:
    moe = config.moe
    if moe is None:
        return {}
    only = {
        "score_func": "softmax",
        "route_scale": 1.0,
        "score_before_experts": False,
        "gate_bias": False,
        "num_shared_experts": 0,
        "num_expert_groups": None,
    }
    refuse_other_routing(moe, "Qwen3-MoE", only)
    return {
        "moe_intermediate_size": moe.hidden_dim,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.route_norm,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
    }

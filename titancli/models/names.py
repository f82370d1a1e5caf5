"""The names of a decoder's parameters in transformers, and the differences between tensors, as data.
Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Swap:
    """Two dimensions are swapped."""

    first: int
    second: int


@dataclass(frozen=True)
class Pairs:
    """Along `dim`, pairs are adjacent there, (2i, 2i + 1), and half apart here, (i, i + half)."""

    dim: int = 0
    group: int | None = None
    """Size of the groups (heads) within which they are; None: all are one group."""
    last: int | None = None
    """Only this many at the end of a group are paired; None: all."""


@dataclass(frozen=True)
class Source:
    """The source of a parameter, and the steps that convert it from theirs to ours, in order."""

    theirs: str
    """Name within the block. With `{}`, for an expert's index: one tensor per expert, stacked here."""
    steps: tuple[Swap | Pairs, ...] = ()


Names = Mapping[str, str | Source]
"""By name within our block; a plain name is a source without steps."""

TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
}
"""Parameters outside of the blocks, unless a family's names differ."""
LAYER: Names = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}
QK_NORM: Names = {
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
}
BIASES: Names = {f"attention.w{name}.bias": f"self_attn.{name}_proj.bias" for name in "qkvo"}
GATE = "moe.router.gate.weight"
EXPERT_BIAS = "moe.expert_bias"
EXPERTS: Names = {
    GATE: "mlp.gate.weight",
    "moe.experts.w1": "mlp.experts.{}.gate_proj.weight",
    "moe.experts.w2": "mlp.experts.{}.down_proj.weight",
    "moe.experts.w3": "mlp.experts.{}.up_proj.weight",
}
SHARED: Names = {
    "moe.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "moe.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "moe.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
}
MTP_LAYER: Names = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "head_norm.weight": "shared_head.norm.weight",
}
MTP_COPIES = {"embed_tokens.weight": "tok_embeddings.weight", "shared_head.head.weight": "output.weight"}
"""Copies of the main model's parameters that folders have in each multi-token prediction layer."""
JOINED_EXPERTS = (
    "a folder of Qwen3-VL-MoE holds a layer's experts as single tensors (mlp.experts.gate_up_proj, "
    "down_proj), which titan does not read",
    "use a text release of the same sizes (Qwen3-30B-A3B, Qwen3-235B-A22B), or a dense Qwen3-VL",
)
"""Error and hint for such folders."""

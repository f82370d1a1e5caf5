"""Qwen3-Next, and the text models of Qwen 3.5. This file imports no torch.

Unlike Qwen 3, they have gated DeltaNet (arXiv 2412.06464) in most blocks, gates on attention (arXiv
2505.06708) and on a shared expert, RoPE on a part of each head, and norms with the factor 1 + weight. The
releases' multi-token prediction head is not included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Gt, Le

from titancli import component, hookimpl
from titancli.models.config_json import (
    GROUPED,
    NO_BIAS,
    ConfigJSON,
    Key,
    Ours,
    RopeKeys,
    Table,
    alike,
    decoder,
    routing,
)
from titancli.models.names import GATE, LAYER, QK_NORM, SHARED, Names
from titancli.models.sections import BUILD, DecoderConfig, MoE
from titancli.protocols.shape import Block, Experts, FeedForward, Norm, Spec

if TYPE_CHECKING:
    from titancli import Recipe

_ROUTING: dict[str, Any] = {
    "score_func": "softmax",
    "route_norm": True,
    "score_before_experts": False,
    "num_shared_experts": 1,
    "load_balance_coeff": 1e-3,
}
_DELTA = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_DEBUG: dict[str, Any] = dict(
    dim=128,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    head_dim=64,
    vocab_size=2048,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
)


def _layer_types(ours: Ours) -> list[str]:
    kinds, every = ("linear_attention", "full_attention"), ours["full_attention_interval"]
    return [kinds[(number + 1) % every == 0] for number in range(ours["n_layers"])]


def _interval(there: ConfigJSON, ours: Ours) -> int:
    types, interval = there.get("layer_types") or [], there.get("full_attention_interval", 4)
    if not types:
        return interval
    if "full_attention" in types:
        return types.index("full_attention") + 1
    return max(interval, ours["n_layers"] + 1)


def _gate(there: ConfigJSON, ours: Ours) -> str:
    """Read the gate of gated DeltaNet; swish is another name for silu."""
    return str(there.get("output_gate_type") or "swish").replace("silu", "swish")


def _shared(there: ConfigJSON, ours: Ours) -> int:
    width = there.get("shared_expert_intermediate_size", 512)
    if not width or width % ours["moe.hidden_dim"]:
        there.refuse("shared_expert_intermediate_size", width)
    return max(1, width // ours["moe.hidden_dim"])


_ROWS: tuple[Any, ...] = (
    *decoder(32768),
    *GROUPED,
    Key("head_dim", "head_dim", 256),
    RopeKeys(beside=(Key("partial_rotary_factor", "partial_rotary_factor", 0.25),)),
    NO_BIAS,
    Key(None, "use_sliding_window", only=False, written=False),
    Key(None, "attn_output_gate", only=True, written=False),
    Key(None, "output_gate_type", only="swish", written=False, read=_gate),
    Key("full_attention_interval", "full_attention_interval", read=_interval),
    Key(None, "layer_types", only=_layer_types),
    *alike(**_DELTA),
)
_EXPERTS: tuple[Any, ...] = (
    Key("moe.num_experts", "num_experts"),
    Key("moe.top_k", "num_experts_per_tok"),
    Key("moe.hidden_dim", "moe_intermediate_size"),
    Key(
        "moe.num_shared_experts",
        "shared_expert_intermediate_size",
        read=_shared,
        write=lambda ours: ours["moe.num_shared_experts"] * ours["moe.hidden_dim"],
    ),
    Key("moe.load_balance_coeff", None, 1e-3),
    Key(None, "output_router_logits", only=False),
    *routing(score_func="softmax"),
)
_IGNORED = (
    *("mrope_section", "mrope_interleaved"),  # for text, the three positions of a token are equal
    *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),  # of the head that is not included
    "mamba_ssm_dtype",  # states are fp32 here as well
)


@dataclass(frozen=True, kw_only=True)
class DeltaNet(Spec):
    """A gated DeltaNet layer (arXiv 2412.06464): each head of values keeps a matrix of `key_dim` x
    `value_dim`."""

    module: ClassVar[str] = "titan_qwen3_next.delta:GatedDeltaNet"
    key_heads: int
    heads: int
    """The number of value heads."""
    key_dim: int
    value_dim: int
    kernel: int
    """Tokens that the convolution covers."""
    norm_eps: float

    @property
    def mixed(self) -> int:
        """The number of elements of a token that pass the convolution."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    def flops(self, seq_len: int) -> float:
        """Return the FLOPs of forward and backward for one token, without those of its matrices: a head's
        matrix is read twice and written once. Products of chunks, which do the same in another order, need
        more."""
        return 18.0 * self.heads * self.key_dim * self.value_dim


@component("model", "qwen3_next", target=BUILD, hf="titan_qwen3_next.hf:GatedDeltaHF")
class Qwen3Next(DecoderConfig):
    """Qwen3-Next, and the text model of Qwen 3.5: gated DeltaNet, with attention in every n-th block.

    Feed-forward layers are dense, or experts with a gated shared expert.
    """

    head_dim: Annotated[int, Gt(0)] = 256
    """Dimension of a head of attention."""
    hidden_dim: Annotated[int, Gt(0)] | None = None
    """Hidden dimension of the feed-forward in a dense model."""
    moe: MoE | None = None
    """The mixture-of-experts layers, in place of the feed-forward; None: a dense model."""
    full_attention_interval: Annotated[int, Gt(0)] = 4
    """Every n-th block has attention, the others have gated DeltaNet."""
    partial_rotary_factor: Annotated[float, Gt(0), Le(1)] = 0.25
    """Fraction of an attention head's dimensions that RoPE rotates."""
    linear_num_key_heads: Annotated[int, Gt(0)] = 16
    """Number of query and key heads of gated DeltaNet."""
    linear_num_value_heads: Annotated[int, Gt(0)] = 32
    """Number of value heads of gated DeltaNet."""
    linear_key_head_dim: Annotated[int, Gt(0)] = 128
    """Dimension of a query or key head of gated DeltaNet."""
    linear_value_head_dim: Annotated[int, Gt(0)] = 128
    """Dimension of a value head of gated DeltaNet."""
    linear_conv_kernel_dim: Annotated[int, Gt(0)] = 4
    """Width of gated DeltaNet's short convolution, in tokens."""
    hf_layout: Literal["qwen3_next", "qwen3_5"] = "qwen3_next"
    """Hugging Face format that a model with experts is exported to; dense ones use Qwen 3.5's. Does not
    change what the model computes."""
    max_seq_len: Annotated[int, Gt(0)] = 4096
    rope_theta: Annotated[float, Gt(0)] = 10000000.0
    norm_eps: Annotated[float, Gt(0)] = 1e-6

    without_effect: ClassVar[tuple[str, ...]] = ("max_seq_len", "hf_layout")
    hf_tables: ClassVar = {
        "qwen3_next": Table(
            "Qwen3NextForCausalLM",
            *_ROWS,
            *_EXPERTS,
            Key("moe.route_norm", "norm_topk_prob", True),
            Key(None, "decoder_sparse_step", only=1),
            Key(None, "mlp_only_layers", only=[]),
            ignoring=(*_IGNORED, "intermediate_size"),
        ),
        "qwen3_5_moe_text": Table(
            "Qwen3_5MoeForCausalLM",
            *_ROWS,
            *_EXPERTS,
            Key("moe.route_norm", "norm_topk_prob", only=True, written=False),
            Key("hf_layout", None, "qwen3_5"),
            ignoring=(*_IGNORED, "intermediate_size"),
        ),
        "qwen3_5_text": Table(
            "Qwen3_5ForCausalLM", *_ROWS, Key("hidden_dim", "intermediate_size"), ignoring=_IGNORED
        ),
    }
    model_types: ClassVar[tuple[str, ...]] = (*hf_tables, "qwen3_5_moe", "qwen3_5")
    text_part: ClassVar[str] = "model.language_model."
    other_parts: ClassVar[tuple[str, ...]] = ("model.visual.", "mtp.")
    flavors: ClassVar[dict[str, dict[str, Any]]] = {
        "debugmodel": dict(_DEBUG, moe=dict(_ROUTING, num_experts=8, top_k=2, hidden_dim=64)),
        "debugmodel_dense": dict(_DEBUG, hidden_dim=256, tied=True),
        "80B-A3B": dict(
            dim=2048,
            n_layers=48,
            n_heads=16,
            n_kv_heads=2,
            vocab_size=151936,
            max_seq_len=262144,
            moe=dict(_ROUTING, num_experts=512, top_k=10, hidden_dim=512),
        ),
    }

    @property
    def model_type(self) -> str:
        if self.moe is None:
            return "qwen3_5_text"
        return "qwen3_next" if self.hf_layout == "qwen3_next" else "qwen3_5_moe_text"

    def hf_names(self) -> Names:
        return {
            **LAYER,
            **QK_NORM,
            GATE: "mlp.gate.weight",
            **{ours: str(name).replace("shared_experts", "shared_expert") for ours, name in SHARED.items()},
            "moe.shared_gate.weight": "mlp.shared_expert_gate.weight",
        }

    def has_attention(self, number: int) -> bool:
        """Return whether the block of this index has attention rather than gated DeltaNet."""
        return (number + 1) % self.full_attention_interval == 0

    def layer(self, number: int) -> Block:
        part: FeedForward | Experts = self.feed_forward(self.hidden_dim)
        if self.moe is not None:
            part = self.experts(self.moe, joined=True, shared_gate=True)
        if self.has_attention(number):
            attention = self.attention(qk_norm="head", gated=True, share=self.partial_rotary_factor)
            return self.block(attention, part)
        delta = DeltaNet(
            dim=self.dim,
            key_heads=self.linear_num_key_heads,
            heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            kernel=self.linear_conv_kernel_dim,
            norm_eps=self.norm_eps,
        )
        return self.block(delta, part)

    @property
    def norm(self) -> Norm:
        return Norm(self.norm_eps, zero_centred=True)

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        if (self.hidden_dim is None) == (self.moe is None):
            yield (
                "hidden_dim",
                "set hidden_dim for a dense model or moe.hidden_dim for a model with experts, not both",
            )
        if self.moe is not None and not self.moe.num_shared_experts:
            yield "moe.num_shared_experts", "qwen3_next has a shared expert in each layer"
        rotated = int(self.head_dim * self.partial_rotary_factor)
        if rotated % 2 or not rotated:
            message = f"RoPE rotates pairs, and partial_rotary_factor of head_dim is {rotated}"
            yield "partial_rotary_factor", message
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if values % keys:
            yield (
                "linear_num_value_heads",
                f"linear_num_value_heads {values} is not divisible by linear_num_key_heads {keys}",
            )
        ranks = recipe.mesh.tp * recipe.mesh.cp
        if ranks > 1 and keys % ranks:
            yield (
                "linear_num_key_heads",
                f"gated DeltaNet is sharded by heads: mesh.tp x mesh.cp = {ranks} does not divide "
                f"linear_num_key_heads {keys}",
            )


@hookimpl
def titan_components() -> list[type]:
    return [Qwen3Next]


@hookimpl
def titan_recipes() -> Path:
    return Path(__file__).parent / "recipes"


__all__ = ["DeltaNet", "Qwen3Next"]

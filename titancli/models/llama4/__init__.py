"""Llama 4's config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Gt

from titancli.models.llama3 import RopeScaling
from titancli.models.sections import DecoderConfig, MoE
from titancli.models.shape import Block, Decoder, block, grouped_query, swiglu
from titancli.registry.component import component, section

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe


@section
class AttnTemperature:
    """Sharper attention for queries that see much (arXiv 2501.19399, as Llama 4 has it): they are multiplied
    by 1 + attn_scale · ln(1 + ⌊(position + 1) / floor_scale⌋)."""

    floor_scale: Annotated[int, Gt(0)] = 8192
    """Number of positions per step of the floor."""
    attn_scale: Annotated[float, Gt(0)] = 0.1
    """Factor of the logarithm."""


_ROUTING = {
    "top_k": 1,
    "score_func": "sigmoid",
    "score_before_experts": True,
    "num_shared_experts": 1,
    "load_balance_coeff": 1e-3,
}
_ROPE = {"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0, "original_max_position": 8192}
_DEBUG = dict(
    dim=256,
    n_layers=6,
    n_heads=16,
    hidden_dim=768,
    vocab_size=2048,
    interleave_moe_layer_step=2,
    rope_scaling=_ROPE,
    moe=dict(_ROUTING, num_experts=8, hidden_dim=512),
)
_17B = dict(dim=5120, n_layers=48, n_heads=40, n_kv_heads=8, vocab_size=202048)
_IROPE = dict(every_n_layers_nope=4, fixed_attn_block_size=8192, attn_temperature={})
_16E = dict(
    _17B,
    **_IROPE,
    qk_norm=True,
    max_seq_len=10485760,
    rope_scaling=_ROPE,
    moe=dict(_ROUTING, num_experts=16, hidden_dim=8192),
)
_128E = dict(
    _17B,
    **_IROPE,
    hidden_dim=16384,
    interleave_moe_layer_step=2,
    moe=dict(_ROUTING, num_experts=128, hidden_dim=8192),
)


@component(
    "model", "llama4", target="titancli.models.llama4.model:build", hf="titancli.models.llama4.model:Llama4HF"
)
class Llama4(DecoderConfig):
    """Llama 4, text only: mixture of experts with a shared expert, chunked attention, NoPE layers (iRoPE).

    17bx16e and 17bx128e, with or without `_irope`, are Meta's Scout and Maverick as released: chunked
    attention, blocks without RoPE that have an attention temperature, and in Scout QK norms.
    """

    hidden_dim: Annotated[int, Gt(0)] | None = None
    """Hidden dimension of the feed-forward in dense blocks; None: every block is MoE."""
    moe: MoE
    """The mixture-of-experts layers."""
    interleave_moe_layer_step: Annotated[int, Gt(0)] = 1
    """Every n-th block is MoE."""
    every_n_layers_nope: Annotated[int, Gt(0)] | None = None
    """Every n-th block has no RoPE; None: all blocks have it."""
    fixed_attn_block_size: Annotated[int, Gt(0)] | None = None
    """Chunk size of attention in blocks with RoPE, in tokens: a token attends only to its own chunk; None:
    full causal attention."""
    qk_norm: bool = False
    """Apply RMS norm without weights to queries and keys after RoPE, in the blocks that have RoPE."""
    attn_temperature: AttnTemperature | None = None
    """Attention temperature of blocks without RoPE, by position; None: no temperature."""
    max_seq_len: Annotated[int, Gt(0)] = 1048576
    rope_theta: Annotated[float, Gt(0)] = 500000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: Annotated[float, Gt(0)] = 1e-5

    model_types: ClassVar[tuple[str, ...]] = ("llama4_text", "llama4")
    flavors: ClassVar[dict[str, dict[str, Any]]] = {
        "debugmodel": _DEBUG,
        "debugmodel_irope": dict(_DEBUG, every_n_layers_nope=4, fixed_attn_block_size=256),
        "17bx16e": _16E,
        "17bx16e_irope": _16E,
        "17bx128e": _128E,
        "17bx128e_irope": _128E,
    }

    def has_experts(self, number: int) -> bool:
        """Whether the block of this number (from 0) has experts."""
        return (number + 1) % self.interleave_moe_layer_step == 0

    def has_rope(self, number: int) -> bool:
        """Whether the block of this number (from 0) has RoPE."""
        return self.every_n_layers_nope is None or (number + 1) % self.every_n_layers_nope != 0

    @staticmethod
    def from_config_json(config_json: Mapping[str, Any]) -> dict[str, Any]:
        """See `titancli.models.llama4.config_json`; what no `config.json` says is as it was released."""
        from titancli.models.llama4.config_json import read

        keys = read(config_json)
        return {**keys, "moe": {**_ROUTING, **keys["moe"]}}

    def shape(self) -> Decoder:
        """The sizes of it all; see `titancli.models.shape`."""
        whole = grouped_query(self.dim, self.n_heads, self.kv_heads, self.head_width)
        nope = replace(whole, rotary=False, scaled=self.attn_temperature is not None)
        rope = replace(whole, chunk=self.fixed_attn_block_size, norm_after=self.qk_norm)
        dense = swiglu(self.dim, self.hidden_dim or 0)
        experts = self.moe.shape(self.dim, joined=True)
        made: dict[tuple[bool, bool], Block] = {}  # blocks that are alike are one, and computed once

        def kind(number: int) -> Block:
            key = (self.has_rope(number), self.has_experts(number))
            if key not in made:
                made[key] = block(self.dim, rope if key[0] else nope, experts if key[1] else dense)
            return made[key]

        return Decoder(self.dim, self.vocab_size, tuple(map(kind, range(self.n_layers))), tied=self.tied)

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        step = self.interleave_moe_layer_step
        if step > self.n_layers:
            message = f"none of the {self.n_layers} blocks would have experts"
            yield "interleave_moe_layer_step", message
        if step > 1 and self.hidden_dim is None:
            yield "hidden_dim", "blocks without experts (interleave_moe_layer_step) need a hidden_dim"
        if step == 1 and self.hidden_dim is not None:
            yield "hidden_dim", "every block has experts, whose width is moe.hidden_dim: remove hidden_dim"
        if self.attn_temperature is not None and self.every_n_layers_nope is None:
            yield (
                "attn_temperature",
                "it applies to blocks without RoPE, but there are none: see every_n_layers_nope",
            )
        for key, message in self.moe.problems():
            yield f"moe.{key}", message

    @property
    def n_experts(self) -> int:
        """What mesh.ep must divide."""
        return self.moe.num_experts

"""Llama 4's text model. Source: Meta's release (Scout, Maverick), as in transformers' Llama4ForCausalLM.

Unlike Llama 3, it has experts, one of them shared, and chunked attention between blocks that see whole rows
without RoPE (iRoPE) but with an attention temperature (arXiv 2501.19399).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Gt

from titancli.models.config_json import (
    GROUPED,
    NO_BIAS,
    ROPE_SCALING,
    ConfigJSON,
    Key,
    Ours,
    RopeKeys,
    Table,
    decoder,
    routing,
)
from titancli.models.names import LAYER, SHARED, Names, Pairs, Source, Swap
from titancli.models.sections import BUILD, FORM, AttnTemperature, DecoderConfig, MoE, RopeScaling
from titancli.protocols.shape import Block
from titancli.registry.component import component

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe


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


def _every(n: int | None, layers: int) -> list[bool]:
    """Return which layers are an n-th, by layer."""
    return [n is not None and (number + 1) % n == 0 for number in range(layers)]


def _ropes(ours: Ours) -> list[bool]:
    """Return which layers have RoPE, by layer."""
    return [not nope for nope in _every(ours["every_n_layers_nope"], ours["n_layers"])]


def _experts(ours: Ours) -> list[int]:
    """Return the layers with experts."""
    every = _every(ours["interleave_moe_layer_step"], ours["n_layers"])
    return [number for number, one in enumerate(every) if one]


def _read_step(there: ConfigJSON, ours: Ours) -> int:
    layers = there.get("moe_layers")
    if layers is None:
        return there.get("interleave_moe_layer_step", 1)
    if not layers:
        there.refuse("moe_layers", layers)  # no layer with experts, but every Llama 4 model has some
    return min(layers, default=0) + 1


def _read_nope(there: ConfigJSON, ours: Ours) -> int | None:
    interval = there.get("no_rope_layer_interval", 4)
    ropes = there.get("no_rope_layers") or [not nope for nope in _every(interval, ours["n_layers"])]
    return None if all(ropes) else [bool(rope) for rope in ropes].index(False) + 1


def _read_chunk(there: ConfigJSON, ours: Ours) -> int | None:
    chunked = "chunked_attention" in (there.get("layer_types") or ["chunked_attention"])
    return there.get("attention_chunk_size", 8192) if chunked else None


def _temperature(key: str, default: float) -> Key:
    def read(there: ConfigJSON, ours: Ours) -> Any:
        tuned = there.get("attn_temperature_tuning", True) and ours["every_n_layers_nope"] is not None
        return there.get(key, default) if tuned else None

    return Key(f"attn_temperature.{key}", key, read=read)


def _layer_types(ours: Ours) -> list[str]:
    chunks = ours["fixed_attn_block_size"] is not None
    return ["chunked_attention" if rope and chunks else "full_attention" for rope in _ropes(ours)]


_TABLE = Table(
    "Llama4ForCausalLM",
    *decoder(131072, 1e-5),
    *GROUPED,
    RopeKeys(500000.0, "rope_scaling", "llama3", ROPE_SCALING),
    NO_BIAS,
    Key("qk_norm", "use_qk_norm", True),
    Key("moe.num_experts", "num_local_experts"),
    Key("moe.top_k", "num_experts_per_tok", 1),
    Key("moe.hidden_dim", "intermediate_size"),
    Key("moe.load_balance_coeff", None, 1e-3),
    *routing(score_func="sigmoid", route_norm=False, score_before_experts=True, num_shared_experts=1),
    Key("interleave_moe_layer_step", "interleave_moe_layer_step", read=_read_step),
    Key(None, "moe_layers", only=_experts),
    Key(
        "hidden_dim",
        "intermediate_size_mlp",
        read=lambda there, ours: (
            there.get("intermediate_size_mlp", 16384) if ours["interleave_moe_layer_step"] > 1 else None
        ),
    ),
    Key("every_n_layers_nope", None, read=_read_nope),
    Key(
        None,
        "no_rope_layers",
        only=_ropes,
        read=lambda there, ours: there.get("no_rope_layers") or _ropes(ours),
        write=lambda ours: list(map(int, _ropes(ours))),
    ),
    # transformers needs a number, used or not
    Key(
        "fixed_attn_block_size",
        "attention_chunk_size",
        read=_read_chunk,
        write=lambda ours: ours["fixed_attn_block_size"] or ours["max_seq_len"],
    ),
    Key(None, "layer_types", only=_layer_types),
    Key(None, "attn_temperature_tuning", True, write=lambda ours: ours["attn_temperature"] is not None),
    _temperature("floor_scale", 8192),
    _temperature("attn_scale", 0.1),
    # only used where the lists are missing
    ignoring=("no_rope_layer_interval", "intermediate_size_mlp", "floor_scale", "attn_scale"),
)


@component("model", "llama4", target=BUILD, hf=FORM)
class Llama4(DecoderConfig):
    """Llama 4, text only: mixture of experts with a shared expert, chunked attention, NoPE layers (iRoPE).

    17bx16e and 17bx128e, with or without `_irope`, are Meta's Scout and Maverick as released: chunked
    attention, blocks without RoPE but with an attention temperature, and in Scout QK norms.
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

    hf_tables: ClassVar = {"llama4_text": _TABLE}
    model_types: ClassVar[tuple[str, ...]] = ("llama4_text", "llama4")
    text_part: ClassVar[str] = "language_model."
    other_parts: ClassVar[tuple[str, ...]] = ("vision_model.", "multi_modal_projector.")
    flavors: ClassVar[dict[str, dict[str, Any]]] = {
        "debugmodel": _DEBUG,
        "debugmodel_irope": dict(_DEBUG, every_n_layers_nope=4, fixed_attn_block_size=256),
        "17bx16e": _16E,
        "17bx16e_irope": _16E,
        "17bx128e": _128E,
        "17bx128e_irope": _128E,
    }

    def has_experts(self, number: int) -> bool:
        """Return whether the block of this index has experts."""
        return (number + 1) % self.interleave_moe_layer_step == 0

    def has_rope(self, number: int) -> bool:
        """Return whether the block of this index has RoPE."""
        return self.every_n_layers_nope is None or (number + 1) % self.every_n_layers_nope != 0

    def hf_names(self) -> Names:
        # Also without RoPE, where the order does not change the products of queries and keys.
        return {
            **{ours: str(theirs).replace("mlp.", "feed_forward.") for ours, theirs in LAYER.items()},
            "attention.wq.weight": Source("self_attn.q_proj.weight", (Pairs(group=self.head_width),)),
            "attention.wk.weight": Source("self_attn.k_proj.weight", (Pairs(group=self.head_width),)),
            "moe.router.gate.weight": "feed_forward.router.weight",
            "moe.experts.w13": Source("feed_forward.experts.gate_up_proj", (Swap(1, 2),)),
            "moe.experts.w2": Source("feed_forward.experts.down_proj", (Swap(1, 2),)),
            **{
                ours: str(theirs).replace("mlp.shared_experts", "feed_forward.shared_expert")
                for ours, theirs in SHARED.items()
            },
        }

    def layer(self, number: int) -> Block:
        rope = self.has_rope(number)
        attention = self.attention(
            scaling=self.rope_scaling,
            rotary=rope,
            chunk=self.fixed_attn_block_size if rope else None,
            norm_after=rope and self.qk_norm,
            temperature=None if rope else self.attn_temperature,
        )
        if self.has_experts(number):
            return self.block(attention, self.experts(self.moe, joined=True))
        return self.block(attention, self.feed_forward(self.hidden_dim))

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

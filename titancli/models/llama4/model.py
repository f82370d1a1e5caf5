"""Llama 4's text model, and its Hugging Face form.

Source: Meta's release of Llama 4 (Scout, Maverick), as in transformers' Llama4ForCausalLM. What it has beside
Llama 3 is experts, one of them shared, chunks between blocks that see whole rows and have no RoPE (iRoPE),
and there a temperature (arXiv 2501.19399).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import rms_norm, silu

from titancli.models.blocks.attention import Attention
from titancli.models.blocks.decoder import Block, Decoder
from titancli.models.blocks.feed_forward import FeedForward
from titancli.models.blocks.grouped import grouped_linear
from titancli.models.blocks.hf import (
    LAYER,
    UnbalancedHF,
    llama3_rope_json,
    refuse_other_routing,
)
from titancli.models.blocks.moe import Experts, MoE
from titancli.models.blocks.reach import WHOLE, Reach
from titancli.models.blocks.rope import inverse_frequencies
from titancli.models.llama4 import Llama4


class Llama4Attention(Attention):
    """With RoPE within chunks or, without it, over the whole row."""

    def __init__(self, config: Llama4, number: int) -> None:
        self.rope = config.has_rope(number)
        reach = Reach(chunk=config.fixed_attn_block_size) if self.rope else WHOLE
        super().__init__(config.dim, config.n_heads, config.kv_heads, config.head_width, reach=reach)
        self.norm_eps = config.norm_eps if config.qk_norm else None
        self.has_temperature = config.attn_temperature is not None
        if self.has_temperature and not self.rope:
            self.angles = "temperature"

    def place(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """As of `Attention`; without RoPE `cos` is what queries are multiplied by, if they are."""
        if self.rope:
            q, k = super().place(q, k, cos, sin)
            return (q, k) if self.norm_eps is None else (self._normed(q), self._normed(k))
        return ((q * cos).to(q.dtype), k) if self.has_temperature else (q, k)

    def _normed(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], eps=self.norm_eps)


class Llama4Experts(Experts):
    """SwiGLU experts whose first two matrices are one, as in the family's files: the gate's rows first."""

    @staticmethod
    def shapes(dim: int, hidden_dim: int) -> dict[str, tuple[int, ...]]:
        return {"w13": (2 * hidden_dim, dim), "w2": (dim, hidden_dim)}

    def compute(self, x: Tensor, counts: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        ends = counts.cumsum(0).int()
        gate, up = grouped_linear(x, weights["w13"], ends).chunk(2, -1)
        return grouped_linear(silu(gate) * up, weights["w2"], ends)


class Llama4Model(Decoder):
    """Blocks with and without experts, with and without RoPE."""

    def __init__(self, config: Llama4) -> None:
        def block(number: int) -> Block:
            branch = (
                MoE(config.dim, config.moe, Llama4Experts)
                if config.has_experts(number)
                else FeedForward(config.dim, config.hidden_dim or 0)
            )
            return Block(config.dim, config.norm_eps, Llama4Attention(config, number), branch)

        def frequencies() -> Tensor:
            return inverse_frequencies(config.head_width, config.rope_theta, config.rope_scaling)

        super().__init__(config, block, frequencies)
        self.temperature = config.attn_temperature

    def angles(self, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Beside "rope" the "temperature" of queries, [B or 1, S, 1, 1] fp32, in both places."""
        found = super().angles(positions)
        if self.temperature is not None:
            # What pads a row in front has positions below 0, of which there would be no logarithm.
            steps = ((positions.clamp(min=0) + 1) // self.temperature.floor_scale).float()
            scale = (steps.log1p() * self.temperature.attn_scale + 1)[..., None, None]
            found["temperature"] = scale, scale
        return found


def build(config: Llama4, *, seq_len: int) -> Llama4Model:
    """The model on the current device, without initial values."""
    return Llama4Model(config)


_ROUTING = {
    "score_func": "sigmoid",
    "route_norm": False,
    "route_scale": 1.0,
    "score_before_experts": True,
    "gate_bias": False,
    "num_shared_experts": 1,
    "num_expert_groups": None,
}
TEXT = "language_model."
"""What stands before the text model's names in a folder that sees images too."""
IMAGES = ("vision_model.", "multi_modal_projector.")


class Llama4HF(UnbalancedHF):
    """transformers' Llama4ForCausalLM, and the text model of Llama4ForConditionalGeneration.

    Experts are stacked, their matrices transposed, the first two one. Pairs that RoPE rotates are neighbours
    there and half a head apart here, so rows of queries and keys change places; without RoPE, where that
    changes no product of the two, as well.
    """

    model_type = "llama4_text"
    model_types: ClassVar[tuple[str, ...]] = ("llama4_text", "llama4")
    layer: ClassVar = {
        **{ours: theirs.replace("mlp.", "feed_forward.") for ours, theirs in LAYER.items()},
        "moe.router.gate.weight": "feed_forward.router.weight",
        "moe.experts.w13": "feed_forward.experts.gate_up_proj",
        "moe.experts.w2": "feed_forward.experts.down_proj",
        "moe.shared_experts.w1.weight": "feed_forward.shared_expert.gate_proj.weight",
        "moe.shared_experts.w2.weight": "feed_forward.shared_expert.down_proj.weight",
        "moe.shared_experts.w3.weight": "feed_forward.shared_expert.up_proj.weight",
    }

    def to_hf(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        return [(hf_name, self._turned(name, x, (2, -1))) for hf_name, x in super().to_hf(name, tensor)]

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        return self._turned(name, super().from_hf(name, tensors), (-1, 2))

    def _turned(self, name: str, x: Tensor, halves: tuple[int, int]) -> Tensor:
        """`halves`: how the rows of a head are divided before the two numbers change places."""
        if ".experts." in name:
            return x.transpose(1, 2).contiguous()
        if name.endswith(("attention.wq.weight", "attention.wk.weight")):
            heads = x.unflatten(0, (-1, self.config.head_width)).unflatten(1, halves)
            return heads.transpose(1, 2).reshape(x.shape)
        return x

    @staticmethod
    def known_as(hf_name: str) -> str:
        """The name in a folder of the text model alone."""
        return hf_name.removeprefix(TEXT)

    def ignored(self, hf_name: str) -> bool:
        return hf_name.startswith(IMAGES) or super().ignored(hf_name)

    def config_json(self) -> dict[str, Any]:
        config = self.config
        refuse_other_routing(config.moe, "Llama 4", _ROUTING)
        numbers = range(config.n_layers)
        chunk, temperature = config.fixed_attn_block_size, config.attn_temperature
        local = [chunk is not None and config.has_rope(number) for number in numbers]
        found = {
            "architectures": ["Llama4ForCausalLM"],
            "model_type": self.model_type,
            **self.decoder_json(),
            "intermediate_size": config.moe.hidden_dim,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_width,
            "rope_scaling": llama3_rope_json(config.rope_scaling),
            "attention_bias": False,
            "num_local_experts": config.moe.num_experts,
            "num_experts_per_tok": config.moe.top_k,
            "interleave_moe_layer_step": config.interleave_moe_layer_step,
            "moe_layers": [number for number in numbers if config.has_experts(number)],
            "no_rope_layers": [int(config.has_rope(number)) for number in numbers],
            "layer_types": ["chunked_attention" if seen else "full_attention" for seen in local],
            # transformers wants a number, used or not.
            "attention_chunk_size": chunk or config.max_seq_len,
            "use_qk_norm": config.qk_norm,
            "attn_temperature_tuning": temperature is not None,
        }
        if config.hidden_dim is not None:
            found["intermediate_size_mlp"] = config.hidden_dim
        if temperature is not None:
            found |= {"floor_scale": temperature.floor_scale, "attn_scale": temperature.attn_scale}
        return found

    from_config_json = staticmethod(Llama4.from_config_json)

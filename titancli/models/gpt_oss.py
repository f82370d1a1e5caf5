"""gpt-oss. Source: gpt-oss-120b & gpt-oss-20b Model Card (arXiv 2508.10925).

Unlike a Llama with experts, it has biases, a sink in every head, a sliding window in every other layer, YaRN,
and a clamped SwiGLU in its experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Gt

from titancli.models.config_json import (
    GROUPED,
    Key,
    RopeKeys,
    Table,
    alike,
    decoder,
    routing,
    windows,
    yarn_keys,
)
from titancli.models.names import BIASES, LAYER, Names, Pairs, Source, Swap
from titancli.models.sections import BUILD, FORM, DecoderConfig, MoE, Yarn
from titancli.protocols.shape import Block
from titancli.registry.component import component

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe

_YARN = {"factor": 32.0, "original_max_position": 4096, "truncate": False}
_ROUTING = {
    "hidden_dim": 2880,
    "top_k": 4,
    "score_func": "softmax",
    "route_norm": True,
    "score_before_experts": False,
    "gate_bias": True,
}
# No load_balance_coeff: the released models have no such bias, and a Hugging Face folder has no place for it.
_COMMON: dict[str, Any] = {"n_heads": 64, "n_kv_heads": 8, "yarn": _YARN}


@component("model", "gpt_oss", target=BUILD, hf=FORM)
class GptOss(DecoderConfig):
    """gpt-oss: experts with biases, attention sinks, and a sliding window in every other layer."""

    head_dim: Annotated[int, Gt(0)] = 64
    """Dimension of a head."""
    moe: MoE
    """The mixture-of-experts layers. Experts have biases and a clamped SwiGLU. The flavors do not set
    load_balance_coeff, because the Hugging Face format cannot store the bias that it updates."""
    sliding_window: Annotated[int, Gt(0)] = 128
    """Size of the sliding window in layers 1, 3, …, in tokens: a token attends to at most this many, itself
    included."""
    swiglu_alpha: Annotated[float, Gt(0)] = 1.702
    """Factor of the gate inside its sigmoid."""
    swiglu_limit: Annotated[float, Gt(0)] = 7.0
    """Clamping bound of SwiGLU: the gate is clamped from above, the linear part to ± this value."""
    max_seq_len: Annotated[int, Gt(0)] = 131072
    rope_theta: Annotated[float, Gt(0)] = 150000.0
    yarn: Yarn | None = None
    """RoPE scaling beyond the original context; None: no scaling."""
    norm_eps: Annotated[float, Gt(0)] = 1e-5

    hf_tables: ClassVar = {
        "gpt_oss": Table(
            "GptOssForCausalLM",
            *decoder(131072, 1e-5),
            *GROUPED,
            *alike(head_dim=lambda ours: 64, sliding_window=128, swiglu_alpha=1.702, swiglu_limit=7.0),
            # without RoPE keys, transformers uses gpt-oss's own values
            RopeKeys(
                150000.0,
                "yarn",
                "yarn",
                yarn_keys("yarn", lambda ours: ours["max_seq_len"]),
                plain={"rope_type": "default"},
                unsaid=_YARN,
            ),
            Key("moe.num_experts", "num_local_experts", also=("num_experts",)),
            Key("moe.top_k", "num_experts_per_tok", also=("experts_per_token",)),
            Key("moe.hidden_dim", "intermediate_size"),
            Key(None, "attention_bias", only=True),
            windows(2),
            Key(None, "output_router_logits", only=False),
            *routing(score_func="softmax", route_norm=True, gate_bias=True, num_shared_experts=0),
            ignoring=("initial_context_length",),  # repeated by YaRN's own keys
        )
    }
    model_types: ClassVar[tuple[str, ...]] = ("gpt_oss",)
    flavors: ClassVar[dict[str, dict[str, Any]]] = {
        "debugmodel": dict(_COMMON, dim=256, n_layers=4, vocab_size=2048, moe=dict(_ROUTING, num_experts=8)),
        "20b": dict(_COMMON, dim=2880, n_layers=24, vocab_size=201088, moe=dict(_ROUTING, num_experts=32)),
        "120b": dict(_COMMON, dim=2880, n_layers=36, vocab_size=201088, moe=dict(_ROUTING, num_experts=128)),
    }

    def hf_names(self) -> Names:
        return {
            **LAYER,
            **BIASES,
            "attention.sinks": "self_attn.sinks",
            "moe.router.gate.weight": "mlp.router.weight",
            "moe.router.gate.bias": "mlp.router.bias",
            # Gate and up are concatenated here, interleaved there; [E, out, in] here, [E, in, out] there.
            "moe.experts.w13": Source("mlp.experts.gate_up_proj", (Swap(1, 2), Pairs(1))),
            "moe.experts.w13_bias": Source("mlp.experts.gate_up_proj_bias", (Pairs(1),)),
            "moe.experts.w2": Source("mlp.experts.down_proj", (Swap(1, 2),)),
            "moe.experts.w2_bias": "mlp.experts.down_proj_bias",
        }

    def layer(self, number: int) -> Block:
        attention = self.attention(
            scaling=self.yarn,
            length=1.0 if self.yarn is None else self.yarn.length,
            bias="qkvo",
            sinks=True,
            window=None if number % 2 else self.sliding_window,
        )
        clamped = (self.swiglu_alpha, self.swiglu_limit)
        return self.block(attention, self.experts(self.moe, joined=True, clamped=clamped))

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        if self.moe.num_shared_experts:
            yield "moe.num_shared_experts", "gpt_oss has no shared experts"
        if self.yarn is not None and self.yarn.beta_fast <= self.yarn.beta_slow:
            yield "yarn.beta_fast", "beta_fast must be greater than beta_slow"

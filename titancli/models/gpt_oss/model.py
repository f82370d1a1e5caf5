"""gpt-oss: the model, and its Hugging Face form.

Source: gpt-oss-120b & gpt-oss-20b Model Card (arXiv 2508.10925). What it has beside a Llama of experts:
biases, a sink in every head, a sliding window in every other layer, YaRN, and experts whose SwiGLU is
clamped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from titancli.models.blocks.attention import Attention
from titancli.models.blocks.decoder import Block, Decoder
from titancli.models.blocks.grouped import add_bias, grouped_linear
from titancli.models.blocks.hf import (
    LAYER,
    UnbalancedHF,
    refuse_other_routing,
)
from titancli.models.blocks.moe import Experts, MoE
from titancli.models.blocks.reach import Reach
from titancli.models.blocks.rope import inverse_frequencies, yarn_frequencies
from titancli.models.gpt_oss import GptOss
from titancli.models.gpt_oss.config_json import layer_types


class GptOssModel(Decoder):
    """Experts in every block; the first layer, the third, … see no farther than the window."""

    def __init__(self, config: GptOss) -> None:
        experts = partial(ClampedExperts, alpha=config.swiglu_alpha, limit=config.swiglu_limit)

        def block(number: int) -> Block:
            attention = Attention(
                config.dim,
                config.n_heads,
                config.kv_heads,
                config.head_dim,
                bias=True,
                reach=Reach(window=config.window_of(number)),
                sinks=True,
            )
            return Block(config.dim, config.norm_eps, attention, MoE(config.dim, config.moe, experts))

        def frequencies() -> Tensor:
            if config.yarn is None:
                return inverse_frequencies(config.head_dim, config.rope_theta, None)
            return yarn_frequencies(config.head_dim, config.rope_theta, config.yarn)

        super().__init__(config, block, frequencies)
        factor = 1.0 if config.yarn is None else max(config.yarn.factor, 1.0)
        self._concentration = 0.1 * math.log(factor) + 1.0

    def angles(self, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Cosine and sine are longer than 1, so that attention is sharper over stretched contexts (arXiv
        2309.00071, section 3.4)."""
        cos, sin = super().angles(positions)["rope"]
        return {"rope": (cos * self._concentration, sin * self._concentration)}


class ClampedExperts(Experts):
    """`w2((clamp(u) + 1) * g * sigmoid(alpha * g)) + w2_bias` with g and u the halves of `w13 x + w13_bias`,
    g clamped from above, u from both sides."""

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, *, alpha: float, limit: float) -> None:
        super().__init__(dim, hidden_dim, num_experts)
        self.alpha, self.limit = alpha, limit

    @staticmethod
    def shapes(dim: int, hidden_dim: int) -> dict[str, tuple[int, ...]]:
        both = 2 * hidden_dim
        return {"w13": (both, dim), "w13_bias": (both,), "w2": (dim, hidden_dim), "w2_bias": (dim,)}

    def compute(self, x: Tensor, counts: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        ends = counts.cumsum(0).int()
        both = add_bias(grouped_linear(x, weights["w13"], ends), weights["w13_bias"], ends)
        inner = _ClampedSwiglu.apply(both, self.alpha, self.limit)
        return add_bias(grouped_linear(inner, weights["w2"], ends), weights["w2_bias"], ends)


class _ClampedSwiglu(torch.autograd.Function):
    """Keeps what comes in and nothing else: operation by operation, autograd would keep three times that."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(both)
        ctx.alpha, ctx.limit = alpha, limit
        gate, up = both.chunk(2, -1)
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * (gate * torch.sigmoid(alpha * gate))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, -1)
        clamped = gate.clamp(max=ctx.limit)
        open_ = torch.sigmoid(ctx.alpha * clamped)
        slope = open_ * (1 + ctx.alpha * clamped * (1 - open_))
        for_gate = grad * (up.clamp(-ctx.limit, ctx.limit) + 1) * slope * (gate <= ctx.limit)
        for_up = grad * clamped * open_ * (up.abs() <= ctx.limit)
        return torch.cat((for_gate, for_up), -1), None, None


def build(config: GptOss, *, seq_len: int) -> GptOssModel:
    """The model on the current device, without initial values."""
    return GptOssModel(config)


_STACKED = ("moe.experts.w13", "moe.experts.w13_bias")
"""Gate and up: one after the other here, in turn in Hugging Face's files."""
_TURNED = ("moe.experts.w13", "moe.experts.w2")
"""[E, out, in] here, [E, in, out] there."""


class GptOssHF(UnbalancedHF):
    """transformers' GptOssForCausalLM, whose files have a layer's experts in one tensor."""

    model_type = "gpt_oss"
    layer: ClassVar = {
        **LAYER,
        "attention.wq.bias": "self_attn.q_proj.bias",
        "attention.wk.bias": "self_attn.k_proj.bias",
        "attention.wv.bias": "self_attn.v_proj.bias",
        "attention.wo.bias": "self_attn.o_proj.bias",
        "attention.sinks": "self_attn.sinks",
        "moe.router.gate.weight": "mlp.router.weight",
        "moe.router.gate.bias": "mlp.router.bias",
        "moe.experts.w13": "mlp.experts.gate_up_proj",
        "moe.experts.w13_bias": "mlp.experts.gate_up_proj_bias",
        "moe.experts.w2": "mlp.experts.down_proj",
        "moe.experts.w2_bias": "mlp.experts.down_proj_bias",
    }

    def to_hf(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        if name.endswith(_STACKED):
            tensor = tensor.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        if name.endswith(_TURNED):
            tensor = tensor.transpose(1, 2).contiguous()
        return super().to_hf(name, tensor)

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        tensor = super().from_hf(name, tensors)
        if name.endswith(_TURNED):
            tensor = tensor.transpose(1, 2).contiguous()
        if name.endswith(_STACKED):
            tensor = tensor.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return tensor

    def config_json(self) -> dict[str, Any]:
        """
        Raises:
            EnvironmentProblem: the experts are routed as transformers' are not.
        """
        config, moe = self.config, self.config.moe
        refuse_other_routing(moe, "gpt-oss", _ROUTING)
        return {
            "architectures": ["GptOssForCausalLM"],
            "model_type": self.model_type,
            **self.decoder_json(),
            "intermediate_size": moe.hidden_dim,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "rope_scaling": _rope_json(config),
            "sliding_window": config.sliding_window,
            "layer_types": layer_types(config.n_layers),
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "swiglu_alpha": config.swiglu_alpha,
            "swiglu_limit": config.swiglu_limit,
            "attention_bias": True,
            "output_router_logits": False,
        }

    from_config_json = staticmethod(GptOss.from_config_json)


def _rope_json(config: GptOss) -> dict[str, Any]:
    if config.yarn is None:
        return {"rope_type": "default"}
    return {
        "rope_type": "yarn",
        "factor": config.yarn.factor,
        "beta_fast": config.yarn.beta_fast,
        "beta_slow": config.yarn.beta_slow,
        "truncate": config.yarn.truncate,
        "original_max_position_embeddings": config.yarn.original_max_position,
    }


_ROUTING = {
    "score_func": "softmax",
    "route_norm": True,
    "route_scale": 1.0,
    "score_before_experts": False,
    "gate_bias": True,
    "num_shared_experts": 0,
    "num_expert_groups": None,
}
"""What transformers' experts have, whatever config.json says."""

"""DeepSeek-V2 and V3: the model, and its Hugging Face form.

Source: DeepSeek-V2 (arXiv 2405.04434), DeepSeek-V3 Technical Report (arXiv 2412.19437). What it has beside
Llama 3 is latent attention, and in all blocks but the first ones experts, of which some are shared.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from titancli.errors import EnvironmentProblem
from titancli.models.blocks.decoder import Block, Decoder
from titancli.models.blocks.feed_forward import FeedForward
from titancli.models.blocks.hf import (
    LAYER,
    UnbalancedHF,
    refuse_other_routing,
)
from titancli.models.blocks.latent import LatentAttention
from titancli.models.blocks.moe import MoE
from titancli.models.blocks.rope import inverse_frequencies, yarn_frequencies
from titancli.models.deepseek_v3 import DeepSeekV3
from titancli.models.deepseek_v3.config_json import LATENT
from titancli.models.sections import MoE as MoEConfig

logger = logging.getLogger(__name__)

_GATE, _BIAS = "moe.router.gate.weight", "moe.expert_bias"
_SWIGLU = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class DeepSeekV3Model(Decoder):
    """The first blocks dense, the others with experts."""

    tensor_plan: ClassVar = {
        **Decoder.tensor_plan,
        # Latents are narrow: every rank makes them whole, and of them its own heads.
        "layers.*.attention.w*_a.weight": "replicate",
        "layers.*.attention.w*_b.weight": "column",
    }

    def __init__(self, config: DeepSeekV3) -> None:
        def block(number: int) -> Block:
            attention = LatentAttention(
                config.dim,
                config.n_heads,
                query_rank=config.q_lora_rank,
                kv_rank=config.kv_lora_rank,
                nope_dim=config.qk_nope_head_dim,
                rope_dim=config.qk_rope_head_dim,
                value_dim=config.v_head_dim,
                scale=softmax_scale(config),
            )
            dense = number < config.n_dense_layers
            part = FeedForward(config.dim, config.hidden_dim) if dense else MoE(config.dim, config.moe)
            return Block(config.dim, config.norm_eps, attention, part)

        def frequencies() -> Tensor:
            if config.rope_scaling is None:
                return inverse_frequencies(config.qk_rope_head_dim, config.rope_theta, None)
            return yarn_frequencies(config.qk_rope_head_dim, config.rope_theta, config.rope_scaling)

        super().__init__(config, block, frequencies)


def softmax_scale(config: DeepSeekV3) -> float:
    """What products of queries and keys are multiplied by."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    yarn = config.rope_scaling
    if yarn is None or yarn.factor <= 1:
        return scale
    return scale * (1 + 0.1 * yarn.mscale * math.log(yarn.factor)) ** 2


def build(config: DeepSeekV3, *, seq_len: int) -> DeepSeekV3Model:
    """The model on the current device, without initial values."""
    return DeepSeekV3Model(config)


class DeepSeekHF(UnbalancedHF):
    """transformers' DeepseekV2ForCausalLM where scores are softmax's, DeepseekV3ForCausalLM where they are
    sigmoid's.

    Their files have every expert apart, and what is rotated in pairs (2i, 2i + 1): its rows are put in our
    order, (i, i + rope_dim/2), on the way in, and back on the way out. V2 has no place for the biases that
    balance experts.
    """

    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v2", "deepseek_v3")
    layer: ClassVar = {
        **LAYER,
        "attention.wq.weight": "self_attn.q_proj.weight",
        "attention.wq_a.weight": "self_attn.q_a_proj.weight",
        "attention.q_norm.weight": "self_attn.q_a_layernorm.weight",
        "attention.wq_b.weight": "self_attn.q_b_proj.weight",
        "attention.wkv_a.weight": "self_attn.kv_a_proj_with_mqa.weight",
        "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
        "attention.wkv_b.weight": "self_attn.kv_b_proj.weight",
        _GATE: "mlp.gate.weight",
        _BIAS: "mlp.gate.e_score_correction_bias",
        **{f"moe.shared_experts.{w}.weight": f"mlp.shared_experts.{hf}.weight" for w, hf in _SWIGLU.items()},
    }
    expert: ClassVar = {f"moe.experts.{w}": f"mlp.experts.{{}}.{hf}.weight" for w, hf in _SWIGLU.items()}

    def __init__(self, config: DeepSeekV3) -> None:
        super().__init__(config)
        self._is_v3 = config.moe.score_func == "sigmoid"
        self._told_of_more = False

    @property
    def model_type(self) -> str:
        return "deepseek_v3" if self._is_v3 else "deepseek_v2"

    # ------------------------------------------------------------------------------------------ tensors

    def sources(self, name: str) -> list[str]:
        found = super().sources(name)
        return [*found, self._bias_of(name)] if self._brings_bias(name) else found

    def to_hf(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        if self._brings_bias(name):
            (gate,) = super().sources(name)
            zeros = torch.zeros(len(tensor), dtype=torch.float32, device=tensor.device)
            return [(gate, tensor), (self._bias_of(name), zeros)]
        if name.endswith(_BIAS):
            tensor = tensor.float()  # its steps are too small for less
        return super().to_hf(name, self._turned(name, tensor, _to_pairs))

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        if self._brings_bias(name):
            *tensors, bias = tensors
            if not bias.is_meta and bool(bias.any()):
                raise EnvironmentProblem(
                    f"{self._bias_of(name)} is not zero, but this model has no such bias",
                    hint="set model.moe.load_balance_coeff = 0.001",
                )
        return self._turned(name, super().from_hf(name, tensors), _from_pairs)

    def ignored(self, hf_name: str) -> bool:
        layer = re.match(r"model\.layers\.(\d+)\.", hf_name)
        if layer is None or int(layer[1]) < self.config.n_layers:
            return super().ignored(hf_name)
        if not self._told_of_more:
            self._told_of_more = True
            logger.warning("ignoring the layers beyond the %d of the model", self.config.n_layers)
        return True

    @property
    def loses_biases(self) -> bool:
        return not self._is_v3

    def _brings_bias(self, name: str) -> bool:
        """Whether a gate stands for the bias as well: V3's files always have one, a model that is not
        balanced has none."""
        return self._is_v3 and not self.config.moe.load_balance_coeff and name.endswith(_GATE)

    def _bias_of(self, gate: str) -> str:
        (name,) = super().sources(gate.replace(_GATE, _BIAS))
        return name

    def _turned(self, name: str, tensor: Tensor, turn: Callable[[Tensor, int], Tensor]) -> Tensor:
        """With the rows that make what is rotated in the other order."""
        config, rope = self.config, self.config.qk_rope_head_dim
        if name.endswith(("attention.wq.weight", "attention.wq_b.weight")):
            heads = tensor.unflatten(0, (config.n_heads, -1))
            return torch.cat((heads[:, :-rope], turn(heads[:, -rope:], 1)), 1).flatten(0, 1)
        if name.endswith("attention.wkv_a.weight"):
            return torch.cat((tensor[:-rope], turn(tensor[-rope:], 0)))
        return tensor

    # ------------------------------------------------------------------------------------------- config

    def config_json(self) -> dict[str, Any]:
        config, moe = self.config, self.config.moe
        _refuse_export(moe, self._is_v3)
        own = {
            "architectures": ["DeepseekV3ForCausalLM" if self._is_v3 else "DeepseekV2ForCausalLM"],
            "scoring_func": moe.score_func,
            "norm_topk_prob": moe.route_norm,
            "n_group": moe.num_expert_groups or 1,
            "topk_group": moe.num_limited_groups or 1,
        }
        if self._is_v3:
            own |= {"topk_method": "noaux_tc", "rope_interleave": True, "num_nextn_predict_layers": 0}
        else:
            own |= {"topk_method": "group_limited_greedy" if moe.num_expert_groups else "greedy"}
        return {
            **own,
            "model_type": self.model_type,
            **self.decoder_json(),
            "intermediate_size": config.hidden_dim,
            "first_k_dense_replace": config.n_dense_layers,
            "num_key_value_heads": config.n_heads,
            "q_lora_rank": config.q_lora_rank,
            **{name: getattr(config, name) for name in LATENT},
            "rope_scaling": _yarn_json(config),
            "moe_intermediate_size": moe.hidden_dim,
            "n_routed_experts": moe.num_experts,
            "n_shared_experts": moe.num_shared_experts,
            "num_experts_per_tok": moe.top_k,
            "routed_scaling_factor": moe.route_scale,
            "moe_layer_freq": 1,
            "attention_bias": False,
        }

    from_config_json = staticmethod(DeepSeekV3.from_config_json)


def _from_pairs(x: Tensor, dim: int) -> Tensor:
    """Along `dim`: what stands in pairs (2i, 2i + 1) to (i, i + half)."""
    return x.unflatten(dim, (-1, 2)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def _to_pairs(x: Tensor, dim: int) -> Tensor:
    """The other way."""
    return x.unflatten(dim, (2, -1)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def _refuse_export(moe: MoEConfig, is_v3: bool) -> None:
    only = {
        "score_before_experts": False,
        "gate_bias": False,
        "num_shared_experts": max(1, moe.num_shared_experts),
    }
    if not is_v3:
        only["route_norm"] = False  # transformers' V2 does not look at norm_topk_prob
    if moe.num_expert_groups:
        only["group_top_k"] = 2 if is_v3 else 1
    refuse_other_routing(moe, "DeepSeek-V3" if is_v3 else "DeepSeek-V2", only)


def _yarn_json(config: DeepSeekV3) -> dict[str, Any] | None:
    yarn = config.rope_scaling
    if yarn is None:
        return None
    return {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_position,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale,
        "truncate": yarn.truncate,
    }

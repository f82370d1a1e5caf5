"""What the Hugging Face forms of decoders share: tables of names, stacked experts, checks of routing."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from titancli.errors import EnvironmentProblem

if TYPE_CHECKING:
    from titancli.models import RopeScaling
    from titancli.models.sections import MoE

TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
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

logger = logging.getLogger(__name__)


class DecoderHF:
    """A form in which names differ and values do not, save that experts are stacked here and apart there."""

    top: ClassVar[Mapping[str, str]] = TOP
    layer: ClassVar[Mapping[str, str]] = LAYER
    """Names within a block."""
    expert: ClassVar[Mapping[str, str]] = {}
    """Names within a block of stacked weights, to a name with `{}` for the expert's number."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def sources(self, name: str) -> list[str]:
        if name in self.top:
            return [self.top[name]]
        _, layer, rest = name.split(".", 2)
        if rest in self.expert:
            rests = [self.expert[rest].format(e) for e in range(self.config.moe.num_experts)]
        else:
            rests = [self.layer[rest]]
        return [f"model.layers.{layer}.{hf_rest}" for hf_rest in rests]

    def to_hf(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        pieces = tensor.unbind() if self._stacked(name) else (tensor,)
        return list(zip(self.sources(name), pieces, strict=True))

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        return torch.stack(tensors) if self._stacked(name) else tensors[0]

    def decoder_json(self) -> dict[str, Any]:
        """What `config.json` says of every decoder in the same words."""
        config = self.config
        return {
            "hidden_size": config.dim,
            "num_hidden_layers": config.n_layers,
            "num_attention_heads": config.n_heads,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_seq_len,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta,
            "hidden_act": "silu",
            "tie_word_embeddings": config.tied,
        }

    def ignored(self, hf_name: str) -> bool:
        return self.copy_of(hf_name) is not None or hf_name.endswith("rotary_emb.inv_freq")

    def copy_of(self, hf_name: str) -> str | None:
        tied_copy = self.config.tied and hf_name == self.top["output.weight"]
        return self.top["tok_embeddings.weight"] if tied_copy else None

    def _stacked(self, name: str) -> bool:
        return name not in self.top and name.split(".", 2)[2] in self.expert


class UnbalancedHF(DecoderHF):
    """A form of models whose experts may have been balanced; the biases that did it have no place in it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._told = False

    def sources(self, name: str) -> list[str]:
        return [] if self._loses(name) else super().sources(name)

    def to_hf(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        if not self._loses(name):
            return super().to_hf(name, tensor)
        if not self._told and not tensor.is_meta and bool(tensor.any()):
            self._told = True
            logger.warning(
                "a Hugging Face folder cannot hold the biases that balance the experts: without them, "
                "tokens near the border between two experts may be routed to the other one"
            )
        return []

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        if self._loses(name):
            return torch.zeros(self.config.moe.num_experts)
        return super().from_hf(name, tensors)

    @property
    def loses_biases(self) -> bool:
        """Whether the biases have no place."""
        return True

    def _loses(self, name: str) -> bool:
        return self.loses_biases and name.endswith("moe.expert_bias")


def llama3_rope_json(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """`rope_scaling` as transformers 4 reads it; 5 turns it into its `rope_parameters`."""
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }


def refuse_other_routing(moe: MoE, theirs: str, only: Mapping[str, Any]) -> None:
    """See to it that experts are chosen as transformers' model does.

    Raises:
        EnvironmentProblem: some fields are not as in `only` (names them all).
    """
    wrong = [f"moe.{k} = {getattr(moe, k)!r}" for k, good in only.items() if getattr(moe, k) != good]
    if wrong:
        raise EnvironmentProblem(f"transformers' {theirs} has no {', '.join(wrong)}")

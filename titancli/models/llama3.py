"""Llama 3: the model, and its Hugging Face form.

Source: The Llama 3 Herd of Models (arXiv 2407.21783). Single-device code: it says what can be split, and the
`decoder` plan splits it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from titancli.errors import EnvironmentProblem
from titancli.models import Llama3
from titancli.models.blocks.attention import Attention, document_mask
from titancli.models.blocks.cache import KVCache, LayerCache
from titancli.models.blocks.feed_forward import FeedForward
from titancli.models.blocks.head import Output
from titancli.models.blocks.init import normal_, ones_, trunc_normal_
from titancli.models.blocks.rope import inverse_frequencies, rotation

if TYPE_CHECKING:
    from titancli.data.batch import Batch
    from titancli.losses.result import LossResult
    from titancli.registry.kinds import Loss


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: Llama3) -> None:
        super().__init__()
        head_dim = config.head_dim or config.dim // config.n_heads
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config.dim, config.n_heads, config.n_kv_heads or config.n_heads, head_dim)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config.dim, config.hidden_dim)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: LayerCache | None = None
    ) -> Tensor:
        """[B, S, dim] -> [B, S, dim]."""
        x = x + self.attention(self.attention_norm(x), cos, sin, mask, cache)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama3Model(nn.Module):
    inputs = ("tokens", "positions", "document_ids")
    sequence_dim = {"tokens": 1, "positions": 1}  # noqa: RUF012
    tensor_plan = {  # noqa: RUF012
        "tok_embeddings.weight": "vocab",
        "layers.*.attention.w[qkv].weight": "column",
        "layers.*.attention.wo.weight": "row",
        "layers.*.feed_forward.w[13].weight": "column",
        "layers.*.feed_forward.w2.weight": "row",
        "layers.*.*_norm.weight": "norm",
        "norm.weight": "norm",
        "output.weight": "vocab",
    }
    experts: dict[str, nn.Module] = {}  # noqa: RUF012

    def __init__(self, config: Llama3) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = Output(config.dim, config.vocab_size)
        if config.tied:
            self.output.weight = self.tok_embeddings.weight
        self._frequencies: Tensor | None = None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        batch: Batch | None = None,
        loss: Loss | None = None,
        cache: KVCache | None = None,
    ) -> Tensor | LossResult:
        """Logits [B, S, V], or a LossResult when a loss is given; with a cache the last token's, [B, 1, V].

        A pipeline stage lacks modules (None): it is given the hidden states of the stage before it instead of
        tokens, with positions, and returns hidden states if it is not the last.

        Args:
            tokens: [B, S] int64.
            positions: [B, S] int64; None counts from 0 in every row.
            document_ids: [B, S]; None means that a row is one document.
            batch: what the loss is computed on.
            loss: computed inside the output module.
            cache: holds the tokens before these, and is given these; it knows their positions, so `positions`
                and `document_ids` stay None.
        """
        if cache is not None:
            return self._continue(tokens, cache)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        cos, sin = rotation(positions, self._rope_frequencies(tokens.device))
        mask = None if document_ids is None else document_mask(document_ids)
        hidden = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for block in self.layers.values():
            hidden = block(hidden, cos, sin, mask)
        if self.norm is not None:
            hidden = self.norm(hidden)
        return hidden if self.output is None else self.output(hidden, batch, loss)

    def new_cache(self, length: int, padding: Tensor | None = None) -> KVCache:
        """An empty cache for `forward(tokens, cache=…)`; see `KVCache`."""
        return KVCache(self.layers, length, padding)

    def _continue(self, tokens: Tensor, cache: KVCache) -> Tensor:
        positions, mask = cache.advance(tokens.shape[1], tokens.device)
        cos, sin = rotation(positions, self._rope_frequencies(tokens.device))
        hidden = self.tok_embeddings(tokens)
        for name, block in self.layers.items():
            hidden = block(hidden, cos, sin, mask, cache.layers[name])
        return self.output(self.norm(hidden[:, -1:]))

    def _rope_frequencies(self, device: torch.device) -> Tensor:
        # Not a buffer: that would be garbage after construction on meta, and cast with the parameters.
        if self._frequencies is None or self._frequencies.device != device:
            head_dim = self.config.head_dim or self.config.dim // self.config.n_heads
            self._frequencies = inverse_frequencies(
                head_dim, self.config.rope_theta, self.config.rope_scaling
            ).to(device)
        return self._frequencies

    def init_weights(self, generator_for: Callable[[str], torch.Generator]) -> None:
        """Matrices N(0, 0.02), those that end a branch scaled down with depth; norms 1."""
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                ones_(parameter)
            elif name == "tok_embeddings.weight":
                # A tied embedding is the output's matrix as well, and must give logits of unit scale.
                std = self.config.dim**-0.5 if self.config.tied else 1.0
                normal_(parameter, std, generator_for(name))
            elif name == "output.weight":
                trunc_normal_(parameter, self.config.dim**-0.5, generator_for(name))
            else:
                trunc_normal_(parameter, _std(name), generator_for(name))

    def flops_per_token(self, seq_len: int) -> float:
        """6 per matrix weight, and 12 · layers · width of attention · seq_len (PaLM, appendix B)."""
        matrices = sum(p.numel() for p in self.parameters()) - self.tok_embeddings.weight.numel()
        if self.config.tied:
            matrices += self.output.weight.numel()
        head_dim = self.config.head_dim or self.config.dim // self.config.n_heads
        return 6.0 * matrices + 12.0 * self.config.n_layers * self.config.n_heads * head_dim * seq_len


def _std(name: str) -> float:
    layer = int(name.split(".")[1])
    ends_branch = re.search(r"\.(wo|w2|w3)\.weight$", name)
    return 0.02 / (2 * (layer + 1)) ** 0.5 if ends_branch else 0.02


def build(config: Llama3, *, seq_len: int) -> Llama3Model:
    """The model on the current device, without initial values."""
    return Llama3Model(config)


_HF_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_HF_TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class LlamaHF:
    """transformers' LlamaForCausalLM. Names differ; values do not: both rotate pairs (i, i + head_dim/2)."""

    model_type = "llama"

    def __init__(self, config: Llama3) -> None:
        self.config = config

    def sources(self, name: str) -> list[str]:
        if name in _HF_TOP:
            return [_HF_TOP[name]]
        _, layer, rest = name.split(".", 2)
        return [f"model.layers.{layer}.{_HF_LAYER[rest.removesuffix('.weight')]}.weight"]

    def to_hf(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        return [(self.sources(name)[0], tensor)]

    def from_hf(self, name: str, tensors: list[Tensor]) -> Tensor:
        return tensors[0]

    def ignored(self, hf_name: str) -> bool:
        tied_copy = self.config.tied and hf_name == "lm_head.weight"
        return tied_copy or hf_name.endswith("rotary_emb.inv_freq")

    def config_json(self) -> dict[str, Any]:
        config = self.config
        rope: dict[str, Any] = {"rope_type": "default"}
        if config.rope_scaling is not None:
            rope = {
                "rope_type": "llama3",
                "factor": config.rope_scaling.factor,
                "low_freq_factor": config.rope_scaling.low_freq_factor,
                "high_freq_factor": config.rope_scaling.high_freq_factor,
                "original_max_position_embeddings": config.rope_scaling.original_max_position,
            }
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": self.model_type,
            "hidden_size": config.dim,
            "intermediate_size": config.hidden_dim,
            "num_hidden_layers": config.n_layers,
            "num_attention_heads": config.n_heads,
            "num_key_value_heads": config.n_kv_heads or config.n_heads,
            "head_dim": config.head_dim or config.dim // config.n_heads,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_seq_len,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta,
            # transformers 4 reads rope_scaling and rope_theta; 5 turns them into its rope_parameters.
            "rope_scaling": rope if config.rope_scaling is not None else None,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": config.tied,
        }

    @staticmethod
    def from_config_json(config_json: dict[str, Any]) -> dict[str, Any]:
        """The keys of `[model]` for a `config.json`.

        Raises:
            EnvironmentProblem: biases, another activation, or another RoPE than Llama 3's.
        """
        rope = config_json.get("rope_parameters") or config_json.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        wrong = [
            f"{key} = {config_json[key]!r}"
            for key, good in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu"))
            if config_json.get(key, good) != good
        ]
        if kind not in ("default", "llama3"):
            wrong.append(f"rope_type = {kind!r}")
        if wrong:
            raise EnvironmentProblem(
                f"config.json has {', '.join(wrong)}, which the model llama3 does not have"
            )
        keys = {
            "dim": config_json["hidden_size"],
            "n_layers": config_json["num_hidden_layers"],
            "n_heads": config_json["num_attention_heads"],
            "n_kv_heads": config_json.get("num_key_value_heads") or config_json["num_attention_heads"],
            "head_dim": config_json.get("head_dim")
            or config_json["hidden_size"] // config_json["num_attention_heads"],
            "hidden_dim": config_json["intermediate_size"],
            "vocab_size": config_json["vocab_size"],
            "max_seq_len": config_json.get("max_position_embeddings", 2048),
            "rope_theta": float(config_json.get("rope_theta") or rope.get("rope_theta", 10000.0)),
            "norm_eps": config_json.get("rms_norm_eps", 1e-6),
            "tied": bool(config_json.get("tie_word_embeddings", False)),
        }
        if kind == "llama3":
            keys["rope_scaling"] = {
                "factor": float(rope["factor"]),
                "low_freq_factor": float(rope["low_freq_factor"]),
                "high_freq_factor": float(rope["high_freq_factor"]),
                "original_max_position": int(rope["original_max_position_embeddings"]),
            }
        return keys

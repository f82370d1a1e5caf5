"""gpt-oss's config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Gt

from titancli.models.sections import DecoderConfig, MoE, Yarn
from titancli.models.shape import Decoder, Experts, Parameter, block, grouped_query
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


@component(
    "model",
    "gpt_oss",
    target="titancli.models.gpt_oss.model:build",
    hf="titancli.models.gpt_oss.model:GptOssHF",
)
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

    model_types: ClassVar[tuple[str, ...]] = ("gpt_oss",)
    flavors: ClassVar[dict[str, dict[str, Any]]] = {
        "debugmodel": dict(_COMMON, dim=256, n_layers=4, vocab_size=2048, moe=dict(_ROUTING, num_experts=8)),
        "20b": dict(_COMMON, dim=2880, n_layers=24, vocab_size=201088, moe=dict(_ROUTING, num_experts=32)),
        "120b": dict(_COMMON, dim=2880, n_layers=36, vocab_size=201088, moe=dict(_ROUTING, num_experts=128)),
    }

    def window_of(self, layer: int) -> int | None:
        """Tokens that a token sees at most in the layer of this number; None: all before it."""
        return None if layer % 2 else self.sliding_window

    @staticmethod
    def from_config_json(config_json: Mapping[str, Any]) -> dict[str, Any]:
        """See `titancli.models.gpt_oss.config_json`; what no `config.json` says is as it was released."""
        from titancli.models.gpt_oss.config_json import read

        keys = read(config_json)
        keys.setdefault("yarn", _YARN)  # without a word of RoPE, transformers takes gpt-oss's own
        if keys["yarn"] is None:
            del keys["yarn"]
        return {**keys, "moe": {**_ROUTING, **keys["moe"]}}

    def shape(self) -> Decoder:
        """The sizes of it all; see `titancli.models.shape`."""
        experts = self._experts()
        kinds = [
            block(
                self.dim,
                grouped_query(
                    self.dim,
                    self.n_heads,
                    self.kv_heads,
                    self.head_dim,
                    bias=True,
                    sinks=True,
                    window=self.window_of(layer),
                ),
                experts,
            )
            for layer in (0, 1)
        ]
        blocks = tuple(kinds[layer % 2] for layer in range(self.n_layers))
        return Decoder(self.dim, self.vocab_size, blocks, tied=self.tied)

    def _experts(self) -> Experts:
        plain, many = self.moe.shape(self.dim, joined=True), self.moe.num_experts
        widths = {"w13_bias": 2 * self.moe.hidden_dim, "w2_bias": self.dim}
        biases = [Parameter(f"moe.experts.{key}", (many, wide), "expert") for key, wide in widths.items()]
        return replace(plain, parameters=(*plain.parameters, *biases), clamped=True)

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        for key, message in self.moe.problems():
            yield f"moe.{key}", message
        if self.moe.num_shared_experts:
            yield "moe.num_shared_experts", "gpt_oss has no shared experts"
        if self.yarn is not None and self.yarn.beta_fast <= self.yarn.beta_slow:
            yield "yarn.beta_fast", "beta_fast must be greater than beta_slow"

    @property
    def n_experts(self) -> int:
        """What mesh.ep must divide."""
        return self.moe.num_experts

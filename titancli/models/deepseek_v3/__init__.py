"""DeepSeek-V2's and V3's config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Gt

from titancli.models.sections import MoE, Sizes, Yarn
from titancli.models.shape import Decoder, block, latent, swiglu
from titancli.registry.component import component, section

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe


@section
class LatentYarn(Yarn):
    """YaRN as in DeepSeek: attention logits are scaled up with the context length."""

    mscale: Annotated[float, Gt(0)] = 1.0
    """Attention logits are multiplied by (1 + 0.1 · mscale · ln factor)²."""


_SOFTMAX = {"score_func": "softmax", "score_before_experts": False, "load_balance_coeff": 1e-3}
_SIGMOID = {**_SOFTMAX, "score_func": "sigmoid", "route_norm": True}
_YARN = {"factor": 40.0, "original_max_position": 4096}
_RELEASED: dict[str, Any] = {"max_seq_len": 163840, "norm_eps": 1e-6}


@component(
    "model",
    "deepseek_v3",
    target="titancli.models.deepseek_v3.model:build",
    hf="titancli.models.deepseek_v3.model:DeepSeekHF",
)
class DeepSeekV3(Sizes):
    """DeepSeek-V2 and V3: multi-head latent attention, shared and routed experts."""

    hidden_dim: Annotated[int, Gt(0)]
    """Hidden dimension of the feed-forward in the dense blocks, which come first."""
    n_dense_layers: Annotated[int, Ge(0)] = 1
    """Number of dense blocks."""
    moe: MoE
    """The mixture-of-experts layers of the other blocks."""
    q_lora_rank: Annotated[int, Gt(0)] | None = None
    """Rank of the query latent; None: queries are projected directly."""
    kv_lora_rank: Annotated[int, Gt(0)] = 512
    """Rank of the latent of keys and values."""
    qk_nope_head_dim: Annotated[int, Gt(0)] = 128
    """Dimensions of a head's query and key without positional encoding."""
    qk_rope_head_dim: Annotated[int, Gt(0)] = 64
    """Dimensions of a head's query and key with RoPE; all heads share those of the key."""
    v_head_dim: Annotated[int, Gt(0)] = 128
    """Dimension of a head's value."""
    max_seq_len: Annotated[int, Gt(0)] = 16384
    rope_theta: Annotated[float, Gt(0)] = 10000.0
    rope_scaling: LatentYarn | None = None
    norm_eps: Annotated[float, Gt(0)] = 1e-5

    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v3", "deepseek_v2")
    flavors: ClassVar[dict[str, dict[str, Any]]] = {
        "debugmodel": dict(
            dim=256,
            n_layers=6,
            n_heads=16,
            hidden_dim=1024,
            vocab_size=2048,
            rope_scaling=dict(_YARN, mscale=0.7),
            moe=dict(_SOFTMAX, num_experts=8, num_shared_experts=2, top_k=3, hidden_dim=256),
        ),
        "16B": dict(
            _RELEASED,
            dim=2048,
            n_layers=27,
            n_heads=16,
            hidden_dim=10944,
            vocab_size=102400,
            rope_scaling=dict(_YARN, mscale=0.707),
            moe=dict(_SOFTMAX, num_experts=64, num_shared_experts=2, top_k=6, hidden_dim=1408),
        ),
        "236B": dict(
            _RELEASED,
            dim=5120,
            n_layers=60,
            n_heads=128,
            hidden_dim=12288,
            vocab_size=102400,
            q_lora_rank=1536,
            rope_scaling=dict(_YARN, mscale=0.707),
            moe=dict(
                _SOFTMAX,
                num_experts=160,
                num_shared_experts=2,
                top_k=6,
                hidden_dim=1536,
                route_scale=16.0,
                num_expert_groups=8,
                num_limited_groups=3,
                group_top_k=1,
            ),
        ),
        "671B": dict(
            _RELEASED,
            dim=7168,
            n_layers=61,
            n_heads=128,
            hidden_dim=18432,
            n_dense_layers=3,
            vocab_size=129280,
            q_lora_rank=1536,
            rope_scaling=dict(_YARN, mscale=1.0),
            moe=dict(
                _SIGMOID,
                num_experts=256,
                num_shared_experts=1,
                top_k=8,
                hidden_dim=2048,
                route_scale=2.5,
                num_expert_groups=8,
                num_limited_groups=4,
            ),
        ),
    }

    @staticmethod
    def from_config_json(config_json: Mapping[str, Any]) -> dict[str, Any]:
        """See `titancli.models.deepseek_v3.config_json`."""
        from titancli.models.deepseek_v3.config_json import read

        return read(config_json)

    def shape(self) -> Decoder:
        """The sizes of it all; see `titancli.models.shape`."""
        attention = latent(
            self.dim,
            self.n_heads,
            query_rank=self.q_lora_rank,
            kv_rank=self.kv_lora_rank,
            nope_dim=self.qk_nope_head_dim,
            rope_dim=self.qk_rope_head_dim,
            value_dim=self.v_head_dim,
        )
        dense = block(self.dim, attention, swiglu(self.dim, self.hidden_dim))
        sparse = block(self.dim, attention, self.moe.shape(self.dim))
        blocks = (dense,) * self.n_dense_layers + (sparse,) * (self.n_layers - self.n_dense_layers)
        return Decoder(self.dim, self.vocab_size, blocks, tied=self.tied)

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        if self.qk_rope_head_dim % 2:
            yield "qk_rope_head_dim", "rotary embedding needs an even qk_rope_head_dim"
        if self.v_head_dim > self.qk_nope_head_dim + self.qk_rope_head_dim:
            yield (
                "v_head_dim",
                f"v_head_dim {self.v_head_dim} is more than qk_nope_head_dim + qk_rope_head_dim, "
                f"{self.qk_nope_head_dim + self.qk_rope_head_dim}, but attention supports only narrower "
                f"values",
            )
        if self.n_dense_layers >= self.n_layers:
            yield (
                "n_dense_layers",
                f"n_dense_layers {self.n_dense_layers} leaves none of the {self.n_layers} layers with "
                f"experts",
            )
        for key, message in self.moe.problems():
            yield f"moe.{key}", message

    @property
    def n_experts(self) -> int:
        """What mesh.ep must divide."""
        return self.moe.num_experts

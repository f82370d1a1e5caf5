"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437).

Unlike Llama 3, they have latent attention, and experts, some of them shared, in all blocks but the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Gt

from titan_families.mtp import MTP, MTP_KEY
from titancli.errors import EnvironmentProblem
from titancli.models.config_json import (
    NO_BIAS,
    SHARED_EXPERTS,
    STORED_BIAS,
    ConfigJSON,
    Key,
    Ours,
    RopeKeys,
    Table,
    decoder,
    expert_groups,
    routing,
    yarn_keys,
)
from titancli.models.names import EXPERT_BIAS, EXPERTS, LAYER, MTP_LAYER, SHARED, Names, Pairs, Source
from titancli.models.sections import BUILD, FORM, MoE, Yarn
from titancli.protocols.shape import Block, Latent, Rope
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


def _mscale(there: ConfigJSON, ours: Ours) -> float:
    """Read YaRN's mscale; without it, transformers scales cosine and sine instead."""
    value = there.get("mscale")
    if not value:
        there.refuse("mscale", value)
    return value or 1.0


def _rows(max_seq_len: int, dense: int) -> tuple[Any, ...]:
    return (
        *decoder(max_seq_len),
        Key("hidden_dim", "intermediate_size"),
        Key("n_dense_layers", "first_k_dense_replace", dense),
        Key("q_lora_rank", "q_lora_rank", 1536, nullable=True),
        *(Key(name, name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
        RopeKeys(
            10000.0,
            "rope_scaling",
            "yarn",
            (
                # The first becomes the scale of attention, and their ratio that of cosine and sine.
                Key("rope_scaling.mscale", "mscale", read=_mscale),
                Key(None, "mscale_all_dim", 0, only=lambda ours: ours["rope_scaling.mscale"]),
                *yarn_keys("rope_scaling"),
                Key(None, "attention_factor", only=lambda ours: 1.0, written=False),
                Key(None, "type", only="yarn"),
            ),
        ),
        NO_BIAS,
        Key(None, "num_key_value_heads", only=lambda ours: ours["n_heads"]),
        Key(None, "moe_layer_freq", only=1),
        *SHARED_EXPERTS,
    )


def _grouped(there: ConfigJSON) -> bool:
    """Return whether V2's tokens choose from a few groups only."""
    method = there.get("topk_method")
    if method not in (None, "greedy", "group_limited_greedy"):
        there.refuse("topk_method", method)
    return bool(method == "group_limited_greedy")


_SIZES = ("head_dim", "qk_head_dim")  # derived from other keys
_SPARSE = {"deepseek_v32": "DeepSeek-V3.1", "glm_moe_dsa": "GLM-4.5 or GLM-4.6"}
"""Types with sparse attention, and the previous releases, which have none."""


@component("model", "deepseek_v3", target=BUILD, hf=FORM)
class DeepSeekV3(MTP):
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

    hf_tables: ClassVar = {
        "deepseek_v3": Table(
            "DeepseekV3ForCausalLM",
            *routing(groups=True),
            *_rows(4096, 3),
            *expert_groups(8, 2),
            Key("moe.score_func", "scoring_func", "sigmoid", only="sigmoid"),
            Key("moe.route_norm", "norm_topk_prob", True),
            Key("moe.route_scale", "routed_scaling_factor", 2.5),
            Key(None, "topk_method", only="noaux_tc"),
            Key(None, "rope_interleave", only=True),
            MTP_KEY,
            STORED_BIAS,
            ignoring=_SIZES,
        ),
        "deepseek_v2": Table(
            "DeepseekV2ForCausalLM",
            Key("n_mtp_layers", None, only=0),
            *routing(groups=True),
            *_rows(2048, 0),
            *expert_groups(1, 1, _grouped),
            Key("moe.score_func", "scoring_func", "softmax", only="softmax"),
            Key("moe.route_norm", "norm_topk_prob", only=False),  # ignored by transformers' V2
            Key("moe.route_scale", "routed_scaling_factor", 1.0),
            Key(
                None,
                "topk_method",
                write=lambda ours: "group_limited_greedy" if ours["moe.num_expert_groups"] else "greedy",
            ),
            ignoring=_SIZES,
        ),
    }
    # Kimi K2 is a DeepSeek-V3 of other sizes; K2.5 adds a vision tower. Types with sparse attention are
    # rejected.
    model_types: ClassVar[tuple[str, ...]] = (
        *hf_tables,
        *("kimi_k2", "kimi_k25"),
        *_SPARSE,
    )
    text_part: ClassVar[str] = "language_model."
    other_parts: ClassVar[tuple[str, ...]] = ("vision_tower.", "mm_projector.", "multi_modal_projector.")
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

    @property
    def model_type(self) -> str:
        return "deepseek_v3" if self.moe.score_func == "sigmoid" else "deepseek_v2"

    @classmethod
    def from_config_json(cls, config_json: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of `[model]`, see `Sizes.from_config_json`."""
        text = cls.text_config(config_json)
        if text.get("index_topk") or text.get("model_type") in _SPARSE:
            instead = _SPARSE.get(text.get("model_type", ""), "DeepSeek-V3.1")
            raise EnvironmentProblem(
                f"config.json is of a model with sparse attention: an indexer selects index_topk = "
                f"{text.get('index_topk')} keys for each token, which titan neither computes nor trains",
                hint=f"use a release with attention to all keys: {instead}",
            )
        return super().from_config_json(text)

    def hf_names(self) -> Names:
        nope, rope = self.qk_nope_head_dim, self.qk_rope_head_dim
        queries = (Pairs(group=nope + rope, last=rope),)
        names: dict[str, Any] = {
            **LAYER,
            **EXPERTS,
            **SHARED,
            **MTP_LAYER,
            "attention.wq.weight": Source("self_attn.q_proj.weight", queries),
            "attention.wq_a.weight": "self_attn.q_a_proj.weight",
            "attention.q_norm.weight": "self_attn.q_a_layernorm.weight",
            "attention.wq_b.weight": Source("self_attn.q_b_proj.weight", queries),
            "attention.wkv_a.weight": Source("self_attn.kv_a_proj_with_mqa.weight", (Pairs(last=rope),)),
            "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
            "attention.wkv_b.weight": "self_attn.kv_b_proj.weight",
        }
        # V2 has no such bias.
        bias = {EXPERT_BIAS: "mlp.gate.e_score_correction_bias"}
        return names | (bias if self.model_type == "deepseek_v3" else {})

    @property
    def softmax_scale(self) -> float:
        """Factor of the products of queries and keys."""
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        yarn = self.rope_scaling
        if yarn is None or yarn.factor <= 1:
            return scale
        return scale * (1 + 0.1 * yarn.mscale * math.log(yarn.factor)) ** 2

    def layer(self, number: int) -> Block:
        attention = Latent(
            dim=self.dim,
            heads=self.n_heads,
            kv_heads=self.n_heads,
            head_dim=self.qk_nope_head_dim + self.qk_rope_head_dim,
            width=self.v_head_dim,
            query_rank=self.q_lora_rank,
            kv_rank=self.kv_lora_rank,
            rope=Rope(self.qk_rope_head_dim, self.rope_theta, self.rope_scaling),
            scale=self.softmax_scale,
        )
        dense = number < self.n_dense_layers
        return self.block(attention, self.feed_forward(self.hidden_dim) if dense else self.experts(self.moe))

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

"""Qwen 3, dense and mixture of experts. Source: Qwen3 Technical Report (arXiv 2505.09388).

Unlike Llama 3, it has norms over each head's query and key, a head_dim independent of dim, and experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Gt

from titancli.errors import EnvironmentProblem
from titancli.models.config_json import (
    GROUPED,
    NO_BIAS,
    ConfigJSON,
    Key,
    Ours,
    RopeKeys,
    Table,
    decoder,
    routing,
    yarn_keys,
)
from titancli.models.names import EXPERTS, JOINED_EXPERTS, LAYER, QK_NORM, Names
from titancli.models.sections import BUILD, FORM, DecoderConfig, MoE, Yarn
from titancli.protocols.shape import Block
from titancli.registry.component import component, section

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe

_RELEASED: dict[str, Any] = {"vocab_size": 151936, "max_seq_len": 40960}
_DENSE: dict[str, Any] = {**_RELEASED, "n_kv_heads": 8, "head_dim": 128}
_ROUTING = {
    "top_k": 8,
    "score_func": "softmax",
    "route_norm": True,
    "score_before_experts": False,
    "load_balance_coeff": 1e-3,
}


@section
class FactorYarn(Yarn):
    """YaRN whose factor of cosine and sine may be set."""

    attention_factor: Annotated[float, Gt(0)] | None = None
    """Factor of cosine and sine; None: 0.1 · ln factor + 1."""

    @property
    def length(self) -> float:
        """The factor of cosine and sine."""
        return super().length if self.attention_factor is None else self.attention_factor


def _factor(there: ConfigJSON, ours: Ours) -> float:
    """Read YaRN's factor; null stands for the ratio of the two context lengths."""
    value = there.get("factor")
    return ours["max_seq_len"] / ours["rope_scaling.original_max_position"] if value is None else value


def _attention_factor(there: ConfigJSON, ours: Ours) -> float | None:
    """Read the factor of cosine and sine, which DeepSeek's scales may stand for; None: the usual one."""
    value: Any = there.get("attention_factor")
    scales: list[Any] = [there.get("mscale"), there.get("mscale_all_dim")]
    usual = Yarn(factor=ours["rope_scaling.factor"]).length
    if value is None and all(scales):
        one, other = (1.0 + scale * (usual - 1.0) for scale in scales)
        value = one / other
    return None if value is None or math.isclose(value, usual, rel_tol=1e-9) else value


_, *_OTHER_YARN_KEYS = yarn_keys("rope_scaling", lambda ours: ours["max_seq_len"])
_ROPE = RopeKeys(
    10000.0,
    "rope_scaling",
    "yarn",
    (
        *_OTHER_YARN_KEYS,
        Key("rope_scaling.factor", "factor", read=_factor),
        Key("rope_scaling.attention_factor", "attention_factor", read=_attention_factor),
    ),
)
_ATTENTION: tuple[Any, ...] = (
    *GROUPED,
    NO_BIAS,
    Key(None, "use_sliding_window", only=False),
    Key(None, "layer_types", only=lambda ours: ["full_attention"] * ours["n_layers"], written=False),
)
_ROWS: tuple[Any, ...] = (*decoder(32768), *_ATTENTION, _ROPE)
_DENSE_ROWS = (Key("head_dim", "head_dim", lambda ours: 128), Key("hidden_dim", "intermediate_size"))
_JOINED = ("qwen3_vl_moe", "qwen3_vl_moe_text")
_IGNORED = ("sliding_window", "max_window_layers")  # without effect if no layer has a window


@component("model", "qwen3", target=BUILD, hf=FORM)
class Qwen3(DecoderConfig):
    """Qwen 3, dense and mixture of experts: grouped-query attention with QK norms."""

    head_dim: Annotated[int, Gt(0)] = 128
    """Dimension of a head."""
    hidden_dim: Annotated[int, Gt(0)] | None = None
    """Hidden dimension of the feed-forward in a dense model."""
    moe: MoE | None = None
    """The mixture-of-experts layers, in place of the feed-forward; None: a dense model."""
    max_seq_len: Annotated[int, Gt(0)] = 4096
    rope_theta: Annotated[float, Gt(0)] = 1000000.0
    rope_scaling: FactorYarn | None = None
    """RoPE scaling beyond the original context; None: no scaling."""
    norm_eps: Annotated[float, Gt(0)] = 1e-6

    hf_tables: ClassVar = {
        "qwen3": Table("Qwen3ForCausalLM", *_ROWS, *_DENSE_ROWS, ignoring=_IGNORED),
        # For text, the three positions of a token are equal.
        "qwen3_vl_text": Table(
            "Qwen3ForCausalLM",
            *decoder(128000),
            *_ATTENTION,
            RopeKeys(500000.0),
            *_DENSE_ROWS,
            ignoring=("mrope_section", "mrope_interleaved"),
        ),
        "qwen3_moe": Table(
            "Qwen3MoeForCausalLM",
            *_ROWS,
            Key("moe.num_experts", "num_experts", also=("num_local_experts",)),
            Key("moe.top_k", "num_experts_per_tok"),
            Key("moe.hidden_dim", "moe_intermediate_size"),
            Key("moe.route_norm", "norm_topk_prob", False),
            Key("moe.load_balance_coeff", None, 1e-3),
            Key(None, "decoder_sparse_step", only=1),
            Key(None, "mlp_only_layers", only=[]),
            Key(None, "output_router_logits", only=False),
            *routing(score_func="softmax", num_shared_experts=0),
            ignoring=(*_IGNORED, "intermediate_size"),
        ),
    }
    model_types: ClassVar[tuple[str, ...]] = (*hf_tables, "qwen3_vl", *_JOINED)  # the last are rejected
    text_part: ClassVar[str] = "model.language_model."
    other_parts: ClassVar[tuple[str, ...]] = ("model.visual.",)
    flavors: ClassVar[dict[str, dict[str, Any]]] = {
        "debugmodel": dict(
            dim=256, n_layers=8, n_heads=16, n_kv_heads=8, hidden_dim=3072, vocab_size=2048, tied=True
        ),
        "0.6B": dict(_DENSE, dim=1024, n_layers=28, n_heads=16, hidden_dim=3072, tied=True),
        "1.7B": dict(_DENSE, dim=2048, n_layers=28, n_heads=16, hidden_dim=6144, tied=True),
        "4B": dict(_DENSE, dim=2560, n_layers=36, n_heads=32, hidden_dim=9728, tied=True),
        "8B": dict(_DENSE, dim=4096, n_layers=36, n_heads=32, hidden_dim=12288),
        "14B": dict(_DENSE, dim=5120, n_layers=40, n_heads=40, hidden_dim=17408),
        "32B": dict(_DENSE, dim=5120, n_layers=64, n_heads=64, hidden_dim=25600),
        "debugmodel_moe": dict(
            dim=256,
            n_layers=8,
            n_heads=16,
            n_kv_heads=8,
            vocab_size=2048,
            moe=dict(_ROUTING, num_experts=64, hidden_dim=768),
        ),
        "30B-A3B": dict(
            _RELEASED,
            dim=2048,
            n_layers=48,
            n_heads=32,
            n_kv_heads=4,
            moe=dict(_ROUTING, num_experts=128, hidden_dim=768),
        ),
        "235B-A22B": dict(
            _RELEASED,
            dim=4096,
            n_layers=94,
            n_heads=64,
            n_kv_heads=4,
            moe=dict(_ROUTING, num_experts=128, hidden_dim=1536),
        ),
    }

    @property
    def model_type(self) -> str:
        return "qwen3" if self.moe is None else "qwen3_moe"

    @classmethod
    def from_config_json(cls, config_json: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of `[model]`, see `Sizes.from_config_json`."""
        if config_json.get("model_type") in _JOINED:
            raise EnvironmentProblem(JOINED_EXPERTS[0], hint=JOINED_EXPERTS[1])
        return super().from_config_json(config_json)

    def hf_names(self) -> Names:
        return {**LAYER, **QK_NORM, **EXPERTS}

    def layer(self, number: int) -> Block:
        part = self.feed_forward(self.hidden_dim) if self.moe is None else self.experts(self.moe)
        yarn = self.rope_scaling
        length = 1.0 if yarn is None else yarn.length
        return self.block(self.attention(qk_norm="head", scaling=yarn, length=length), part)

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        if self.rope_scaling is not None and self.rope_scaling.beta_fast <= self.rope_scaling.beta_slow:
            yield "rope_scaling.beta_fast", "beta_fast must be greater than beta_slow"
        if (self.hidden_dim is None) == (self.moe is None):
            yield (
                "hidden_dim",
                "set hidden_dim for a dense model or moe.hidden_dim for a model with experts, not both",
            )

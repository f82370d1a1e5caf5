"""Qwen 3's config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Gt

from titancli.models.sections import DecoderConfig, MoE
from titancli.models.shape import Decoder, block, grouped_query, swiglu
from titancli.registry.component import component

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


@component(
    "model", "qwen3", target="titancli.models.qwen3.model:build", hf="titancli.models.qwen3.model:Qwen3HF"
)
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
    norm_eps: Annotated[float, Gt(0)] = 1e-6

    model_types: ClassVar[tuple[str, ...]] = ("qwen3", "qwen3_moe")
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

    @staticmethod
    def from_config_json(config_json: Mapping[str, Any]) -> dict[str, Any]:
        """See `titancli.models.qwen3.config_json`; what no `config.json` says is as it was released."""
        from titancli.models.qwen3.config_json import read

        keys = read(config_json)
        return {**keys, "moe": {**_ROUTING, **keys["moe"]}} if "moe" in keys else keys

    def shape(self) -> Decoder:
        """The sizes of it all; see `titancli.models.shape`."""
        attention = grouped_query(self.dim, self.n_heads, self.kv_heads, self.head_dim, qk_norm=True)
        dense = swiglu(self.dim, self.hidden_dim or 0)
        one = block(self.dim, attention, dense if self.moe is None else self.moe.shape(self.dim))
        return Decoder(self.dim, self.vocab_size, (one,) * self.n_layers, tied=self.tied)

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        if (self.hidden_dim is None) == (self.moe is None):
            yield (
                "hidden_dim",
                "set hidden_dim for a dense model or moe.hidden_dim for a model with experts, not both",
            )
        if self.moe is not None:
            for key, message in self.moe.problems():
                yield f"moe.{key}", message

    @property
    def n_experts(self) -> int | None:
        """What mesh.ep must divide."""
        return self.moe.num_experts if self.moe else None

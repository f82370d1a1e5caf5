"""Config sections shared by families: a decoder's sizes, experts, RoPE scaling. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Gt

from titancli.models.config_json import Table
from titancli.models.names import LAYER, Names
from titancli.protocols.shape import Attention, Block, Decoder, Experts, FeedForward, Norm, Rope
from titancli.registry.component import component_info, section

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe

_OF_ALL = ("quantization_config", "tie_word_embeddings")  # keys that may apply to all parts of a model
BUILD, FORM = "titancli.models.blocks.decoder:build", "titancli.models.blocks.hf:DecoderHF"
"""Targets of families whose `shape` describes the module completely."""


def sizes(
    dim: int, n_layers: int, n_heads: int, n_kv_heads: int, hidden_dim: int, **more: Any
) -> dict[str, Any]:
    """Return the values of a dense decoder's flavor."""
    heads = {"n_heads": n_heads, "n_kv_heads": n_kv_heads}
    return {"dim": dim, "n_layers": n_layers, **heads, "hidden_dim": hidden_dim, **more}


@section
class Sizes:
    """The fields of every decoder. A family adds its own fields, and sets these fields' defaults."""

    dim: Annotated[int, Gt(0)]
    """Width of the residual stream."""
    n_layers: Annotated[int, Gt(0)]
    """Number of transformer blocks."""
    n_heads: Annotated[int, Gt(0)]
    """Number of query heads."""
    vocab_size: Annotated[int, Gt(0)]
    """Vocabulary size of the embedding and the output layer."""
    max_seq_len: Annotated[int, Gt(0)]
    """Maximum sequence length."""
    rope_theta: Annotated[float, Gt(0)]
    """Base of the rotary frequencies."""
    norm_eps: Annotated[float, Gt(0)]
    """Epsilon of the RMS norms."""
    tied: bool = False
    """Share the embedding's weight with the output layer."""

    # Fields that do not change what the model computes from tokens and weights.
    without_effect: ClassVar[tuple[str, ...]] = ("max_seq_len",)

    # Hugging Face form: tables by model_type, the first for any other; and the model_types that can be read.
    hf_tables: ClassVar[Mapping[str, Table]] = {}
    model_types: ClassVar[tuple[str, ...]] = ()
    # Prefix of the text model's names in a multimodal folder, and prefixes of the rest.
    text_part: ClassVar[str] = ""
    other_parts: ClassVar[tuple[str, ...]] = ()

    @property
    def model_type(self) -> str:
        """The model_type that is written."""
        return next(iter(self.hf_tables))

    @classmethod
    def from_config_json(cls, config_json: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of `[model]` (without `type`) for a `config.json`; for a multimodal model, those of
        its text model.

        Raises:
            EnvironmentProblem: the model does not support some of its keys; names all of them.
            KeyError: a key is missing.
        """
        text = cls.text_config(config_json)
        return cls._table(text).read(component_info(cls).name, text)

    @classmethod
    def key_in(cls, config_json: Mapping[str, Any], field: str) -> str | None:
        """Return the key of a `config.json` that a field of `[model]` is read from; None: it is not known."""
        return cls._table(cls.text_config(config_json)).theirs(field)

    @classmethod
    def _table(cls, text: Mapping[str, Any]) -> Table:
        tables = cls.hf_tables
        return tables.get(text.get("model_type", ""), next(iter(tables.values())))

    @classmethod
    def text_config(cls, config_json: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the text model's part of a `config.json`, with the keys that apply to all parts."""
        text = config_json.get("text_config") if cls.text_part else None
        if text is None:
            return config_json
        return {**{key: config_json[key] for key in _OF_ALL if key in config_json}, **text}

    def hf_names(self) -> Names:
        """Return the names of a block's parameters in transformers."""
        return LAYER

    def layer(self, number: int) -> Block:
        """Return the spec of the block of this index."""
        raise NotImplementedError

    def shape(self) -> Decoder:
        """Return the spec of the model; equal blocks are one object."""
        made: dict[Block, Block] = {}
        blocks = tuple(made.setdefault(one, one) for one in map(self.layer, range(self.n_layers)))
        return Decoder(
            dim=self.dim, vocab_size=self.vocab_size, blocks=blocks, tied=self.tied, norm=self.norm
        )

    @property
    def norm(self) -> Norm:
        """The spec of all its norms."""
        return Norm(self.norm_eps)

    def block(self, attention: Any, feed_forward: Any, **options: Any) -> Block:
        """Return a block of these parts; `options` are further fields of `titancli.protocols.shape.Block`."""
        parts = {"attention": attention, "feed_forward": feed_forward}
        return Block(dim=self.dim, norm=self.norm, **parts, **options)

    def feed_forward(self, hidden: int | None, **options: Any) -> FeedForward:
        """Return a dense layer; `options` are further fields of `titancli.protocols.shape.FeedForward`."""
        return FeedForward(dim=self.dim, hidden=hidden or 0, **options)

    def experts(self, routing: MoE, **options: Any) -> Experts:
        """Return a layer of experts; `options` are further fields of `titancli.protocols.shape.Experts`."""
        return Experts(dim=self.dim, routing=routing, **options)

    @property
    def n_experts(self) -> int | None:
        """Number that mesh.ep must divide."""
        moe = getattr(self, "moe", None)
        return None if moe is None else moe.num_experts

    def explicit(self) -> Self:
        """Return the config with derived fields written out."""
        return self

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if recipe.training.seq_len > self.max_seq_len:
            yield (
                "max_seq_len",
                f"training.seq_len {recipe.training.seq_len} is beyond the model's {self.max_seq_len}",
            )
        if (moe := getattr(self, "moe", None)) is not None:
            for key, message in moe.problems():
                yield f"moe.{key}", message


@section
class DecoderConfig(Sizes):
    """A decoder with grouped-query attention."""

    n_kv_heads: Annotated[int, Gt(0)] | None = None
    """Number of key and value heads; None: n_heads."""
    head_dim: Annotated[int, Gt(0)] | None = None
    """Dimension of a head; None: dim / n_heads."""

    def explicit(self) -> Self:
        """Return the config with derived fields written out."""
        return replace(self, n_kv_heads=self.kv_heads, head_dim=self.head_width)

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.n_kv_heads or self.n_heads

    @property
    def head_width(self) -> int:
        """Dimension of a head."""
        return self.head_dim or self.dim // self.n_heads

    def attention(
        self,
        *,
        theta: float | None = None,
        scaling: Any = None,
        share: float = 1.0,
        length: float = 1.0,
        **options: Any,
    ) -> Attention:
        """Return the spec of its attention.

        Args:
            theta: None: `rope_theta`.
            scaling, length: see `titancli.protocols.shape.Rope`.
            share: fraction of a head that is rotated.
            options: further fields of `titancli.protocols.shape.Attention`.
        """
        return Attention(
            dim=self.dim,
            heads=self.n_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_width,
            rope=Rope(int(self.head_width * share), theta or self.rope_theta, scaling, length),
            norm=self.norm,
            **options,
        )

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if self.head_dim is None and self.dim % self.n_heads:
            yield "n_heads", f"dim {self.dim} is not divisible by n_heads {self.n_heads}; set head_dim"
        elif self.head_width % 2:
            yield "head_dim", "rotary embedding needs an even head_dim"
        if self.n_heads % self.kv_heads:
            yield "n_kv_heads", f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.kv_heads}"
        yield from super().check(recipe)


@section
class MoE:
    """Mixture of experts: a router selects a few experts for each token."""

    num_experts: Annotated[int, Gt(0)] = 8
    """Number of routed experts."""
    top_k: Annotated[int, Gt(0)] = 1
    """Number of experts per token."""
    hidden_dim: Annotated[int, Gt(0)]
    """Hidden dimension of an expert."""
    num_shared_experts: Annotated[int, Ge(0)] = 0
    """Number of shared experts, which process every token; built as one feed-forward of that many times the
    hidden dimension."""
    score_func: Literal["softmax", "sigmoid"] = "sigmoid"
    """Function that turns router logits into scores."""
    route_norm: bool = False
    """Normalize the scores of the selected experts by their sum."""
    route_scale: Annotated[float, Gt(0)] = 1.0
    """Factor applied to the final scores."""
    score_before_experts: bool = True
    """Multiply scores with the input of the experts (true) or with their output (false)."""
    gate_bias: bool = False
    """Add a bias to the router."""
    num_expert_groups: Annotated[int, Gt(0)] | None = None
    """Number of expert groups for group-limited routing; None: a token may select any experts."""
    num_limited_groups: Annotated[int, Gt(0)] | None = None
    """Number of groups from which a token may select its experts."""
    group_top_k: Annotated[int, Gt(0)] = 2
    """Number of top scores that are summed to rank a group: 2 in DeepSeek-V3, 1 in V2."""
    load_balance_coeff: Annotated[float, Ge(0)] | None = None
    """Update rate of the expert bias for auxiliary-loss-free load balancing; 0 or None: no bias. Models
    that start from weights without such a bias, and whose Hugging Face format cannot store one, are
    trained without it."""
    freeze_expert_bias: bool = False
    """Freeze the expert bias: it is read, applied and exported, but load_balance_coeff does not update it.
    True if `[model]` is read from a Hugging Face folder whose format stores one (DeepSeek-V3, GLM-4.5),
    because fine-tuning with transformers freezes it, too."""

    z_loss_coeff: Annotated[float, Ge(0)] = 0.0
    """Weight of the router z-loss (arXiv 2202.08906): for each layer, the mean over all tokens of a step
    (prompts and targets, but not padding) of the squared log-sum-exp of the router's logits; added to the
    loss, whatever that is an average over. It affects the gradients but not the reported loss. All
    micro-batches of a step must be passed to one call of forward_backward; if there are several, an
    additional forward pass first counts their weights."""

    aux_loss_coeff: Annotated[float, Ge(0)] = 0.0
    """Weight of the load-balancing loss (arXiv 2101.03961): for each layer, num_experts times the sum over
    experts of the router's mean probability times the expert's share of the tokens. Means and shares are
    taken over all tokens of a step on all ranks (arXiv 2501.11873), and are thus the same on every layout;
    transformers takes them over the tokens of all layers together. Added, counted and limited like the
    z-loss, and not reported either."""

    # Fields that change how the model is trained, not what it computes.
    without_effect: ClassVar[tuple[str, ...]] = (
        "aux_loss_coeff",
        "freeze_expert_bias",
        "load_balance_coeff",
        "z_loss_coeff",
    )

    def explicit(self) -> MoE:
        """Return the section without settings for groups if there are none."""
        return self if self.num_expert_groups else replace(self, group_top_k=2)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield the fields that contradict each other, with messages."""
        if self.hidden_dim % 8:
            yield (
                "hidden_dim",
                (
                    f"hidden_dim {self.hidden_dim} is not a multiple of 8, as grouped "
                    f"matrix multiplications require"
                ),
            )
        if self.top_k > self.num_experts:
            yield "top_k", f"top_k {self.top_k} is greater than num_experts {self.num_experts}"
        groups, limited = self.num_expert_groups, self.num_limited_groups
        if (groups is None) != (limited is None):
            yield "num_expert_groups", "num_expert_groups and num_limited_groups must be set together"
        elif groups is not None and limited is not None:
            size = self.num_experts // groups
            if self.num_experts % groups or size < self.group_top_k:
                least = f"group_top_k {self.group_top_k} or more"
                yield (
                    "num_expert_groups",
                    f"num_experts {self.num_experts} cannot be divided into {groups} groups of {least}",
                )
            elif limited > groups:
                yield (
                    "num_limited_groups",
                    (f"num_limited_groups {limited} is greater than the number of groups, {groups}"),
                )
            elif limited * size < self.top_k:
                yield (
                    "num_limited_groups",
                    f"{limited} groups have {limited * size} experts, fewer than top_k {self.top_k}",
                )


@section
class RopeScaling:
    """RoPE scaling of Llama 3.1, for sequences beyond the original context length."""

    factor: Annotated[float, Gt(0)] = 8.0
    """Factor by which low frequencies are divided."""
    low_freq_factor: Annotated[float, Gt(0)] = 1.0
    """Wavelengths above original_max_position / this are scaled by the whole factor."""
    high_freq_factor: Annotated[float, Gt(0)] = 4.0
    """Wavelengths below original_max_position / this are left unchanged."""
    original_max_position: Annotated[int, Gt(0)] = 8192
    """Original context length, in tokens."""


@section
class LinearScaling:
    """Linear RoPE scaling (arXiv 2306.15595): positions are interpolated."""

    factor: Annotated[float, Gt(0)] = 8.0
    """Factor by which frequencies are divided."""


@section
class AttnTemperature:
    """Attention temperature that grows with the position (arXiv 2501.19399): queries are multiplied by 1 +
    attn_scale · ln(1 + ⌊(position + 1) / floor_scale⌋)."""

    floor_scale: Annotated[int, Gt(0)] = 8192
    """Number of positions per step of the floor."""
    attn_scale: Annotated[float, Gt(0)] = 0.1
    """Factor of the logarithm."""


@section
class Yarn:
    """YaRN (arXiv 2309.00071): interpolate low frequencies, keep high ones."""

    factor: Annotated[float, Gt(0)]
    """Factor by which low frequencies are divided."""
    original_max_position: Annotated[int, Gt(0)] = 4096
    """Original context length, in tokens."""
    beta_fast: Annotated[float, Gt(0)] = 32.0
    """Dimensions that rotate more often than this within the original context are left unchanged."""
    beta_slow: Annotated[float, Gt(0)] = 1.0
    """Dimensions that rotate less often than this are fully interpolated."""
    truncate: bool = True
    """Round the ends of the ramp between the two to whole dimensions."""

    @property
    def length(self) -> float:
        """The factor of cosine and sine: attention is sharper over stretched contexts (section 3.4)."""
        return 0.1 * math.log(max(self.factor, 1.0)) + 1.0

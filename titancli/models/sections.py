"""What the configs of families share: a decoder's sizes, experts, stretched rotary positions. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from annotated_types import Ge, Gt

from titancli.models.shape import Experts, mixture
from titancli.registry.component import section

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe


@section
class Sizes:
    """What every decoder has. A family adds its own fields, and gives these the defaults that it has."""

    dim: Annotated[int, Gt(0)]
    """Width of the residual stream."""
    n_layers: Annotated[int, Gt(0)]
    """Blocks."""
    n_heads: Annotated[int, Gt(0)]
    """Query heads."""
    vocab_size: Annotated[int, Gt(0)]
    """Rows of the embedding and of the output."""
    max_seq_len: Annotated[int, Gt(0)]
    """The longest row it is meant for."""
    rope_theta: Annotated[float, Gt(0)]
    """Base of the rotary frequencies."""
    norm_eps: Annotated[float, Gt(0)]
    """Added to the mean square inside the norms."""
    tied: bool = False
    """Whether the output uses the embedding's weight."""

    # Fields that do not change what the model computes from tokens and weights.
    without_effect: ClassVar[tuple[str, ...]] = ("max_seq_len",)

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if recipe.training.seq_len > self.max_seq_len:
            yield (
                "max_seq_len",
                f"training.seq_len {recipe.training.seq_len} is beyond the model's {self.max_seq_len}",
            )


@section
class DecoderConfig(Sizes):
    """A decoder with grouped-query attention."""

    n_kv_heads: Annotated[int, Gt(0)] | None = None
    """Key and value heads; None: n_heads."""
    head_dim: Annotated[int, Gt(0)] | None = None
    """Width of a head; None: dim / n_heads."""

    def explicit(self) -> Self:
        """The same, with what follows from other fields written out."""
        return replace(self, n_kv_heads=self.kv_heads, head_dim=self.head_width)

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.n_kv_heads or self.n_heads

    @property
    def head_width(self) -> int:
        """Numbers of a head."""
        return self.head_dim or self.dim // self.n_heads

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if self.head_dim is None and self.dim % self.n_heads:
            yield "n_heads", f"dim {self.dim} is not divisible by n_heads {self.n_heads}; give head_dim"
        elif self.head_width % 2:
            yield "head_dim", "rotary embedding needs an even head_dim"
        if self.n_heads % self.kv_heads:
            yield "n_kv_heads", f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.kv_heads}"
        yield from super().check(recipe)


@section
class MoE:
    """Experts of which each token visits a few, chosen by a router."""

    num_experts: Annotated[int, Gt(0)] = 8
    """Routed experts."""
    top_k: Annotated[int, Gt(0)] = 1
    """Experts that a token visits."""
    hidden_dim: Annotated[int, Gt(0)]
    """Width inside an expert."""
    num_shared_experts: Annotated[int, Ge(0)] = 0
    """Experts that every token visits, as one feed-forward of so many times the width."""
    score_func: Literal["softmax", "sigmoid"] = "sigmoid"
    """What makes scores of the router's outputs."""
    route_norm: bool = False
    """Whether the scores of the chosen experts are divided by their sum."""
    route_scale: Annotated[float, Gt(0)] = 1.0
    """What the scores are multiplied by in the end."""
    score_before_experts: bool = True
    """Whether scores multiply what goes into the experts, or what comes out of them."""
    gate_bias: bool = False
    """Whether the router's matrix has a bias."""
    num_expert_groups: Annotated[int, Gt(0)] | None = None
    """Groups that the experts are divided into; None: a token may choose any experts."""
    num_limited_groups: Annotated[int, Gt(0)] | None = None
    """Groups that a token may choose its experts from."""
    group_top_k: Annotated[int, Gt(0)] = 2
    """How many of a group's scores, the best ones, add up to the group's own: 2 in DeepSeek-V3, 1 in V2."""
    load_balance_coeff: Annotated[float, Ge(0)] | None = None
    """Step of the bias that evens out how often experts are chosen, without a loss; 0 or None: no such bias.
    Given weights without one, whose Hugging Face form has no place for it, are trained without."""

    z_loss_coeff: Annotated[float, Ge(0)] = 0.0
    """Weight of the router's z-loss (arXiv 2202.08906): in each layer the squared log-sum-exp of the logits
    of every token, added to the loss's sum, and so divided by its weight (target tokens). It is part of the
    gradients, not of the loss that is reported."""

    aux_loss_coeff: Annotated[float, Ge(0)] = 0.0
    """Weight of the load-balancing loss (arXiv 2101.03961): in each layer, for every token, num_experts times
    the sum over experts of the router's probability and the expert's share of all tokens. Shares are those of
    the whole batch of a step's call over all ranks (arXiv 2501.11873); where that is several micro-batches,
    they are counted in a forward beforehand. Added and divided like the z-loss, and not reported either."""

    # Fields that change how it is trained, not what it computes.
    without_effect: ClassVar[tuple[str, ...]] = ("aux_loss_coeff", "load_balance_coeff", "z_loss_coeff")

    def explicit(self) -> MoE:
        """The same, without what counts among groups where there are none."""
        return self if self.num_expert_groups else replace(self, group_top_k=2)

    def shape(self, dim: int, *, joined: bool = False) -> Experts:
        """The sizes of the layer, as the child `moe` of a block of this width; see `mixture`."""
        return mixture(
            dim,
            self.hidden_dim,
            self.num_experts,
            self.top_k,
            shared=self.num_shared_experts,
            gate_bias=self.gate_bias,
            joined=joined,
            score_before=self.score_before_experts,
        )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Fields that do not fit each other, with what is wrong."""
        if self.hidden_dim % 8:
            yield "hidden_dim", f"hidden_dim {self.hidden_dim} is no multiple of 8, as grouped products need"
        if self.top_k > self.num_experts:
            yield "top_k", f"top_k {self.top_k} is more than num_experts {self.num_experts}"
        groups, limited = self.num_expert_groups, self.num_limited_groups
        if (groups is None) != (limited is None):
            yield "num_expert_groups", "num_expert_groups and num_limited_groups go together"
        elif groups is not None and limited is not None:
            size = self.num_experts // groups
            if self.num_experts % groups or size < self.group_top_k:
                least = f"group_top_k {self.group_top_k} or more"
                yield (
                    "num_expert_groups",
                    f"num_experts {self.num_experts} cannot be divided into {groups} groups of {least}",
                )
            elif limited > groups:
                yield "num_limited_groups", f"num_limited_groups {limited} is more than the {groups} groups"
            elif limited * size < self.top_k:
                yield (
                    "num_limited_groups",
                    f"{limited} groups have {limited * size} experts, fewer than top_k {self.top_k}",
                )


@section
class Yarn:
    """YaRN (arXiv 2309.00071): slow pairs are stretched, fast ones stay."""

    factor: Annotated[float, Gt(0)]
    """Slow pairs' frequencies are divided by this."""
    original_max_position: Annotated[int, Gt(0)] = 4096
    """Context of the first pretraining, in tokens."""
    beta_fast: Annotated[float, Gt(0)] = 32.0
    """Pairs that turn more often than this in the original context stay."""
    beta_slow: Annotated[float, Gt(0)] = 1.0
    """Pairs that turn less often than this are stretched whole."""
    truncate: bool = True
    """Whether the ramp between the two begins and ends at whole pairs."""

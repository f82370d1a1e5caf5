"""The configs of the losses. Torch-free; the code is in the files beside this one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from titancli.registry.component import component

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe


@component("loss", "cross_entropy", target="titancli.losses.cross_entropy:CrossEntropy")
class CrossEntropy:
    """Cross-entropy, averaged over all targets, computed in chunks without materializing the full logits."""


@component("loss", "cross_entropy_full", target="titancli.losses.cross_entropy:CrossEntropyFull")
class CrossEntropyFull:
    """Cross-entropy by torch's own function on the full logits: slower and larger, for reference."""


@component("loss", "sft", target="titancli.losses.sft:SFT")
class SFT:
    """Cross-entropy for supervised fine-tuning, weighted by the batch's `weights` if it has any."""


@component("loss", "dpo", target="titancli.losses.dpo:DPO")
class DPO:
    """Direct preference optimization (DPO): make the chosen answer of a pair more probable than the rejected.

    DPO (arXiv 2305.18290), averaged over pairs; with label_smoothing cDPO (2403.00409).
    """

    beta: Annotated[float, Gt(0)] = 0.1
    """Strength of the pull towards the reference model."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """Probability that the labels of a pair are swapped."""
    learns_from_pairs: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The common fields of losses that learn from samples and their advantages."""

    learns_from_samples: ClassVar[bool] = True

    kl_coef: Annotated[float, Ge(0)] = 0.0
    """Weight of the KL divergence from the initial model, of which a copy is kept if this is above 0."""
    entropy_coef: Annotated[float, Ge(0)] = 0.0
    """Weight of the entropy, which is maximised, averaged as the objective is."""
    temperature: Annotated[float, Gt(0)] | None = None
    """Divisor of the logits in log-probabilities and entropy, so that they are those of sampling; None: the
    generator's in the loop grpo, else 1."""
    importance: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "none"
    """Correction for a sampler whose log-probabilities differ from the model's: each token's objective is
    multiplied by the ratio of both, or by that of its whole sample. Ratios above `importance_max` are
    truncated to it, or masked: multiplied by 0."""
    importance_max: Annotated[float, Gt(0)] = 3.0
    """Upper bound of the ratios of `importance`."""

    @property
    def needs_reference(self) -> bool:
        """Return whether a copy of the initial model is kept."""
        return self.kl_coef > 0


@component("loss", "grpo", target="titancli.losses.policy:Grpo")
class Grpo(Policy):
    """Clipped policy gradient per token: GRPO, or DAPO and Dr. GRPO by its fields.

    GRPO (arXiv 2402.03300) is the default. DAPO (2503.14476): clip_high = 0.28, length_norm = "token".
    Dr. GRPO (2503.20783): length_norm = "constant", with the advantage group_mean.
    """

    clip_low: Annotated[float, Ge(0)] = 0.2
    """Lower clipping bound: ratios are clipped at 1 - this."""
    clip_high: Annotated[float, Ge(0)] = 0.2
    """Upper clipping bound: ratios are clipped at 1 + this."""
    length_norm: Literal["sample", "token", "constant"] = "sample"
    """Averaging: over samples, of their means; over all tokens; or over samples, of their sums /
    `constant`."""
    constant: Annotated[int, Gt(0)] | None = None
    """Divisor of the sum over a sample's tokens, such as the generator's max_new_tokens."""
    delta: Annotated[float, Gt(1)] | None = None
    """Upper bound of ratios where the advantage is negative (dual clip, arXiv 1912.09729); None: there is
    none."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if (self.length_norm == "constant") != (self.constant is not None):
            yield "constant", 'set constant if length_norm = "constant", and only then'
        yield from _delta(self)


@component("loss", "gspo", target="titancli.losses.policy:Gspo")
class Gspo(Policy):
    """Clipped policy gradient per sample (GSPO, arXiv 2507.18071)."""

    clip_low: Annotated[float, Ge(0)] = 3e-4
    """Lower clipping bound: a sample's ratio is clipped at 1 - this."""
    clip_high: Annotated[float, Ge(0)] = 4e-4
    """Upper clipping bound: a sample's ratio is clipped at 1 + this."""
    per_token: bool = True
    """The ratio is that of the whole sample to the power of 1 / length; false: of the whole sample, as in
    TRL's RLOO."""
    delta: Annotated[float, Gt(1)] | None = None
    """Upper bound of ratios where the advantage is negative (dual clip); None: there is none."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from _delta(self)


@component("loss", "cispo", target="titancli.losses.policy:Cispo")
class Cispo(Policy):
    """Policy gradient with clipped importance weights for every token (CISPO, arXiv 2506.13585)."""

    clip_high: Annotated[float, Ge(0)] = 5.0
    """Upper clipping bound: weights are at most 1 + this, the paper's ε_high; what others call ε_max or
    epsilon_high is 1 + this. There is no lower bound, as in the paper's experiments."""


@component("loss", "importance_sampling", target="titancli.losses.policy:ImportanceSampling")
class ImportanceSampling(Policy):
    """Policy gradient with importance weights, unclipped, averaged over tokens."""


def _delta(loss: Grpo | Gspo) -> Iterator[tuple[str, str]]:
    if loss.delta is not None and loss.delta <= 1 + loss.clip_high:
        yield "delta", f"must be greater than 1 + clip_high = {1 + loss.clip_high:g}"


COMPONENTS: list[type] = [CrossEntropy, CrossEntropyFull, SFT, DPO, Grpo, Gspo, Cispo, ImportanceSampling]

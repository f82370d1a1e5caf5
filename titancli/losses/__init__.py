"""The configs of the losses. Torch-free; the code is in the files beside this one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from titancli.registry.component import component

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe


@component("loss", "cross_entropy", target="titancli.losses.cross_entropy:CrossEntropy")
class CrossEntropy:
    """Negative log-likelihood of the targets, averaged over all of them; the full logits never exist."""


@component("loss", "cross_entropy_full", target="titancli.losses.cross_entropy:CrossEntropyFull")
class CrossEntropyFull:
    """The same from the full logits, by torch's own function: slower and larger, the reference."""


@component("loss", "sft", target="titancli.losses.sft:SFT")
class SFT:
    """Negative log-likelihood of the targets, each with the batch's `weights` where it has them."""


@component("loss", "dpo", target="titancli.losses.dpo:DPO")
class DPO:
    """Direct preference optimisation: the chosen answer of a pair made more probable than the rejected one.

    DPO (arXiv 2305.18290), averaged over pairs; with label_smoothing cDPO (2403.00409).
    """

    beta: Annotated[float, Gt(0)] = 0.1
    """How near to the reference it stays: greater is nearer."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """How probable it is that the two answers of a pair are the wrong way round."""
    learns_from_pairs: ClassVar[bool] = True


@component("loss", "grpo", target="titancli.losses.policy:Grpo")
class Grpo:
    """Clipped policy gradient, token by token: GRPO, and by its fields DAPO and Dr. GRPO.

    GRPO (arXiv 2402.03300) is the default. DAPO (2503.14476): clip_high = 0.28, length_norm = "token".
    Dr. GRPO (2503.20783): length_norm = "constant", with the advantage group_mean.
    """

    learns_from_samples: ClassVar[bool] = True

    clip_low: Annotated[float, Ge(0)] = 0.2
    """A ratio below 1 - this is worth no more."""
    clip_high: Annotated[float, Ge(0)] = 0.2
    """A ratio above 1 + this is worth no more."""
    length_norm: Literal["sample", "token", "constant"] = "sample"
    """An average over samples of their averages; over all tokens; over samples of their sums / `constant`."""
    constant: Annotated[int, Gt(0)] | None = None
    """What the sum over a sample's tokens is divided by, such as the generator's max_new_tokens."""
    kl_coef: Annotated[float, Ge(0)] = 0.0
    """Weight of the KL divergence from the model that the run began with; above 0 a copy of it is kept."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if (self.length_norm == "constant") != (self.constant is not None):
            yield "constant", 'length_norm = "constant" and a constant go together'


@component("loss", "gspo", target="titancli.losses.policy:Gspo")
class Gspo:
    """Clipped policy gradient, sample by sample (GSPO, arXiv 2507.18071)."""

    learns_from_samples: ClassVar[bool] = True

    clip_low: Annotated[float, Ge(0)] = 3e-4
    """A sample's ratio below 1 - this is worth no more."""
    clip_high: Annotated[float, Ge(0)] = 4e-4
    """A sample's ratio above 1 + this is worth no more."""
    kl_coef: Annotated[float, Ge(0)] = 0.0
    """Weight of the KL divergence from the model that the run began with; above 0 a copy of it is kept."""


@component("loss", "cispo", target="titancli.losses.policy:Cispo")
class Cispo:
    """Policy gradient with clipped importance weights, which every token has (CISPO, arXiv 2506.13585)."""

    learns_from_samples: ClassVar[bool] = True

    clip_high: Annotated[float, Ge(0)] = 5.0
    """A weight is at most 1 + this; it has no lower bound, as in the paper."""
    kl_coef: Annotated[float, Ge(0)] = 0.0
    """Weight of the KL divergence from the model that the run began with; above 0 a copy of it is kept."""


@component("loss", "importance_sampling", target="titancli.losses.policy:ImportanceSampling")
class ImportanceSampling:
    """Policy gradient with importance weights, unclipped, averaged over tokens."""

    learns_from_samples: ClassVar[bool] = True

    kl_coef: Annotated[float, Ge(0)] = 0.0
    """Weight of the KL divergence from the model that the run began with; above 0 a copy of it is kept."""


COMPONENTS: list[type] = [CrossEntropy, CrossEntropyFull, SFT, DPO, Grpo, Gspo, Cispo, ImportanceSampling]

"""The configs of the losses. Torch-free; the code is in the files beside this one."""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Lt

from titancli.registry.component import component


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


COMPONENTS: list[type] = [CrossEntropy, CrossEntropyFull, SFT, DPO]

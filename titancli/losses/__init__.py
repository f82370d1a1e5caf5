"""The configs of the losses. Torch-free; the code is in the files beside this one."""

from __future__ import annotations

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


COMPONENTS: list[type] = [CrossEntropy, CrossEntropyFull, SFT]

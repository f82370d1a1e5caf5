"""The losses. This file is the menu."""

from __future__ import annotations

from titancli.registry.component import component


@component("loss", "cross_entropy", target="titancli.losses.cross_entropy:CrossEntropy")
class CrossEntropy:
    """Negative log-likelihood of the targets, averaged over all of them; the full logits never exist."""


@component("loss", "cross_entropy_full", target="titancli.losses.cross_entropy:CrossEntropyFull")
class CrossEntropyFull:
    """The same from the full logits, by torch's own function: slower and larger, the reference."""


COMPONENTS: list[type] = [CrossEntropy, CrossEntropyFull]

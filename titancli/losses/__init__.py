"""The losses. This file is the menu."""

from __future__ import annotations

from titancli.registry.component import component


@component("loss", "cross_entropy", target="titancli.losses.cross_entropy:CrossEntropy")
class CrossEntropy:
    """Negative log-likelihood of the targets, averaged over all of them."""


COMPONENTS: list[type] = [CrossEntropy]

"""The training programs. This file is the menu."""

from __future__ import annotations

from titancli.registry.component import component


@component("loop", "pretrain", target="titancli.loops.pretrain:build")
class Pretrain:
    """Next-token training on a stream of batches."""


COMPONENTS: list[type] = [Pretrain]

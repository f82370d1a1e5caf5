"""How a model is cut over devices. This file is the menu; each technique is one file beside it."""

from __future__ import annotations

from typing import Literal

from titancli.registry.component import component


@component("parallelize", "decoder", target="titancli.parallel.decoder:build")
class Decoder:
    """The plan for decoders: activation checkpointing, compile and FSDP2, block by block."""

    reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether gathered parameters are freed after forward (least memory) or kept for backward (least
    traffic). "default" frees them, save those of the last group, which backward needs first."""


COMPONENTS: list[type] = [Decoder]

"""How a model is cut over devices. This file is the menu; each technique is one file beside it."""

from __future__ import annotations

from typing import Literal

from titancli.registry.component import component


@component("parallelize", "decoder", target="titancli.parallel.decoder:build")
class Decoder:
    """The plan for decoders: tensor, context, expert parallel, activation checkpointing, compile, FSDP2."""

    reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether gathered parameters are freed after forward (least memory) or kept for backward (least
    traffic). "default" frees them, save those of the last group, which backward needs first, and never under
    a pipeline."""
    context_parallel: Literal["allgather", "ulysses", "ring"] = "allgather"
    """How attention sees the whole row under mesh.cp: gather keys and values, exchange heads for sequence
    (all-to-all), or pass keys and values around (GPUs only)."""


COMPONENTS: list[type] = [Decoder]

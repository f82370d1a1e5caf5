"""Activation offload. This file has the config and imports no torch; `activations.py` has the code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from titancli import component, hookimpl
from titancli.layout.stages import SCHEDULES
from titancli.registry.component import component_info

if TYPE_CHECKING:
    from titancli import Recipe


@component("callback", "activation_offload", target="titan_offload.activations:build")
class ActivationOffload:
    """Keep what blocks save for backward in pinned host memory, with copies beside the computation.

    With activation_checkpoint.mode = "full" that is each block's input, with "none" everything.
    """

    effect: ClassVar = "speed"
    offloads_activations: ClassVar[bool] = True

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        section, schedule = recipe.activation_checkpoint, recipe.pipeline.schedule
        by_operation = section.mode == "selective" and not section.selective_ac_option.isdecimal()
        if by_operation and not recipe.compile.model:
            yield (
                "",
                "what uncompiled blocks keep by operation is held by torch, and cannot be moved: set "
                'activation_checkpoint.mode = "full" or "none", or compile.enable = true',
            )
        if recipe.mesh.pp != 1 and SCHEDULES[schedule].splits_backward:
            yield (
                "",
                f"{schedule} goes backward twice, and activations would travel twice: use another "
                "pipeline.schedule",
            )
        if recipe.compile.cuda_graphs != "none":
            yield "", 'memory that comes and goes cannot be captured: set compile.cuda_graphs = "none"'
        if sum(component_info(one).name == "activation_offload" for one in recipe.callbacks) > 1:
            yield "", "activations are moved once: remove the others"


@hookimpl
def titan_components() -> list[type]:
    return [ActivationOffload]

"""QLoRA. This file has the config and imports no torch; `converter.py` has the code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from titancli import component, hookimpl
from titancli.converters import LoRA

if TYPE_CHECKING:
    from titancli import Recipe


@component("converter", "qlora", target="titan_qlora.converter:build")
class QLoRA(LoRA):
    """QLoRA: adapters in float32 beside a frozen base in 4 bits (arXiv 2305.14314).

    Linear layers and routed experts of the blocks are quantized to NF4 with double quantization, as
    bitsandbytes does. Checkpoints hold the adapters alone; the base is quantized anew from `weights`.
    """

    values_per_block: ClassVar[int] = 64
    """Values along a row that no rank may share, for `titan prove`."""
    skip: list[str] = field(default_factory=list)
    """Layers and stacks of experts to leave as they are: a full name (`layers.0.attention.wq`), the end of
    one (`wq`, `experts.w2`), or a pattern (`layers.0.*`)."""
    backend: Literal["auto", "torch", "bitsandbytes"] = "auto"
    """Who dequantizes: plain torch, or bitsandbytes, which is faster, with the same bits; auto: bitsandbytes
    on GPUs where it is installed."""

    @property
    def facts(self) -> dict[str, Any]:
        return {**super().facts, "base_in": "nf4"}

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from super().check(recipe)
        names = [type(config).__name__ for config in recipe.converters]
        if names.count("QLoRA") > 1:
            yield "", "there is a second qlora converter: use a single one with the targets of both"
        for other, why in {
            "LoRA": "qlora has adapters of its own",
            "Float8Linear": "the base is in 4 bits",
        }.items():
            if other in names:
                yield "", f"{why}: remove the other converter ({other})"
        if getattr(recipe.parallelize, "cpu_offload", False):
            yield "", "a base in 4 bits stays on the GPU: remove parallelize.cpu_offload"
        if recipe.compile.enable:
            yield "", "products with weights in 4 bits are not compiled yet: remove compile.enable"


@hookimpl
def titan_components() -> list[type]:
    return [QLoRA]


@hookimpl
def titan_recipes() -> Path:
    return Path(__file__).parent / "recipes"

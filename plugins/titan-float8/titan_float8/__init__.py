"""Float8 training. This file has the configs and imports no torch; `linear.py` has the code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Literal

from titancli import component, hookimpl

if TYPE_CHECKING:
    from titancli import Recipe


@component("converter", "float8_linear", target="titan_float8.linear:build")
class Float8Linear:
    """Run the matrix products of linear layers in float8, with dynamic scaling (torchao).

    Weights, gradients and checkpoints keep their dtypes: only the products' operands are cast.
    """

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """One scale per tensor (fastest), one per row (closer to bf16), or one per row with weight gradients in
    bf16 (closest)."""
    enable_fsdp_float8_all_gather: bool = False
    """All-gather weights in float8, which halves the traffic; tensorwise only."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute the scales of all gathered weights after each step, in one all-reduce instead of one per
    weight."""
    skip: list[str] = field(default_factory=list)
    """Linear layers to leave unchanged: a full name (`layers.0.attention.wq`), the end of one (`wq`,
    `attention.wo`), or a pattern (`layers.0.*`). `output` is always worth skipping."""
    emulate: bool | None = None
    """Emulate float8: compute in the usual dtype on values rounded to float8. None: only if the hardware has
    no float8 (CPUs, and GPUs before compute capability 8.9)."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        width = recipe.model.dim
        if isinstance(width, int) and width % 16:
            yield (
                "",
                f"every linear layer has a dimension of model.dim = {width}, but float8 needs multiples "
                f"of 16",
            )
        if self.enable_fsdp_float8_all_gather and self.recipe != "tensorwise":
            yield (
                "enable_fsdp_float8_all_gather",
                f"a float8 all-gather needs one scale per tensor; recipe {self.recipe!r} has one per "
                f"row: use recipe = 'tensorwise', or remove it",
            )
        if self.precompute_float8_dynamic_scale_for_fsdp and not self.enable_fsdp_float8_all_gather:
            yield (
                "precompute_float8_dynamic_scale_for_fsdp",
                "scales are only precomputed with enable_fsdp_float8_all_gather = true",
            )


@hookimpl
def titan_components() -> list[type]:
    return [Float8Linear]

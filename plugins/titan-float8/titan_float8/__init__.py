"""Training in low precision. This file has the configs and imports no torch; the code is beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

from titancli import component, hookimpl

if TYPE_CHECKING:
    from titancli import Recipe

ADAPTERS = ("lora", "qlora")


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
        yield from _sides("float8", recipe, 16)
        yield from _fits("float8_linear", recipe)
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


@component("converter", "float8_experts", target="titan_float8.experts:build_float8")
class Float8Experts:
    """Run the grouped matrix products of experts in float8, with dynamic scaling.

    Weights, gradients and checkpoints keep their dtypes: only the products' operands are cast.
    """

    recipe: Literal["rowwise", "blockwise"] = "rowwise"
    """One scale per row, a power of two, as torchao's recipe of experts; or, emulated only, one for each 128
    numbers of activations and gradients and each 128 × 128 of weights (DeepSeek-V3)."""
    skip: list[str] = field(default_factory=list)
    """Experts to leave unchanged: a full name (`layers.0.moe.experts`) or a pattern (`layers.0.*`)."""
    emulate: bool | None = None
    """Emulate float8: compute in the usual dtype on values rounded to float8. None: unless the GPU is of
    compute capability 9.0."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from _fits("float8_experts", recipe)


@component("converter", "mxfp8_linear", target="titan_float8.block_linear:build_mxfp8")
class MXFP8Linear:
    """Run the matrix products of linear layers in MXFP8: float8 with a scale for each 32 numbers (torchao).

    Weights, gradients and checkpoints keep their dtypes: only the products' operands are cast.
    """

    scale_calculation_mode: Literal["rceil", "floor"] = "rceil"
    """Scales that no number of a block exceeds, as the hardware rounds them; or the OCP specification's
    smallest rule, under which some saturate."""
    wgrad_with_hp: bool = False
    """Compute the gradients of weights in bf16."""
    skip: list[str] = field(default_factory=list)
    """Linear layers to leave unchanged, as in `float8_linear`."""
    emulate: bool | None = None
    """Emulate MXFP8: compute in the usual dtype on values rounded to MXFP8. None: unless the GPU is of
    compute capability 10.0."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from _sides("MXFP8", recipe, 32)
        yield from _fits("mxfp8_linear", recipe)


@component("converter", "mxfp8_experts", target="titan_float8.experts:build_mxfp8")
class MXFP8Experts:
    """Run the grouped matrix products of experts in MXFP8: float8 with a scale for each 32 numbers (torchao).

    Weights, gradients and checkpoints keep their dtypes: only the products' operands are cast.
    """

    scale_calculation_mode: Literal["rceil", "floor"] = "rceil"
    """As in `mxfp8_linear`."""
    wgrad_with_hp: bool = False
    """Compute the gradients of weights in bf16."""
    skip: list[str] = field(default_factory=list)
    """Experts to leave unchanged, as in `float8_experts`."""
    emulate: bool | None = None
    """Emulate MXFP8: compute in the usual dtype on values rounded to MXFP8. None: unless the GPU is of
    compute capability 10.0."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from _fits("mxfp8_experts", recipe)


@component("converter", "nvfp4_linear", target="titan_float8.block_linear:build_nvfp4")
class NVFP4Linear:
    """Run the matrix products of linear layers in NVFP4: 4 bits with a scale for each 16 numbers (torchao).

    As published (arXiv 2509.25149): weights share scales over 16 × 16 numbers, gradients are rounded
    stochastically, and the operands of weight gradients are turned by a random Hadamard transform. Which
    layers stay in bf16 is up to `skip`.
    """

    stochastic_rounding: bool = True
    """Round gradients up or down at random, so that they are right on average."""
    hadamard: bool = True
    """Turn both operands of weight gradients before they are rounded, which spreads outliers."""
    wgrad_with_hp: bool = False
    """Compute the gradients of weights in bf16."""
    skip: list[str] = field(default_factory=list)
    """Linear layers to leave unchanged, as in `float8_linear`."""
    emulate: bool | None = None
    """Emulate NVFP4: compute in the usual dtype on values rounded to NVFP4. None: unless the GPU is of
    compute capability 10.0."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from _sides("NVFP4", recipe, 16)
        yield from _fits("nvfp4_linear", recipe)


@component("converter", "nvfp4_experts", target="titan_float8.experts:build_nvfp4")
class NVFP4Experts:
    """Run the grouped matrix products of experts in NVFP4, emulated: 4 bits with a scale for each 16 numbers.

    torchao has no training of experts in NVFP4; rounding is that of `nvfp4_linear`, expert by expert.
    """

    stochastic_rounding: bool = True
    """As in `nvfp4_linear`."""
    hadamard: bool = True
    """As in `nvfp4_linear`."""
    wgrad_with_hp: bool = False
    """Compute the gradients of weights in bf16."""
    skip: list[str] = field(default_factory=list)
    """Experts to leave unchanged, as in `float8_experts`."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        yield from _fits("nvfp4_experts", recipe)


def _sides(what: str, recipe: Recipe, multiple: int) -> Iterator[tuple[str, str]]:
    width = recipe.model.dim
    if isinstance(width, int) and width % multiple:
        yield (
            "",
            f"every linear layer has a dimension of model.dim = {width}, but {what} needs multiples "
            f"of {multiple}",
        )


def _fits(name: str, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Check what stands beside the converter: adapters of linear layers have a product of their own, those of
    experts add to the experts' own."""
    from titancli.registry.component import component_info

    model: Any = recipe.model
    if name.endswith("_experts") and hasattr(model, "shape") and getattr(model, "moe", None) is None:
        yield "", "the model has no experts"
    names = [component_info(one).name for one in recipe.converters]
    adapters = next((one for one in names if one in ADAPTERS), None)
    if adapters is None:
        return
    if name.endswith("_linear"):
        yield "", f"{adapters} and {name} change the same layers: use only one of them"
    elif adapters == "qlora":
        yield "", f"qlora stores experts in 4 bits, which {name} cannot cast: use only one of them"
    elif names.index(adapters) < names.index(name):
        yield "", f"put {name} before {adapters}, whose adapters add to the products of experts"


@hookimpl
def titan_components() -> list[type]:
    return [Float8Linear, Float8Experts, MXFP8Linear, MXFP8Experts, NVFP4Linear, NVFP4Experts]

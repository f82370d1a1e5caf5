"""The converters of experts: their grouped products in float8, MXFP8 and NVFP4."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from titan_float8.hardware import kernel_for
from titan_float8.products import grouped_product
from titan_float8.scheme import Scheme
from titan_float8.selection import choose
from titancli.converters.lora_experts import OWN as ADAPTERS
from titancli.errors import EnvironmentProblem, TitanError
from titancli.models.blocks.moe import Experts

if TYPE_CHECKING:
    from titan_float8 import Float8Experts, MXFP8Experts, NVFP4Experts
    from titancli.layout.degrees import Degrees
    from titancli.observe.peaks import Device


def build_float8(
    config: Float8Experts, *, mesh: Degrees, compile: bool, planned: Device | None = None
) -> LowPrecisionExperts:
    """Build the converter.

    Raises:
        EnvironmentProblem: `emulate = false` without the hardware, or with products that are only emulated.
    """
    if config.recipe == "blockwise":
        if config.emulate is False:
            raise EnvironmentProblem(
                "float8_experts: emulate = false, but products of recipe 'blockwise' are only emulated",
                hint="remove emulate, or use recipe = 'rowwise'",
            )
        return LowPrecisionExperts("float8_experts", Scheme("blockwise"), config.skip)
    kernel = kernel_for("float8_experts", "float8 groups", config.emulate, "hopper", planned)
    if compile and kernel == "hopper":
        # As of linear layers: fused code may recompute a scale with another precision.
        from torch._inductor import config as inductor

        inductor.emulate_precision_casts = True
    return LowPrecisionExperts("float8_experts", Scheme("rowwise", kernel), config.skip)


def build_mxfp8(
    config: MXFP8Experts, *, mesh: Degrees, compile: bool, planned: Device | None = None
) -> LowPrecisionExperts:
    """Build the converter.

    Raises:
        EnvironmentProblem: `emulate = false` without the hardware.
    """
    kernel = kernel_for("mxfp8_experts", "MXFP8", config.emulate, "torchao", planned)
    scheme = Scheme("mxfp8", kernel, config.scale_calculation_mode == "floor", config.wgrad_with_hp)
    return LowPrecisionExperts("mxfp8_experts", scheme, config.skip)


def build_nvfp4(
    config: NVFP4Experts, *, mesh: Degrees, compile: bool, planned: Device | None = None
) -> LowPrecisionExperts:
    """Build the converter, which always emulates: torchao trains no experts in NVFP4."""
    rounded = (config.wgrad_with_hp, config.stochastic_rounding, config.hadamard)
    return LowPrecisionExperts("nvfp4_experts", Scheme("nvfp4", "emulated", False, *rounded), config.skip)


class LowPrecisionExperts:
    """A Converter (see `titancli.protocols`)."""

    def __init__(self, name: str, scheme: Scheme, skip: list[str]) -> None:
        self.name, self.scheme, self.skip = name, scheme, skip

    def convert(self, model: nn.Module) -> None:
        """Change the class of all experts that are not skipped, in place.

        Raises:
            RecipeError: a name in `skip` matches no experts, or nothing is left to convert.
        """
        experts = {name: m for name, m in model.named_modules() if isinstance(m, Experts)}
        chosen = choose(self.name, experts, self.skip, lambda _, m: self._unfit(m), "group of experts")
        for layer in chosen.values():
            kind: Any = type(layer)
            layer.__class__ = _quantized(kind)
            layer.scheme = self.scheme  # type: ignore[assignment]

    def _unfit(self, layer: Experts) -> str | None:
        if isinstance(layer, QuantizedExperts):
            return "in low precision already"
        if replaced := {"forward", "compute", "product"} & vars(layer).keys():
            return f"it has its own {min(replaced)}"
        if type(layer).product is not Experts.product:
            return f"its class {type(layer).__name__} has its own products"
        for name, parameter in layer.named_parameters(recurse=False):
            p, q = parameter.shape[-2:]
            if parameter.ndim == 3 and (p % self.scheme.block or q % self.scheme.block):
                return f"{name} [{p}, {q}] is not divisible by {self.scheme.block}"
        return None

    def after_step(self, model: nn.Module) -> None:
        """Nothing follows from the weights: they are cast in each product."""

    def plain(self, name: str, tensor: Tensor) -> Tensor:
        """Return the parameter: it is of no class of its own."""
        return tensor


class QuantizedExperts(Experts):
    """Above a class of experts: its products are in low precision."""

    scheme: Scheme

    def compute(self, x: Tensor, counts: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Compute as the class below; `product` takes the matrices out, one after the other."""
        left = dict(weights)
        out = super().compute(x, counts, left)
        if missed := [name for name, matrix in left.items() if matrix.ndim == 3]:
            raise TitanError(
                f"{type(self).__name__}.compute multiplies with {missed[0]} without Experts.product, and so "
                f"not in low precision",
                hint="compute products with self.product(x, name, weights, ends), or add the experts to skip",
            )
        given: dict[str, Tensor] = weights  # type: ignore[assignment] # with adapters, that of their class
        for name in [name for name in weights if name.endswith(ADAPTERS)]:
            del given[name]  # taken by their class, which looks for those that are left
        return out

    def product(self, x: Tensor, name: str, weights: Mapping[str, Tensor], ends: Tensor) -> Tensor:
        """Multiply as `Experts.product`."""
        taken: dict[str, Tensor] = weights  # type: ignore[assignment] # `compute` has made it
        matrix = taken.pop(name)
        return grouped_product(x, matrix.transpose(1, 2) if self.is_transposed else matrix, ends, self.scheme)


@cache
def _quantized(kind: Any) -> type[QuantizedExperts]:
    return type(
        kind.__name__, (QuantizedExperts, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__}
    )

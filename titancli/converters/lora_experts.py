"""Adapters of stacked experts: each expert has an A and a B of its own, stacked as its matrices are.

A stack `w1` gets `w1_lora_a` and `w1_lora_b` beside it. Of a stack [E, p, q] these are [E, rank, q] and
[E, p, rank], so that what is added to it is B·A, whichever of p and q is the side of the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from titancli.errors import RecipeError, TitanError
from titancli.models.blocks.grouped import grouped_linear
from titancli.models.blocks.moe import Experts

MULTIPLE = 8
"""The rank must be a multiple of this: grouped products need rows of whole 16 bytes."""
OWN = ("_lora_a", "_lora_b")


class AdaptedExperts(Experts):
    """Above a class of experts: frozen stacks, some with adapters."""

    scale: float
    enabled = True
    """False: the experts are the base's."""

    @staticmethod
    def adapt(layer: Any, stack: str, rank: int, scale: float) -> None:
        """Put adapters beside a stack, in place; its values are frozen already."""
        if replaced := sorted({"forward", "compute"} & vars(layer).keys()):
            raise RecipeError(
                f"lora: experts whose {replaced[0]} a converter has replaced cannot have an adapter",
                hint="put lora before that converter",
            )
        if not isinstance(layer, AdaptedExperts):
            kind: Any = type(layer)
            layer.__class__ = _adapted(kind)
            layer.scale = scale
        weight = getattr(layer, stack)
        experts, p, q = weight.shape
        like: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        own = ((experts, rank, q), (experts, p, rank))
        made = {
            stack + end: nn.Parameter(torch.empty(*shape, **like))
            for end, shape in zip(OWN, own, strict=True)
        }
        # Each stack's right behind it: who merges one after the other holds one of them only.
        before = dict(layer._parameters)
        layer._parameters.clear()
        for name, parameter in before.items():
            layer._parameters[name] = parameter
            if name == stack:
                layer._parameters.update(made)

    def tensor_plan(self, style: str | None) -> Mapping[str, str]:
        """Adapters travel with their experts."""
        return {name: "expert" for name in self._parameters if name.endswith(OWN)}

    def compute(self, x: Tensor, counts: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        left = dict(weights)
        out = super().compute(x, counts, left)
        if unused := [name for name in left if name.endswith(OWN)]:
            raise TitanError(
                f"lora: {type(self).__name__}.compute multiplies without Experts.product, and so without "
                f"the adapter {unused[0]}",
                hint="compute products with self.product(x, name, weights, ends), or remove the experts "
                "from targets",
            )
        return out

    def product(self, x: Tensor, name: str, weights: Mapping[str, Tensor], ends: Tensor) -> Tensor:
        out = self.base_product(x, name, weights, ends)
        if name + OWN[0] not in weights:
            return out
        taken: dict[str, Tensor] = weights  # type: ignore[assignment] # `compute` has made it
        a, b = (taken.pop(name + end) for end in OWN)
        if not self.enabled:
            return out
        first, second = (b.transpose(1, 2), a.transpose(1, 2)) if self.is_transposed else (a, b)
        return out + self.scale * grouped_linear(grouped_linear(x, first, ends), second, ends)

    def base_product(self, x: Tensor, name: str, weights: Mapping[str, Tensor], ends: Tensor) -> Tensor:
        """Return what the frozen stack makes of x; see `AdaptedLinear.base_product`."""
        return super().product(x, name, weights, ends)


@cache
def _adapted(kind: Any) -> type[AdaptedExperts]:
    return type(
        kind.__name__, (AdaptedExperts, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__}
    )


def stacks_of(model: nn.Module) -> dict[str, Experts]:
    """Return the modules of a model's stacked experts, by the names of their stacks of matrices."""
    return {
        f"{path}.{name}": module
        for path, module in model.named_modules()
        if isinstance(module, Experts)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and not name.endswith(OWN)
    }

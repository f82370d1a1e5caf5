"""titan's experts in transformers' mixtures: grouped products, and tokens sent to other ranks.

transformers' modules of stacked experts look up the function that computes them in a table. They keep their
place and their parameters' names, but compute with `titancli.models.blocks.moe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from titancli.models.blocks.grouped import add_bias
from titancli.models.blocks.moe import Experts
from titancli.protocols import Visit

EXPERTS = "titan"
"""Name of our function in transformers' table."""


def register_experts() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _forward)


def stacked_experts(base: nn.Module) -> dict[str, nn.Module]:
    """Turn a base's modules of stacked experts into titan's, in place; return them by their names in it."""
    found: dict[str, nn.Module] = {}
    module: Any
    for name, module in base.named_modules():
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
            kind: Any = type(module)
            module.__class__ = _ours(kind)
            module.force_load_balance = False
            found[name] = module
    return found


@cache
def _ours(kind: Any) -> type[nn.Module]:
    return type(kind.__name__, (_Stacked, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


class _Stacked(Experts):
    """Mixed in before a class of transformers, which keeps its parameters, gate and activation."""

    def forward(self, hidden: Tensor, choices: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        """Return the weighted sum of the chosen experts' outputs.

        Args:
            hidden: [N, dim].
            choices: [N, top_k], indices of experts; an index out of range adds nothing.
            weights: [N, top_k].
        """
        none = choices >= self.num_experts
        weights, choices = weights.masked_fill(none, 0.0), choices.clamp(max=self.num_experts - 1)
        flat = choices.flatten()
        counts = flat.new_zeros(self.num_experts).scatter_add(0, flat, torch.ones_like(flat))
        return super().forward(Visit(hidden, choices, weights, counts))

    def compute(self, x: Tensor, counts: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Compute the experts, see `titancli.models.blocks.moe.Experts.compute`."""
        own: Any = self
        ends = counts.cumsum(0).int()
        name = "gate_up_proj" if own.has_gate else "up_proj"
        x = self.product(x, name, weights, ends)
        x = own._apply_gate(x) if own.has_gate else own.act_fn(x)
        x = self.product(x, "down_proj", weights, ends)
        return own.post_expert_norm(x) if own.has_post_expert_norm else x

    def product(self, x: Tensor, name: str, weights: Mapping[str, Tensor], ends: Tensor) -> Tensor:
        out = super().product(x, name, weights, ends)
        own: Any = self
        return add_bias(out, weights[f"{name}_bias"], ends) if own.has_bias else out


def _forward(module: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Compute experts whose class `stacked_experts` has not converted, such as one created later."""
    kind: Any = type(module)
    made: Tensor = _ours(kind).forward(module, *args, **kwargs)
    return made

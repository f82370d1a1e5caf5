"""titan's experts in transformers' mixtures: products in groups, and tokens that travel to other ranks.

transformers' modules of stacked experts ask a table for the function that computes them. They stay where they
are, with their parameters under their names; what they compute is that of `titancli.models.blocks.moe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from titancli.models.blocks.grouped import add_bias
from titancli.models.blocks.moe import Experts, Rearrange

EXPERTS = "titan"
"""What transformers knows our function by."""


def register_experts() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _forward)


def stacked_experts(base: nn.Module) -> dict[str, nn.Module]:
    """Make a base's modules of stacked experts titan's, in place; return them by their names in it."""
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
    """Above a class of transformers: parameters, gate and activation are its."""

    def forward(self, hidden: Tensor, choices: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        """What the chosen experts make of tokens, weighed.

        Args:
            hidden: [N, dim].
            choices: [N, top_k], numbers of experts; what is no number of one adds nothing.
            weights: [N, top_k].
        """
        top_k, none = choices.shape[-1], choices >= self.num_experts
        weights = weights.masked_fill(none, 0.0).to(hidden.dtype)
        flat = choices.flatten().clamp(max=self.num_experts - 1)
        order = flat.argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        counts = flat.new_zeros(self.num_experts).scatter_add(0, flat, torch.ones_like(flat))
        visitors = Rearrange.apply(hidden, order, place, top_k)
        made = Rearrange.apply(self.over_experts(visitors, counts), place, order, 1)
        return torch.bmm(weights[:, None], made.view(len(hidden), top_k, -1))[:, 0]

    def compute(self, x: Tensor, counts: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """See `titancli.models.blocks.moe.Experts.compute`."""
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
    """What transformers calls for a class that `stacked_experts` has not met, as one made on the way."""
    kind: Any = type(module)
    made: Tensor = _ours(kind).forward(module, *args, **kwargs)
    return made

"""Schedule-free AdamW: an average of the iterates in place of a decaying rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from titan_optimizers import ScheduleFree
from titan_optimizers.elementwise import Skipping, Update, counted, kept, local
from titancli.protocols import Role


class ScheduleFreeOptimizer(Skipping):
    """See `titan_optimizers.ScheduleFree`.

    Parameters hold the average x, which is evaluated, saved and exported; z are the iterates. Only for the
    passes that compute gradients do they hold y, between the two: as a hook of the engine's steps, the
    optimizer puts it there, and x back. The facebookresearch/schedule_free package keeps y and computes x,
    with rounding each time.
    """

    @contextmanager
    def around_backward(self, backward: Any) -> Iterator[None]:
        """Let parameters hold y in the block."""
        with torch.no_grad():
            averages = self._at_y()
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, average in averages:
                    weight.copy_(average)

    def _at_y(self) -> list[tuple[Tensor, Tensor]]:
        """Put y into the parameters; return their shards, and copies of what was in them."""
        found = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if "z" in self.state[parameter]:
                    weight = local(parameter.detach())
                    found.append((weight, weight.clone()))
                    weight.lerp_(local(self.state[parameter]["z"]), 1 - group["betas"][0])
        return found

    def update(self, at: Update) -> None:
        parameter, weight, grad, wrong, group = at
        state = self.state[parameter]
        if not state:
            for name in ("step", "lr_max", "weight_sum"):
                state[name] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state["z"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            local(state["z"]).copy_(weight)
        z, second = local(state["z"]), local(state["exp_avg_sq"])
        step, (beta1, beta2) = counted(state, wrong).double(), group["betas"]
        largest = state["lr_max"].clamp(min=group["lr"])
        total = state["weight_sum"] + largest.square()
        share = torch.where(total > 0, largest.square() / total, 0.0)
        moment = (second * beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (moment / (1 - beta2**step).float()).sqrt_().add_(group["eps"])
        y = weight.lerp(z, 1 - beta1)
        iterate = z - group["lr"] * (grad / denominator + group["weight_decay"] * y)
        kept(weight, weight.lerp(iterate, share), wrong)
        for old, new in (
            (z, iterate),
            (second, moment),
            (state["lr_max"], largest),
            (state["weight_sum"], total),
        ):
            kept(old, new, wrong)


def build(
    config: ScheduleFree,
    *,
    named_parameters: list[tuple[str, nn.Parameter]],
    roles: Mapping[str, Role] | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer."""
    shared = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    return ScheduleFreeOptimizer([parameter for _, parameter in named_parameters], shared)

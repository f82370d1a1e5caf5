"""Optimizers that update each element by itself: shards of DTensors are updated as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_optimizers import Lion
from titancli.protocols import Role


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor; the tensor itself, if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Elementwise(torch.optim.Optimizer):
    """An optimizer with one function for all elements of a shard."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, local(parameter), local(parameter.grad).float(), group)
        return loss

    def _update(self, parameter: nn.Parameter, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class LionOptimizer(Elementwise):
    """See `titan_optimizers.Lion`; its algorithm 2 has the update."""

    def _update(self, parameter: nn.Parameter, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        momentum, (beta1, beta2) = local(state["exp_avg"]), group["betas"]
        update = momentum.lerp(grad, 1 - beta1).sign_()
        weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
        momentum.lerp_(grad, 1 - beta2)


def build_lion(
    config: Lion, *, named_parameters: list[tuple[str, nn.Parameter]], roles: Mapping[str, Role] | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer."""
    shared = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "weight_decay": config.weight_decay,
    }
    return LionOptimizer([parameter for _, parameter in named_parameters], shared)

"""Optimizers that skip steps on the device, and Lion, which updates each element by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_optimizers import Lion
from titancli.protocols import Role


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor; the tensor itself, if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def kept(old: Tensor, new: Tensor, wrong: Tensor | None) -> None:
    """Write new values in place of old ones, unless `wrong` is 1.0: the step is then skipped."""
    old.copy_(new if wrong is None else torch.where(wrong > 0, old, new))


def counted(state: dict[str, Any], wrong: Tensor | None) -> Tensor:
    """Return the number of a parameter's steps, with this one unless it is skipped: a scalar on its device,
    which only the device reads."""
    state["step"] += 1.0 if wrong is None else 1.0 - wrong
    step: Tensor = state["step"]
    return step


class Update(NamedTuple):
    """What the update of one parameter depends on, beside its state."""

    parameter: nn.Parameter
    weight: Tensor
    """This rank's shard of the parameter."""
    grad: Tensor
    """Its gradient, fp32."""
    wrong: Tensor | None
    """1.0 where the step is skipped, else 0.0."""
    group: dict[str, Any]


class Skipping(torch.optim.Optimizer, ABC):
    """An optimizer that updates one parameter after another, and skips steps on the device.

    As with torch's fused steps, gradients are divided by `grad_scale`, and the step is skipped where
    `found_inf` is 1.0; both are device scalars or None.
    """

    _step_supports_amp_scaling = True
    """torch's marker for an optimizer that honors them."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    own = local(parameter)
                    scale, wrong = (
                        None if given is None else given.to(own.device, non_blocking=own.is_cuda)
                        for given in (self.grad_scale, self.found_inf)
                    )
                    grad = local(parameter.grad).float()
                    grad = grad if scale is None else grad / scale
                    self.update(Update(parameter, own, grad, wrong, group))
        return loss

    @abstractmethod
    def update(self, at: Update) -> None:
        """Change a parameter and its state in place."""


class LionOptimizer(Skipping):
    """See `titan_optimizers.Lion`; its algorithm 2 has the update."""

    def update(self, at: Update) -> None:
        parameter, weight, grad, wrong, group = at
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        momentum, (beta1, beta2) = local(state["exp_avg"]), group["betas"]
        update = momentum.lerp(grad, 1 - beta1).sign_()
        decayed = weight * (1 - group["lr"] * group["weight_decay"])
        kept(weight, decayed.sub_(update, alpha=group["lr"]), wrong)
        kept(momentum, momentum.lerp(grad, 1 - beta2), wrong)


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

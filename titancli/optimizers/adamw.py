"""AdamW: torch's where parameters and state are float32, our own step where either is bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titancli.errors import RecipeError
from titancli.optimizers import AdamW


def build(config: AdamW, *, named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """An optimizer with one group that decays and, where `no_decay` names some, one that does not.

    Raises:
        RecipeError: a pattern of `no_decay` matches no parameter.
    """
    for pattern in config.no_decay:
        if not any(fnmatchcase(name, pattern) for name, _ in named_parameters):
            raise RecipeError(
                f"optimizer.no_decay: {pattern!r} matches no parameter",
                hint=f"names look like {named_parameters[0][0]!r} and {named_parameters[-1][0]!r}",
            )
    decaying: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    for name, parameter in named_parameters:
        is_exempt = any(fnmatchcase(name, pattern) for pattern in config.no_decay)
        (exempt if is_exempt else decaying).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((decaying, config.weight_decay), (exempt, 0.0))
        if params
    ]
    shared: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    state_dtype = getattr(torch, config.state_dtype)
    if state_dtype == torch.float32 and all(p.dtype == torch.float32 for _, p in named_parameters):
        fused, foreach = config.implementation == "fused", config.implementation == "foreach"
        return torch.optim.AdamW(groups, **shared, fused=fused, foreach=foreach)
    return MixedAdamW(groups, **shared, state_dtype=state_dtype)


class MixedAdamW(torch.optim.Optimizer):
    """AdamW whose parameters and moments may each be float32 or bfloat16; the arithmetic is float32.

    torch's own steps refuse float32 parameters with bfloat16 moments, and give bfloat16 parameters bfloat16
    moments whether wanted or not.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
        state_dtype: torch.dtype,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.state_dtype = state_dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=self.state_dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self.state_dtype)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        step = state["step"].item()
        weight, gradient = _local(parameter), _local(grad).float()
        first, second = _local(state["exp_avg"]), _local(state["exp_avg_sq"])
        mean = first.float().lerp_(gradient, 1 - beta1)
        square = second.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        first.copy_(mean)
        second.copy_(square)
        denominator = square.div(1 - beta2**step).sqrt_().add_(group["eps"])
        value = weight.float().mul_(1 - group["lr"] * group["weight_decay"])
        weight.copy_(value.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**step)))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

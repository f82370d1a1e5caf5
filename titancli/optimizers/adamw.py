"""AdamW: torch's where parameters and state are float32, our own step where either is bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titancli.errors import RecipeError
from titancli.optimizers import AdamW


def build(
    config: AdamW,
    *,
    named_parameters: list[tuple[str, nn.Parameter]],
    model_names: Sequence[str] | None = None,
) -> torch.optim.Optimizer:
    """An optimizer with one group that decays and, where `no_decay` names some, one that does not.

    Raises:
        RecipeError: a pattern of `no_decay` matches no parameter of the whole model.
    """
    model_names = [name for name, _ in named_parameters] if model_names is None else model_names
    for pattern in config.no_decay:
        if not any(fnmatchcase(name, pattern) for name in model_names):
            raise RecipeError(
                f"optimizer.no_decay: {pattern!r} matches no parameter",
                hint=f"names look like {model_names[0]!r} and {model_names[-1]!r}",
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
    return MixedAdamW(groups, **shared, state_dtype=state_dtype, fused=config.implementation == "fused")


class MixedAdamW(torch.optim.Optimizer):
    """AdamW whose parameters and moments may each be float32 or bfloat16; the arithmetic is float32.

    torch's own steps refuse float32 parameters with bfloat16 moments, and give bfloat16 parameters bfloat16
    moments whether wanted or not. With `fused` a GPU does each parameter in one compiled kernel, in which
    every number is read and written once.
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
        fused: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.state_dtype = state_dtype
        self._fused = fused

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
        weight, gradient = _local(parameter), _local(grad)
        first, second = _local(state["exp_avg"]), _local(state["exp_avg_sq"])
        decay = 1 - group["lr"] * group["weight_decay"]
        size, correction = group["lr"] / (1 - beta1**step), 1 - beta2**step
        tensors = (weight, gradient, first, second)
        if self._in_one_kernel(tensors):
            flat = (tensor.view(-1) for tensor in tensors)
            changing = _on_device((decay, size, correction), weight.device)
            _compiled_update()(*flat, *changing, beta1, beta2, group["eps"])
        else:
            _update_(*tensors, decay, size, correction, beta1, beta2, group["eps"])

    def _in_one_kernel(self, tensors: Sequence[Tensor]) -> bool:
        return self._fused and all(tensor.is_cuda and tensor.is_contiguous() for tensor in tensors)


def _update_(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    decay: Any,
    size: Any,
    correction: Any,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """One step of one parameter, in place.

    Args:
        decay: what the weight is multiplied by.
        size: the learning rate over the first moment's bias correction.
        correction: the second moment's bias correction.
    """
    gradient = gradient.float()
    mean = first.float().lerp_(gradient, 1 - beta1)
    square = second.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    first.copy_(mean)
    second.copy_(square)
    denominator = square.div(correction).sqrt_().add_(eps)
    weight.copy_(weight.float().mul_(decay).sub_(mean.mul(size).div_(denominator)))


@lru_cache(maxsize=4)
def _on_device(numbers: tuple[float, ...], device: torch.device) -> tuple[Tensor, ...]:
    """What changes from step to step, as tensors: as numbers it would be compiled in, again at each step."""
    return torch.tensor(numbers, dtype=torch.float32, device=device).unbind()


@cache
def _compiled_update() -> Callable[..., None]:
    # One graph for matrices of all sizes, and one for vectors.
    return torch.compile(_update_, dynamic=True, fullgraph=True)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""Adafactor on whole matrices and on shards of them: `torch.optim.Adafactor` is for whole ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate

from titan_optimizers import Adafactor
from titan_optimizers.elementwise import Skipping, Update, counted, kept, local
from titancli.distributed.local import sharded_as
from titancli.protocols import Role


class AdafactorOptimizer(Skipping):
    """See `titan_optimizers.Adafactor`.

    The update is that of `torch.optim.Adafactor`, except that the mean of a matrix's second moments, which
    torch takes to be at least 1e-7, may be as small as those of small gradients are.
    """

    def update(self, at: Update) -> None:
        parameter, weight, grad, wrong, group = at
        state, count = self.state[parameter], parameter.numel()
        if not state:
            self._begin(parameter, state)
        step = counted(state, wrong)
        if wrong is not None:  # no gradient that is not finite takes part in sums
            grad = torch.where(wrong > 0, 0.0, grad)
            step = step.clamp(min=1.0)
        decay = step ** group["beta2_decay"]
        tiny = torch.finfo(torch.float32).eps ** 2
        rms = (_summed(weight.float().square().sum(), parameter, range(parameter.ndim)) / count).sqrt()
        size = rms.clamp(min=group["eps"]) * step.rsqrt().clamp(max=group["lr"])
        if "variance" in state:
            old = [local(state["variance"])]
            new = [old[0].lerp(grad.square(), decay)]
            estimate = new[0].clamp(min=tiny)
        else:
            squares, n_rows, n_columns = grad.square(), parameter.shape[-2], parameter.shape[-1]
            last, before = parameter.ndim - 1, parameter.ndim - 2
            old = [local(state["row_var"]), local(state["col_var"])]
            means = [
                _summed(squares.sum(-1, keepdim=True), parameter, [last]) / n_columns,
                _summed(squares.sum(-2, keepdim=True), parameter, [before]) / n_rows,
            ]
            new = [one.lerp(mean, decay) for one, mean in zip(old, means, strict=True)]
            mean = _summed(new[0].sum(-2, keepdim=True), parameter, [before]) / n_rows
            estimate = (new[0] @ new[1]).div_(mean.clamp(min=tiny)).clamp_(min=tiny)
        update = estimate.rsqrt_().mul_(grad)
        norm = _summed(update.square().sum(), parameter, range(parameter.ndim)).sqrt()
        denominator = (norm / (math.sqrt(count) * group["clip"])).clamp(min=1.0)
        decayed = weight * (1 - group["lr"] * group["weight_decay"])
        kept(weight, decayed.sub_(update.mul_(size / denominator)), wrong)
        for one, value in zip(old, new, strict=True):
            kept(one, value, wrong)

    def _begin(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        state["step"] = torch.zeros((), dtype=torch.float32, device=local(parameter).device)
        if parameter.ndim < 2:
            state["variance"] = torch.zeros_like(parameter)
            return
        for name, dim in (("row_var", parameter.ndim - 1), ("col_var", parameter.ndim - 2)):
            shape, whole = list(local(parameter).shape), list(parameter.shape)
            shape[dim] = whole[dim] = 1
            given = parameter.placements if isinstance(parameter, DTensor) else ()
            places = [Replicate() if _cuts(one, dim) else one for one in given]
            own = torch.zeros(shape, device=local(parameter).device)
            state[name] = sharded_as(parameter, own, whole, places)


def _cuts(placement: Placement, dim: int) -> bool:
    # Strided shards too, as FSDP2 makes after tensor parallelism.
    return getattr(placement, "dim", None) == dim


def _summed(own: Tensor, parameter: Tensor, dims: Any) -> Tensor:
    """Return the sum over the ranks that `parameter` is sharded over along these dimensions. Collective."""
    if not isinstance(parameter, DTensor):
        return own
    for number, placement in enumerate(parameter.placements):
        if any(_cuts(placement, dim) for dim in dims) and parameter.device_mesh.size(number) > 1:
            dist.all_reduce(own, group=parameter.device_mesh.get_group(number))
    return own


def build(
    config: Adafactor,
    *,
    named_parameters: list[tuple[str, nn.Parameter]],
    roles: Mapping[str, Role] | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer."""
    shared = {
        "lr": config.lr,
        "beta2_decay": config.beta2_decay,
        "eps": config.eps,
        "clip": config.clip,
        "weight_decay": config.weight_decay,
    }
    return AdafactorOptimizer([parameter for _, parameter in named_parameters], shared)

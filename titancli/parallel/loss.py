"""The parameters of a loss on several ranks. Those of tp and cp have the same rows, and compute the same with
them: tensor parallelism keeps them whole, and their gradients are not parts of a sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from titancli.distributed.local import call_with, slots
from titancli.distributed.mesh import Mesh
from titancli.parallel.tensor import distribute
from titancli.parallel.wrapped import wrap


def loss_parallel(module: nn.Module, mesh: Mesh, dtype: torch.dtype) -> None:
    """Prepare a loss on meta, in place: its forward, and its `values`, compute with whole parameters in a
    dtype."""
    if mesh.tp is not None:
        distribute(module, mesh.tp, {name: "replicate" for name, _ in module.named_parameters()})
    # FSDP2 sums over the ranks of cp, too.
    for name in ("forward", "values"):
        if callable(method := getattr(module, name, None)):
            wrap(module, name, partial(_on_whole, module, 1 / mesh.degrees.cp, dtype, method))


def _on_whole(
    loss: nn.Module, share: float, dtype: torch.dtype, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    def is_own(parameter: Any) -> bool:  # no longer so where one method calls the other
        return isinstance(parameter, nn.Parameter)

    def computed_with(parameter: Tensor) -> Tensor:
        if isinstance(parameter, DTensor):
            parameter = parameter.to_local(grad_placements=[Replicate()])
        if parameter.is_floating_point():
            parameter = parameter.to(dtype)
        return parameter if share == 1.0 else _Shared.apply(parameter, share)

    return call_with(slots(loss.modules(), is_own), computed_with, forward, *args, **kwargs)


class _Shared(torch.autograd.Function):
    """The identity, whose gradient is this rank's share of one that several ranks compute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.share, None

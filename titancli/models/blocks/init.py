"""Initial values that do not depend on the layout: drawn whole, then cut."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


@torch.no_grad()
def fill(parameter: Tensor, draw: Callable[[Tensor], object]) -> None:
    """Let `draw` fill a whole fp32 tensor of the parameter's shape, and keep this rank's part of it.

    DTensor's own random operations are not used: on CPU they give each shard the same numbers and each
    replica different ones.
    """
    whole = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
    draw(whole)
    if isinstance(parameter, DTensor):
        # src_data_rank=None: all ranks have drawn the same values, and each cuts its part.
        whole = distribute_tensor(
            whole, parameter.device_mesh, parameter.placements, src_data_rank=None
        ).to_local()
        parameter = parameter.to_local()
    parameter.copy_(whole)


def normal_(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    """Normal with mean 0."""
    fill(parameter, lambda whole: whole.normal_(0.0, std, generator=generator))


def trunc_normal_(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    """Normal with mean 0, cut at three standard deviations."""
    fill(
        parameter,
        lambda whole: torch.nn.init.trunc_normal_(whole, 0.0, std, -3 * std, 3 * std, generator=generator),
    )


def ones_(parameter: Tensor) -> None:
    fill(parameter, lambda whole: whole.fill_(1.0))

"""Gradients at the end of a step: their norm over every mesh, and what divides and clips them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def total_norm(
    parameters: Iterable[nn.Parameter], device: torch.device, stages: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the 2-norm of all gradients, as `norm_of` has it."""
    return norm_of((parameter.grad for parameter in parameters), device, stages)


def norm_of(
    tensors: Iterable[Tensor | None], device: torch.device, stages: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the 2-norm of tensors, such as gradients, an fp32 scalar, the same on every rank. None is zero.

    Squares are added up over the mesh dimensions that a tensor is cut along, each mesh for itself, and over
    `stages`, the ranks that have the other stages of a pipeline.
    """
    groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for gradient in tensors:
        if isinstance(gradient, DTensor):
            cut = tuple(
                gradient.device_mesh.get_group(dim)
                for dim, placement in enumerate(gradient.placements)
                if not placement.is_replicate()  # _StridedShard, of FSDP2 over TP, is no Shard
            )
            groups[cut].append(gradient.to_local())
        elif gradient is not None:
            groups[()].append(gradient)
    squares = [torch.zeros((), dtype=torch.float32, device=device)]
    for process_groups, gradients in groups.items():
        square = torch.stack(_norms(gradients)).square_().sum().to(device)  # from the CPU, where offloaded
        for group in process_groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    total = torch.stack(squares).sum()
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt_()


def _norms(gradients: list[Tensor]) -> list[Tensor]:
    if gradients[0].is_cuda:
        return list(torch._foreach_norm(gradients, 2, dtype=torch.float32))
    # A CPU adds the squares of a tensor in fp32 one by one, which loses half a percent over 64 M of them (and
    # another amount on another number of ranks). Rows first, and it is exact to rounding, and as quick.
    rows = (torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float32) for gradient in gradients)
    return [torch.linalg.vector_norm(norms) for norms in rows]


@torch.no_grad()
def norm_and_scale(
    parameters: list[nn.Parameter],
    weight: Tensor,
    max_norm: float,
    stages: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the norm of the gradients over `weight`, and what gradients are to be divided by: the weight,
    and more where the norm exceeds `max_norm` (0: never). fp32 scalars; nothing is read to the host.

    By a weight that is not above zero nothing can be divided, and the guard skips the step.
    """
    weight = torch.where(weight <= 0, 1.0, weight)
    norm = total_norm(parameters, weight.device, stages) / weight
    if max_norm > 0:
        weight = weight / (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm, weight


@torch.no_grad()
def divide(parameters: Iterable[nn.Parameter], scale: Tensor) -> None:
    """Divide gradients in a pass of their own, to the same bits: for optimizers that do not in theirs."""
    gradients = [
        p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None
    ]
    if gradients:
        torch._foreach_div_(gradients, scale.to(gradients[0].device))

"""Gradients at the end of a step: their norm over every mesh, division and clipping."""

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
    """Return the 2-norm of all gradients; see `norm_of`."""
    return norm_of((parameter.grad for parameter in parameters), device, stages)


def norm_of(
    tensors: Iterable[Tensor | None], device: torch.device, stages: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the 2-norm of tensors such as gradients: an fp32 scalar, the same on every rank. None counts as
    zero.

    Squares are summed over the mesh dimensions along which a tensor is sharded, per mesh, and over `stages`,
    the ranks with the other stages of a pipeline.
    """
    groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for gradient in tensors:
        if isinstance(gradient, DTensor):
            cut = tuple(
                gradient.device_mesh.get_group(dim)
                for dim, placement in enumerate(gradient.placements)
                if not placement.is_replicate()  # FSDP2 over TP uses _StridedShard, which is no Shard
            )
            groups[cut].append(gradient.to_local())
        elif gradient is not None:
            groups[()].append(gradient)
    squares = [torch.zeros((), dtype=torch.float32, device=device)]
    for process_groups, gradients in groups.items():
        square = torch.stack(_norms(gradients)).square_().sum().to(device)  # from the CPU if offloaded
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
    # A CPU sums squares in fp32 one by one, which loses half a percent over 64 M of them (and
    # varies with the number of ranks). Summing rows first is exact to rounding, and as fast.
    rows = (torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float32) for gradient in gradients)
    return [torch.linalg.vector_norm(norms) for norms in rows]


@torch.no_grad()
def norm_and_scale(
    parameters: list[nn.Parameter],
    weight: Tensor,
    max_norm: float,
    stages: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the norm of the gradients over `weight`, and their divisor: the weight, and more if the norm
    exceeds `max_norm` (0: never). fp32 scalars; nothing is read to the host.

    If the weight is not above zero, the guard skips the step.
    """
    weight = torch.where(weight <= 0, 1.0, weight)
    norm = total_norm(parameters, weight.device, stages) / weight
    if max_norm > 0:
        weight = weight / (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm, weight


@torch.no_grad()
def divide(parameters: Iterable[nn.Parameter], scale: Tensor) -> None:
    """Divide gradients in a separate pass, with the same bits: for optimizers that do not divide."""
    gradients = [
        p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None
    ]
    if gradients:
        torch._foreach_div_(gradients, scale.to(gradients[0].device))

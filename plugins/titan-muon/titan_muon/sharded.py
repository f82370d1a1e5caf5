"""`torch.optim.Muon` for sharded matrices.

Muon makes an update from a whole matrix, and a rank under FSDP2 holds some of its rows. Momentum is
elementwise and stays cut. Then as many matrices as there are ranks are made whole at once, each on a rank of
its own: one all-to-all brings their rows together, each rank orthogonalises one, and a second all-to-all
takes the rows back. So each matrix is orthogonalised once, and not once a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


class ShardedMuon(torch.optim.Muon):
    """The same as torch's on whole matrices, and the same again on sharded ones.

    The arguments are torch's. The state of a parameter is its `momentum_buffer`, cut as the parameter is.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            # The largest first, so that those that are worked on at the same time cost about the same.
            parameters.sort(key=lambda parameter: -parameter.numel())
            for parameter, update in self._updates(parameters, group):
                weight = _local(parameter)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"])
        return loss

    def _updates(
        self, parameters: list[nn.Parameter], group: dict[str, Any]
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter with this rank's part of its update, fp32."""
        rowwise: dict[dist.ProcessGroup, list[nn.Parameter]] = {}
        for parameter in parameters:
            ranks = _ranks_that_share_rows(parameter)
            if ranks is not None:
                rowwise.setdefault(ranks, []).append(parameter)
            elif isinstance(parameter, DTensor):
                yield parameter, self._from_full_tensor(parameter, group)
            else:
                yield parameter, orthogonal(self._direction(parameter, group), group)
        for ranks, together in rowwise.items():
            count = dist.get_world_size(ranks)
            for at in range(0, len(together), count):
                some = together[at : at + count]
                directions = [self._direction(parameter, group) for parameter in some]
                rows = [parameter.shape[0] for parameter in some]
                yield from zip(some, one_a_rank(directions, rows, ranks, group), strict=True)

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """This rank's part of what is to be made orthogonal; advances the momentum."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = _local(state["momentum_buffer"])
        gradient = _local(parameter.grad).to(buffer.dtype)  # type: ignore[arg-type]
        buffer.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer

    def _from_full_tensor(self, parameter: DTensor, group: dict[str, Any]) -> Tensor:
        """The update of a matrix that is cut in some other way: every rank makes it whole for itself."""
        mesh, placements = parameter.device_mesh, parameter.placements
        part = self._direction(parameter, group)
        shape, stride = parameter.shape, parameter.stride()
        direction = DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
        update = orthogonal(direction.full_tensor(), group)
        return distribute_tensor(update, mesh, placements, src_data_rank=None).to_local()


def one_a_rank(
    directions: list[Tensor], rows: list[int], ranks: dist.ProcessGroup, group: dict[str, Any]
) -> list[Tensor]:
    """Orthogonalise at most as many matrices as there are ranks, the i-th on rank i.

    Args:
        directions: this rank's rows of each matrix.
        rows: of each whole matrix.
        ranks: hold the rows of each matrix, one after the other.

    Returns:
        This rank's rows of each update.
    """
    count, me = dist.get_world_size(ranks), dist.get_rank(ranks)
    sizes = [direction.numel() for direction in directions]
    sizes += [0] * (count - len(sizes))
    # torch.optim.Muon computes in bfloat16, so that nothing is lost by sending that.
    sent = torch.cat([direction.to(torch.bfloat16).flatten() for direction in directions])
    mine = me < len(directions)
    columns = directions[me].shape[1] if mine else 0
    pieces = [(_rows_of(rank, rows[me], count) if mine else 0) * columns for rank in range(count)]
    whole = sent.new_empty(sum(pieces))
    dist.all_to_all_single(whole, sent, pieces, sizes, group=ranks)
    update = orthogonal(whole.view(rows[me], columns), group) if mine else whole.float()
    back = torch.empty(sum(sizes), dtype=update.dtype, device=update.device)
    dist.all_to_all_single(back, update.flatten(), sizes, pieces, group=ranks)
    parts = back.split(sizes)[: len(directions)]
    return [part.view_as(direction) for part, direction in zip(parts, directions, strict=True)]


def orthogonal(direction: Tensor, group: dict[str, Any]) -> Tensor:
    """What torch.optim.Muon subtracts for a learning rate of 1 and this whole matrix, fp32."""
    update = nn.Parameter(torch.zeros_like(direction, dtype=torch.float32))
    update.grad = direction.float()
    settings = {name: group[name] for name in ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    torch.optim.Muon([update], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, **settings).step()
    return update.detach().neg_()


def _ranks_that_share_rows(parameter: nn.Parameter) -> dist.ProcessGroup | None:
    """The ranks that hold its rows, where it is cut in just that way; None where it is not."""
    if not isinstance(parameter, DTensor):
        return None
    cut = [dim for dim, placement in enumerate(parameter.placements) if not isinstance(placement, Replicate)]
    if len(cut) != 1 or parameter.placements[cut[0]] != Shard(0):
        return None
    return parameter.device_mesh.get_group(cut[0])


def _rows_of(rank: int, rows: int, ranks: int) -> int:
    """How many rows a rank holds: equal pieces, rounded up, so that the last ranks may hold fewer or none."""
    piece = -(-rows // ranks)
    return max(0, min(piece, rows - rank * piece))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

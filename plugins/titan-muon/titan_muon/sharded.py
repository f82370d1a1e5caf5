"""`torch.optim.Muon` for sharded matrices, and for experts, which are many matrices in one tensor.

Muon computes an update from a whole matrix, but a rank holds a shard of it. Momentum is elementwise and stays
sharded. Then as many matrices as there are ranks are gathered at once, each on a rank of its own:
all-to-alls, one per mesh dimension that shards them, bring their shards together, each rank orthogonalizes
one matrix, and the same all-to-alls return the shards. So each matrix is orthogonalized once rather than once
per rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from titan_muon.cuts import Cut, cuts_of


class ShardedMuon(torch.optim.Optimizer):
    """Muon that gives the same result on sharded matrices as torch's on whole ones.

    Parameters are matrices, or stacks of them, [experts, rows, columns]. The options are those of
    `torch.optim.Muon`. A parameter's state is its `momentum_buffer`, sharded like the parameter.

    As with torch's fused optimizers, gradients are divided by `grad_scale`, and the step is skipped where
    `found_inf` is 1.0; both are device scalars or None. The step never synchronizes with the host.
    """

    _step_supports_amp_scaling = True
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, params: Iterable[nn.Parameter], **options: Any) -> None:
        # Use torch's checks and defaults; it does not accept stacks itself.
        defaults = torch.optim.Muon([nn.Parameter(torch.empty(1, 1))], **options).defaults
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            # The largest first, so that matrices that are processed together cost about the same.
            parameters.sort(key=lambda parameter: -math.prod(parameter.shape[-2:]))
            for weight, update in self._updates(parameters, group):
                lr = group["lr"]
                if self.found_inf is not None:
                    lr = lr * _keep(self.found_inf, weight).double()  # exact, like a number on the host
                # In fp32: a device scalar is rounded to the dtype that it is multiplied with, and a decay
                # factor near 1 would become 1 in bfloat16.
                weight.copy_(weight.float() * (1 - lr * group["weight_decay"]) - update * lr)
        return loss

    def _updates(
        self, parameters: list[nn.Parameter], group: dict[str, Any]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's shard of each matrix with its part of the update, fp32."""
        together: dict[tuple[dist.ProcessGroup, ...], list[tuple[nn.Parameter, list[Cut]]]] = {}
        for parameter in parameters:
            cuts = cuts_of(parameter)
            if cuts is not None:
                together.setdefault(tuple(cut.ranks for cut in cuts), []).append((parameter, cuts))
            else:
                yield from zip(
                    _matrices(_local(parameter)), self._from_full_tensor(parameter, group), strict=True
                )
        for ranks, some in together.items():
            at_once = math.prod(dist.get_world_size(group) for group in ranks)
            for batch in _batches(self._parts(some, group), at_once):
                weights, directions, cuts_of_each = zip(*batch, strict=True)
                yield from zip(weights, orthogonalised(directions, cuts_of_each, group), strict=True)

    def _parts(
        self, parameters: list[tuple[nn.Parameter, list[Cut]]], group: dict[str, Any]
    ) -> Iterator[tuple[Tensor, Tensor, list[Cut]]]:
        """Yield, for each matrix, this rank's shard, its part of the direction, and the cuts of both."""
        for parameter, cuts in parameters:
            weights, directions = _matrices(_local(parameter)), _matrices(self._direction(parameter, group))
            for weight, direction in zip(weights, directions, strict=True):
                yield weight, direction, cuts

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return this rank's part of the direction to orthogonalize; advances the momentum."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = _local(state["momentum_buffer"])
        gradient = _local(parameter.grad).to(buffer.dtype)  # type: ignore[arg-type]
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale.to(gradient.device)
        if self.found_inf is None:
            buffer.lerp_(gradient, 1 - group["momentum"])
        else:
            keep = _keep(self.found_inf, gradient)
            gradient = torch.where(keep > 0, gradient, 0.0)  # a product with 0 would keep NaN and inf
            buffer.lerp_(gradient, keep.to(buffer.dtype) * (1 - group["momentum"]))
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer

    def _from_full_tensor(self, parameter: Any, group: dict[str, Any]) -> list[Tensor]:
        """Return the updates of a parameter that is sharded in some other way: every rank gathers it."""
        mesh, placements = parameter.device_mesh, parameter.placements
        part = self._direction(parameter, group)
        shape, stride = parameter.shape, parameter.stride()
        direction = DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
        whole = [orthogonal(matrix, group) for matrix in _matrices(direction.full_tensor())]
        update = torch.stack(whole).view(shape)
        return _matrices(distribute_tensor(update, mesh, placements, src_data_rank=None).to_local())


def _keep(wrong: Tensor, like: Tensor) -> Tensor:
    """Return 1.0 if a step is applied, 0.0 if it is skipped."""
    return 1.0 - wrong.to(like.device)


def orthogonalised(
    parts: tuple[Tensor, ...], cuts: tuple[list[Cut], ...], group: dict[str, Any]
) -> list[Tensor]:
    """Return this rank's parts of the updates, fp32, for matrices that are cut by the same ranks.

    Collective over the ranks of all cuts. Matrices are dealt to the ranks of the first cut, each of which
    then has larger parts of fewer matrices; and so on, until each rank has whole ones.

    Args:
        parts: this rank's part of each matrix.
        cuts: the cuts of each matrix, the last first; the i-th cuts of all have the same ranks.
    """
    if not parts:
        return []
    if not cuts[0]:
        return [orthogonal(part, group) for part in parts]
    ranks = cuts[0][0].ranks
    count, me = dist.get_world_size(ranks), dist.get_rank(ranks)
    dealt = [list(range(rank, len(parts), count)) for rank in range(count)]
    # torch.optim.Muon computes in bfloat16, so sending that loses nothing.
    sent = [[parts[i].to(torch.bfloat16) for i in dealt[rank]] for rank in range(count)]
    empty = parts[0].new_empty(0)
    shapes = [[_shape(parts[i], cuts[i][0], rank) for i in dealt[me]] for rank in range(count)]
    received = _exchange(sent, shapes, ranks, empty.to(torch.bfloat16))
    mine = tuple(
        torch.cat([received[rank][k] for rank in range(count)], cuts[i][0].dim)
        for k, i in enumerate(dealt[me])
    )
    done = orthogonalised(mine, tuple(cuts[i][1:] for i in dealt[me]), group)
    pieces = [
        update.split(cuts[i][0].sizes, cuts[i][0].dim) for update, i in zip(done, dealt[me], strict=True)
    ]
    back = _exchange(
        [[piece[rank] for piece in pieces] for rank in range(count)],
        [[parts[i].shape for i in dealt[rank]] for rank in range(count)],
        ranks,
        empty.float(),
    )
    updates: dict[int, Tensor] = {}
    for rank in range(count):
        updates.update(zip(dealt[rank], back[rank], strict=True))
    return [updates[i] for i in range(len(parts))]


def _shape(part: Tensor, cut: Cut, rank: int) -> torch.Size:
    """Return the shape of another rank's part of the same matrix."""
    shape = list(part.shape)
    shape[cut.dim] = cut.sizes[rank]
    return torch.Size(shape)


def _exchange(
    to_ranks: list[list[Tensor]],
    from_ranks: list[list[torch.Size]],
    ranks: dist.ProcessGroup,
    empty: Tensor,
) -> list[list[Tensor]]:
    """Send each rank its tensors, and receive tensors of the given shapes; all like `empty`."""
    sent = torch.cat([empty, *(tensor.flatten() for tensors in to_ranks for tensor in tensors)])
    sizes = [sum(tensor.numel() for tensor in tensors) for tensors in to_ranks]
    lengths = [[shape.numel() for shape in shapes] for shapes in from_ranks]
    received = empty.new_empty(sum(map(sum, lengths)))
    dist.all_to_all_single(received, sent, [sum(some) for some in lengths], sizes, group=ranks)
    pieces = iter(received.split([length for some in lengths for length in some]))
    return [[next(pieces).view(shape) for shape in shapes] for shapes in from_ranks]


def orthogonal(direction: Tensor, group: dict[str, Any]) -> Tensor:
    """Return what torch.optim.Muon subtracts for a learning rate of 1 and this whole matrix, fp32."""
    update = nn.Parameter(torch.zeros_like(direction, dtype=torch.float32))
    update.grad = direction.float()
    settings = {name: group[name] for name in ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    torch.optim.Muon([update], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, **settings).step()
    return update.detach().neg_()


def _batches(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of `size` items, the last one possibly shorter."""
    batch = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _matrices(tensor: Tensor) -> list[Tensor]:
    """Return the matrix, or those of a stack, as views."""
    return list(tensor.unbind(0)) if tensor.ndim == 3 else [tensor]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

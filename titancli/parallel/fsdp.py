"""FSDP2 wherever ranks share parameters: sharding, mixed precision, and gradients that are sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from titancli.distributed.mesh import Mesh
from titancli.models.loss import LOSS
from titancli.protocols import Precision


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh,
    *,
    precision: Precision,
    reshard_after_forward: str,
    cpu_offload: bool = False,
) -> None:
    """Shard in place: each block a group, its experts another, what stands before the blocks, and after.

    Args:
        mesh: 1-D (shard) or 2-D (replicate, shard).
        expert_mesh: the same for experts, over what expert parallel leaves of the ranks.
        reshard_after_forward: "always", "never", or "default" (all but the last group).
        cpu_offload: parameters, gradients and optimizer state are in the CPU's memory; parameters must be
            given theirs there.
    """
    # Forward inputs are not cast: they are integers and, for the blocks, rotation angles that must stay fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=precision.param, reduce_dtype=precision.reduce, cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    reshard = _reshards(mesh, reshard_after_forward)
    front, back = around(model, model.layers)  # type: ignore[arg-type]
    for experts in model.experts.values():  # type: ignore[operator]
        fully_shard(
            experts,
            mesh=expert_mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=_reshards(expert_mesh, reshard_after_forward),
            shard_placement_fn=_placement(experts, expert_mesh),
        )
    for block in model.layers.values():  # type: ignore[operator]
        fully_shard(block, **options, reshard_after_forward=reshard)
    if share_parameters(front, back):
        # A tied weight may belong to one group only, and is in use from the first module to the last.
        fully_shard([*front, *back], **options, reshard_after_forward=False)
    else:
        for module in front:
            fully_shard(module, **options, reshard_after_forward=reshard)
        if back:  # a pipeline stage may have nothing there
            fully_shard(back, **options, reshard_after_forward=reshard_after_forward == "always")
    fully_shard(model, **options, reshard_after_forward=reshard)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are sums, divided once by the optimizer step. Each call alone is not enough: the first
            # fails on gloo, the second still divides by the ranks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def shared(model: nn.Module, mesh: Mesh) -> bool:
    """Return whether FSDP2 has something to do: other ranks have a shard or a replica of a parameter, or the
    gradients of a pipeline's micro-batches are to be summed in more than parameters are stored in."""
    meshes = [mesh.fsdp, mesh.expert_fsdp] if model.experts else [mesh.fsdp]
    rounded = any(p.requires_grad and p.dtype != torch.float32 for p in model.parameters())
    return any(one.size() > 1 for one in meshes) or (mesh.degrees.pp > 1 and rounded)


def gathers_its_own_way(model: nn.Module) -> bool:
    """Return whether a parameter is of a class that FSDP2 asks how to gather it, as those in float8 are."""
    return any(hasattr(parameter, "fsdp_pre_all_gather") for parameter in model.parameters())


def reduce_after(model: nn.Module, *, last: bool, each: bool) -> None:
    """Say which collectives the next backward ends with; that of a call's last micro-batch ends reduced.

    Args:
        each: whether shards are reduced after every micro-batch; replicas need the sum once.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or each)
        model.set_requires_all_reduce(last)


def reshard(model: nn.Module) -> None:
    """Free what a forward has gathered that no backward follows: backward would, and without it the next step
    would use weights gone stale."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def around(model: nn.Module, layers: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules with parameters before the blocks, and after them, on every level of modules above
    them. A loss is neither: it does not run in every forward, and is the group of the model itself."""
    front: list[nn.Module] = []
    back: list[nn.Module] = []
    above = model
    while above is not layers:
        children = [child for name, child in above.named_children() if name != LOSS]
        at = next(i for i, child in enumerate(children) if layers in child.modules())
        front += children[:at]
        back = [*children[at + 1 :], *back]
        above = children[at]
    return _with_parameters(front), _with_parameters(back)


def _with_parameters(modules: list[nn.Module]) -> list[nn.Module]:
    return [module for module in modules if next(module.parameters(), None) is not None]


def _reshards(mesh: DeviceMesh, reshard_after_forward: str) -> bool:
    # Freed parameters of one shard would only be cast again, not gathered.
    alone = reshard_after_forward == "default" and _shards(mesh) == 1
    return reshard_after_forward != "never" and not alone


def _shards(mesh: DeviceMesh) -> int:
    return mesh.size(mesh.ndim - 1)


def _placement(experts: nn.Module, mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """Cut along the experts where every rank gets one; else along the next dimension, if that is even, and
    all parameters can be cut there: one that FSDP2 asks how to gather it must not have `rows_alone`."""
    shards = _shards(mesh)
    parameters = [p.to_local() if isinstance(p, DTensor) else p for p in experts.parameters()]
    mine = min(p.shape[0] for p in parameters)
    even = all(p.ndim > 1 and p.shape[1] % shards == 0 for p in parameters)
    even = even and not any(getattr(p, "rows_alone", False) for p in parameters)
    place = Shard(1) if mine < shards and even else Shard(0)
    return lambda parameter: place


def share_parameters(front: list[nn.Module], back: list[nn.Module]) -> bool:
    ours = {id(p) for module in front for p in module.parameters()}
    return any(id(p) in ours for module in back for p in module.parameters())

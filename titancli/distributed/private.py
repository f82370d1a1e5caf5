"""All private names of FSDP2, DTensor, process groups, DCP and oneDNN that titan uses: torch promises none of
them.

No other module uses one; those of torchelastic stand in `titancli/launchers/agent.py`. Each has a test in
`tests/distributed/test_private.py`, which says on a new torch what has changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C import _distributed_c10d
from torch.distributed import ProcessGroup, Store, distributed_c10d
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# ----------------------------------------------------------------------------------------- process groups


def groups() -> list[Any]:
    """Return the process groups that this process is in."""
    return list(distributed_c10d._world.pg_map)


def set_timeout(group: ProcessGroup, limit: timedelta) -> None:
    """Limit how long the collectives of a group that begin from now on are waited for."""
    distributed_c10d._set_pg_timeout(limit, group)


def timeout_of(group: Any) -> timedelta | None:
    """Return how long a group waits for a collective, on the CPU if it can; None: a dry run's never waits."""
    device = min(group._device_types, key=lambda device: device.type != "cpu")
    options = group._get_backend(torch.device(device.type)).options
    return options._timeout if options else None


def collectives_begun(group: ProcessGroup) -> int:
    """Return how many collectives of a group this process has begun."""
    ours: Any = group
    return int(ours._get_sequence_number_for_group())


def wait_in_pipelines_by(wait: Callable[[Any], None]) -> None:
    """Have torch's pipeline schedules call `wait` with a list of sends and receives, where they wait for
    them. torch 2.11 has this under no name, and goes on as it does."""
    if schedules := sys.modules.get("torch.distributed.pipelining.schedules"):
        vars(schedules)["_wait_batch_p2p"] = wait


def default_store() -> Store:
    """Return the store that the default group was made with."""
    return distributed_c10d._get_default_store()


def flight_record() -> bytes:
    """Return what the flight recorder holds, as JSON; empty where this torch has none for gloo."""
    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    return bytes(dump()) if dump is not None else b""


# ------------------------------------------------------------------------------------------------- DTensor


def mesh_of_nobody(name: str, size: int) -> DeviceMesh:
    """Return a 1-D mesh of `size` ranks, of which this process is the first and the others do not exist:
    tensors can be sharded on it, but nothing can be exchanged."""
    from torch.distributed.device_mesh import DeviceMesh

    class Nobody(DeviceMesh):
        def get_group(self, mesh_dim: int | str | None = None) -> Any:
            return GroupOfNobody(name, size)

    # Of a kind of device that no other mesh is of: DTensor remembers results by mesh, whoever's it is.
    return Nobody("meta", torch.arange(size), mesh_dim_names=(name,), _init_backend=False, _rank=0)


class GroupOfNobody:
    """The members of a process group that such a mesh uses."""

    def __init__(self, name: str, size: int) -> None:
        self.group_name, self._size = name, size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


def sharded_as(
    parameter: Tensor, own: Tensor, shape: Sequence[int], placements: Sequence[Placement] | None = None
) -> Tensor:
    """Return this rank's shard as a tensor of `shape` on the mesh of a parameter; the shard itself, if the
    parameter has none. `DTensor.from_local` would move it to the mesh's device, away from a parameter that is
    offloaded.

    Args:
        placements: how it is sharded; None: as the parameter is.
    """
    if not isinstance(parameter, DTensor):
        return own
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), own.dtype)
    spec = DTensorSpec(parameter.device_mesh, tuple(placements or parameter.placements), meta)
    return DTensor(own, spec, requires_grad=False)


def offsets_of(tensor: DTensor) -> Sequence[int]:
    """Return where this rank's part of a tensor begins, along each dimension."""
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1]


def boxes_of(tensor: Tensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return offsets and sizes of each piece that this rank holds of a tensor."""
    from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in _create_chunk_list(tensor)]


def forget_meshes() -> None:
    """Let DTensor forget the meshes of a process group that is gone, in a process that makes another.

    It remembers results by mesh, and meshes of the same ranks are equal, whatever their groups are: a result
    would come back with groups that are no more, or are those of another dimension now. And meshes that are
    kept keep their groups, each with threads that wake up over and over.
    """
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    for name in ("_clear_sharding_prop_cache", "_clear_python_sharding_prop_cache"):  # torch 2.13, 2.11
        if hasattr(debug, name):
            getattr(debug, name)()
            return
    raise RuntimeError("this version of torch cannot clear DTensor's cache")


# --------------------------------------------------------------------------------------------------- FSDP2


def forget_iteration(model: nn.Module) -> None:
    """Have FSDP2 forget the iteration that has raised: what it has gathered, its gradients that are not
    reduced yet, and which hooks it still waits for. Sharded gradients (`.grad`) stay.

    Without it the next backward would queue no callback at its end, and add to what lies in FSDP2's own
    accumulators. Nothing is exchanged with other ranks, whose collectives must have been as many.
    """
    from torch.distributed.fsdp import FSDPModule

    states = _states(model)
    groups = [group for state in states for group in _groups(state)]
    # torch 2.15 resets the sharded gradients, too.
    sharded = [(p.sharded_param, p.sharded_param.grad) for group in groups for p in group.fsdp_params]
    for state in states:
        # None: no forward has begun yet; False: its root's turn.
        if state._is_root:
            if hasattr(FSDPModule, "reset_iter_state"):  # torch 2.13
                state._modules[0].reset_iter_state()
            else:
                _reset(state)
    for group in groups:
        _shard_again(group)
        _drop_gradients(group)
    for parameter, gradient in sharded:
        parameter.grad = gradient


def _states(model: nn.Module) -> list[Any]:
    """Return the states of all FSDP2 modules; several modules may share one."""
    from torch.distributed.fsdp import FSDPModule

    found: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            found[id(state)] = state
    return list(found.values())


def _groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _shard_again(group: Any) -> None:
    """Free what is gathered, or is being gathered; also before the first forward, and where gathering has
    raised half way."""
    if group._all_gather_result is not None:
        if hasattr(group._all_gather_result.all_gather_work, "wait"):
            group._all_gather_result.all_gather_work.wait()
        group._all_gather_result = None
    group._to_sharded()
    for parameter in group.fsdp_params:
        parameter.to_sharded()


def _drop_gradients(group: Any) -> None:
    for parameter in group.fsdp_params:
        if "unsharded_accumulated_grad" in vars(
            parameter
        ):  # since torch 2.15 `grad` of the unsharded parameter
            parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
        if parameter.grad_offload_event is not None:
            parameter.grad_offload_event.synchronize()
            parameter.grad_offload_event = None


def _reset(root: Any) -> None:
    """Reset FSDP2 as `FSDPModule.reset_iter_state` of torch 2.13 does, after waiting for all work under
    way."""
    if root._device.type != "cpu":
        torch.accelerator.synchronize(root._device)
    context, communication = root._state_ctx, root._comm_ctx
    for name, nothing in _COMMUNICATION.items():
        if hasattr(communication, name):
            setattr(communication, name, nothing())
    idle = type(root._training_state).IDLE
    for state in context.all_states:
        state._training_state = idle
        if hasattr(state, "_modules_to_run_forward"):
            state._modules_to_run_forward.clear()  # shared with the hooks: never another set
        for group in _groups(state):
            group._post_reduce_event = group._all_reduce_state = group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = idle
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


_COMMUNICATION: dict[str, Any] = {
    "all_gather_state": lambda: None,
    "reduce_scatter_state": lambda: None,
    "reduce_scatter_states": list,
    "_last_post_reduce_events": dict,
    "post_forward_order": list,
}
"""The attributes for work under way, each with its idle value."""


# ------------------------------------------------------------------------------------------------- oneDNN


def order_of_onednn(weight: Tensor) -> Tensor:
    """Return a copy of a matrix, [out, in], in the order in which oneDNN multiplies by it."""
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return found


def linear_of_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `torch.nn.functional.linear` by oneDNN; the weight is in torch's order or in oneDNN's."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found

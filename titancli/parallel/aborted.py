"""FSDP2 after a forward or a backward that has raised: back to where every iteration begins."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def forget_iteration(model: nn.Module) -> None:
    """Have FSDP2 forget the iteration that has raised: what it has gathered, its gradients that are not
    reduced yet, and which hooks it still waits for. Sharded gradients (`.grad`) stay.

    Without it the next backward would queue no callback at its end, and add to what lies in FSDP2's own
    accumulators. Nothing is exchanged with other ranks, whose collectives must have been as many.
    """
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
    """Of all FSDP2 modules; several modules may have one together."""
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
    """What `FSDPModule.reset_iter_state` of torch 2.13 does; all work that is under way is waited for."""
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
"""What is under way, and what it is when nothing is."""

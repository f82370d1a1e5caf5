"""Engines in separate process groups that train one model together: sums of gradients, transfer of state.

The set of engines may change between steps; the caller knows it and can reach them. Rank n of each engine has
the same shards as rank n of any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titancli.checkpoint.exclude import NOTHING
from titancli.engine.optimizer_state import counters_of
from titancli.engine.step import PART
from titancli.errors import TitanError
from titancli.protocols.batch import Counts

if TYPE_CHECKING:
    from titancli.engine.engine import Engine


def reduce_gradients(engine: Engine, add: Callable[[Sequence[Tensor]], None]) -> dict[str, Tensor]:
    """Add the gradients of other engines to those of `forward_backward`, before `optim_step`. Collective.

    Loss weights are summed as well, so that the step equals that of one engine on all rows.

    Args:
        add: adds to each tensor, in place, the same tensors of the other engines: the gradients of this
            rank's shards, token counts of experts, and one vector of float64.

    Returns:
        `loss`, `tokens`, `targets` and `padding` of all engines.

    Raises:
        TitanError: there are no gradients. Errors of `add` are passed on, after the gradients of the step are
            discarded.
    """
    with engine._verb("reduce_gradients") as call:
        optimizer = engine._trained("reduce_gradients")
        with call.agreed():
            step = engine.pending
            if step is None:
                raise TitanError("reduce_gradients without gradients", hint="call forward_backward first")
            engine.runner.router_losses.refuse(
                "reduce_gradients over engines that have counted their own tokens alone",
                hint="set it to 0 and balance with model.moe.load_balance_coeff, or train on one engine",
            )
        with engine._aborted("reduce_gradients", forget=True), call.shared(), torch.no_grad():
            trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for parameter in trained:
                if parameter.grad is None:  # other engines may have a gradient
                    parameter.grad = torch.zeros_like(parameter)
            counts = [count for part in engine.parts for count in part.token_counts().values()]
            own = [step.loss, step.weight, *torch.tensor(astuple(step.counts))]
            sums = torch.stack([number.to(engine.device, torch.float64) for number in own])
            add([*(local(parameter.grad) for parameter in trained), *counts, sums])
            step.loss, step.weight = sums[0].float(), sums[1].float()
            step.counts = Counts(*map(int, sums[2:].tolist()))
        return {"loss": step.average, **asdict(step.counts)}


def take_state(engine: Engine, tensors: Mapping[str, Tensor], counters: Mapping[str, Any]) -> None:
    """Replace the state of an engine by the result of `shared_state` on the same rank of another. Collective.

    Raises:
        TitanError: the other engine has another model, optimizer or layout. If it raises after it has started
            to replace anything, the engine is unusable until a `load` succeeds.
    """
    with engine._verb("take_state", mends="load") as call:
        with call.agreed():
            mine = {name: local(tensor) for name, tensor in engine.live_state()[0].items()}
            names = mine.keys() | tensors.keys()
            if wrong := {name for name in names if form(mine.get(name)) != form(tensors.get(name))}:
                raise TitanError(
                    f"the state of another engine does not fit this one: {min(wrong)} and "
                    f"{len(wrong) - 1} other tensors differ",
                    hint="start all of them with the same recipe, on as many ranks",
                )
        with call.shared(), torch.no_grad():
            before = engine.version
            engine.mark_unusable("to take over the state of another engine failed after it had started")
            for name, tensor in mine.items():
                tensor.copy_(tensors[name])
            found = counters_of({"engine": dict(counters)}, Path("the other engine"), engine.guard, NOTHING)
            engine.hooks.weights_loaded(counters.get(PART))
        if found is not None:
            engine.step, engine.tokens_seen = found.step, found.tokens_seen
        engine._has_new_weights(max(engine.version, before + 1))
        engine.unusable = None


def shared_state(engine: Engine) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return this rank's part of the state of an engine: the live tensors, and counters as plain JSON."""
    tensors, counters = engine.save_state()
    return {name: local(tensor) for name, tensor in tensors.items()}, counters


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def form(tensor: Tensor | None) -> tuple[Any, ...] | None:
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype)

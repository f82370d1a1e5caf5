"""Gradients, added up and applied: `forward_backward` and `optim_step` after their checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titancli.engine.grad_clip import norm_and_scale
from titancli.engine.rng import Stream
from titancli.engine.skip_step import step_with
from titancli.engine.step import Backward, Metrics, Step
from titancli.engine.sums import largest, nan_if_invalid, quotient, summed
from titancli.errors import TitanError
from titancli.observe.phases import phase

if TYPE_CHECKING:
    from titancli.engine.agreement import Call
    from titancli.engine.core import EngineCore
    from titancli.engine.runners import Sums
    from titancli.protocols.batch import Batch


def refuse_another(engine: EngineCore) -> None:
    """Check that gradients can be added.

    Raises:
        TitanError: gradients are disabled; or the model's routers have losses and this is the second call of
            a step.
    """
    if not torch.is_grad_enabled():
        raise TitanError("forward_backward under torch.no_grad()", hint="call it outside that block")
    if engine.pending is not None:
        engine.runner.router_losses.refuse(
            "forward_backward for the second time in a step",
            hint="pass all micro-batches of the step to one call: engine.forward_backward([first, second])",
        )


class Pass:
    """A pass through the model that adds gradients."""

    sums: Sums
    """The sums of the runner; set by the caller."""
    metrics: Metrics
    """The result of the verb; set at the end of the block."""


@contextmanager
def accumulating(
    engine: EngineCore,
    call: Call,
    placed: Sequence[Batch],
    loss: Any,
    poison: Tensor | None,
    *,
    first: Callable[[Step], Sums] | None = None,
) -> Iterator[Pass]:
    """Let the block add gradients of batches by the engine's runner and set the pass's sums, then finish the
    verb.

    Args:
        poison: see `titancli.engine.inputs.checked_batches`.
        first: computes what the loss needs of the model, before each pass and with its weights and random
            numbers; returns sums that replace those of the loss. None: nothing is needed.
    """
    optimizer = engine._trained("forward_backward")
    is_first = engine.pending is None
    step = engine.pending = engine.pending or _begun(engine, optimizer)
    step.steady = step.steady and loss.steady
    # On an error an unknown part of the gradients may have been added.
    with engine._aborted("forward_backward", forget=True), call.shared():
        replaced, added = {}, Pass()
        backward = _backward(engine, step, placed, loss, first, is_first=is_first)
        with engine.hooks.around_backward(backward, engine.call_lock.lent):
            if first is not None:
                replaced = first(step)
            with step.stream.drawn():
                yield added
        sums = nan_if_invalid(call.in_order({**added.sums, **replaced}), poison)
        worst = largest(quotient(sums["loss"], sums["weight"]), engine.mesh.dp_group)
        totals = summed(sums, engine.mesh.dp_group)
        weight = totals.pop("weight")
        step.weight = step.weight + weight
        step.loss = step.loss + totals["loss"]
        averages = {name: quotient(value, weight) for name, value in totals.items()}
    step.counts += call.all_counts
    step.batches += len(placed)
    added.metrics = {**averages, "loss_max": worst, **asdict(call.all_counts)}


def apply(engine: EngineCore, call: Call, optimizer: torch.optim.Optimizer, step: Step) -> Metrics:
    """Clip, step and advance the engine for `optim_step`; return the metrics of the hooks."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    with phase("clip"):
        with call.shared():
            max_norm, stages = engine.settings.max_norm, engine.mesh.pp_group
            step.norm, scale = norm_and_scale(parameters, step.weight, max_norm, stages)
        # If a callback raised on one rank alone, the others would wait in the last hook.
        together = call.agreed() if engine.hooks.wait_for_gradients else call.shared()
        with together, engine.call_lock.lent():
            engine.hooks.gradients_ready(step)
        with call.shared(), engine.call_lock.lent():
            engine.hooks.decide(step)
    with call.shared():
        with phase("optimizer"), step.stream.drawn():
            step_with(optimizer, scale, step.skipped)
            engine.step, engine.version = engine.step + 1, engine.version + 1
            engine.tokens_seen += step.tokens
            with engine.call_lock.lent():
                reported = engine.hooks.step_applied(step)
        engine._forget_gradients()
    return reported


def _begun(engine: EngineCore, optimizer: torch.optim.Optimizer) -> Step:
    """Return the next step, without gradients."""
    optimizer.zero_grad(set_to_none=True)
    stream = Stream(engine.device, engine.settings.seed, engine.step, engine.mesh.dp_rank)
    nothing = torch.zeros((), dtype=torch.float32, device=engine.device)
    return Step(engine.step + 1, stream, loss=nothing, weight=nothing, norm=nothing)


def _backward(
    engine: EngineCore,
    step: Step,
    batches: Sequence[Batch],
    loss: Any,
    first: Callable[[Step], Sums] | None,
    *,
    is_first: bool,
) -> Backward:
    """Return the backward pass as hooks see it."""

    def compute(some: Sequence[Batch]) -> None:
        engine.hooks.weights_moved()
        if first is not None:
            first(step)
        with step.stream.copy().drawn():
            engine.runner.forward_backward(some, loss)

    return Backward(step, batches, loss, is_first, compute, engine._drop_gradients)

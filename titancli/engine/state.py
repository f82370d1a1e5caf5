"""What an engine saves and loads: tensors keyed by parameter name, never by index."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from titancli.errors import EnvironmentProblem

if TYPE_CHECKING:
    from titancli.checkpoint.manifest import Verify
    from titancli.engine.engine import Engine


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, Tensor]:
    """`optimizer.<parameter>.<key>` for every tensor of the optimizer's state."""
    initialise_state(optimizer)
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in named_parameters
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


@torch.no_grad()
def initialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer that has not stepped yet create its state, changing no parameter.

    A step with a learning rate and gradients of zero does it for any optimizer; its count is taken back.
    """
    if optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"].zero_()


def load_state(engine: Engine, folder: Path, *, optimizer: bool, verify: Verify = "full") -> dict[str, Any]:
    """Fill the engine's tensors from a checkpoint and set its counters."""
    from titancli.checkpoint import load_checkpoint

    tensors, _ = engine.save_state()
    if not optimizer:
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    state = load_checkpoint(folder, tensors, verify=verify)
    for converter in engine.converters:
        for part in engine.parts:
            converter.after_step(part)
    if optimizer:
        counters = state.get("engine")
        if counters is None:
            raise EnvironmentProblem(
                f"{folder} holds weights but no training state, so a run cannot be continued from it",
                hint=f"start a new run from it with weights={folder}",
            )
        engine.step, engine.tokens_seen = counters["step"], counters["tokens_seen"]
    return state

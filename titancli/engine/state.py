"""What an engine saves beside its weights: the optimizer's state, by parameter name, and adapters."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titancli.errors import TitanError


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
    """Make an optimizer create the state of what it has not moved yet, changing no parameter.

    A step with a learning rate and gradients of zero does it for any optimizer; its count is taken back. The
    gradients that there are stay.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    lacking = [p for p in parameters if p not in optimizer.state]
    if not lacking:
        return
    gradients = [parameter.grad for parameter in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        optimizer.zero_grad(set_to_none=True)
        for parameter in lacking:
            parameter.grad = torch.zeros_like(parameter)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
    except BaseException:
        for parameter in lacking:
            optimizer.state.pop(parameter, None)
        raise
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
    for parameter in lacking:
        state = optimizer.state.get(parameter, {})
        if isinstance(state.get("step"), Tensor):
            state["step"].zero_()


def told_adapters(
    adapters: Any, folder: Path, *, base: dict[str, str] | None = None
) -> dict[str, Any] | None:
    """What a checkpoint tells of its adapters; None where it has none, or is no checkpoint.

    Args:
        adapters: the engine's, if it has any.
        base: the one that the engine's adapters stand beside, if it is known by now.

    Raises:
        TitanError: they are others than the engine's, or it has none.
        EnvironmentProblem: they were trained on another base.
    """
    from titancli.checkpoint.base import adapters_of, require_base
    from titancli.checkpoint.manifest import MANIFEST, read_manifest

    told = adapters_of(read_manifest(folder)) if (folder / MANIFEST).is_file() else None
    if told is None:
        return None
    if adapters is None:
        raise TitanError(
            f"{folder} holds adapters ({told['form']}) and not the weights of a model",
            hint=f"merge them first: titan convert-checkpoint {folder} FOLDER --to hf",
        )
    for name, here in adapters.facts.items():
        if told[name] != here:
            raise TitanError(
                f"{folder} holds adapters of {name} {told[name]}, and this recipe's have {here}",
                hint=f"write {name} = {told[name]!r} in the converter",
            )
    if base is not None:
        require_base(told, folder, base)
    return told

"""The parameters of a loss, which are the model's: its child `loss`, in the part that computes the loss.

Only the engine knows the child: a model's own `init_weights`, tensor plan, stages and Hugging Face form do
not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from titancli.errors import PluginError
from titancli.protocols import LossDefaults

LOSS = "loss"
"""The name of the child."""
OPTIONAL = f"model.{LOSS}."
"""The beginning of its names in a checkpoint, which weights alone may lack, or have in excess."""


def module_of(loss: Any) -> nn.Module | None:
    """Return the module with the parameters of a loss; None: it has none to train."""
    module = getattr(loss, "_function", loss)
    trains = isinstance(module, nn.Module) and any(p.requires_grad for p in module.parameters())
    return module if trains else None


def of_loss(name: str) -> bool:
    """Return whether a parameter, by its name in the model, is one of the loss."""
    return name.startswith(f"{LOSS}.")


def loss_in(model: Any) -> nn.Module | None:
    """Return the loss that is a child of a model or of a part of it; None: there is none."""
    found = model._modules.get(LOSS)
    return found if isinstance(found, nn.Module) else None


def attach(model: Any, loss: Any) -> int:
    """Make a loss with parameters, on meta, a child of a model; return their number, 0 for other losses.

    Raises:
        PluginError: the loss cannot be trained so, or the model has something else of this name.
    """
    if (module := module_of(loss)) is None:
        return 0
    if fault := _fault(module) or _taken(model):
        raise PluginError(f"the loss {type(module).__name__} has parameters, but {fault[0]}", hint=fault[1])
    setattr(model, LOSS, module.to("meta", next(model.parameters()).dtype))
    return sum(parameter.numel() for parameter in module.parameters())


def _fault(module: Any) -> tuple[str, str] | None:
    if not callable(getattr(type(module), "init_weights", None)):
        return (
            "no method init_weights(generator_for)",
            "fill each with titancli.models.blocks.init, which gives the same values on every layout",
        )
    if getattr(type(module), "token_weights", LossDefaults.token_weights) is not LossDefaults.token_weights:
        return "declares token_weights, with which its sum has no gradient", "remove token_weights"
    if getattr(module, "output", None) == "projection":
        return (
            'its output is "projection", of which each rank has a part',
            'declare outputs = ("hidden:-1",), which gives batch["hidden"], the same on all ranks',
        )
    return None


def _taken(model: Any) -> tuple[str, str] | None:
    if not hasattr(model, LOSS):
        return None
    return f"{type(model).__name__} has an attribute `{LOSS}`, the name of their module", "rename that"


@contextmanager
def without_loss(model: Any) -> Iterator[nn.Module | None]:
    """Take the loss off a model in the block, and yield it; None: it has none."""
    module = loss_in(model)
    if module is not None:
        delattr(model, LOSS)
    try:
        yield module
    finally:
        if module is not None:
            setattr(model, LOSS, module)


def initialise(model: Any, generator_for: Callable[[str], torch.Generator]) -> None:
    """Set the initial values of the loss in a model, if there is one; see `LossDefaults.init_weights`."""
    module: Any = loss_in(model)
    if module is not None:
        module.init_weights(lambda name: generator_for(f"{LOSS}.{name}"))

"""The module under training as something to sample from: its parameters gathered once, its forwards plain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from titancli.distributed.private import forget_iteration
from titancli.errors import TitanError
from titancli.parallel.alone import held
from titancli.parallel.wrapped import as_written
from titancli.protocols import ModelDefaults
from titancli.registry.defaults import with_defaults

if TYPE_CHECKING:
    from titancli.layout.degrees import Degrees

FSDP = "torch.distributed.fsdp"
"""Where the hooks come from that gather parameters before a forward and free them after it."""


def refuse_layout(model: Any, degrees: Degrees) -> None:
    """
    Raises:
        TitanError: the layout, or the model, cannot be sampled from.
    """
    for name, why in {
        "tp": "its ranks hold parts of the sequence, and a single token cannot be split",
        "cp": "each rank would hold a part of the growing row",
        "pp": "each rank holds only some stages of the model",
        "ep": "its ranks would have to sample in lockstep",
    }.items():
        if (degree := getattr(degrees, name)) > 1:
            raise TitanError(
                f"sampling: a model under mesh.{name} = {degree} cannot be sampled from: {why}",
                hint=f"set mesh.{name} = 1, or pass engine.weights() to a separate generator",
            )
    if with_defaults(ModelDefaults, model).new_cache is None:
        raise TitanError(
            f"sampling: {type(model).__name__} cannot generate: it has no new_cache",
            hint="titancli.protocols.Model describes what a model needs for that",
        )


@contextmanager
def not_training(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Have modules compute as they do after training: dropout drops nothing. What was training trains again
    afterwards."""
    training = [module for part in parts for module in part.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Have all parameters whole on every rank, and forwards run without FSDP2's hooks, compiled code and
    activation checkpointing; what converters have made of the model stays. All of it is put back.
    Collective at its beginning."""
    with ExitStack() as stack:
        stack.callback(forget_iteration, model)  # frees what is gathered, also where gathering raises
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
        stack.enter_context(held(model))
        for module in model.modules():
            stack.enter_context(_without_fsdp_hooks(module))
        for block in model.layers.values():  # type: ignore[operator]
            stack.enter_context(as_written(block))
        yield


@contextmanager
def _without_fsdp_hooks(module: nn.Module) -> Iterator[None]:
    # They would find everything gathered already, and take as long as a small layer does.
    registries: list[Any] = [module._forward_pre_hooks, module._forward_hooks]
    kept = [dict(registry) for registry in registries]
    try:
        for registry in registries:
            for key, hook in list(registry.items()):
                if str(getattr(hook, "__module__", "")).startswith(FSDP):
                    del registry[key]
        yield
    finally:
        for registry, hooks in zip(registries, kept, strict=True):
            registry.clear()
            registry.update(hooks)

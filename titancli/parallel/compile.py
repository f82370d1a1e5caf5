"""torch.compile where it pays: each block's forward, and the arithmetic of the chunked loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from titancli.errors import RecipeError
from titancli.recipe.schema import ActivationCheckpoint, Compile


def compile_model(model: nn.Module, section: Compile, activation_checkpoint: ActivationCheckpoint) -> None:
    """Compile in place what `section` names, without changing a name in the module tree.

    Blocks that `compile_parts` is for are left alone.

    Raises:
        RecipeError: torch has no such backend.
    """
    compiled = _compiler(section, activation_checkpoint)
    if "model" in section.components:
        for block in compiled_whole(model):
            # The forward, not the module: FSDP2's hooks stay outside of the compiled code, which blocks of
            # one shape share.
            block.forward = compiled(block.forward)
    if "loss" in section.components and hasattr(model.output, "loss_backend"):
        model.output.loss_backend = section.backend  # type: ignore[union-attr]


def compile_parts(model: nn.Module, section: Compile, activation_checkpoint: ActivationCheckpoint) -> None:
    """Compile the parts of the blocks that cannot be compiled whole: their `compile_in_place` knows which.

    Tokens travel between a block's experts in numbers that no compiler knows. Activation checkpointing has to
    come after it: what it runs again must not be cut short inside of compiled code.

    Raises:
        RecipeError: torch has no such backend.
    """
    whole = compiled_whole(model)
    if "model" in section.components:
        for block in model.layers.values():  # type: ignore[operator]
            if block not in whole:
                block.compile_in_place(_compiler(section, activation_checkpoint))


def compiled_whole(model: nn.Module) -> list[nn.Module]:
    """The blocks whose forward is compiled as one graph."""
    layers: nn.ModuleDict = model.layers  # type: ignore[assignment]
    return [block for block in layers.values() if not getattr(block, "compiles_in_parts", False)]


def _compiler(section: Compile, activation_checkpoint: ActivationCheckpoint) -> Callable[..., Any]:
    known = torch._dynamo.list_backends(exclude_tags=())
    if section.backend not in known:
        raise RecipeError(
            f"compile.backend = {section.backend!r} is not one of torch's", hint=", ".join(sorted(known))
        )
    backend: Any = section.backend
    if activation_checkpoint.mode == "memory_budget":
        backend = within_budget(section.backend, activation_checkpoint.memory_budget)
    return partial(torch.compile, backend=backend, fullgraph=True)


@lru_cache  # blocks share compiled code only while their backend is one object
def within_budget(backend: str, budget: float) -> Callable[..., Any]:
    """A backend that may keep this share of a graph's activations for backward, and makes the others again.

    The partitioner chooses, by the time that each would take (`torch._functorch.config`); the setting holds
    while a graph is compiled, and nowhere else.
    """

    def compile_graph(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return torch._dynamo.lookup_backend(backend)(graph, inputs, **options)

    return compile_graph

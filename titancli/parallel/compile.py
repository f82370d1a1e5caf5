"""torch.compile where it pays: each block's forward, and the arithmetic of the chunked loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from titancli.errors import RecipeError
from titancli.parallel.activation_checkpoint import parts
from titancli.recipe.schema import ActivationCheckpoint, Compile

RECOMPILES = 64
"""Of one function, at most. What is run again in backward torch compiles through one function of its own, for
every kind of block, with and without gradients: its own limit of 8 is soon reached, and would end the run."""


def compile_model(model: nn.Module, section: Compile, activation_checkpoint: ActivationCheckpoint) -> None:
    """Compile in place what `section` names, without changing a name in the module tree.

    Raises:
        RecipeError: torch has no such backend.
    """
    known = torch._dynamo.list_backends(exclude_tags=())
    if section.backend not in known:
        raise RecipeError(
            f"compile.backend = {section.backend!r} is not one of torch's",
            hint=f"write one of {', '.join(sorted(torch._dynamo.list_backends()))}",
        )
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILES)
    if "model" in section.components:
        backend: Any = section.backend
        if activation_checkpoint.mode == "memory_budget":
            backend = within_budget(section.backend, activation_checkpoint.memory_budget)
        for block in model.layers.values():  # type: ignore[operator]
            for module, name in parts(block):
                # The forward, not the module: FSDP2's hooks stay outside of the compiled code, which blocks
                # of one shape share.
                compiled = torch.compile(getattr(module, name), backend=backend, fullgraph=True)
                setattr(module, name, compiled)
    output: Any = getattr(model, "output", None)  # a pipeline stage may have none
    if "loss" in section.components and hasattr(output, "loss_backend"):
        output.loss_backend = section.backend


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

"""torch.compile where it pays: each block's forward, and the arithmetic of the chunked loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from titancli.errors import RecipeError
from titancli.parallel.activation_checkpoint import parts
from titancli.parallel.budget import in_our_words, within_budget
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
                compiled: Any = torch.compile(getattr(module, name), backend=backend, fullgraph=True)
                setattr(module, name, in_our_words(compiled) if backend is not section.backend else compiled)
    output: Any = getattr(model, "output", None)  # a pipeline stage may have none
    if "loss" in section.components and hasattr(output, "loss_backend"):
        output.loss_backend = section.backend

"""Sampling from a model: the config of the generator `local`. Imports no torch.

The code is in `generator.py`, `complete.py`, `decode.py` and `sampling.py`, which `titan generate` shares;
`prompts.py` has the prompts of a loop's task.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Le, MinLen

from titancli.registry.component import component

if TYPE_CHECKING:
    from titancli.recipe.schema import Recipe


@component("generator", "local", target="titancli.rl.generator:build")
class Local:
    """Samples from the model in training itself, with a key-value cache."""

    max_new_tokens: Annotated[int, Gt(0)] = 256
    """Maximum tokens per completion; less if the prompt leaves less room in training.seq_len."""
    temperature: Annotated[float, Gt(0)] = 1.0
    """Sampling temperature; losses divide logits by it, too."""
    top_k: Annotated[int, Gt(0)] | None = None
    """Sample from this many most probable tokens; None: from all."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Nucleus sampling: sample from the smallest set of tokens with this cumulative probability."""
    stop: list[Annotated[str, MinLen(1)]] = field(default_factory=list)
    """Stop sequences that end a completion."""
    batch_size: Annotated[int, Gt(0)] = 256
    """Completions that each rank makes together; where one ends, the next begins."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if recipe.mesh.pp != 1:
            yield "", f"it samples from a whole model, but mesh.pp = {recipe.mesh.pp} cuts it into stages"


COMPONENTS: list[type] = [Local]

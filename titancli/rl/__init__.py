"""Learning from what a model writes itself: the menu of tasks, generators, rewards and advantages.

Torch-free. How tokens are drawn is in `sampling.py` and `decode.py`, which `titan generate` shares.
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
    """Samples from the very model that is trained, with a key-value cache."""

    max_new_tokens: Annotated[int, Gt(0)] = 256
    """Tokens of a completion at most; a prompt that leaves less room in training.seq_len has shorter ones."""
    temperature: Annotated[float, Gt(0)] = 1.0
    """Logits are divided by this before tokens are drawn; losses see the model's own probabilities."""
    top_k: Annotated[int, Gt(0)] | None = None
    """Draw from so many most probable tokens; None: from all."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Draw from the most probable tokens, as few as reach this probability together."""
    stop: list[Annotated[str, MinLen(1)]] = field(default_factory=list)
    """Texts that end a completion."""
    batch_size: Annotated[int, Gt(0)] = 256
    """Completions that a rank makes together."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        for name in ("tp", "cp", "pp", "ep"):
            degree = getattr(recipe.mesh, name)
            if degree != 1:
                yield (
                    "",
                    f"it samples from whole rows and a whole model, and mesh.{name} = {degree} cuts them",
                )


@component("advantage", "group_mean", target="titancli.rl.advantages:GroupMean")
class GroupMean:
    """A reward less the mean of its prompt's samples (Dr. GRPO)."""


@component("advantage", "group_norm", target="titancli.rl.advantages:GroupNorm")
class GroupNorm:
    """The same over the samples' standard deviation (GRPO, DAPO)."""


@component("advantage", "leave_one_out", target="titancli.rl.advantages:LeaveOneOut")
class LeaveOneOut:
    """A reward less the mean of the prompt's other samples (RLOO)."""


COMPONENTS: list[type] = [Local, GroupMean, GroupNorm, LeaveOneOut]

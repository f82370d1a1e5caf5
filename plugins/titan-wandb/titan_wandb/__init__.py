"""Weights & Biases logger. This file has the config and imports nothing; `logger.py` has the code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Literal

from titancli import component, hookimpl

if TYPE_CHECKING:
    from titancli import Recipe


@component("logger", "wandb", target="titan_wandb.logger:build")
class WandB:
    """Weights & Biases: metrics, resolved recipe and environment, as one W&B run, also after a resume."""

    project: str | None = None
    """W&B project; None: the recipe's name."""
    entity: str | None = None
    """User or team; None: your default one."""
    group: str | None = None
    """Group of runs that belong together."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run."""
    mode: Literal["online", "offline"] | None = None
    """Whether to send metrics, or keep them in the run folder for `wandb sync`; None: as set by
    WANDB_MODE."""
    rewind: bool = True
    """After a crash, let W&B drop the rows that the resumed run will log again (a beta feature of W&B)."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if sum(isinstance(one, WandB) for one in recipe.loggers) > 1:
            yield "type", "two wandb loggers would write to the same W&B run: remove one"


@hookimpl
def titan_components() -> list[type]:
    return [WandB]

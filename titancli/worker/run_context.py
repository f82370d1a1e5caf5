"""What the ranks of a run have agreed on before anything is built. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titancli.process import Place
from titancli.runs import RunFolder

if TYPE_CHECKING:
    import torch

    from titancli.protocols import Copies
    from titancli.recipe import Loaded
    from titancli.recipe.schema import Recipe


@dataclass(frozen=True)
class RunContext:
    """A run on one rank: what everything that is built for it is given."""

    loaded: Loaded
    lock_text: str
    record: dict[str, Any]
    """The contents of `run.json`."""
    checkpoint: Path | None
    """The checkpoint to continue from; None starts at step 0."""
    device: torch.device
    folder: RunFolder
    place: Place
    restart: int = 0
    """How often the ranks of this attempt have been restarted."""
    copies: Copies | None = None
    """The copies of the state between checkpoints."""

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    @property
    def attempt(self) -> dict[str, Any]:
        """This attempt, as `run.json` has it."""
        attempt: dict[str, Any] = self.record["attempts"][-1]
        return attempt

    @property
    def run_id(self) -> str:
        run_id: str = self.record["run_id"]
        return run_id

    @property
    def trains(self) -> bool:
        return self.recipe.loop.trains

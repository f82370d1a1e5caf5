"""The state of a run that the ranks have agreed on, and the objects that were opened for it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titancli.process import Place
from titancli.runs import RunFolder

if TYPE_CHECKING:
    import torch

    from titancli.engine import Engine
    from titancli.loops.run import Run
    from titancli.observe.observers import Observers
    from titancli.protocols import Copies
    from titancli.recipe import Loaded
    from titancli.recipe.schema import Recipe


@dataclass(frozen=True)
class Start:
    """The facts that the ranks have agreed on before anything is built."""

    loaded: Loaded
    lock_text: str
    record: dict[str, Any]
    """The contents of `run.json`."""
    checkpoint: Path | None
    """The checkpoint to continue from; None starts at step 0."""
    device: torch.device

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    @property
    def run_id(self) -> str:
        run_id: str = self.record["run_id"]
        return run_id

    @property
    def trains(self) -> bool:
        return self.recipe.loop.trains


@dataclass(frozen=True)
class Opened:
    """A run on one rank, before its loop begins."""

    start: Start
    folder: RunFolder
    place: Place
    restart: int
    """How often the ranks of this attempt have been restarted."""
    engine: Engine
    run: Run
    tokenizer: Any
    data: Any
    """None for a loop that does not train."""
    observers: Observers
    copies: Copies | None
    """The copies of the state between checkpoints."""

    @property
    def recipe(self) -> Recipe:
        return self.start.recipe

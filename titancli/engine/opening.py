"""Opening an engine from a recipe: agreement among the ranks, building, weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from titancli.checkpoint.exclude import Exclusion
from titancli.checkpoint.format.manifest import DamagedCheckpoint, names_and_sizes
from titancli.checkpoint.hf.config_match import refuse_other_model
from titancli.checkpoint.start_from import start_from
from titancli.distributed import process_group
from titancli.distributed.together import Ranks
from titancli.engine import recipes
from titancli.engine.build import build_engine
from titancli.engine.checkpoints import load
from titancli.engine.core import EngineCore
from titancli.engine.turn_ends import stop_at_turns, trains_on_turns
from titancli.process import determinism
from titancli.recipe.schema import Recipe

E = TypeVar("E", bound=EngineCore)


def opened(
    made: type[E],
    recipe_here: Callable[[], tuple[Recipe, Path | None]],
    device: torch.device,
    frozen: bool,
    checkpoint: Path | None = None,
) -> tuple[E, Recipe]:
    """Return the engine, and its recipe as read on this rank; all ranks must have read the same. Collective.

    Args:
        made: the engine's class.
        recipe_here: returns the recipe, and the run that it comes from.
        checkpoint: see `titancli.Engine.build`.
    """
    call = recipes.call()
    with call.shared():
        found, run = recipe_here()
    with call.agreed():
        recipes.compare(call, found, frozen, checkpoint)
    recipe = recipes.weights_alone(found) if frozen else found
    with ExitStack() as ends, call.shared():
        if recipe.debug.deterministic:
            ends.enter_context(determinism(recipe.debug.deterministic))
        recipes.limit(recipe.comm)
        damaged: dict[Path, str] = {}
        while True:
            try:
                engine = build_engine(made, recipe, device=device, frozen=frozen, checkpoint=checkpoint)
                break
            except DamagedCheckpoint as error:  # found while reading into the tensors
                if run is None or error.folder != recipe.weights:
                    raise
                damaged[error.folder] = error.why
                verify = names_and_sizes(recipe.checkpoint.verify)
                recipe = replace(recipe, weights=recipes.checkpoint_of(run, verify=verify, damaged=damaged))
        process_group.enlist(engine)
        ends.callback(process_group.leave, engine)
        if engine.adapters_from is not None:
            load(engine, run or engine.adapters_from, optimizer=False, verify=recipe.checkpoint.verify)
        if not frozen and trains_on_turns(recipe):
            stop_at_turns(engine)
        engine._ends = ends.pop_all()
    return engine, found


def take_over(engine: EngineCore, recipe: Recipe) -> None:
    """Load the complete state of the checkpoint that the recipe names, if it asks for it. Collective."""
    start = start_from(recipe)
    if start.kind == "state":

        def look() -> Exclusion:
            refuse_other_model(recipe, start.folder)
            return start.exclusion

        exclude = Ranks(process_group.patient_group()).call(f"reading {start.folder}", look)
        load(engine, start.folder, exclude=exclude)

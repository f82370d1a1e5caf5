"""Make the `Run` that a loop uses, and the callbacks that take part in it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from titancli.distributed import process_group
from titancli.engine import Engine
from titancli.loops.hooks import RunHooks
from titancli.loops.run import Run, Stop
from titancli.registry.component import build
from titancli.runs import RunFolder
from titancli.worker.data import open_dataset

if TYPE_CHECKING:
    from titancli.worker.opened import Start


def open_run(start: Start, engine: Engine, tokenizer: Any, stop: Stop, folder: RunFolder) -> Run:
    """Make the loop's `Run`, with the callbacks of the recipe."""
    recipe = start.recipe
    run = Run(
        steps=recipe.training.steps,
        stop=stop,
        gc_freq=recipe.training.gc_freq,
        save_or_stop=recipe.checkpoint.on_error == "stop",
        guard=engine.guard,
        on_first_step=lambda: process_group.tighten_timeouts(recipe.comm.train_timeout_seconds),
        open_dataset=partial(open_dataset, recipe, tokenizer, engine),
        reference=partial(Engine.frozen, recipe, device=start.device),
        batch_shape=(recipe.training.local_batch_size, recipe.training.seq_len),
        folder=folder.path,
        recipe=recipe,
        tokenizer=tokenizer,
        hooks=RunHooks(engine),
    )
    for config in recipe.callbacks if start.trains else ():
        callback = build(config, engine=engine, run=run)
        engine.hooks.add(callback)
        run.hooks.add(callback)
    return run

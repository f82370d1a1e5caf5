"""Make the `Run` that a loop uses, and the hooks that take part in it: the recipe's callbacks and titan's
own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from titancli.distributed import process_group
from titancli.engine import Engine
from titancli.engine.digest import Digests
from titancli.loops.hooks import RunHooks
from titancli.loops.run import Run, Stop
from titancli.observe.digests import DigestWriter
from titancli.observe.profiler import Profiler
from titancli.registry.component import build
from titancli.worker.data import open_dataset

if TYPE_CHECKING:
    from titancli.worker.run_context import RunContext


def open_run(context: RunContext, engine: Engine, tokenizer: Any, stop: Stop) -> Run:
    """Make the loop's `Run`, with its hooks in the order in which they are called."""
    recipe = context.recipe
    run = Run(
        steps=recipe.training.steps,
        stop=stop,
        gc_freq=recipe.training.gc_freq,
        save_or_stop=recipe.checkpoint.on_error == "stop",
        guard=engine.guard,
        on_first_step=lambda: process_group.tighten_timeouts(recipe.comm.train_timeout_seconds),
        open_dataset=partial(open_dataset, recipe, tokenizer, engine),
        reference=partial(Engine.frozen, recipe, device=context.device),
        batch_shape=(recipe.training.local_batch_size, recipe.training.seq_len),
        folder=context.folder.path,
        recipe=recipe,
        tokenizer=tokenizer,
        hooks=RunHooks(engine),
    )
    with ExitStack() as failed:
        failed.push(run.hooks)
        for hook in _hooks_of_steps(context, engine, run) if context.trains else ():
            engine.hooks.add(hook)
            run.hooks.add(hook)
        run.hooks.add(_profiler(context))
        failed.pop_all()
    return run


def _hooks_of_steps(context: RunContext, engine: Engine, run: Run) -> Iterator[Any]:
    """Build what takes part in steps too."""
    for config in context.recipe.callbacks:
        yield build(config, engine=engine, run=run)
    if context.recipe.debug.digests:
        yield _digests(context, engine)


def _digests(context: RunContext, engine: Engine) -> Digests:
    """Return the hook that writes this rank's digest of each step into the run folder."""
    named = engine.trained_parameters()
    header = {
        "attempt": len(context.record["attempts"]),
        "restart": context.restart,
        "rank": context.place.rank,
        "world": context.place.world,
        "dp_rank": engine.mesh.dp_rank,
        "mesh": asdict(engine.mesh.degrees),
        "names": [name for name, _ in named],
    }
    return Digests(DigestWriter(context.folder.path, header), named, engine.converters)


def _profiler(context: RunContext) -> Profiler:
    """Return the hook that records traces and memory snapshots, on a schedule or on request."""
    return Profiler(
        context.recipe.profiling,
        context.folder.path,
        rank=context.place.rank,
        world=context.place.world,
        device=context.device,
        total_steps=context.recipe.training.steps,
    )

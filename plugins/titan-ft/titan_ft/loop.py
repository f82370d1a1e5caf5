"""The loop: pretraining, with a quorum of the replicas before each step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from titan_ft.replicas import NoQuorum, Replicas
from titancli import phase
from titancli.engine.replicas import reduce_gradients
from titancli.errors import EnvironmentProblem

if TYPE_CHECKING:
    from titan_ft import FaultTolerant
    from titancli.data.loader import Loader
    from titancli.engine import Engine
    from titancli.loops.run import Run
    from titancli.observe.observers import Observers

logger = logging.getLogger("titancli.plugins.titan_ft")


def build(
    config: FaultTolerant, *, engine: Engine, data: Loader, tokenizer: Any, observers: Observers, run: Run
) -> Callable[[], None]:
    return partial(train, config, engine, data, observers, run)


def train(config: FaultTolerant, engine: Engine, data: Loader, observers: Observers, run: Run) -> None:
    """Train until the last step, the end of the data, or a signal; save on the way and at the end."""
    with Replicas(config, engine, data, run.folder) as replicas:
        try:
            steps(config, engine, data, observers, run, replicas)
        except NoQuorum:
            replicas.abandon()
            engine.clear_gradients()
            save(engine, data, run)
            raise
    run.finish(engine, data)


def steps(
    config: FaultTolerant, engine: Engine, data: Loader, observers: Observers, run: Run, replicas: Replicas
) -> None:
    """Take one step after another. Raises the errors of `Replicas.meet`."""
    while run.should_continue(engine.step):
        replicas.begin()
        if engine.step >= run.steps:  # the others are done, and this replica has their state
            break
        rows = engine.settings.accumulation
        batches = run.next_microbatches(data, rows * config.replicas)
        if len(batches) < rows * config.replicas:
            run.why = "data_ended"
            break
        own = batches[config.replica * rows : (config.replica + 1) * rows]
        metrics = step(engine, replicas, own, run)
        if metrics is None:
            continue
        metrics |= engine.optim_step() | {"data_wait": run.data_wait}
        observers.step_end(engine.step, metrics)
        run.step_done(engine.step)
        if run.checkpoint_due(engine.step):
            run.save(engine, data)


def save(engine: Engine, data: Loader, run: Run) -> None:
    """Save the last step if it is unsaved; a failing disk must not hide why the run ends."""
    if run.checkpoints is None or engine.step in (0, run.saved_step):
        return
    try:
        run.save(engine, data)
        run.checkpoints.wait()
    except EnvironmentProblem as error:
        logger.warning("step %d was not saved: %s", engine.step, error)


def step(engine: Engine, replicas: Replicas, own: list[Any], run: Run) -> dict[str, Any] | None:
    """Compute the gradients of a step, again and again until all present replicas have exchanged theirs.

    Returns None if the step must not be taken: this replica received the others' state, or is stopping.
    """
    said = None
    while True:
        metrics = engine.forward_backward(own)
        with phase("replicas"):
            metrics |= reduce_gradients(engine, replicas.add) | {"replicas": replicas.count}
            if replicas.agree():
                return metrics
        engine.clear_gradients()
        if (why := replicas.failure()) != said:
            logger.warning("step %d is computed once more: %s", engine.step + 1, why)
            said = why
        if run.should_stop():
            replicas.abandon()
            return None
        if replicas.meet():
            return None

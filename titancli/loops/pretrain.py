"""Pretraining: the loop, from top to bottom."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titancli.data.loader import Loader
    from titancli.engine import Engine
    from titancli.loops.run import Run
    from titancli.observe.observers import Observers


def build(
    config: Any, *, engine: Engine, data: Loader, tokenizer: Any, observers: Observers, run: Run
) -> Callable[[], None]:
    return partial(pretrain, engine, data, observers, run)


def pretrain(engine: Engine, data: Loader, observers: Observers, run: Run) -> None:
    """Train until the last step, the end of the data, or a signal; save on the way and at the end."""
    while run.goes_on(engine.step):
        batches = run.take(data, engine.settings.accumulation)
        if not batches:
            break
        metrics = engine.forward_backward(batches)
        metrics |= engine.optim_step() | {"data_wait": run.data_wait}
        observers.step_end(engine.step, metrics)
        run.step_done(engine.step)
        if run.checkpoint_due(engine.step):
            run.save(engine, data)
    run.finish(engine, data)

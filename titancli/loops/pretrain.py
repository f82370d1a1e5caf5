"""The loop of pretraining, and of whatever else learns from batches of data, from top to bottom."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titancli.data.loader import Loader
    from titancli.engine import Engine
    from titancli.loops.run import Run
    from titancli.observe.observers import Observers
    from titancli.protocols.batch import Batch


def build(
    config: Any, *, engine: Engine, data: Loader, tokenizer: Any, observers: Observers, run: Run
) -> Callable[[], None]:
    return partial(pretrain, engine, data, observers, run)


def pretrain(
    engine: Engine,
    data: Loader,
    observers: Observers,
    run: Run,
    prepare: Callable[[list[Batch]], list[Batch]] | None = None,
) -> None:
    """Train until the last step, the end of the data, or a signal; save on the way and at the end.

    Args:
        prepare: adds to the batches of a step what the loss reads beside the data. Collective.
    """
    while run.should_continue(engine.step):
        batches = run.next_microbatches(data, engine.settings.accumulation)
        if not batches:
            break
        metrics = engine.forward_backward(batches if prepare is None else prepare(batches))
        metrics |= engine.optim_step() | {"data_wait": run.data_wait}
        observers.step_end(engine.step, metrics)
        run.step_done(engine.step)
        if run.checkpoint_due(engine.step):
            run.save(engine, data)
    run.finish(engine, data)

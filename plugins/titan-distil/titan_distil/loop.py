"""Distillation: the loop, from top to bottom."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from titan_distil.store import Stored
from titan_distil.teacher import Teacher
from titancli import TitanError

if TYPE_CHECKING:
    from typing import Any

    from titan_distil import Distil
    from titancli import Engine
    from titancli.data.loader import Loader
    from titancli.loops.run import Run
    from titancli.observe.observers import Observers


def build(
    config: Distil, *, engine: Engine, data: Loader, tokenizer: Any, observers: Observers, run: Run
) -> Callable[[], None]:
    if run.recipe is None:
        raise TitanError("the loop distil needs the recipe of its run")
    teacher: Teacher | Stored
    if config.teacher.topk is not None:
        teacher = Stored(engine, config.teacher, tokenizer, run, data)
    else:
        teacher = Teacher(engine, run.recipe, config.teacher)
    if run.validation is not None:
        run.validation.prepare = teacher
    return partial(distil, engine, data, observers, run, teacher)


def distil(engine: Engine, data: Loader, observers: Observers, run: Run, teacher: Teacher | Stored) -> None:
    """Train until the last step, the end of the data, or a signal; save on the way and at the end."""
    while run.goes_on(engine.step):
        batches = [teacher(batch) for batch in run.take(data, engine.settings.accumulation)]
        if not batches:
            break
        metrics = engine.forward_backward(batches)
        metrics |= engine.optim_step() | {"data_wait": run.data_wait}
        observers.step_end(engine.step, metrics)
        run.step_done(engine.step)
        if run.checkpoint_due(engine.step):
            run.save(engine, data)
    run.finish(engine, data)
    teacher.close()

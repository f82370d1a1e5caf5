"""Supervised fine-tuning: the loop, from top to bottom."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from titancli.loops.held_out import Validation

if TYPE_CHECKING:
    from typing import Any

    from titancli.data.loader import Loader
    from titancli.engine import Engine
    from titancli.loops import SFT
    from titancli.loops.run import Run
    from titancli.observe.observers import Observers


def build(
    config: SFT, *, engine: Engine, data: Loader, tokenizer: Any, observers: Observers, run: Run
) -> Callable[[], None]:
    validation = Validation(config, engine, run) if config.validation is not None else None
    return partial(sft, engine, data, observers, run, validation)


def sft(engine: Engine, data: Loader, observers: Observers, run: Run, validation: Validation | None) -> None:
    """Train until the last step, the end of the data, or a signal; evaluate and save on the way."""
    while run.goes_on(engine.step):
        batches = run.take(data, engine.settings.accumulation)
        if not batches:
            break
        metrics = engine.forward_backward(batches)
        metrics |= engine.optim_step() | {"data_wait": run.data_wait}
        if validation is not None and validation.due(engine.step):
            found, seconds = validation()
            observers.evaluated({**found, "val_perplexity": found["val_loss"].exp()}, seconds)
        observers.step_end(engine.step, metrics)
        run.step_done(engine.step)
        if run.checkpoint_due(engine.step):
            run.save(engine, data)
    run.finish(engine, data)

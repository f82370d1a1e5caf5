"""Evaluation alone: the datasets of `[validation]`, once, on an engine without an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from titancli.checkpoint import read_manifest
from titancli.loops.reference import Referenced

if TYPE_CHECKING:
    from titancli.engine import Engine
    from titancli.loops import Evaluate
    from titancli.loops.run import Run
    from titancli.observe.observers import Observers


def build(
    config: Evaluate, *, engine: Engine, data: None, tokenizer: Any, observers: Observers, run: Run
) -> Callable[[], None]:
    step = 0 if config.checkpoint is None else read_manifest(config.checkpoint).step
    return partial(evaluate, engine, run, step)


def evaluate(engine: Engine, run: Run, step: int) -> None:
    """Evaluate each dataset, and stop; a signal ends it early."""
    if run.validation is None:
        return
    if "reference_row_logprobs" in engine.loss.needs:
        run.validation.prepare = Referenced(engine, run)
    if not run.validation.alone(step, run.asked_to_stop):
        run.should_stop()

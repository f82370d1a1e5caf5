"""Supervised fine-tuning: the loop, from top to bottom."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from titancli.errors import TitanError

if TYPE_CHECKING:
    from titancli.data.loader import Loader
    from titancli.engine import Engine
    from titancli.loops import SFT
    from titancli.loops.run import Run
    from titancli.observe.observers import Observers

AT_ONCE = 8
"""Batches that one call evaluates."""


def build(
    config: SFT, *, engine: Engine, data: Loader, tokenizer: Any, observers: Observers, run: Run
) -> Callable[[], None]:
    validation = None
    if config.validation is not None:
        validation = Validation(config, engine, run)
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
            observers.evaluated(*validation())
        observers.step_end(engine.step, metrics)
        run.step_done(engine.step)
        if run.checkpoint_due(engine.step):
            run.save(engine, data)
    run.finish(engine, data)


class Validation:
    """The loss on data that are held out; the same batches each time."""

    def __init__(self, config: SFT, engine: Engine, run: Run) -> None:
        if run.open_dataset is None:
            raise TitanError("a run that evaluates must be able to open a dataset")
        self._config, self._engine, self._steps = config, engine, run.steps
        self._data = run.open_dataset(config.validation)
        self._start = self._data.state_dict()

    def due(self, step: int) -> bool:
        return step % self._config.eval_freq == 0 or step == self._steps

    def __call__(self) -> tuple[dict[str, Any], float]:
        """`val_loss` and `val_perplexity` (its exponential), and the seconds that they took. Collective."""
        began = time.perf_counter()
        self._data.load_state_dict(self._start)
        batches = itertools.islice(self._data, self._config.eval_batches)
        total = weight = torch.zeros((), device=self._engine.device)
        while some := list(itertools.islice(batches, AT_ONCE)):
            found = self._engine.evaluate(some)
            total = total + found["loss"] * found["weight"]
            weight = weight + found["weight"]
        loss = total / weight.clamp(min=torch.finfo(torch.float32).tiny)
        return {"val_loss": loss, "val_perplexity": loss.exp()}, time.perf_counter() - began

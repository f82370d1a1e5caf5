"""Direct preference optimisation: the loop, from top to bottom."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from titancli.loops.reference import Reference
from titancli.protocols.batch import Batch

if TYPE_CHECKING:
    from typing import Any

    from titancli.data.loader import Loader
    from titancli.engine import Engine
    from titancli.loops import DPO
    from titancli.loops.run import Run
    from titancli.observe.observers import Observers


def build(
    config: DPO, *, engine: Engine, data: Loader, tokenizer: Any, observers: Observers, run: Run
) -> Callable[[], None]:
    reference = Referenced(engine, run)
    if run.validation is not None:
        run.validation.prepare = reference
    return partial(dpo, engine, data, observers, run, reference)


def dpo(engine: Engine, data: Loader, observers: Observers, run: Run, reference: Referenced) -> None:
    """Train until the last step, the end of the data, or a signal; save on the way and at the end."""
    while run.goes_on(engine.step):
        batches = [reference(batch) for batch in run.take(data, engine.settings.accumulation)]
        if not batches:
            break
        metrics = engine.forward_backward(batches)
        metrics |= engine.optim_step() | {"data_wait": run.data_wait}
        observers.step_end(engine.step, metrics)
        run.step_done(engine.step)
        if run.checkpoint_due(engine.step):
            run.save(engine, data)
    run.finish(engine, data)


class Referenced:
    """Adds `reference_row_logprobs` to a batch that has none: of the model that the run began with. For a
    loss that reads none it does nothing."""

    def __init__(self, engine: Engine, run: Run) -> None:
        self._engine, self._reference = engine, Reference(engine, run)
        self._needed = "reference_row_logprobs" in engine.loss.needs

    def __call__(self, batch: Batch) -> Batch:
        """Collective."""
        if not self._needed or "reference_row_logprobs" in batch:  # the data may bring them
            return batch
        batch = batch.to(self._engine.device)
        reference = self._reference.log_probs(batch).sum(1)
        return Batch({**batch, "reference_row_logprobs": reference}, unit=batch.unit)

"""Direct preference optimisation: the loop of pretraining, on batches that have the reference's
log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from titancli.loops.pretrain import pretrain
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
    return partial(pretrain, engine, data, observers, run, lambda batches: [*map(reference, batches)])


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

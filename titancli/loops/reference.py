"""The model that a run began with, to compare the present one with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from titancli.errors import TitanError
from titancli.observe.phases import phase
from titancli.protocols.batch import Batch

if TYPE_CHECKING:
    from titancli.engine import Engine
    from titancli.loops.run import Run


class Reference:
    """The base, where adapters are trained that began at zero; elsewhere a frozen engine, which is built when
    it is first asked for."""

    def __init__(self, engine: Engine, run: Run) -> None:
        self._engine, self._build = engine, run.reference
        self._frozen: Engine | None = None

    def log_probs(self, batch: Any, **how: Any) -> Any:
        """log p of targets, or of the tokens of samples; see `Engine.forward`. Collective."""
        with phase("reference"):
            return self._log_probs(batch, **how)

    def _log_probs(self, batch: Any, **how: Any) -> Any:
        if self._engine.begins_as_base:
            with self._engine.as_base():
                return self._engine.forward(batch, **how)
        if self._frozen is None:
            if self._build is None:
                raise TitanError("this loop needs a run that can build the initial model")
            self._frozen = self._build()
        return self._frozen.forward(batch, **how)


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

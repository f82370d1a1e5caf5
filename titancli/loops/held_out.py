"""Evaluation on data that are held out: what the loops sft and dpo share."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from titancli.errors import TitanError
from titancli.observe.phases import phase

if TYPE_CHECKING:
    from titancli.data.batch import Batch
    from titancli.engine import Engine
    from titancli.loops import DPO, SFT
    from titancli.loops.run import Run

AT_ONCE = 8
"""Batches that one call evaluates."""


class Validation:
    """The loss on data that are held out; the same batches each time."""

    def __init__(
        self,
        config: SFT | DPO,
        engine: Engine,
        run: Run,
        prepare: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        """`prepare` makes of a batch what the loss needs."""
        if run.open_dataset is None:
            raise TitanError("an evaluation needs a run that can open datasets")
        self._config, self._engine, self._steps, self._prepare = config, engine, run.steps, prepare
        self._data = run.open_dataset(config.validation)
        self._start = self._data.state_dict()

    def due(self, step: int) -> bool:
        return step % self._config.eval_freq == 0 or step == self._steps

    def __call__(self) -> tuple[dict[str, Any], float]:
        """`val_loss`, and what the loss reports as `val_…`; and the seconds that it took. Collective."""
        with phase("evaluation"):
            return self._evaluated()

    def _evaluated(self) -> tuple[dict[str, Any], float]:
        began = time.perf_counter()
        self._data.load_state_dict(self._start)
        batches = itertools.islice(self._data, self._config.eval_batches)
        totals: dict[str, Any] = {}
        weight = torch.zeros((), device=self._engine.device)
        while some := list(itertools.islice(batches, AT_ONCE)):
            found = self._engine.evaluate([self._prepare(batch) for batch in some])
            part = found.pop("weight")
            weight = weight + part
            for name, value in found.items():
                totals[name] = totals.get(name, 0.0) + value * part
        weight = weight.clamp(min=torch.finfo(torch.float32).tiny)
        averages = {f"val_{name}": total / weight for name, total in totals.items()}
        return averages, time.perf_counter() - began

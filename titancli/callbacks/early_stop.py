"""End a run whose evaluations no longer improve (Prechelt, "Early stopping - but when?", 1998)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from titancli.callbacks.watched import is_better, value_of

if TYPE_CHECKING:
    from titancli.callbacks import EarlyStop as Config
    from titancli.loops.run import Run

logger = logging.getLogger(__name__)


class EarlyStop:
    """Counts the evaluations since the best one."""

    def __init__(self, config: Config, *, engine: Any, run: Run) -> None:
        self._config, self._run = config, run
        self._metric = config.name_of(run.recipe)
        self.name = f"early_stop.{self._metric}"  # one run may watch several
        self._best: float | None = None
        self._since = self._seen = 0

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        value = value_of(self._metric, metrics)
        if value is None or step <= self._seen:  # the evaluation of a step is done again after a resume there
            return
        self._seen, self._since = step, self._since + 1
        if is_better(self._config, value, self._best, self._config.min_delta):
            self._best, self._since = value, 0
        self._end()

    def run_start(self, step: int) -> None:
        self._end()

    def _end(self) -> None:
        if self._since >= self._config.patience:
            best = "was never a finite number" if self._best is None else f"was {self._best:.4g} at its best"
            self._run.end_early(f"{self._metric} {best}, {self._since} evaluations ago")

    def state(self) -> dict[str, Any]:
        return {"metric": self._metric, "best": self._best, "since": self._since, "step": self._seen}

    def load_state(self, state: dict[str, Any] | None) -> None:
        if state is None or state["metric"] != self._metric:  # nothing to compare with
            self._best, self._since, self._seen = None, 0, 0
        else:
            self._best, self._since, self._seen = state["best"], state["since"], state["step"]

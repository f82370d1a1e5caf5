"""The checkpoint of the best evaluation so far."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from titancli.callbacks.watched import is_better, value_of
from titancli.checkpoint.format.manifest import is_checkpoint, read_manifest
from titancli.distributed.together import Ranks
from titancli.errors import EnvironmentProblem

if TYPE_CHECKING:
    from titancli.callbacks import Best as Config
    from titancli.engine import Engine
    from titancli.loops.run import Run

NAME = "best"

logger = logging.getLogger(__name__)


class Best:
    """Saves `RUN/best` where an evaluation improves on the one that is there."""

    def __init__(self, config: Config, *, engine: Engine, run: Run) -> None:
        self._config, self._engine, self._run = config, engine, run
        self._metric = config.name_of(run.recipe)
        self._value: float | None = None

    def run_start(self, step: int) -> None:
        if step:  # whatever the step that is resumed: it is this checkpoint that a better one replaces
            self._value = Ranks().broadcast_call("reading the best checkpoint", self._kept)

    def _kept(self) -> float | None:
        path = self._run.folder / NAME if self._run.folder else None
        if path is None or not is_checkpoint(path):
            return None
        if self._run.checkpoints is not None:
            self._run.checkpoints.remove_replaced(path)
        try:
            kept = read_manifest(path).state.get(NAME, {})
        except EnvironmentProblem as error:
            logger.warning(
                "the best checkpoint so far is damaged, and the next one replaces it: %s", error.message
            )
            return None
        return kept.get("value") if kept.get("metric") == self._metric else None

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        value = value_of(self._metric, metrics)
        if not step or value is None or not is_better(self._config, value, self._value):
            return
        self._value = value
        self._run.save_named(NAME, self._engine, {"metric": self._metric, "value": value, "step": step})
        logger.info("saved %s: step %d, %s %.4g", NAME, step, self._metric, value)

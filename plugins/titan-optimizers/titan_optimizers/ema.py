"""An exponential moving average of the weights (Polyak and Juditsky, 1992)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titan_optimizers import EMA
from titan_optimizers.elementwise import local

if TYPE_CHECKING:
    from titancli import Engine
    from titancli.engine.step import Step
    from titancli.loops.run import Run

logger = logging.getLogger(f"titancli.plugins.{__name__}")


class Average:
    """Keeps the average of the parameters that are trained, each rank that of its own shards."""

    def __init__(self, config: EMA, *, engine: Engine, run: Run) -> None:
        self.name = config.name
        self._config, self._engine, self._run = config, engine, run
        self._average = {name: weight.float().clone() for name, weight in self._weights().items()}

    def _weights(self) -> dict[str, Tensor]:
        trained = {name for name, _ in self._engine.trained_parameters()}
        return {name: weight for name, weight in self._engine.plain_parameters() if name in trained}

    @torch.no_grad()
    def step_applied(self, step: Step) -> None:
        share = torch.as_tensor(1.0 - self._config.decay, device=step.norm.device)
        if step.skipped is not None:  # known to the device alone
            share = share * (1.0 - step.skipped)
        for name, weight in self._weights().items():
            average = local(self._average[name])
            average.lerp_(local(weight).float(), share.to(average.device))

    def tensors(self) -> dict[str, Tensor]:
        return self._average

    @torch.no_grad()
    def load_state(self, state: dict[str, Any] | None) -> None:
        if state is None:  # the average begins with the weights that were loaded
            for name, weight in self._weights().items():
                local(self._average[name]).copy_(local(weight))

    def run_end(self, why: str) -> None:
        if self._config.export and self._engine.step and self._run.has_ended:
            adapters = self._engine.save_state()[1].get("adapters")  # as checkpoints have them, without base
            weights = {} if adapters else dict(self._engine.plain_parameters())
            self._run.export(self._engine.step, self.name, weights | self._average, adapters)

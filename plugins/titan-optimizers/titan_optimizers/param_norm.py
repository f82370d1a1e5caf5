"""The norm of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from titancli.engine import norm_of

if TYPE_CHECKING:
    from titancli import Engine
    from titancli.engine.step import Step


class Norm:
    """See `titan_optimizers.ParamNorm`."""

    def __init__(self, config: Any, *, engine: Engine, run: Any) -> None:
        self._engine = engine

    def step_applied(self, step: Step) -> dict[str, Tensor]:
        weights = [parameter.detach() for _, parameter in self._engine.trained_parameters()]
        return {"param_norm": norm_of(weights, self._engine.device, self._engine.mesh.pp_group)}

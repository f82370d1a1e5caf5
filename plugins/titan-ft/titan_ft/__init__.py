"""Replicas that come and go while others train on. This file has the config and imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt

from titancli import component, hookimpl

if TYPE_CHECKING:
    from titancli import Recipe


@component("loop", "ft", target="titan_ft.loop:build")
class FaultTolerant:
    """Pretraining in several replicas, each a run of its own, that add up their gradients in each step.

    A replica that fails costs the others one step; one that comes back takes over their state.
    """

    joins_other_runs: ClassVar[bool] = True

    lighthouse: str
    """Address of torchft's lighthouse, which knows who is there: http://HOST:PORT."""
    replica: Annotated[int, Ge(0)]
    """Which of the replicas this is, from 0; the only value in which their recipes differ."""
    replicas: Annotated[int, Gt(0)]
    """How many there are when all are there. Each trains on its share of the rows of a step."""
    min_replicas: Annotated[int, Gt(0)] = 1
    """A step is only taken by as many or more."""
    timeout_seconds: Annotated[int, Gt(0)] = 60
    """How long an exchange with other replicas may take: gradients, or the whole state."""
    quorum_timeout_seconds: Annotated[int, Gt(0)] = 120
    """How long to wait for others, and for the lighthouse, which may be restarted meanwhile; then the run
    saves a checkpoint and ends with an error, or restarts."""
    alone: bool = False
    """Whether a replica trains alone where others have been before it came, and none is there: they may have
    finished. Otherwise it waits for them, and ends with an error."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if not self.lighthouse.startswith("http://"):
            yield "lighthouse", f"{self.lighthouse!r} is not an address such as http://node0:29510"
        if self.replica >= self.replicas:
            yield "replica", f"replicas are numbered from 0 to {self.replicas - 1}"
        if self.min_replicas > self.replicas:
            yield "min_replicas", f"there are never more than {self.replicas} replicas"
        if recipe.dataset is None:
            yield "", "ft trains on a dataset"
        moe = getattr(recipe.model, "moe", None)
        for name in ("aux_loss_coeff", "z_loss_coeff"):
            if getattr(moe, name, 0.0):
                why = "multiplies a mean over all tokens of a step, of which a replica knows its own alone"
                yield (
                    "",
                    f"model.moe.{name} {why}: set it to 0 (model.moe.load_balance_coeff balances as well)",
                )


@hookimpl
def titan_components() -> list[type]:
    return [FaultTolerant]

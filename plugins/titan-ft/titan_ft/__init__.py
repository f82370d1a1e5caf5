"""Fault-tolerant training in replicas that may join and leave. This file has the config and imports no
torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt

from titancli import component, hookimpl

if TYPE_CHECKING:
    from titancli import Recipe


@component("loop", "ft", target="titan_ft.loop:build")
class FaultTolerant:
    """Pretraining in several replicas, each a run of its own, that sum their gradients in each step.

    A failed replica costs the others one step; one that rejoins receives their state. Who starts a replica
    names torchft's lighthouse, which tracks them, in TORCHFT_LIGHTHOUSE=http://HOST:PORT; a recipe cannot.
    """

    joins_other_runs: ClassVar[bool] = True

    replica: Annotated[int, Ge(0)]
    """Index of this replica, from 0; the only value in which the replicas' recipes differ."""
    replicas: Annotated[int, Gt(0)]
    """Total number of replicas. Each trains on its share of the rows of a step."""
    min_replicas: Annotated[int, Gt(0)] = 1
    """Minimum number of replicas for a step."""
    timeout_seconds: Annotated[int, Gt(0)] = 60
    """Maximum time of an exchange with other replicas: gradients, or the whole state."""
    quorum_timeout_seconds: Annotated[int, Gt(0)] = 120
    """Time to wait for other replicas, and for the lighthouse, which may be restarted meanwhile; then the
    run saves a checkpoint and ends with an error, or restarts."""
    alone: bool = False
    """Whether a replica trains alone if others were there before it and none is now: they may have
    finished. Otherwise it waits for them, and ends with an error."""

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        if self.replica >= self.replicas:
            yield "replica", f"replicas are numbered from 0 to {self.replicas - 1}"
        if self.min_replicas > self.replicas:
            yield "min_replicas", f"there are never more than {self.replicas} replicas"
        if recipe.dataset is None:
            yield "", "ft trains on a dataset"
        moe = getattr(recipe.model, "moe", None)
        for name in ("aux_loss_coeff", "z_loss_coeff"):
            if getattr(moe, name, 0.0):
                why = "multiplies a mean over all tokens of a step, but a replica only has its own"
                yield (
                    "",
                    f"model.moe.{name} {why}: set it to 0 (model.moe.load_balance_coeff balances as well)",
                )


@hookimpl
def titan_components() -> list[type]:
    return [FaultTolerant]

"""The configs of what can start the workers of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt

from titancli.registry.component import component


@component("launcher", "local", target="titancli.launchers.local:launch")
class Local:
    """Run on this machine, or on several machines on which the same command is started."""

    nproc: Annotated[int, Gt(0)] | Literal["auto"] = "auto"
    """Processes per machine; auto: one per visible GPU, or one if there is none."""
    max_restarts: Annotated[int, Ge(0)] = 0
    """How many times the processes are restarted from the newest checkpoint after one of them has failed, or
    a machine was lost."""
    node_timeout_seconds: Annotated[int, Ge(3)] = 30
    """Seconds without a sign of life after which a machine counts as lost."""
    join_timeout_seconds: Annotated[int, Gt(0)] = 600
    """Seconds that the other machines wait for one that is missing."""


COMPONENTS: list[type] = [Local]

"""The configs of what can start the workers of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt

from titancli.registry.component import component


@component("launcher", "local", target="titancli.launchers.local:launch")
class Local:
    """Runs on this machine, or on several where the same command is started on each."""

    nproc: Annotated[int, Gt(0)] | Literal["auto"] = "auto"
    """Processes on each machine; auto: one for each visible GPU, and one where there is none."""
    max_restarts: Annotated[int, Ge(0)] = 0
    """How often the processes are started anew, from the newest checkpoint, after one of them failed."""


COMPONENTS: list[type] = [Local]

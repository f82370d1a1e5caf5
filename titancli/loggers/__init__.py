"""The configs of what can watch a run, besides the event log and the console that every run has."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Gt

from titancli.registry.component import component


@component("logger", "tensorboard", target="titancli.loggers.tensorboard:build")
class TensorBoard:
    """TensorBoard event files in the run folder's `tb/`, written by rank 0."""

    flush_secs: Annotated[int, Gt(0)] = 30
    """Seconds between two writes to disk."""


COMPONENTS: list[type] = [TensorBoard]

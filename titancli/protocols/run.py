"""The parts that run a recipe and report on it: loops, launchers, loggers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from titancli.launch import LaunchRequest


class Logger(Protocol):
    """Receives the metrics and events of a run, on rank 0 or on every rank (see `is_main`). All methods
    are optional.

    A logger that raises is reported once and not called again; it never ends a run.
    """

    def run_start(self, info: dict[str, Any]) -> None:
        """Start of a run; `info` has the contents of `run.json`, plus `recipe` (the resolved data)."""

    def step_end(self, step: int, metrics: dict[str, float]) -> None:
        """Metrics of a step: every `metrics.log_freq` steps, and after the first and the last step."""

    def validated(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        """Metrics of an evaluation of `[validation]`, `validation/NAME/loss` and so on, and how long it took.
        A logger without this method gets these metrics by `step_end`."""

    def checkpoint_saved(self, step: int, path: Path) -> None: ...

    def run_end(self, outcome: dict[str, Any]) -> None: ...


class LoggerBuilder(Protocol):
    def __call__(self, config: Any, *, run_folder: Path, is_main: bool) -> Logger: ...


class LauncherBuilder(Protocol):
    """Starts ranks, waits for their end, and returns the exit code of the command. Must not import torch."""

    def __call__(self, config: Any, *, request: LaunchRequest) -> int: ...


class LoopBuilder(Protocol):
    """Builds the training program; `run` has what a loop needs to know about its run: see
    `titancli.loops.run.Run`."""

    def __call__(
        self, config: Any, *, engine: Any, data: Any, tokenizer: Any, observers: Any, run: Any
    ) -> Callable[[], None]: ...

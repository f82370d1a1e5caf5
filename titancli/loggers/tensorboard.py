"""Metrics as TensorBoard scalars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from titancli.errors import PluginError
from titancli.loggers import TensorBoard
from titancli.runs import LOCK_NAME

ENVIRONMENT = ("host", "platform", "device", "world", "mesh", "versions", "git", "argv")


class TensorBoardLogger:
    """Writes each metric as a scalar under its own name."""

    def __init__(self, run_folder: Path, flush_secs: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise PluginError(
                "the logger 'tensorboard' needs the package tensorboard, which is not installed",
                hint="pip install 'titancli[tensorboard]', or remove the logger from the recipe",
            ) from error
        self._open = lambda step: SummaryWriter(
            str(run_folder / "tb"), flush_secs=flush_secs, purge_step=step
        )
        self._lock = run_folder / LOCK_NAME
        self._writer: Any = None

    def run_start(self, info: dict[str, Any]) -> None:
        step = int(info.get("step") or 0)
        self._writer = self._open(step + 1)  # points beyond it were left by the attempt before
        newest = {**(info.get("attempts") or [{}])[-1], **info}
        environment = {name: newest[name] for name in ENVIRONMENT if newest.get(name) is not None}
        # Four spaces: TensorBoard draws markdown.
        for name, text in (
            ("recipe", self._lock.read_text(encoding="utf-8") if self._lock.is_file() else ""),
            ("environment", json.dumps(environment, indent=2)),
        ):
            if text:
                self._writer.add_text(name, "    " + text.replace("\n", "\n    "), step)

    def step_end(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def run_end(self, outcome: dict[str, Any]) -> None:
        self._writer.close()


def build(config: TensorBoard, *, run_folder: Path, is_main: bool) -> Any:
    """Return a TensorBoardLogger on rank 0; elsewhere a logger without methods.

    Raises:
        PluginError: tensorboard is not installed.
    """
    return TensorBoardLogger(run_folder, config.flush_secs) if is_main else object()

"""Metrics as TensorBoard scalars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titancli.errors import PluginError
from titancli.loggers import TensorBoard


class TensorBoardLogger:
    """Writes each metric as a scalar under its own name."""

    def __init__(self, folder: Path, flush_secs: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise PluginError(
                "the logger 'tensorboard' needs the package tensorboard, which is not installed",
                hint="pip install 'titancli[tensorboard]', or remove the logger from the recipe",
            ) from error
        self._open = lambda step: SummaryWriter(str(folder), flush_secs=flush_secs, purge_step=step)
        self._writer: Any = None

    def run_start(self, info: dict[str, Any]) -> None:
        # Points beyond the checkpoint that is resumed from were left by the attempt before.
        step = int(info.get("step") or 0)
        self._writer = self._open(step + 1 if step else None)

    def step_end(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def run_end(self, outcome: dict[str, Any]) -> None:
        self._writer.close()


def build(config: TensorBoard, *, run_folder: Path, is_main: bool) -> Any:
    """A TensorBoardLogger on rank 0; elsewhere a logger without methods.

    Raises:
        PluginError: tensorboard is not installed.
    """
    return TensorBoardLogger(run_folder / "tb", config.flush_secs) if is_main else object()

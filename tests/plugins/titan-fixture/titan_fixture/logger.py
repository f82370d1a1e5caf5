"""A logger with some of the four methods."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan_fixture import TextLog as Config


class TextLog:
    def __init__(self, config: Config, *, run_folder: Path, is_main: bool) -> None:
        self.file = run_folder / config.file if is_main else None

    def step_end(self, step: int, metrics: dict[str, float]) -> None:
        self._write(f"step {step} {' '.join(sorted(metrics))}")

    def run_end(self, outcome: dict[str, Any]) -> None:
        self._write(f"end {outcome['why']}")

    def _write(self, line: str) -> None:
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(line + "\n")

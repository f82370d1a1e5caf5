"""The samples of a run, kept in its folder: `rollouts/step-N.jsonl`, a line for each prompt. Torch-free.

A step that is done again after a resume writes its file anew.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titancli.errors import EnvironmentProblem
from titancli.files import parse_json, read_bytes
from titancli.observe.events import plain
from titancli.runs import write_atomically

FOLDER = "rollouts"

logger = logging.getLogger(__name__)


class Recorder:
    """Writes them on rank 0. A disk error is reported once, and does not end the run."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / FOLDER
        self._healthy = True

    def write(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """The prompts of a step, see docs/post-training.md for what a row holds."""
        text = "".join(json.dumps(plain(row), ensure_ascii=False) + "\n" for row in rows)
        try:
            self._folder.mkdir(exist_ok=True)
            write_atomically(self._folder / f"step-{step}.jsonl", text.encode(errors="replace").decode())
        except (OSError, EnvironmentProblem) as error:
            if self._healthy:
                self._healthy = False
                logger.warning("rollouts cannot be written (%s); the run continues without them", error)


def recorded(run_folder: Path) -> dict[int, Path]:
    """The steps of a run whose rollouts are there, in their order."""
    found = {
        int(match[1]): path
        for path in (run_folder / FOLDER).glob("step-*.jsonl")
        if (match := re.fullmatch(r"step-(\d+)\.jsonl", path.name))
    }
    return dict(sorted(found.items()))


def read(path: Path) -> list[dict[str, Any]]:
    """
    Raises:
        EnvironmentProblem: the file cannot be read, or is none of titan's.
    """
    try:
        # As bytes: at U+2028, which a model may write, a str would be split, and JSON has no line end there.
        rows = [parse_json(line) for line in read_bytes(path).splitlines()]
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(f"{path} cannot be read as rollouts: {error}") from error
    if not all(isinstance(row, dict) and {"prompt", "answer", "samples"} <= row.keys() for row in rows):
        raise EnvironmentProblem(
            f"{path} cannot be read as rollouts: a line has no prompt, answer or samples"
        )
    return rows

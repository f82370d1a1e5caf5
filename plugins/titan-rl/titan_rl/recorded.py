"""The samples of a run, stored in its folder: `rollouts/step-N.jsonl`, one line per prompt. Without torch.

A step that is repeated after a resume replaces its file.
"""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titancli.errors import EnvironmentProblem
from titancli.files import json_text, parse_json, read_bytes
from titancli.observe.events import plain
from titancli.runs import write_atomically

if TYPE_CHECKING:
    from numpy import ndarray

FOLDER = "rollouts"

logger = logging.getLogger(f"titancli.plugins.{__name__}")


class Recorder:
    """Writes samples on rank 0. A disk error is reported once, and does not end the run."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / FOLDER
        self._healthy = True

    def write(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Write the prompts of a step; docs/post-training.md describes the rows."""
        text = "".join(json_text(plain(row)) + "\n" for row in rows)
        try:
            self._folder.mkdir(exist_ok=True)
            write_atomically(self._folder / f"step-{step}.jsonl", text)
        except (OSError, EnvironmentProblem) as error:
            if self._healthy:
                self._healthy = False
                logger.warning("rollouts cannot be written (%s); the run continues without them", error)


def packed_routes(routes: ndarray[Any, Any]) -> dict[str, Any]:
    """Return `Completion.routes` as plain JSON: dtype, shape, and the bytes in base64."""
    data = base64.b64encode(routes.tobytes()).decode()
    return {"dtype": str(routes.dtype), "shape": list(routes.shape), "data": data}


def unpacked_routes(entry: dict[str, Any]) -> ndarray[Any, Any]:
    """Return the routes of a recorded sample, as they were in its completion.

    Raises:
        EnvironmentProblem: they were not written by titan.
    """
    import numpy as np

    try:
        if entry["dtype"] not in ("uint8", "int16"):
            raise ValueError(f"dtype {entry['dtype']}")
        data = np.frombuffer(base64.b64decode(entry["data"], validate=True), entry["dtype"])
        return data.reshape(entry["shape"]).copy()
    except (KeyError, TypeError, ValueError) as error:
        raise EnvironmentProblem(f"a sample's routes cannot be read: {error}") from error


def recorded(run_folder: Path) -> dict[int, Path]:
    """Return the recorded steps of a run, in order."""
    found = {
        int(match[1]): path
        for path in (run_folder / FOLDER).glob("step-*.jsonl")
        if (match := re.fullmatch(r"step-(\d+)\.jsonl", path.name))
    }
    return dict(sorted(found.items()))


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file.

    Raises:
        EnvironmentProblem: the file cannot be read, or was not written by titan.
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

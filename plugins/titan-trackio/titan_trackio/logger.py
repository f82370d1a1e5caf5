"""A run of titan as a run of Trackio: `trackio.init`, a `log` for each logged step, `finish`."""

from __future__ import annotations

import atexit
import os
import sqlite3
import sys
from contextlib import closing, redirect_stdout
from pathlib import Path
from typing import Any

import trackio
from trackio import context_vars
from trackio.sqlite_storage import SQLiteStorage

from titancli import TitanError

from . import Trackio

LOCK = "recipe.lock.toml"
ENVIRONMENT = ("host", "platform", "device", "world", "mesh", "versions", "git", "argv")
ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class TrackioLogger:
    """A Trackio run named after the run folder and its id, so that every attempt continues the same one."""

    def __init__(self, config: Trackio, run_folder: Path) -> None:
        """Check that Trackio writes to this machine.

        Raises:
            TitanError: it would write to another one, where rows cannot be dropped when resuming.
        """
        for name in ELSEWHERE:
            if os.environ.get(name):
                raise TitanError(
                    f"the logger 'trackio' writes to this machine only, but {name} is set",
                    hint=f"unset {name}; a local project is published later with `trackio sync`",
                )
        self._config = config
        self._folder = run_folder

    def run_start(self, info: dict[str, Any]) -> None:
        recipe = info.get("recipe") or {}
        project = self._config.project or recipe.get("name") or "titan"
        name = f"{self._folder.name}-{str(info.get('run_id') or '')[:8]}".rstrip("-")
        newest = {**(info.get("attempts") or [{}])[-1], **info}
        environment = {key: newest[key] for key in ENVIRONMENT if newest.get(key) is not None}
        lock = self._folder / LOCK
        text = lock.read_text(encoding="utf-8") if lock.is_file() else None
        with redirect_stdout(sys.stderr):  # titan's stdout is for data
            drop_after(int(info.get("step") or 0), project, name)
            self._run = trackio.init(
                project,
                name,
                group=self._config.group,
                config={**recipe, "environment": environment, LOCK: text},
                resume="allow",
                embed=False,
            )
        # Trackio would finish the current run when another begins, and at exit, printing to stdout.
        context_vars.current_run.set(None)
        atexit.register(self._finish)

    def step_end(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def run_end(self, outcome: dict[str, Any]) -> None:
        atexit.unregister(self._finish)
        self._finish()

    def _finish(self) -> None:
        """Write pending rows; called at exit if the run failed."""
        with redirect_stdout(sys.stderr):
            self._run.finish()


def drop_after(step: int, project: str, name: str) -> None:
    """Delete a run's rows after a step, since the run continues from there and will log them again."""
    database = SQLiteStorage.get_project_db_path(project)
    if database.is_file():
        with closing(sqlite3.connect(database, timeout=30)) as connection, connection:
            connection.execute("DELETE FROM metrics WHERE run_name = ? AND step > ?", (name, step))


def build(config: Trackio, *, run_folder: Path, is_main: bool) -> Any:
    """Return a TrackioLogger on rank 0, and a logger without methods elsewhere.

    Raises:
        TitanError: see TrackioLogger.
    """
    return TrackioLogger(config, run_folder) if is_main else object()

"""Requests of `titan profile RUN` for traces of a run under way: two files in its folder. Torch-free.

`profile.request` is made by the command, one at a time, and removed by rank 0 between two steps, which
reports on it in `profile.json`. Files, not signals: they reach a run wherever its folder does.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from titancli.errors import EnvironmentProblem
from titancli.files import read_json
from titancli.runs import PROFILE_REQUEST, write_atomically

ANSWER = "profile.json"
EVERY = 0.5
"""Seconds between two looks of rank 0 at the folder, which may lie on a slow disk."""

MAX_STEPS = 20
"""A rank that writes a longer trace is missed by the others, who wait for it in the next step."""

logger = logging.getLogger(__name__)


class Wish(NamedTuple):
    """A request as one number, on which the ranks agree (0: none)."""

    steps: int
    memory: bool = False

    def __int__(self) -> int:
        return 2 * self.steps + self.memory

    @classmethod
    def of(cls, number: int) -> Wish | None:
        return cls(number // 2, bool(number % 2)) if number else None


class Requests:
    """Rank 0's side."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / PROFILE_REQUEST
        self._looked = float("-inf")
        self._id: str | None = None
        self._taken: str | None = None
        """The last one; asked no second time where the file could not be taken away."""

    def wish(self) -> Wish | None:
        """Return the request, or None."""
        now = time.monotonic()
        if now - self._looked < EVERY:
            return None
        self._looked = now
        try:
            asked = read_json(self._file)
            self._id = str(asked["id"])
            wish = Wish(min(max(1, int(asked["steps"])), MAX_STEPS), bool(asked.get("memory")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            logger.warning("%s cannot be read and is ignored: %s", self._file, error)
            self._remove()
            return None
        return wish if self._id != self._taken else None

    def take(self, **known: Any) -> None:
        """Remove the request, and report that it is under way."""
        self._taken = self._id
        self.answer("running", **known)
        self._remove()

    def answer(self, state: str, **known: Any) -> None:
        """Report the state of the request taken last: `running`, `done` or `failed`."""
        text = json.dumps({"id": self._taken, "state": state, **known})
        try:
            write_atomically(self._folder / ANSWER, text + "\n")
        except EnvironmentProblem as error:
            logger.warning("titan profile cannot be answered: %s", error.message)

    def _remove(self) -> None:
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("cannot remove %s: %s", self._file, error)


def ask(folder: Path, wish: Wish) -> str:
    """Ask the run in a folder for a profile; returns the request's id.

    Raises:
        EnvironmentProblem: another request is waiting, or the folder cannot be written.
    """
    file, name = folder / PROFILE_REQUEST, uuid.uuid4().hex
    text = json.dumps({"id": name, "steps": wish.steps, "memory": wish.memory})
    try:
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{PROFILE_REQUEST}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as written:
                written.write(text + "\n")
            os.chmod(temporary, 0o644)
            os.link(temporary, file)  # unlike a rename it replaces nothing
        finally:
            os.unlink(temporary)
    except FileExistsError:
        raise EnvironmentProblem(
            f"another `titan profile` is waiting for {folder}",
            hint=f"wait until the run has taken it; if nobody is waiting, remove {file}",
        ) from None
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot write {file}: {error.strerror}{_owner(folder)}",
            hint="the request is a file in the run folder: run this as a user who can write there",
        ) from error
    return name


def withdraw(folder: Path, name: str) -> None:
    """Take a request back, if the run has not taken it."""
    file = folder / PROFILE_REQUEST
    try:
        if read_json(file)["id"] == name:
            file.unlink()
    except (OSError, ValueError, KeyError):
        return  # taken meanwhile


def answer_to(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the run's answer to a request; None if there is none yet."""
    try:
        found = read_json(folder / ANSWER)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("id") == name else None


def _owner(folder: Path) -> str:
    try:
        import pwd

        owner = folder.stat().st_uid
        return "" if owner == os.geteuid() else f" (the run belongs to {pwd.getpwuid(owner).pw_name})"
    except (ImportError, OSError, KeyError):
        return ""

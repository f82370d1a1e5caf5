"""A run folder: what lies in it, who holds it, and how its files are written.

    recipe.lock.toml    the resolved recipe; recipe.lock.1.toml, .2, … are the ones it had before
    recipe.next.toml    the one that a resume with changes loads; it replaces recipe.lock.toml when all ranks
                        have loaded
    run.json            who, when, where, with what; one entry an attempt, and its outcome
    events.jsonl        what happened, one JSON object a line
    run.lock            held while a command works in the folder; says which host and process
    ranks.lock          held by each rank, which may outlive a command that was killed
    digests/            what each step came to, one file a rank: rows, loss, norm, hashes
    rollouts/           of a run that learns from samples: what these were
    profile_traces/  memory_snapshot/
    rendezvous/         of several nodes: where they meet
    slurm/              of a run that was submitted as a Slurm job, by the plugin titan-slurm
    logs/  checkpoints/

Commands look at run folders, so nothing here imports torch.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from titancli.checksum import RECORD_CHECKSUM, changed_lock
from titancli.errors import EXIT_ENVIRONMENT, EnvironmentProblem, TitanError
from titancli.files import denied, encoded, json_text, out_of_inodes, parse_json, read_bytes
from titancli.locks import IN_USE, Hold, holder, is_locked, locked

LOCK_NAME = "recipe.lock.toml"
NEXT_NAME = "recipe.next.toml"
RECORD_NAME = "run.json"
STEP_NAME = re.compile(r"step-(\d{1,18})\Z")
"""The folder of a checkpoint, in `checkpoints`."""
PROFILE_REQUEST = "profile.request"
"""The request of `titan profile` to a run under way."""
RECORD_FORMAT = 1
ATTEMPT = "TITAN_ATTEMPT"
"""The environment variable with the token of the attempt, for its ranks."""


def runs_root() -> Path:
    """Return the default parent of run folders: `runs`, or the value of TITAN_RUNS."""
    return Path(os.environ.get("TITAN_RUNS") or "runs").absolute()


def timestamp() -> str:
    """Return the current time in UTC: `2026-01-31T12:00:00.123456Z`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new, never half of one.

    Raises:
        EnvironmentProblem: the disk is full, the folder cannot be written, or UTF-8 cannot hold the text.
    """
    data = encoded(path, text)
    descriptor, temporary = -1, ""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        inodes = out_of_inodes(error, path.parent)
        raise EnvironmentProblem(
            f"cannot write {path}: {error.strerror}{f': {inodes}' if inodes else ''}",
            hint=denied(error) or "free some space, or use another --run-dir",
        ) from error


_TYPES: dict[str, dict[str, type | tuple[type, ...]]] = {
    "record": {"run_id": str, "name": str, "created": str},
    "attempt": {
        **dict.fromkeys(("started", "ended", "token", "host", "platform", "device"), str),
        **dict.fromkeys(("recipe", "checkpoint"), str),
        **dict.fromkeys(("world", "serial", "step", "restarts"), int),
        "loaded": bool,
        **dict.fromkeys(("mesh", "versions", "git", "outcome", "origins", "env", "closing"), dict),
        **dict.fromkeys(("argv", "drift", "code_drift", "plugin_files"), list),
    },
    "outcome": {"why": str, "signal": str, "step": int, "checkpoint": str, "error": str, "metrics": dict},
    "closing": {"step": int, "why": str, "left": list},
    "git": {"commit": str, "branch": str},
    "plugin file": {"path": str, "sha256": str},
}
"""Types of the values in run.json, by name; null stands for unknown."""


def _other_types(record: dict[str, Any]) -> str | None:
    """Return the name of a value in a record that has the wrong type; None if all are right."""
    found: list[tuple[str, Any]] = [("record", record)]
    for attempt in record.get("attempts", []):
        found.append(("attempt", attempt))
        found += [
            (name, attempt[name]) for name in ("outcome", "closing", "git") if attempt.get(name) is not None
        ]
        files = attempt.get("plugin_files")
        found += [("plugin file", file) for file in (files if isinstance(files, list) else [])]
    for kind, table in found:
        if not isinstance(table, dict):
            return kind
        for name, expected in _TYPES[kind].items():
            if table.get(name) is not None and not isinstance(table[name], expected):
                return f"{name} ({kind})"
    return None


def read_lock(path: Path) -> str:
    """Return the text of a resolved recipe.

    Raises:
        EnvironmentProblem: it cannot be read, or is not as titan has written it.
    """
    try:
        data = read_bytes(path)
        text = data.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(f"cannot read {path}: {error}") from error
    if (changed := changed_lock(path, data)) is not None:
        raise changed
    return text


_LEFT = {"logs", "checkpoints", "rendezvous", "run.lock", "ranks.lock", "slurm"}


def _is_bare(path: Path) -> bool:
    """Return whether a folder holds only files that a failed start, or other nodes' logs, may leave there."""
    checkpoints = path / "checkpoints"
    saved = checkpoints.is_dir() and any(checkpoints.iterdir())
    return not saved and all(entry.name in _LEFT for entry in path.iterdir())


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current


class TakenOver(TitanError):
    """Another attempt has begun in the run folder: this one must not write there any more. It ends the run,
    whatever `checkpoint.on_error` says."""

    exit_code = EXIT_ENVIRONMENT


class ChangedMeanwhile(EnvironmentProblem):
    """A run has gone on between the plan to resume it and the moment at which its folder was held."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__(
            f"another attempt has used {folder.path} in the meantime", hint="run the same command again"
        )
        self.folder = folder

    def __reduce__(self):
        return ChangedMeanwhile, (self.folder,)


class Claim:
    """An attempt's claim on its run folder, where locks alone may not keep two apart: a disk may not support
    them, or not share them between hosts."""

    def __init__(self, folder: RunFolder, token: str | None) -> None:
        self._folder = folder
        self.token = token
        """The attempt's own, from run.json."""

    @classmethod
    def of(cls, folder: RunFolder, record: Mapping[str, Any]) -> Claim:
        """Return the claim of the attempt that this process belongs to.

        Ranks that are started anew find it in their environment: the newest in `record` may be another by
        then.
        """
        return cls(folder, os.environ.get(ATTEMPT) or record["attempts"][-1].get("token"))

    def check(self) -> None:
        """Read run.json again, before something gets its final name.

        Raises:
            TakenOver: another attempt has been recorded there since.
            EnvironmentProblem: it cannot be read, or is gone.
        """
        newest = self._folder.begun()["attempts"][-1]
        if newest.get("token", self.token) != self.token:
            raise TakenOver(
                f"another attempt has begun in {self._folder.path}, on {newest.get('host')} at "
                f"{newest.get('started')}: this one saves nothing more",
                hint="start each run once; the file system there does not lock files between hosts",
            )


class RunFolder:
    """One run's folder. The object holds no state; all of it is in the files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe_lock = path / LOCK_NAME
        self._next_lock = path / NEXT_NAME
        self.record_file = path / RECORD_NAME
        self.events = path / "events.jsonl"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.rendezvous = path / "rendezvous"

    @staticmethod
    def is_run(path: Path) -> bool:
        """Return whether a folder holds a run."""
        return (path / LOCK_NAME).is_file()

    def is_empty_but_for_checkpoints(self) -> bool:
        """Return whether a folder holds only files that a failed start, or an interrupted download, may leave
        there."""
        return all(entry.name in _LEFT for entry in self.path.iterdir())

    @classmethod
    def choose(cls, name: str, run_dir: Path | None = None) -> RunFolder:
        """Choose the folder of a new run, without creating it: `runs/NAME-20260131T120000Z`, or `run_dir`.

        Raises:
            EnvironmentProblem: `run_dir` exists and is not empty.
        """
        if run_dir is not None:
            path = run_dir.absolute()
            try:
                str(path).encode()
            except UnicodeEncodeError as error:
                raise EnvironmentProblem(
                    f"{str(path)!a} is not valid UTF-8", hint="use another --run-dir"
                ) from error
            if path.exists() and not path.is_dir():
                raise EnvironmentProblem(f"{path} is a file", hint="use another --run-dir")
            if path.is_dir() and not _is_bare(path):
                raise EnvironmentProblem(
                    f"{path} exists and is not a run folder", hint="use a --run-dir that does not exist"
                )
            return cls(path)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        base = runs_root() / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name) or 'run'}-{stamp}"
        path, suffix = base, 1
        while path.exists():
            suffix += 1
            path = base.with_name(f"{base.name}-{suffix}")
        return cls(path)

    @classmethod
    def create(cls, name: str, run_dir: Path | None = None) -> RunFolder:
        """Choose a folder and make it, with `logs/` and `checkpoints/`.

        Raises:
            EnvironmentProblem: it cannot be made, or `run_dir` is in use for something else.
        """
        while True:
            folder = cls.choose(name, run_dir)
            try:
                folder.make(fresh=run_dir is None)
            except FileExistsError:  # another command chose the same name in the same second
                continue
            return folder

    def make(self, *, fresh: bool = False) -> None:
        """Make the folder and its sub-folders.

        Raises:
            FileExistsError: `fresh`, and the folder exists.
            EnvironmentProblem: it cannot be made.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(exist_ok=not fresh)
            self.logs.mkdir(exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            if fresh and isinstance(error, FileExistsError) and self.path.exists():
                raise
            where = f" ({error.filename})" if error.filename != str(self.path) else ""
            raise EnvironmentProblem(
                f"cannot create the run folder {self.path}: {error.strerror}{where}",
                hint="use another --run-dir, or set TITAN_RUNS to a writable folder",
            ) from error

    def set_checkpoints_aside(self) -> Path | None:
        """Rename `checkpoints` to `checkpoints.1`, or the next free number, and create an empty one; an empty
        one, which may be where a disk is mounted, stays.

        Raises:
            EnvironmentProblem: the folder cannot be written.
        """
        number = 1
        while (aside := self.path / f"checkpoints.{number}").exists():
            number += 1
        try:
            if not any(self.checkpoints.iterdir()):
                return None
            self.checkpoints.rename(aside)
            self.checkpoints.mkdir()
        except OSError as error:
            raise EnvironmentProblem(f"cannot rename {self.checkpoints}: {error.strerror}") from error
        return aside

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """Open an existing run.

        Raises:
            EnvironmentProblem: there is none.
        """
        path = Path(path).absolute()
        if not path.is_dir():
            raise EnvironmentProblem(
                f"run folder {path} does not exist", hint="list your runs with: titan runs list"
            )
        if not cls.is_run(path):
            raise EnvironmentProblem(f"{path} is not a run folder: it has no {LOCK_NAME}")
        return cls(path)

    # ------------------------------------------------------------------------------------------ holding

    def hold(self) -> Hold:
        """Hold the folder alone, as a command that will work in it.

        Raises:
            EnvironmentProblem: another process does, or ranks of one that was killed are still at work; the
                message names host and process.
        """
        hold = Hold(self._lock("run.lock", fcntl.LOCK_EX))
        try:
            self._lock("ranks.lock", fcntl.LOCK_EX).close()
        except EnvironmentProblem:
            hold.release()
            raise
        with suppress(OSError):  # nobody is at work, so nobody waits for an answer
            (self.path / PROFILE_REQUEST).unlink()
        return hold

    def join(self) -> Hold:
        """Hold the folder along with the other ranks of a run, until the process ends.

        Raises:
            EnvironmentProblem: another command has just taken it.
        """
        return Hold(self._lock("ranks.lock", fcntl.LOCK_SH))

    def refuse_in_use(self) -> None:
        """Refuse a folder that a command or ranks hold, and change no file.

        Raises:
            EnvironmentProblem: they do; names host and process.
        """
        for name, kind in (("run.lock", fcntl.LOCK_SH), ("ranks.lock", fcntl.LOCK_EX)):
            if is_locked(self.path / name, kind):
                raise EnvironmentProblem(
                    f"the run folder {self.path} is in use by {holder(self.path / name)}", hint=IN_USE
                )

    def in_use(self) -> bool | None:
        """Return whether a command or ranks hold the folder; None where the locks cannot be asked.

        Changes no file. A process of another machine is seen where the file system shares its locks.
        """
        answers = [is_locked(self.path / "run.lock", fcntl.LOCK_SH)]
        if answers == [False]:
            answers.append(is_locked(self.path / "ranks.lock", fcntl.LOCK_EX))  # ranks share it
        return True if True in answers else None if None in answers else False

    def ranks_at_work(self) -> bool:
        """Return whether ranks of any command hold the folder."""
        return is_locked(self.path / "ranks.lock", fcntl.LOCK_EX) is True

    def _lock(self, name: str, kind: int) -> IO[str]:
        """Open a file, lock it, and write who locked it."""
        return locked(self.path / name, kind, f"the run folder {self.path}")

    # ------------------------------------------------------------------------------------- recipe.lock.toml

    @property
    def lock_to_start(self) -> Path:
        """Return the file of the recipe that ranks are to load."""
        return self._next_lock if self._next_lock.is_file() else self.recipe_lock

    def propose_recipe_lock(self, text: str) -> None:
        """Let the ranks that start load a recipe. That of a new run is its lock; one that changes a run stays
        beside the lock until `adopt_recipe_lock`, so that a start that fails changes nothing."""
        self.withdraw_recipe_lock()
        if not self.recipe_lock.is_file():
            self.write_recipe_lock(text)
        elif self.recipe_lock.read_text(encoding="utf-8") != text:
            write_atomically(self._next_lock, text)

    def withdraw_recipe_lock(self) -> None:
        """Remove a proposed recipe, if there is one."""
        self._next_lock.unlink(missing_ok=True)

    def adopt_recipe_lock(self, text: str) -> None:
        """Make a recipe that all ranks have loaded the run's own."""
        self.write_recipe_lock(text)
        self.withdraw_recipe_lock()

    def write_recipe_lock(self, text: str) -> None:
        """Write the resolved recipe; a different existing one is kept under the next free number."""
        if self.recipe_lock.is_file():
            old = self.recipe_lock.read_text(encoding="utf-8")
            if old == text:
                return
            number = 1
            while (kept := self.path / f"recipe.lock.{number}.toml").exists():
                number += 1
            write_atomically(kept, old)
        write_atomically(self.recipe_lock, text)

    # --------------------------------------------------------------------------------------------- run.json

    def record(self) -> dict[str, Any]:
        """Return the contents of `run.json`; empty if there is none.

        Raises:
            EnvironmentProblem: it is damaged, not JSON, of another format, or has no list of attempts.
        """
        try:
            data = read_bytes(self.record_file)
            record = parse_json(data)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError) as error:
            raise EnvironmentProblem(f"cannot read {self.record_file}: {error}") from error
        if RECORD_CHECKSUM.holds(data) is False:
            raise EnvironmentProblem(
                f"{self.record_file} is damaged, or was edited: its checksum does not match",
                hint="restore the file; if it is right as it is, delete its line xxh3_64",
            )
        form = record.get("format", RECORD_FORMAT) if isinstance(record, dict) else None
        if form != RECORD_FORMAT:
            raise EnvironmentProblem(
                f"{self.record_file} has format {form!r}, but this version of titan reads format "
                f"{RECORD_FORMAT}",
                hint="use the version of titan that wrote it, or restore the file",
            )
        attempts = record.get("attempts", [])
        if not isinstance(attempts, list) or not all(isinstance(attempt, dict) for attempt in attempts):
            raise EnvironmentProblem(f"{self.record_file} has no list of attempts", hint="restore the file")
        if (wrong := _other_types(record)) is not None:
            raise EnvironmentProblem(f"{self.record_file} has an invalid {wrong}", hint="restore the file")
        record.pop("xxh3_64", None)
        return record

    def write_record(self, record: Mapping[str, Any]) -> None:
        text = json_text(record, indent=2)
        write_atomically(self.record_file, RECORD_CHECKSUM.put(text.removeprefix("{\n") + "\n"))

    def begun(self) -> dict[str, Any]:
        """Return the contents of `run.json` of a run that has begun; the last attempt is the newest.

        Raises:
            EnvironmentProblem: it cannot be read, or is gone.
        """
        record = self.record()
        if not record.get("attempts"):
            raise EnvironmentProblem(
                f"{self.record_file} is gone: the run folder was moved or deleted while the run used it",
                hint="if it was moved, stop this command and resume the run in its new place",
            )
        return record

    def last_loaded(self) -> dict[str, Any]:
        """Return the newest attempt whose ranks have loaded the run; empty if there is none."""
        attempts = self.record().get("attempts") or []
        return next((attempt for attempt in reversed(attempts) if attempt.get("loaded", True)), {})

    def update_attempt(self, **values: Any) -> None:
        """Add to the newest entry of `attempts`.

        Raises:
            EnvironmentProblem: `run.json` cannot be read or written, or is gone.
        """
        record = self.begun()
        record["attempts"][-1].update(values)
        self.write_record(record)

    def outcome(self) -> dict[str, Any] | None:
        """Return how the newest attempt ended; None while it runs, and if it was killed."""
        attempts = self.record().get("attempts") or [{}]
        return attempts[-1].get("outcome")

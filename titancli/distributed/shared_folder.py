"""A check that all nodes see the same run folder: before training, not at the first save."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from titancli.distributed.together import Ranks
from titancli.errors import EnvironmentProblem
from titancli.files import regular

PATIENCE = 30.0
"""Seconds that a network disk may take to show a file that was written elsewhere: at the start, when a
checkpoint is completed, and when it is loaded. NFS keeps what it knows of a folder for as long."""


def require_shared(folder: Path, host: str, *, first_of_node: bool, patience: float | None = None) -> None:
    """Make sure that what one node writes to a folder is seen on the others. Collective over all ranks.

    The first rank of each node writes a file there; rank 0 reads all of them, the others rank 0's. Under one
    node nothing is written.

    Raises:
        EnvironmentProblem: on every rank, naming the hosts that cannot write there, or see another folder.
    """
    ranks = Ranks()
    everyones = ranks.gather((first_of_node, host))
    writers = [(rank, where) for rank, (first, where) in enumerate(everyones) if first]
    if len(writers) < 2:
        return
    token, rank = ranks.broadcast(secrets.token_hex(8)), ranks.rank
    own = folder / f".probe-{token}-{rank}"
    try:
        refused = ranks.gather(_write(own, token) if first_of_node else None)
        if wrong := [f"{where}: {why}" for rank, where in writers if (why := refused[rank])]:
            raise EnvironmentProblem(
                f"the run folder {folder.parent} cannot be written on {'; '.join(wrong)}",
                hint="use a --run-dir on storage that all nodes share",
            )
        others = [writers[0]] if rank != writers[0][0] else writers[1:]
        limit = PATIENCE if patience is None else patience
        unseen = _unseen(folder, token, others, limit) if first_of_node else []
        found = ranks.gather(unseen)
    finally:
        with suppress(OSError):  # the error itself matters more
            own.unlink(missing_ok=True)
    by_first = found[writers[0][0]]
    blind = sorted({*by_first, *(where for rank, where in writers[1:] if found[rank])})
    if blind:
        raise EnvironmentProblem(
            f"the run folder {folder.parent} is not shared: {', '.join(blind)} and {writers[0][1]} do not "
            f"see what the other writes there",
            hint="use a --run-dir on storage that all nodes share; a local disk is not",
        )


def _write(path: Path, text: str) -> str | None:
    """Write a file to the disk; the reason where that fails."""
    try:
        with open(path, "w", encoding="utf-8", opener=regular) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return None


def _unseen(folder: Path, token: str, writers: Sequence[tuple[int, str]], patience: float) -> list[str]:
    """Return the hosts whose files do not show up here in time."""
    deadline = time.monotonic() + patience
    waiting = list(writers)
    while True:
        waiting = [
            (rank, host) for rank, host in waiting if not _has(folder / f".probe-{token}-{rank}", token)
        ]
        if not waiting or time.monotonic() > deadline:
            return [host for _, host in waiting]
        time.sleep(0.1)


def _has(path: Path, text: str) -> bool:
    # Opened by a name that nobody has asked for before, so no cached listing can hide it.
    try:
        return path.read_text(encoding="utf-8") == text
    except OSError:
        return False

"""Decide which attempt the ranks of several nodes belong to: a new one, or one that continues after a loss.

Before they meet, no node knows whether it is among the first of an attempt, or has replaced one that was
lost. So each rank says which attempt it is in, and rank 0 looks into the run folder.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from titancli.checkpoint.format.manifest import last_serial
from titancli.errors import EnvironmentProblem
from titancli.provenance import SOURCES
from titancli.runs import ATTEMPT, ChangedMeanwhile, RunFolder, TakenOver

PATIENCE = 10.0
"""Seconds that restarted ranks wait for the lock of the ranks before them."""

logger = logging.getLogger("titancli.worker.rank")


def take_part(
    folder: RunFolder, own: Path, lock_text: str, stack: ExitStack, *, first_of_node: bool
) -> tuple[int, bool]:
    """Begin an attempt, or continue the newest one. Collective.

    Args:
        own: this node's folder. Its `run.json` has the plan of this node's command, and from here on the
            run's record: restarted ranks, and the command, know from it which attempt is theirs.
        stack: releases the run folder, which rank 0 holds.

    Returns:
        How often the attempt's ranks have been restarted, and whether there may be newer checkpoints than the
            planned one.

    Raises:
        ChangedMeanwhile: another attempt has worked in the folder since this one was planned, in an
            incompatible way.
        TakenOver: another attempt has begun while this one was running.
        EnvironmentProblem: another run holds the folder, or it cannot be written.
    """
    from titancli.distributed.together import Ranks

    planned = RunFolder(own).record()
    ranks = Ranks()
    tokens = set(ranks.gather(planned["attempts"][-1]["token"]))
    record, stale = ranks.broadcast_call(
        f"beginning an attempt in {folder.path}",
        lambda: _begin_or_continue(folder, planned, tokens, lock_text, stack, own),
    )
    attempt = record["attempts"][-1]
    os.environ[ATTEMPT] = attempt["token"]
    if first_of_node:
        RunFolder(own).write_record(record)
    return attempt.get("restarts", 0), stale


def _begin_or_continue(
    folder: RunFolder,
    planned: dict[str, Any],
    tokens: set[str],
    lock_text: str,
    stack: ExitStack,
    own: Path,
) -> tuple[dict[str, Any], bool]:
    """Hold the run folder and return its record, with a new attempt or one more restart of the newest; and
    whether the plan of the new attempt is stale.

    Each start has a token of its own, so that ranks of the previous one, on a node that was cut off, save
    nothing more.
    """
    folder.make()
    record = folder.record()
    known = [attempt.get("token") for attempt in record.get("attempts", [])]
    if known and known[-1] in tokens:
        _hold_on(folder, stack)
        attempt = record["attempts"][-1]
        attempt.update(token=secrets.token_hex(8), restarts=attempt.get("restarts", 0) + 1, outcome=None)
        folder.write_record(record)
        return record, False
    if tokens & set(known):
        raise TakenOver(f"another attempt has begun in {folder.path}: this one cannot continue")
    stack.callback(folder.hold().release)
    attempt = planned["attempts"][-1]
    serial = last_serial(folder.checkpoints)
    begun = len(known) != len(planned["attempts"]) - 1
    # Before a first attempt, other nodes may be downloading checkpoints from an object store.
    stale = begun or (bool(known) and serial != attempt["serial"] and not attempt["from_scratch"])
    if stale:
        if len(planned["attempts"]) == 1 or attempt["from_scratch"] or attempt.get("step") is not None:
            raise ChangedMeanwhile(folder)
        attempt["serial"] = serial
    planned = {**planned, **record, "attempts": [*record.get("attempts", []), attempt]}
    folder.propose_recipe_lock(lock_text)
    folder.write_record(planned)
    _keep_sources(own / SOURCES, folder.path / SOURCES)
    return planned, stale


def _keep_sources(own: Path, kept: Path) -> None:
    """Copy the sources from the node of rank 0: the code of titan and its plugins is the same on all
    nodes."""
    try:
        if own.is_dir():
            shutil.copytree(own, kept, dirs_exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {kept}: {error}", hint="free some space") from error


def _hold_on(folder: RunFolder, stack: ExitStack) -> None:
    """Hold the folder of an attempt that continues. A node that counts as lost but still runs may hold it;
    after a short wait, continue without the lock."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            stack.callback(folder.hold().release)
            return
        except EnvironmentProblem as error:
            if time.monotonic() > deadline:
                logger.warning("%s, which counts as lost: continuing without the lock", error.message)
                return
        time.sleep(0.2)

"""The ranks of a process group as its engines see them: exchanges on the CPU, and failures.

An error in the middle of a verb is written to the store of the process group, where others can read it
without a collective. If all ranks raised on their own, after the same number of collectives in every group,
they continue. Otherwise their collectives no longer match: the group and every engine in it are lost.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch.distributed as dist

from titancli.distributed import process_group
from titancli.distributed.private import collectives_begun, default_store, groups
from titancli.distributed.together import Ranks, name_ranks
from titancli.errors import RankFailure, TitanError, causes
from titancli.observe.failures import is_communication

PATIENCE = 1.0
"""Seconds that a failed rank waits for the reports of the others, in addition to the time that the verb has
taken here: all began it together."""
ECHO_PATIENCE = 2.0
"""Seconds that a rank which lost the connection waits for a report of the cause."""
NEW_GROUP = "close the engines of the process group, and restart the ranks"


class Report(NamedTuple):
    """The end of a verb on a rank that failed."""

    own: bool
    """True if the rank raised on its own, false if it lost the connection to others."""
    words: str
    places: dict[str, int]
    """The number of collectives begun in each group of this rank."""


class RankGroup:
    """The ranks of a process group, as its engines see them."""

    def __init__(self) -> None:
        group: Any = dist.group.WORLD if dist.is_initialized() else None
        self.group = weakref.ref(group) if group is not None else lambda: None
        self.world = dist.get_world_size() if group is not None else 1
        self.rank = dist.get_rank() if group is not None else 0
        self.active = self.world > 1 and dist.get_backend() != "fake"
        self._process = os.getpid()
        self.lost: str | None = None
        """The reason why all engines in this group are unusable, if they are."""
        self._engines = 0
        self._failures = 0
        """The number of failures that all ranks shared and recovered from."""
        self._later: int | None = None
        self._ranks: Ranks | None = None
        self._verbs = 0

    def enlist(self) -> int:
        """Return the number of a new engine: the same on every rank, because all build in the same order."""
        self._engines += 1
        return self._engines

    def require(self, verb: str) -> None:
        """Check that the group can be used.

        Raises:
            TitanError: the group is lost, or this process is a fork of its member.
        """
        if os.getpid() != self._process:  # the group's threads are missing, so its collectives hang
            raise TitanError(
                f"{verb}: the engine belongs to process {self._process}, of which this process is a fork",
                hint="build the engine in the process that uses it, or start processes with spawn",
            )
        if self.lost is not None:
            raise TitanError(
                f"{verb}: the engine is unusable, like every other engine of this process group: {self.lost}",
                hint=NEW_GROUP,
            )

    # ------------------------------------------------------------------------------------- time limits

    def wait_for_the_first_verb(self, seconds: int, then: int) -> None:
        """Set the time limit of all collectives, and a later limit that applies once a verb is done: until
        then ranks compile and load at different speeds."""
        if self.active:
            process_group.set_timeouts(seconds)
            self._later, self._verbs = then, 0

    def model_runs(self) -> None:
        """Record that a verb that runs the model is about to begin on all ranks."""
        self._verbs += 1
        if self._later is not None and self._verbs > 1:
            seconds, self._later = self._later, None
            process_group.tighten_timeouts(seconds)

    @property
    def _limit(self) -> float:
        limit = process_group.present_timeout()
        return limit.total_seconds() if limit else PATIENCE

    # --------------------------------------------------------------------------------------- exchanges

    @property
    def on_the_cpu(self) -> Ranks:
        """The ranks for exchanges on the CPU, which do not wait for the device: the default group, or a new
        gloo group if that has no CPU backend."""
        if self._ranks is None:
            takes = not self.active or "cpu" in dist.get_backend_config()
            limit = None if takes else process_group.present_timeout()
            self._ranks = Ranks(None if takes else dist.new_group(backend="gloo", timeout=limit))
        return self._ranks

    def fails(self, verb: str, error: BaseException, seconds: float) -> None:
        """Report an error in the middle of a verb to the other ranks, and find out whether they share it.

        Args:
            seconds: how long the verb has taken here.

        Raises:
            RankFailure: the error results from another rank's.
        """
        if _is_echo(error):
            raise self.echo(verb, error) from error
        words = f"{type(error).__name__}: {first_line(error)}"
        self._publish(Report(True, words, _places()))
        reports: dict[int, Report] = {}
        if isinstance(error, Exception):  # do not wait after Ctrl-C
            reports = self._reports(min(self._limit, PATIENCE + seconds))
        shared = len(reports) == self.world and all(report.own for report in reports.values())
        if shared and _same_places(reports.values()):
            self._failures += 1
        else:
            self.lost = f"rank {self.rank} failed in {verb}: {words}"

    def echo(self, verb: str, error: BaseException) -> RankFailure:
        """Return the error of a rank that lost the connection: the cause, if another rank has reported it."""
        self._publish(Report(False, first_line(error), {}))

        def known(reports: dict[int, Report]) -> bool:
            return any(report.own for report in reports.values())

        reports = self._reports(min(self._limit, ECHO_PATIENCE), known)
        causes = {rank: report.words for rank, report in reports.items() if report.own}
        silent = [rank for rank in range(self.world) if rank not in reports]
        if causes:
            rank, words = next(iter(causes.items()))
            self.lost = f"rank {rank} failed in {verb}: {words}"
        elif silent:
            self.lost = f"{name_ranks(silent)} did not call {verb} within {self._limit:g} s"
        else:
            self.lost = f"the ranks lost contact in {verb}: {first_line(error)}"
        return RankFailure(self.lost, hint=NEW_GROUP)

    def _publish(self, report: Report) -> None:
        try:
            self._store().set(self._key(self.rank), json.dumps(report))
        except RuntimeError:  # the store is gone, and so are its readers
            return

    def _reports(
        self, seconds: float, enough: Callable[[dict[int, Report]], bool] = lambda reports: False
    ) -> dict[int, Report]:
        """Return the reports by rank: waits until all have arrived, `enough` is true or the time is over.

        A thread polls: if the node of the store is down, no answer ever comes.
        """
        found: dict[int, Report] = {}
        arguments = (found, enough, time.monotonic() + seconds)
        asking = threading.Thread(target=self._ask_for_reports, args=arguments, daemon=True)
        asking.start()
        asking.join(seconds + 1.0)
        return dict(sorted(found.copy().items()))

    def _ask_for_reports(
        self, found: dict[int, Report], enough: Callable[[dict[int, Report]], bool], until: float
    ) -> None:
        while True:
            try:
                store = self._store()
                for rank in range(self.world):
                    if rank not in found and store.check([self._key(rank)]):
                        found[rank] = Report(*json.loads(store.get(self._key(rank))))
            except RuntimeError:
                return
            if len(found) == self.world or enough(found) or time.monotonic() >= until:
                return
            time.sleep(0.02)

    def _key(self, rank: int) -> str:
        return f"failure-{self._failures}-of-rank-{rank}"

    def _store(self) -> Any:
        return dist.PrefixStore("titan", default_store())


_present: RankGroup | None = None


def rank_group() -> RankGroup:
    """Return the ranks of the initialized process group; without one, this process alone."""
    global _present
    group: Any = dist.group.WORLD if dist.is_initialized() else None
    if _present is None or _present.group() is not group:
        _present = RankGroup()
    return _present


# ------------------------------------------------------------------------------------------------ helpers


def _is_echo(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is about the connection to other ranks."""
    return any(is_communication(cause) for cause in causes(error))


def _places() -> dict[str, int]:
    return {group.group_name: collectives_begun(group) for group in groups()}


def _same_places(reports: Iterable[Report]) -> bool:
    """Return whether all ranks have begun the same number of collectives in each group."""
    found: dict[str, set[int]] = {}
    for report in reports:
        for group, number in report.places.items():
            found.setdefault(group, set()).add(number)
    return all(len(numbers) == 1 for numbers in found.values())


def first_line(error: BaseException | None) -> str:
    """Return the first line of an error's message."""
    text = error.message if isinstance(error, TitanError) else str(error)
    return text.strip().partition("\n")[0]

"""What ranks tell each other around a verb: that all call the same, and which of them failed.

Before a verb sends anything the ranks compare what they were called with, in one exchange of a few numbers on
the CPU. Where they differ, or the checks of one of them failed, all raise, and nothing has happened yet.

What raises later is written to the store of the process group, where it can be read without the others' help.
Ranks that all raised by themselves, at the same place in every group, go on as if nothing had been sent. Else
their collectives do not fit each other any more: the process group is lost, and so is every engine in it.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash

from titancli.distributed import process_group
from titancli.errors import RankFailure, TitanError
from titancli.observe.failures import is_communication
from titancli.observe.phases import phase

if TYPE_CHECKING:
    from torch import Tensor

    from titancli.data.batch import Batch
    from titancli.layout.degrees import Degrees

PATIENCE = 1.0
"""Seconds that a rank which has failed waits for the others' failures, beside the time that the verb has
taken here: they began it together."""
ECHO_PATIENCE = 2.0
"""Seconds that a rank which has lost the others waits for word of the cause."""
FIRST = ("loss", "weight")
NEW_GROUP = "close the engines of the process group, and restart the ranks"


class Disagreement(TitanError):
    """Ranks call what does not go together; raised on all of them alike."""


class Report(NamedTuple):
    """How a verb ended on a rank that failed."""

    own: bool
    """It raised by itself; else it has lost the others."""
    words: str
    places: dict[str, int]
    """Of each group of this rank, how many collectives were begun in it."""


class Together:
    """The ranks of a process group, as its engines see them."""

    def __init__(self) -> None:
        group: Any = dist.group.WORLD if dist.is_initialized() else None
        self.group = weakref.ref(group) if group is not None else lambda: None
        self.world = dist.get_world_size() if group is not None else 1
        self.rank = dist.get_rank() if group is not None else 0
        self.active = self.world > 1 and dist.get_backend() != "fake"
        self.lost: str | None = None
        """Why no verb of any engine in this group can be called any more, if so."""
        self._engines = 0
        self._failures = 0
        """That all ranks shared, and went on from."""
        self._later: int | None = None
        self._gloo: dist.ProcessGroup | None = None
        self._verbs = 0

    def enlist(self) -> int:
        """The number of a new engine: the same on every rank, which build them in the same order."""
        self._engines += 1
        return self._engines

    def require(self, verb: str) -> None:
        """
        Raises:
            TitanError: the group is lost.
        """
        if self.lost is not None:
            raise TitanError(
                f"{verb}: the engine is unusable, like every other engine of this process group: {self.lost}",
                hint=NEW_GROUP,
            )

    # ------------------------------------------------------------------------------------- time limits

    def wait_for_the_first_verb(self, seconds: int, then: int) -> None:
        """Set the time limit of all collectives: another one once a verb is done, since until then ranks
        compile and load at different speeds."""
        if self.active:
            process_group.set_timeouts(seconds)
            self._later, self._verbs = then, 0

    def model_runs(self) -> None:
        """A verb that runs the model is about to begin on all ranks."""
        self._verbs += 1
        if self._later is not None and self._verbs > 1:
            seconds, self._later = self._later, None
            process_group.tighten_timeouts(seconds)

    @property
    def _limit(self) -> float:
        limit = process_group.present_timeout()
        return limit.total_seconds() if limit else PATIENCE

    # --------------------------------------------------------------------------------------- exchanges

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Numbers below 2**63 of every rank, by rank."""
        table = torch.zeros(self.world, len(numbers), dtype=torch.int64)
        table[self.rank] = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(table, group=self._for_the_cpu())
        return table.tolist()

    def _for_the_cpu(self) -> dist.ProcessGroup | None:
        """The default group, or all its ranks in another one where it takes no tensors on the CPU."""
        world: Any = dist.group.WORLD
        if self._gloo is None and torch.device("cpu") not in world._device_types:
            self._gloo = dist.new_group(backend="gloo", timeout=process_group.present_timeout())
        return self._gloo

    def fails(self, verb: str, error: BaseException, seconds: float) -> None:
        """Let the others know of an error in the middle of a verb, and find out whether they shared it.

        Args:
            seconds: how long the verb has taken here.

        Raises:
            RankFailure: the error is the echo of another rank's.
        """
        if _is_echo(error):
            raise self.echo(verb, error) from error
        words = f"{type(error).__name__}: {_first_line(error)}"
        self._publish(Report(True, words, _places()))
        reports: dict[int, Report] = {}
        if isinstance(error, Exception):  # nobody waits after Ctrl-C
            reports = self._reports(min(self._limit, PATIENCE + seconds))
        shared = len(reports) == self.world and all(report.own for report in reports.values())
        if shared and _same_places(reports.values()):
            self._failures += 1
        else:
            self.lost = f"rank {self.rank} failed in {verb}: {words}"

    def echo(self, verb: str, error: BaseException) -> RankFailure:
        """The error of a rank that has lost the others: the cause, where one of them has told it."""
        self._publish(Report(False, _first_line(error), {}))

        def known(reports: dict[int, Report]) -> bool:
            return any(report.own for report in reports.values())

        reports = self._reports(min(self._limit, ECHO_PATIENCE), known)
        causes = {rank: report.words for rank, report in reports.items() if report.own}
        silent = [rank for rank in range(self.world) if rank not in reports]
        if causes:
            rank, words = next(iter(causes.items()))
            self.lost = f"rank {rank} failed in {verb}: {words}"
        elif silent:
            self.lost = f"{_ranks(silent)} did not call {verb} within {self._limit:g} s"
        else:
            self.lost = f"the ranks lost contact in {verb}: {_first_line(error)}"
        return RankFailure(self.lost, hint=NEW_GROUP)

    def _publish(self, report: Report) -> None:
        try:
            self._store().set(self._key(self.rank), json.dumps(report))
        except RuntimeError:  # where it was served is gone, and so are the ranks that would read it
            return

    def _reports(
        self, seconds: float, enough: Callable[[dict[int, Report]], bool] = lambda reports: False
    ) -> dict[int, Report]:
        """The reports that there are by rank, after all are there, or `enough`, or after so many seconds."""
        found: dict[int, Report] = {}
        until = time.monotonic() + seconds
        while True:
            try:
                store = self._store()
                for rank in range(self.world):
                    if rank not in found and store.check([self._key(rank)]):
                        found[rank] = Report(*json.loads(store.get(self._key(rank))))
            except RuntimeError:
                return found
            if len(found) == self.world or enough(found) or time.monotonic() >= until:
                return dict(sorted(found.items()))
            time.sleep(0.02)

    def _key(self, rank: int) -> str:
        return f"failure-{self._failures}-of-rank-{rank}"

    def _store(self) -> Any:
        from torch.distributed import distributed_c10d

        return dist.PrefixStore("titan", distributed_c10d._get_default_store())


class Call:
    """One call of a verb on this rank."""

    def __init__(
        self, ranks: Together, verb: str, engine: int | None = None, degrees: Degrees | None = None
    ) -> None:
        self.verb, self.tokens, self.all_tokens = verb, 0, 0
        self._ranks, self._degrees = ranks, degrees
        self._began = time.monotonic()
        self._alike: list[str] = [] if engine is None else [f"on engine {engine}"]
        """What must be the same on every rank, and goes on from "rank 0 called VERB"."""
        self._same_rows: list[str] = []
        """What must be the same where ranks have the same rows."""
        self._runs_the_model = False

    def given(self, what: str) -> None:
        """The verb is called so on every rank: "with lr=0.1", for one."""
        self._alike.append(what)

    def given_batches(self, batches: Sequence[Batch], tokens: int = 0) -> None:
        """The verb is called with as many batches of the same names on every rank; with the same shapes and
        the same tokens on the ranks of tp, cp and pp.

        Args:
            tokens: in the batches, which `all_tokens` is the sum of, over all data-parallel ranks.
        """
        self.tokens = self.all_tokens = tokens
        self._runs_the_model = True
        if not self._ranks.active:
            if self._degrees is not None:
                self.all_tokens = tokens * self._degrees.dp
            return
        count = len(batches)
        self.given(f"with {count} {'batch' if count == 1 else 'batches'}")
        self.given(f"with {_either([', '.join(sorted(batch)) for batch in batches])}")
        if self._degrees is not None and self._degrees.world > self._degrees.dp:
            self._same_rows.append(f"with {_either([_shapes(batch) for batch in batches])}")
            self._same_rows += [
                f"with {name} of checksum {_checksum(tensor)}"
                for batch in batches
                for name, tensor in sorted(batch.items())
            ]

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Check inside what the verb was called with; at the end the ranks compare.

        Raises:
            Disagreement: they were called differently; on all ranks.
            RankFailure: the checks of another rank have failed, or it does not come.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if not self._ranks.active:
                raise
            failure = error
        if self._ranks.active:
            self._compare(failure)

    def _compare(self, failure: Exception | None) -> None:
        ranks = self._ranks
        alike, rows = _digest([self.verb, *self._alike]), _digest(self._same_rows)
        try:
            with phase("wait"):
                table = ranks.gather([alike, rows, self.tokens, int(failure is not None)])
            same = len({row[0] for row in table}) == 1 and self._same_where_shared(table)
            if not same or any(row[3] for row in table):
                words = f"{type(failure).__name__}: {_first_line(failure)}" if failure else None
                raise self._refusal(
                    process_group.all_gather((self.verb, self._alike, self._same_rows, words))
                )
        except TitanError:
            if failure is not None:
                raise failure from None
            raise
        except Exception as error:
            echo = ranks.echo(self.verb, error)
            if failure is not None:
                raise failure from None
            raise echo from error
        if self._degrees is not None:
            first_of = {self._place(rank): row[2] for rank, row in enumerate(table)}
            self.all_tokens = sum(first_of.values())
        if self._runs_the_model:
            ranks.model_runs()

    def _same_where_shared(self, table: list[list[int]]) -> bool:
        found = {(self._place(rank), row[1]) for rank, row in enumerate(table)}
        return len(found) == len({place for place, _ in found})

    def _place(self, rank: int) -> int:
        """Whose rows a rank has: the same for ranks of tp, cp and pp."""
        degrees = self._degrees
        return 0 if degrees is None else rank // (degrees.cp * degrees.tp) % degrees.dp

    def _refusal(self, everyone: list[Any]) -> TitanError:
        failed = [(rank, verb, words) for rank, (verb, *_, words) in enumerate(everyone) if words is not None]
        if failed:
            rank, verb, words = failed[0]
            more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
            return RankFailure(f"rank {rank}{more} failed in {verb}: {words}")
        verbs = [verb for verb, *_ in everyone]
        if len(set(verbs)) > 1:
            return Disagreement(
                f"the ranks call different verbs: {_by_rank(verbs)}",
                hint="every rank must call the same verbs in the same order",
            )
        for column in zip(*(alike for _, alike, _, _ in everyone), strict=False):
            if len(set(column)) > 1:
                no_rows = "a rank without rows must pass a batch whose targets are all -100"
                return Disagreement(
                    f"the ranks call {self.verb} differently: {_by_rank(column)}",
                    hint=no_rows if "batch" in column[0] else None,
                )
        for place in range(self._degrees.dp if self._degrees else 1):
            peers = [rank for rank in range(len(everyone)) if self._place(rank) == place]
            for column in zip(*(everyone[rank][2] for rank in peers), strict=False):
                if len(set(column)) > 1:
                    return Disagreement(
                        f"the ranks call {self.verb} differently: {_by_rank(column, peers)}",
                        hint="the ranks of mesh.tp, cp and pp must pass the same rows",
                    )
        return Disagreement(f"the ranks call {self.verb} differently")

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Do inside what needs the other ranks: what raises here is made known to them.

        Raises:
            RankFailure: another rank has failed, or does not come within the time limit.
        """
        try:
            yield
        except (Disagreement, RankFailure):
            raise  # every rank has it by now
        except BaseException as error:
            if self._ranks.active:
                self._ranks.fails(self.verb, error, time.monotonic() - self._began)
            raise

    def in_order(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a loss reports, in an order that is the same on every rank.

        Raises:
            Disagreement: a rank has a name that another has not; on all ranks.
        """
        others = self.same_names([name for name in sums if name not in FIRST], "the loss reports")
        return {name: sums[name] for name in (*FIRST, *others)}

    def same_names(self, names: Sequence[str], what: str) -> list[str]:
        """The names, sorted: the same on every rank.

        Raises:
            Disagreement: a rank has one that another has not; on all ranks.
        """
        mine = sorted(names)
        if not self._ranks.active or len({row[0] for row in self._ranks.gather([_digest(mine)])}) == 1:
            return mine
        everyone = process_group.all_gather(mine)
        for name in sorted({name for theirs in everyone for name in theirs}):
            there = [rank for rank, theirs in enumerate(everyone) if name in theirs]
            if len(there) < len(everyone):
                missing = [rank for rank in range(len(everyone)) if rank not in there]
                raise Disagreement(
                    f"{self.verb}: {what} {name!r} on {_ranks(there)}, but not on {_ranks(missing)}",
                    hint="every rank must report the same names; report 0 if there is nothing to count",
                )
        raise Disagreement(f"{self.verb}: {what} different names on different ranks")


_present: Together | None = None


def together() -> Together:
    """The ranks of the process group that is initialised; of this process alone where none is."""
    global _present
    group: Any = dist.group.WORLD if dist.is_initialized() else None
    if _present is None or _present.group() is not group:
        _present = Together()
    return _present


# ------------------------------------------------------------------------------------------------ helpers


def _is_echo(error: BaseException | None) -> bool:
    """Whether an error, or what it was raised from, is about the connection to other ranks."""
    while error is not None:
        if is_communication(error):
            return True
        error = error.__cause__
    return False


def _places() -> dict[str, int]:
    from torch.distributed import distributed_c10d

    groups: list[Any] = list(distributed_c10d._world.pg_map)
    return {group.group_name: group._get_sequence_number_for_group() for group in groups}


def _same_places(reports: Iterator[Report] | Any) -> bool:
    """Whether in each group all ranks have begun as many collectives."""
    found: dict[str, set[int]] = {}
    for report in reports:
        for group, number in report.places.items():
            found.setdefault(group, set()).add(number)
    return all(len(numbers) == 1 for numbers in found.values())


def _digest(words: Sequence[str]) -> int:
    return xxhash.xxh3_64_intdigest("\0".join(words).encode()) >> 1


def _shapes(batch: Batch) -> str:
    return ", ".join(f"{name} {list(batch[name].shape)}" for name in sorted(batch))


def _checksum(tensor: Tensor) -> str:
    """Of integers, where reading them waits for no device. Other numbers may differ by rounding."""
    if tensor.device.type != "cpu" or tensor.is_floating_point():
        return "not known"
    return xxhash.xxh3_64_hexdigest(tensor.contiguous().numpy().data)


def _either(phrases: list[str]) -> str:
    """One phrase for all batches, or all of them."""
    return phrases[0] if len(set(phrases)) == 1 else "; ".join(phrases)


def _first_line(error: BaseException | None) -> str:
    text = error.message if isinstance(error, TitanError) else str(error)
    return text.strip().partition("\n")[0]


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"


def _by_rank(values: Sequence[str], ranks: Sequence[int] | None = None) -> str:
    """`rank 0 with 2 batches, ranks 1, 2 with 1 batch`."""
    found: dict[str, list[int]] = {}
    for rank, value in zip(ranks or range(len(values)), values, strict=True):
        found.setdefault(value, []).append(rank)
    return ", ".join(f"{_ranks(where)} {value}" for value, where in found.items())

"""Agreement of the ranks on a call of a verb, and handling of failures on some of them.

Before a verb communicates, the ranks compare its arguments in one exchange of a few numbers on the CPU. If
they differ, or the checks of a rank fail, all ranks raise and nothing has changed. Later errors are reported
to the other ranks: see `titancli.engine.ranks`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import xxhash

from titancli.distributed.together import Disagreement, Report, by_rank, name_ranks
from titancli.engine.ranks import RankGroup, first_line
from titancli.errors import RankFailure, TitanError
from titancli.observe.phases import phase
from titancli.protocols.batch import NOTHING, Counts

if TYPE_CHECKING:
    from torch import Tensor

    from titancli.layout.degrees import Degrees
    from titancli.protocols.batch import Batch

FIRST = ("loss", "weight")


class Call:
    """A call of a verb on this rank."""

    def __init__(
        self, ranks: RankGroup, verb: str, engine: int | None = None, degrees: Degrees | None = None
    ) -> None:
        self.verb, self.counts, self.all_counts = verb, Counts(), Counts()
        self._ranks, self._degrees = ranks, degrees
        self._began = time.monotonic()
        self._alike: list[str] = [] if engine is None else [f"on engine {engine}"]
        """Facts that must be equal on every rank; in messages they follow "rank 0 called VERB"."""
        self._same_rows: list[str] = []
        """Facts that must be equal on ranks with the same rows."""
        self._runs_the_model = False

    def given(self, what: str) -> None:
        """Declare how the verb is called on every rank, such as "with lr=0.1"."""
        self._alike.append(what)

    def same_rows(self, what: str) -> None:
        """Declare what must be equal on the ranks of tp, cp and pp; in messages it follows "rank 0"."""
        self._same_rows.append(what)

    def given_batches(self, batches: Sequence[Batch], counts: Counts = NOTHING) -> None:
        """Declare the batches. Every rank must have equally many with the same names, except that padding may
        be on some ranks only; the ranks of tp, cp and pp also the same shapes and tokens.

        Args:
            counts: those of the batches; `all_counts` becomes their sum over the data-parallel ranks.
        """
        self.counts = self.all_counts = counts
        self._runs_the_model = True
        if not self._ranks.active:
            if self._degrees is not None:
                self.all_counts = sum([counts] * self._degrees.dp, NOTHING)
            return
        count = len(batches)
        self.given(f"with {count} {'batch' if count == 1 else 'batches'}")
        names = [", ".join(sorted({*batch} - {"padding"})) for batch in batches]
        self.given(f"with {_either(names)}")
        if self._degrees is not None and self._degrees.world > self._degrees.dp:
            self._same_rows.append(f"with {_either([_shapes(batch) for batch in batches])}")
            self._same_rows += [
                f"with {name} of checksum {_checksum(tensor)}"
                for batch in batches
                for name, tensor in sorted(batch.items())
            ]

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Run this rank's checks in the block; at its end the ranks compare their calls.

        Raises:
            Disagreement: the calls differ; on all ranks.
            RankFailure: the checks of another rank failed, or it did not call in time.
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
        counts = self.counts
        numbers = [alike, rows, int(failure is not None), counts.tokens, counts.targets, counts.padding]
        try:
            with phase("wait"):
                table = ranks.on_the_cpu.numbers(numbers)
            same = len({row[0] for row in table}) == 1 and self._same_where_shared(table)
            if not same or any(row[2] for row in table):
                words = f"{type(failure).__name__}: {first_line(failure)}" if failure else None
                mine = Report(self.verb, words, details=(self._alike, self._same_rows))
                raise self._refusal(ranks.on_the_cpu.reports(mine))
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
            first_of = {self._place(rank): Counts(*row[3:]) for rank, row in enumerate(table)}
            self.all_counts = sum(first_of.values(), NOTHING)
        if self._runs_the_model:
            ranks.model_runs()

    def _same_where_shared(self, table: list[list[int]]) -> bool:
        found = {(self._place(rank), row[1]) for rank, row in enumerate(table)}
        return len(found) == len({place for place, _ in found})

    def _place(self, rank: int) -> int:
        """Return the data-parallel rank: equal on ranks of tp, cp and pp, which have the same rows."""
        degrees = self._degrees
        return 0 if degrees is None else rank // (degrees.cp * degrees.tp) % degrees.dp

    def _refusal(self, reports: list[Report]) -> TitanError:
        failed = [(rank, report) for rank, report in enumerate(reports) if report.words is not None]
        if failed:
            rank, report = failed[0]
            more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
            return RankFailure(f"rank {rank}{more} failed in {report.doing}: {report.words}")
        verbs = [report.doing for report in reports]
        if len(set(verbs)) > 1:
            return Disagreement(
                f"the ranks call different verbs: {by_rank(verbs)}",
                hint="every rank must call the same verbs in the same order",
            )
        for column in zip(*(report.details[0] for report in reports), strict=False):
            if len(set(column)) > 1:
                no_rows = "a rank without rows must pass a batch whose targets are all -100"
                return Disagreement(
                    f"the ranks call {self.verb} differently: {by_rank(column)}",
                    hint=no_rows if "batch" in column[0] else None,
                )
        for place in range(self._degrees.dp if self._degrees else 1):
            peers = [rank for rank in range(len(reports)) if self._place(rank) == place]
            for column in zip(*(reports[rank].details[1] for rank in peers), strict=False):
                if len(set(column)) > 1:
                    return Disagreement(
                        f"the ranks call {self.verb} differently: {by_rank(column, peers)}",
                        hint="the ranks of mesh.tp, cp and pp must pass the same rows",
                    )
        return Disagreement(f"the ranks call {self.verb} differently")

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Report an error in the block to the other ranks.

        Raises:
            RankFailure: another rank failed, or did not arrive within the time limit.
        """
        try:
            yield
        except (Disagreement, RankFailure):
            raise  # every rank has received it
        except BaseException as error:
            if self._ranks.active:
                self._ranks.fails(self.verb, error, time.monotonic() - self._began)
            raise

    def in_order(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the metrics of a loss in an order that is the same on every rank.

        Raises:
            Disagreement: a rank has a name that another lacks; on all ranks.
        """
        others = self.same_names([name for name in sums if name not in FIRST], "the loss reports")
        return {name: sums[name] for name in (*FIRST, *others)}

    def same_names(self, names: Sequence[str], what: str) -> list[str]:
        """Return the names, sorted, after checking that all ranks have the same.

        Raises:
            Disagreement: a rank has a name that another lacks; on all ranks.
        """
        mine = sorted(names)
        ranks = self._ranks.on_the_cpu
        if not self._ranks.active or len({row[0] for row in ranks.numbers([_digest(mine)])}) == 1:
            return mine
        everyone = ranks.gather(mine)
        for name in sorted({name for theirs in everyone for name in theirs}):
            there = [rank for rank, theirs in enumerate(everyone) if name in theirs]
            if len(there) < len(everyone):
                missing = [rank for rank in range(len(everyone)) if rank not in there]
                raise Disagreement(
                    f"{self.verb}: {what} {name!r} on {name_ranks(there)}, but not on {name_ranks(missing)}",
                    hint="every rank must report the same names; report 0 if there is nothing to count",
                )
        raise Disagreement(f"{self.verb}: {what} different names on different ranks")


# ------------------------------------------------------------------------------------------------ helpers


def _digest(words: Sequence[str]) -> int:
    return xxhash.xxh3_64_intdigest("\0".join(words).encode()) >> 1


def _shapes(batch: Batch) -> str:
    return ", ".join(f"{name} {list(batch[name].shape)}" for name in sorted(batch))


def _checksum(tensor: Tensor) -> str:
    """Return a checksum of integers, without waiting for a device. Floats are left out: they may differ by
    rounding."""
    if tensor.device.type != "cpu" or tensor.is_floating_point():
        return "not known"
    return xxhash.xxh3_64_hexdigest(tensor.contiguous().numpy().data)


def _either(phrases: list[str]) -> str:
    """Return the phrase that all batches share, or a list of them all."""
    return phrases[0] if len(set(phrases)) == 1 else "; ".join(phrases)

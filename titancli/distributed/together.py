"""Exchange values between ranks on the CPU, and raise on all of them an error that one has raised.

Every exchange begins with the same small collective, in which each rank sends a row of numbers: for what it
does, how many bytes it has to send, and whether it has failed. So ranks that do different things find out,
instead of reading each other's bytes; and if no rank has anything to send, that is all.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from titancli.errors import EnvironmentProblem, RankFailure, TitanError

T = TypeVar("T")
R = TypeVar("R")

WIDTH = 6
"""Numbers in a row: as many in every exchange, since gloo cannot receive more than it expects."""


class Disagreement(TitanError):
    """Ranks do different things where they must do the same; raised on all of them."""


class Report(NamedTuple):
    """The state of a rank at an exchange in which some rank failed."""

    doing: str
    words: str | None
    """The text of the error that was raised here; None if none was."""
    error: BaseException | None = None
    """The error itself, if all ranks raise it unchanged."""
    details: Any = None

    @classmethod
    def of(cls, doing: str, error: BaseException | None, details: Any = None) -> Report:
        if error is None:
            return cls(doing, None, None, details)
        text = error.message if isinstance(error, TitanError) else str(error)
        return cls(doing, f"{type(error).__name__}: {text}", _sendable(error), details)


class Ranks:
    """The ranks of a process group, and what they do together.

    All methods but those of a group of one are collective, and are called alike on all ranks: at the same
    place, with functions of the same name. A group is used by one thread at a time.

    What a function raises on any rank is raised on all of them. Of the first rank that has failed, a
    TitanError or Ctrl-C is raised as it is, and in place of another error a RankFailure that names the ranks;
    its cause is the error itself, where that was raised. If the other ranks are gone, a rank raises its own
    error. One rank alone raises it as it is.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """`group`: None for all ranks, of whom there is one if there is no process group.

        One rank alone does without its process group: gloo copies large messages in a thread of its own, with
        OpenMP threads of their own, and every training step after that is a third slower.
        """
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
        self.group = group
        self.rank = dist.get_rank(group) if several else 0
        self.size = dist.get_world_size(group) if several else 1

    # ------------------------------------------------------------------------------------------ functions

    def allgather_call(self, doing: str, function: Callable[[], T]) -> list[T]:
        """Call a function on every rank, and return the (picklable) results of all ranks, by rank.

        Args:
            doing: words for a message, such as "reading FOLDER".
        """
        if self.size == 1:
            return [self._run(function)]
        _, data, sizes = self._call(doing, "each", function)
        return [_unpacked(packed) for packed in self._all(data, sizes)]

    def call(self, doing: str, function: Callable[[], T]) -> T:
        """Call a function on every rank, and return the result of this rank, which nobody else gets."""
        if self.size == 1:
            return self._run(function)
        return self._call(doing, "local", function, sends=False)[0]

    def broadcast_call(self, doing: str, function: Callable[[], T], *, rank: int = 0) -> T:
        """Call a function on one rank of the group, and return its (picklable) result on every rank."""
        if self.size == 1:
            return self._run(function)
        value, data, sizes = self._call(doing, f"one {rank}", function, calls=self.rank == rank)
        sent = self._broadcast(data, sizes[rank], rank)
        return value if self.rank == rank else _unpacked(sent)

    def reduce(self, doing: str, function: Callable[[], T], reduce: Callable[[list[T]], R]) -> R:
        """Call a function on every rank, and `reduce` on rank 0 with all results, by rank; return what that
        returns on every rank."""
        if self.size == 1:
            return self._run(lambda: reduce([function()]))
        _, data, sizes = self._call(doing, "reduce", function)
        found = self._on_first(data, sizes)
        return self.broadcast_call(doing, lambda: reduce([_unpacked(packed) for packed in found]))

    def _run(self, function: Callable[[], T]) -> T:
        """Call a function. (Subclasses translate what it raises.)"""
        return function()

    def _call(
        self, doing: str, how: str, function: Callable[[], T], *, calls: bool = True, sends: bool = True
    ) -> tuple[T, bytes, list[int]]:
        """Return what the function returns if this rank `calls` it, the same packed, and how many bytes each
        rank has."""
        value: Any = None
        data, error = b"", None
        try:
            if calls:
                value = self._run(function)
                data = _packed(value) if sends else b""
        except BaseException as raised:
            error = raised
        name = getattr(function, "__qualname__", type(function).__qualname__)
        return value, data, self._agreed(doing, f"{how} {name}", len(data), error)

    def _agreed(self, doing: str, call: str, size: int, error: BaseException | None) -> list[int]:
        """Return the sizes of all ranks, which make the same call and have not failed."""
        try:
            rows = self.numbers([xxhash.xxh3_64_intdigest(call.encode()) >> 1, size, error is not None])
            if len({row[0] for row in rows}) == 1 and not any(row[2] for row in rows):
                return [row[1] for row in rows]
            reports = self.reports(Report.of(doing, error))
        except Exception:  # the other ranks are gone, and what was raised here says more
            if error is not None:
                raise error from None
            raise
        raise self._error(reports, error)

    def _error(self, reports: list[Report], own: BaseException | None) -> BaseException:
        """Return what is raised on all ranks; `own`: what was raised here."""
        failed = [rank for rank, report in enumerate(reports) if report.words is not None]
        if not failed:
            return Disagreement(
                f"the ranks do different things: {by_rank([report.doing for report in reports])}",
                hint="every rank must do the same, in the same order",
            )
        doing, words, error, _ = reports[failed[0]]
        if error is not None:
            return own if failed[0] == self.rank and own is not None else error
        failure = RankFailure(f"{doing} failed on {name_ranks(failed)}: {words}")
        failure.__cause__ = own
        return failure

    # ------------------------------------------------------------------------------------------ exchanges

    def gather(self, value: T) -> list[T]:
        """Return a picklable value of every rank, by rank."""
        return self.allgather_call("gathering values", lambda: value)

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return a picklable value of one rank on every rank."""
        return self.broadcast_call("sending a value", lambda: value, rank=source)

    def numbers(self, row: Sequence[int]) -> list[list[int]]:
        """Return the numbers (at most `WIDTH`, below 2**63) of every rank, by rank; in one collective."""
        if self.size == 1:
            return [[*row]]
        mine = torch.tensor([*row, *[0] * (WIDTH - len(row))], dtype=torch.int64, device=self._device)
        table = torch.empty(self.size, WIDTH, dtype=torch.int64, device=self._device)
        dist.all_gather([*table], mine, group=self.group)
        return [numbers[: len(row)] for numbers in table.tolist()]

    def reports(self, report: Report) -> list[Report]:
        """Return the reports of all ranks, by rank. Called where their numbers say that not all are fine."""
        data = _packed(report)
        sizes = [size for (size,) in self.numbers([len(data)])]
        return [_unpacked(packed) for packed in self._all(data, sizes)]

    @property
    def _device(self) -> torch.device:
        """The CPU, if the group takes tensors there."""
        on_cpu = "cpu" in dist.get_backend_config(self.group)
        return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())

    def _all(self, data: bytes, sizes: list[int]) -> list[bytes]:
        longest = max(sizes)
        if not longest:
            return [b""] * self.size
        everyones = torch.empty(self.size, longest, dtype=torch.uint8, device=self._device)
        dist.all_gather([*everyones], self._padded(data, longest), group=self.group)
        return [_bytes(one, size) for one, size in zip(everyones, sizes, strict=True)]

    def _on_first(self, data: bytes, sizes: list[int]) -> list[bytes]:
        """All ranks' bytes on rank 0, and nothing on the others."""
        longest = max(sizes)
        if not longest:
            return [b""] * self.size
        mine = self._padded(data, longest)
        rows = [torch.empty_like(mine) for _ in sizes] if self.rank == 0 else []
        dist.gather(mine, rows or None, group=self.group, group_dst=0)
        return [_bytes(one, size) for one, size in zip(rows, sizes, strict=False)]

    def _broadcast(self, data: bytes, size: int, source: int) -> bytes:
        if not size:
            return b""
        sent = self._padded(data, size)
        dist.broadcast(sent, group=self.group, group_src=source)
        return data if self.rank == source else _bytes(sent, size)

    def _padded(self, data: bytes, size: int) -> Tensor:
        room = bytearray(size)
        room[: len(data)] = data
        return torch.frombuffer(room, dtype=torch.uint8).to(self._device)


def require_same(what: str, value: str, host: str) -> None:
    """Compare a value over all ranks.

    Raises:
        EnvironmentProblem: on every rank, naming the ranks that differ from rank 0.
    """
    everyones = Ranks().gather((value, host))
    differing = [
        (rank, other, where) for rank, (other, where) in enumerate(everyones) if other != everyones[0][0]
    ]
    if not differing:
        return
    listed = "\n".join(f"  rank {rank} on {where}: {other}" for rank, other, where in differing[:8])
    more = f"\n  and {len(differing) - 8} more" if len(differing) > 8 else ""
    raise EnvironmentProblem(
        f"the ranks were started with different {what}\n"
        f"  rank 0 on {everyones[0][1]}: {everyones[0][0]}\n{listed}{more}",
        hint="run the same command, with the same files, on every node",
    )


# -------------------------------------------------------------------------------------------------- words


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 0` or `ranks 0, 1`: at most eight of them."""
    listed = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"


def by_rank(values: Sequence[str], ranks: Sequence[int] | None = None) -> str:
    """Return `rank 0 with 2 batches, ranks 1, 2 with 1 batch`."""
    found: dict[str, list[int]] = {}
    for rank, value in zip(ranks or range(len(values)), values, strict=True):
        found.setdefault(value, []).append(rank)
    return ", ".join(f"{name_ranks(where)} {value}" for value, where in found.items())


# ---------------------------------------------------------------------------------------------- as bytes


def _packed(value: Any) -> bytes:
    """Pickle a value; nothing for None, which many functions return."""
    return b"" if value is None else pickle.dumps(value)


def _unpacked(data: bytes) -> Any:
    return pickle.loads(data) if data else None


def _bytes(tensor: Tensor, size: int) -> bytes:
    return tensor[:size].cpu().numpy().tobytes()


def _sendable(error: BaseException) -> BaseException | None:
    """Return an error that all ranks raise as it is, and None of one that they only tell of.

    A plugin's may have arguments that a pickle does not keep: then it is the nearest that titan has.
    """
    if not isinstance(error, TitanError):
        return error if isinstance(error, KeyboardInterrupt) else None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == TitanError.__module__)
        return kind(error.message, hint=error.hint)
    return error

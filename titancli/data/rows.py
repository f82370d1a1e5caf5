"""Rows of whole examples, dealt to data-parallel ranks: the dataset of conversations and of pairs.

Examples come in groups of `GROUP`; which of them share a row depends only on the lengths within the group.
The position is a group and the number of its rows used, which is exact and independent of the ranks. If
lengths are known (`length_index`), each rank makes only the examples of its own rows. Otherwise, as with
packed documents (`titancli.data.packing`), every rank makes all examples, and only its own rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import torch

from titancli.data.lengths import BAD, row_lengths
from titancli.data.packing import STATE_VERSION, refuse_other_data, tokenizer_identity
from titancli.errors import EnvironmentProblem
from titancli.protocols import Tokenizer
from titancli.protocols.batch import IGNORE, Batch

GROUP = 128
"""Examples that may share rows."""

LENGTHS_VERSION = 2
"""Changes when rows that were bad become good, or become longer or shorter: cached lengths are void."""

STEP = 64
"""Rows that are padded to the longest of a batch are as long as a multiple of this."""

Row = dict[str, np.ndarray]
"""Arrays by tensor name, each for one row of a batch."""


class Examples(Protocol):
    """Examples in an order that depends on the epoch alone."""

    label: str
    """Name in error messages."""
    identity: dict[str, Any]
    """Small plain JSON; equal only if the examples and their order are equal."""

    def read(self, epoch: int, mark: dict[str, Any] | None) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield the epoch's examples, each with its mark, from a mark or from the start on.

        Raises:
            TitanError: data cannot be read, or are not an example.
        """
        ...


class Checked(Protocol):
    """The result of a check, as `titancli.data.row_check.RowCheck` is."""

    rows: int
    """Number of rows that were checked."""

    @property
    def faults(self) -> Sequence[Any]:
        """Return the findings that a strict check refuses."""
        ...

    def lines(self) -> list[str]:
        """Return each finding as a line."""
        ...


class IndexedExamples(Examples, Protocol):
    """Examples that can be made one by one from counted rows."""

    count: int
    """Number of rows, including bad ones."""
    limits: dict[str, Any]
    """Settings that decide which rows are bad."""

    def order(self, epoch: int) -> np.ndarray:
        """Return the rows in the order of an epoch, int64 [count]."""
        ...

    def mark(self, epoch: int, place: int) -> dict[str, Any]:
        """Return the mark of the row at a position in the order."""
        ...

    def place(self, epoch: int, mark: Mapping[str, Any]) -> int: ...

    def example(self, row: int) -> Any:
        """Return the example of a row; if it is bad, report it and return None."""
        ...

    def skipped(self, count: int) -> None:
        """Count bad rows that were skipped."""
        ...


class RowMaker(Protocol):
    """Makes rows from examples."""

    unit: int
    """Number of rows that belong together; a group yields a multiple of it."""

    def length(self, example: Any) -> int: ...

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return which examples of a group form each row, by their lengths."""
        ...

    def row(self, examples: Sequence[Any], number: int) -> Row:
        """Return the row of a group with this index."""
        ...

    def filler(self) -> Row:
        """Return a row without targets."""
        ...


class Group(NamedTuple):
    """Examples that may share rows."""

    mark: dict[str, Any]
    """Mark of the first example."""
    lengths: Sequence[int]
    example: Callable[[int], Any]


class Position(NamedTuple):
    epoch: int = 0
    mark: dict[str, Any] | None = None
    """First example of the group; None: the first of the epoch."""
    used: int = 0
    """Rows of the group that were used."""


class RowDataset:
    """Batches of rows of whole examples: the `Dataset` of `titancli.protocols`."""

    def __init__(
        self,
        examples: Examples,
        maker: RowMaker,
        *,
        tokenizer: Tokenizer,
        seq_len: int,
        rows: int,
        dp_rank: int,
        dp_size: int,
        repeat: bool,
        settings: Mapping[str, Any],
        group: int = GROUP,
        templated: bool = True,
        length_index: bool = False,
        padding: Literal["seq_len", "longest", "none"] = "seq_len",
        check: Callable[[], Checked] | None = None,
    ) -> None:
        """Create the dataset.

        Args:
            settings: everything else that the rows depend on; resuming with other settings is rejected.
            group: number of examples that may share rows.
            templated: whether rows depend on the chat template.
            length_index: measure all examples once, before the first batch; they must be `IndexedExamples`.
            padding: length of the rows of a batch, see `titancli.data.RowsOfExamples`.
            check: checks all rows of the data; None: they are no conversations.
        """
        self._examples, self._maker = examples, maker
        self._rows, self._dp_rank, self._dp_size = rows, dp_rank, dp_size
        self._epochs = math.inf if repeat else 1
        self._identity = {
            **examples.identity,
            "tokenizer": tokenizer_identity(tokenizer),
            **({"chat template": tokenizer.chat_fingerprint} if templated else {}),
            "seq_len": seq_len,
            **settings,
        }
        self._group, self._padding, self._check = group, padding, check
        self._length_index = length_index
        self._lengths: np.ndarray | None = None
        self._position = Position()
        self._ahead: Iterator[tuple[Callable[[], Row], Position]] | None = None
        """Rows after the position, in order."""
        self._consumed = 0

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches from the current position on; without `repeat` the last one is padded with rows
        without targets, and every rank gets the same number of batches.

        Raises:
            EnvironmentProblem: the data cannot be read, or contain no example.
        """
        while taken := self._take(self._rows * self._dp_size):
            first = self._dp_rank * self._rows
            mine = [make() for make in taken[first : first + self._rows]]
            mine += [self._maker.filler() for _ in range(self._rows - len(mine))]
            if self._padding == "none":
                mine = [joined(mine, self._maker.filler())]
            tensors = {name: torch.from_numpy(np.stack([row[name] for row in mine])) for name in mine[0]}
            cut = self._padding == "longest"
            yield Batch(without_padding(tensors) if cut else tensors, unit=self._maker.unit)

    def check(self) -> Checked | None:
        """Check all rows of the data once; None if they are no conversations.

        Raises:
            EnvironmentProblem: the data cannot be read.
        """
        return None if self._check is None else self._check()

    def skip(self, rows: int) -> int | None:
        """Skip this many global rows without making them; return how many were skipped, or None without
        lengths."""
        return len(self._take(rows)) if self._length_index else None

    def rows_left(self, epochs: int) -> int:
        """Return the rows from the position to the end of the first `epochs` epochs. Examples that can be
        made one by one are measured once, as with `length_index`; others are made in each epoch.

        Raises:
            TitanError: the data cannot be read.
        """
        indexed = self._length_index or hasattr(self._examples, "example")
        groups = self._indexed_groups if indexed else self._groups
        plans = (self._maker.plan(group.lengths) for n in range(epochs) for group in groups(n, None))
        return sum(map(len, plans)) - self._consumed

    def epoch_rows(self) -> tuple[int, bool] | None:
        """Return the number of rows in an epoch, and whether it was counted rather than estimated from a
        sample; None for examples that are not counted. Does not move the position."""
        if self._length_index:
            return self.rows_left(1) + self._consumed, True
        if not hasattr(self._examples, "example"):
            return None
        sample = next((group.lengths for group in self._groups(0, None)), [])
        examples = cast(IndexedExamples, self._examples).count
        return round(len(self._maker.plan(sample)) * examples / max(len(sample), 1)), False

    def end_after(self, epochs: int) -> None:
        """End after this many epochs."""
        self._epochs, self._ahead = epochs, None

    def _take(self, rows: int) -> list[Callable[[], Row]]:
        """Advance by this many global rows; return the functions that make them."""
        if self._ahead is None:
            self._ahead = self._from(self._position)
        try:
            taken = list(itertools.islice(self._ahead, rows))
        except BaseException:
            self._ahead = None  # exhausted, it would look like the end of the data
            raise
        if taken:
            self._position = taken[-1][1]
        self._consumed += len(taken)
        return [make for make, _ in taken]

    def _from(self, position: Position) -> Iterator[tuple[Callable[[], Row], Position]]:
        """Yield the function that makes each row, and the position after it."""
        epoch, mark, used = position
        groups = self._indexed_groups if self._length_index else self._groups
        while True:
            nothing = mark is None
            for group in groups(epoch, mark):
                nothing = False
                plan = self._maker.plan(group.lengths)
                for number in range(used, len(plan)):
                    row = partial(self._row, group, plan[number], number)
                    yield row, Position(epoch, group.mark, number + 1)
                used = 0
            if nothing:
                raise EnvironmentProblem(
                    f"{self._examples.label} has no rows to train on", hint="check the rows that were skipped"
                )
            if epoch + 1 >= self._epochs:
                return
            epoch, mark, used = epoch + 1, None, 0

    def _row(self, group: Group, examples: list[int], number: int) -> Row:
        return self._maker.row([group.example(example) for example in examples], number)

    def _groups(self, epoch: int, mark: dict[str, Any] | None) -> Iterator[Group]:
        examples = self._examples.read(epoch, mark)
        while group := list(itertools.islice(examples, self._group)):
            found = [example for example, _ in group]
            yield Group(group[0][1], [self._maker.length(example) for example in found], found.__getitem__)

    def _indexed_groups(self, epoch: int, mark: dict[str, Any] | None) -> Iterator[Group]:
        """Yield the groups without making their examples."""
        source = cast(IndexedExamples, self._examples)
        if self._lengths is None:
            self._lengths = row_lengths(self._unordered, source.count, self._measured)
        order, place = source.order(epoch), 0 if mark is None else source.place(epoch, mark)
        while place < len(order):
            rows = order[place : place + self._group]
            while (self._lengths[rows] != BAD).sum() < self._group and place + len(rows) < len(order):
                rows = order[place : place + 2 * len(rows)]
            good = np.flatnonzero(self._lengths[rows] != BAD)[: self._group]
            last = int(good[-1]) + 1 if len(good) == self._group else len(rows)
            source.skipped(last - len(good))
            if len(good):
                first, chosen = int(good[0]), rows[good]
                yield Group(
                    source.mark(epoch, place + first),
                    self._lengths[chosen].tolist(),
                    partial(self._example, chosen.tolist()),
                )
            place += last

    @property
    def _unordered(self) -> dict[str, Any]:
        """Return the facts that lengths depend on."""
        limits = {**cast(IndexedExamples, self._examples).limits, "version": LENGTHS_VERSION}
        return {name: value for name, value in (self._identity | limits).items() if name != "order"}

    def _measured(self, rows: Sequence[int]) -> list[int]:
        found = map(cast(IndexedExamples, self._examples).example, rows)
        return [BAD if example is None else self._maker.length(example) for example in found]

    def _example(self, rows: list[int], number: int) -> Any:
        found = cast(IndexedExamples, self._examples).example(rows[number])
        if found is None or self._maker.length(found) != cast(np.ndarray, self._lengths)[rows[number]]:
            raise EnvironmentProblem(
                f"{self._examples.label}: row {rows[number]:,} is no longer as long as when it was measured",
                hint="the tokenizer or the data changed without changing their names and contents: set "
                "dataset.length_index = false",
            )
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch, the same on every rank; `rows` counts all rows
        consumed."""
        epoch, mark, used = self._position
        return {
            "version": STATE_VERSION,
            "epoch": epoch,
            "group": mark,
            "used": used,
            "rows": self._consumed,
            "data": self._identity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position, with any number of ranks and rows.

        Raises:
            EnvironmentProblem: the state was saved with other data, or does not belong to this dataset.
        """
        refuse_other_data(state, self._identity, self._examples.label, "epoch", "group", "used", "rows")
        self._consumed = state["rows"]
        self._position = Position(state["epoch"], state["group"], state["used"])
        self._ahead = None


def joined(rows: Sequence[Row], filler: Row) -> Row:
    """Return one row of all rows up to their last targets, each a document, and `filler` up to a multiple of
    `STEP`, or to the length of all rows."""
    targets = [(row["targets"] != IGNORE).nonzero()[0] for row in rows]
    kept = [(row, int(there[-1]) + 1) for row, there in zip(rows, targets, strict=True) if len(there)]
    total, length = sum(width for _, width in kept), filler["targets"].size
    step = min(STEP, length)
    kept.append((filler, min(-total % step, len(rows) * length - total) if kept else step))
    made = {name: np.concatenate([row[name][:width] for row, width in kept]) for name in filler}
    numbers = np.arange(len(kept), dtype=np.int32)
    return {**made, "document_ids": numbers.repeat([width for _, width in kept])}


def without_padding(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cut off the columns after the last target of all rows, rounded up to a multiple of `STEP`."""
    there = (tensors["targets"] != IGNORE).any(0).nonzero()
    width = -(-(int(there[-1]) + 1) // STEP) * STEP if len(there) else STEP
    return {
        name: tensor[:, :width].contiguous() if tensor.ndim > 1 else tensor
        for name, tensor in tensors.items()
    }

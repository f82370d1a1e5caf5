"""Rows made of whole examples, dealt to data-parallel ranks: the dataset of conversations and of pairs.

Examples come in groups of `GROUP`; a group's rows depend on its examples alone. The position is a group, and
how many of its rows were used: it is exact, and independent of the ranks. As with packed documents
(`titancli.data.packing`) every rank makes all rows and keeps its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from titancli.data.batch import Batch
from titancli.data.packing import STATE_VERSION, refuse_other_data, tokenizer_identity
from titancli.errors import EnvironmentProblem
from titancli.protocols import Tokenizer, TokenizerDefaults
from titancli.registry.defaults import with_defaults

GROUP = 128
"""Examples that may share rows."""

Row = dict[str, np.ndarray]
"""Arrays by the names of a batch's tensors, each of one row."""


class Examples(Protocol):
    """Examples in an order that depends on the epoch alone."""

    label: str
    """How error messages name it."""
    identity: dict[str, Any]
    """Plain JSON, small; equal only if the examples and their order are equal."""

    def read(self, epoch: int, mark: dict[str, Any] | None) -> Iterator[tuple[Any, dict[str, Any]]]:
        """The epoch's examples, each with the mark that leads back to it, from a mark on or from the start.

        Raises:
            TitanError: something cannot be read, or is no example.
        """
        ...


class RowMaker(Protocol):
    """What makes rows of examples."""

    unit: int
    """Rows that belong together; a group gives a multiple of it."""

    def rows(self, examples: Sequence[Any]) -> list[Row]: ...

    def filler(self) -> Row:
        """A row without targets."""
        ...


class Position(NamedTuple):
    epoch: int = 0
    mark: dict[str, Any] | None = None
    """The first example of the group; None: the first of the epoch."""
    used: int = 0
    """Rows of the group that were used."""


class RowDataset:
    """Batches of rows made of whole examples: the `Dataset` of `titancli.protocols`."""

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
    ) -> None:
        """
        Args:
            settings: what else the rows depend on; a resume under others is refused.
            group: examples that may share rows.
            templated: whether the chat template is among the former.
        """
        self._examples, self._maker = examples, maker
        self._rows, self._dp_rank, self._dp_size, self._repeat = rows, dp_rank, dp_size, repeat
        self._identity = {
            **examples.identity,
            "tokenizer": tokenizer_identity(tokenizer),
            **(
                {"chat template": with_defaults(TokenizerDefaults, tokenizer).chat_fingerprint}
                if templated
                else {}
            ),
            "seq_len": seq_len,
            **settings,
        }
        self._group = group
        self._position = Position()
        self._consumed = 0

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the present position on; without `repeat` the last one is filled up with rows that
        have no targets, the same number of batches on every rank.

        Raises:
            EnvironmentProblem: the data cannot be read, or hold no example at all.
        """
        rows = self._from(self._position)
        while taken := list(itertools.islice(rows, self._rows * self._dp_size)):
            self._position = taken[-1][1]
            self._consumed += len(taken)
            first = self._dp_rank * self._rows
            mine = [row for row, _ in taken[first : first + self._rows]]
            mine += [self._maker.filler() for _ in range(self._rows - len(mine))]
            tensors = {name: torch.from_numpy(np.stack([row[name] for row in mine])) for name in mine[0]}
            yield Batch(tensors, unit=self._maker.unit)

    def _from(self, position: Position) -> Iterator[tuple[Row, Position]]:
        """Rows, and the position after each."""
        epoch, mark, used = position
        while True:
            nothing = mark is None
            examples = self._examples.read(epoch, mark)
            while group := list(itertools.islice(examples, self._group)):
                nothing = False
                begin = group[0][1]
                rows = self._maker.rows([example for example, _ in group])
                for number in range(used, len(rows)):
                    yield rows[number], Position(epoch, begin, number + 1)
                used = 0
            if nothing:
                raise EnvironmentProblem(
                    f"{self._examples.label} has no rows to train on", hint="check the rows that were skipped"
                )
            if not self._repeat:
                return
            epoch, mark, used = epoch + 1, None, 0

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch, the same on every rank; `rows` were consumed since the start."""
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
        """Continue from a position, under any number of ranks and rows.

        Raises:
            EnvironmentProblem: the state was saved on other data, or is not one of this dataset.
        """
        refuse_other_data(state, self._identity, self._examples.label, "epoch", "group", "used", "rows")
        self._consumed = state["rows"]
        self._position = Position(state["epoch"], state["group"], state["used"])

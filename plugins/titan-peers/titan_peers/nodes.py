"""Nodes, as groups of ranks that share memory, and transfers of files between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from titan_peers.memory import Memory
from titancli.distributed.together import Ranks

T = TypeVar("T")

_BLOCK = 1 << 28
"""Bytes of one message."""


@dataclass(frozen=True)
class Nodes:
    """The ranks of each node, in the order of their lowest ranks."""

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, memories: Sequence[str]) -> Nodes:
        """Return the nodes, given the identity of each rank's memory."""
        nodes = dict.fromkeys(memories)
        return cls(tuple(tuple(r for r, m in enumerate(memories) if m == node) for node in nodes))

    def node(self, rank: int) -> int:
        return next(number for number, ranks in enumerate(self.ranks) if rank in ranks)

    def is_first(self, rank: int) -> bool:
        """Return whether a rank is the first of its node."""
        return self.ranks[self.node(rank)][0] == rank

    def partner(self, rank: int) -> int | None:
        """Return the rank of the next node that receives this rank's files; None: there is only one node."""
        node = self.node(rank)
        others = self.ranks[(node + 1) % len(self.ranks)]
        return others[self.ranks[node].index(rank) % len(others)] if len(self.ranks) > 1 else None

    def written_for(self, rank: int) -> set[int]:
        """Return the ranks whose files a rank's node has: its own ranks, and those of the previous node."""
        node = self.node(rank)
        return {*self.ranks[node], *self.ranks[node - 1]}


class Team(Ranks):
    """All ranks, each with the memory of its node. Errors of the operating system are raised as
    EnvironmentProblems."""

    def __init__(self, memory: Memory, nodes: Nodes, group: dist.ProcessGroup | None) -> None:
        super().__init__(group)
        self.memory, self.nodes = memory, nodes
        self.is_first = nodes.is_first(self.rank)
        """Whether this rank is the one that acts for its node."""

    def _run(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except OSError as error:
            raise self.memory.refusal(error) from error

    def on_nodes(self, doing: str, function: Callable[[], Any]) -> None:
        """Call a function once on each node."""
        self.call(doing, lambda: function() if self.is_first else None)


class Transfer(NamedTuple):
    """Bytes of a file that one rank sends to another."""

    sender: int
    receiver: int
    name: str
    start: int
    stop: int


def prepare(folder: Path, transfers: Iterable[Transfer], rank: int) -> list[tuple[Transfer, Tensor]]:
    """Map the files that this rank sends, and allocate those that it receives, so that `exchange` cannot run
    out of memory.

    Raises:
        OSError: there is too little memory, or a file cannot be read.
    """
    prepared = []
    for transfer in transfers:
        if rank not in (transfer.sender, transfer.receiver):
            continue
        path = folder / transfer.name
        if rank == transfer.receiver:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(file, transfer.start, transfer.stop - transfer.start)
            finally:
                os.close(file)
        whole = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
        prepared.append((transfer, whole[transfer.start : transfer.stop]))
    return prepared


def exchange(prepared: Iterable[tuple[Transfer, Tensor]], rank: int, group: dist.ProcessGroup | None) -> None:
    """Send and receive, directly from one node's memory to another's. Both ranks of a pair list their
    transfers in the same order."""
    works: list[Any] = []
    for transfer, memory in prepared:
        for block in memory.split(_BLOCK):
            if rank == transfer.sender:
                works.append(dist.isend(block, transfer.receiver, group=group))
            else:
                works.append(dist.irecv(block, transfer.sender, group=group))
    for work in works:
        work.wait()

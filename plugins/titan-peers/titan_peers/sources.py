"""Reading a copy whose files are in the memory of several nodes, which send each other what is missing.

Each node has a folder with all files of the checkpoint: links to those that it has, and sparse files of the
right size for the others. Before reading, a load requests the ranges that it needs; ranges that were not
requested read as zeros, whose checksums are wrong.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from titan_peers.memory import Copy, description
from titan_peers.nodes import Team, Transfer, exchange, prepare
from titancli.checkpoint.format.manifest import MANIFEST, DamagedCheckpoint, read_manifest
from titancli.checkpoint.sources import Range, end, lend
from titancli.errors import EnvironmentProblem

logger = logging.getLogger(f"titancli.plugins.{__name__}")


class Sources:
    """The files of a copy that each node has. All methods are collective."""

    def __init__(self, team: Team, copy: Copy) -> None:
        """Find the copy's files, and create the folder to load from.

        Raises:
            EnvironmentProblem: the copy is not complete, or there is too little memory; raised on all ranks.
        """
        memory, nodes = team.memory, team.nodes
        self.folder = memory.loading / f"step-{copy.step}"
        self.sent = 0
        """Bytes sent between nodes so far."""
        self._team = team
        self._from: dict[tuple[int, str], int] = {}
        """The node that sent a file, or part of one, by receiving node and file."""
        host = socket.gethostname()
        found = team.allgather_call(
            self._doing, lambda: (*memory.held(copy), host) if team.is_first else ({}, [], host)
        )
        self._hosts = [found[ranks[0]][2] for ranks in nodes.ranks]
        self._held = [found[ranks[0]][0] for ranks in nodes.ranks]
        wrong = [f"on {where}: {why}" for _, whys, where in found for why in whys]
        holders = [ranks[0] for ranks, held in zip(nodes.ranks, self._held, strict=True) if held]
        if not holders:
            raise EnvironmentProblem("; ".join(wrong) or "no node has a part of it")
        self._say(wrong)
        source = memory.folder / self.folder.name

        def describe() -> tuple[dict[str, int], dict[str, bytes]]:
            manifest = read_manifest(source)
            small = {n: (source / n).read_bytes() for n in (MANIFEST, *description(manifest))}
            return {name: digest.size for name, digest in manifest.files.items()}, small

        self._sizes, small = team.broadcast_call(self._doing, describe, rank=holders[0])
        if missing := sorted(self._sizes.keys() - set().union(*self._held)):
            more = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
            raise EnvironmentProblem(f"{missing[0]}{more} were only on nodes that are lost")
        team.on_nodes(self._doing, lambda: self._furnish(source, small))
        lend(self.folder, self)

    def _say(self, wrong: Iterable[str]) -> None:
        if self._team.rank == 0:
            for line in sorted(wrong):
                logger.warning("a copy in memory is not used, %s", line)

    @property
    def _doing(self) -> str:
        return f"reading {self.folder}"

    def take(self, wanted: Iterable[Range]) -> None:
        """Transfer what this rank is about to read to its node.

        Raises:
            DamagedCheckpoint: there is too little memory, or no node has a file; raised on all ranks.
        """
        rank = self._team.rank
        held = self._held[self._team.nodes.node(rank)]
        lacking = _joined(one for one in wanted if one[0] not in held and one[1] < one[2])
        prepared: list[Any] = []

        def ready(transfers: list[Transfer]) -> None:
            prepared.extend(prepare(self.folder, transfers, rank))

        try:
            transfers = self._team.reduce(self._doing, lambda: lacking, self._transfers)
            self._team.call(self._doing, lambda: ready(transfers))
        except EnvironmentProblem as error:
            raise DamagedCheckpoint(self.folder, error.message) from error
        exchange(prepared, rank, self._team.group)
        node = self._team.nodes.node
        self._from |= {(node(one.receiver), one.name): node(one.sender) for one in transfers}
        self.sent += sum(transfer.stop - transfer.start for transfer in transfers)
        self._team.gather(None)  # until the requests of this node's other ranks are there, too

    def refuse(self, file: str | None) -> bool:
        """Use another node's copy of a data file that this rank found damaged. Return whether each file that
        any rank found damaged has another copy."""
        found = [(rank, name) for rank, name in enumerate(self._team.gather(file)) if name is not None]
        wrong = set()
        for rank, name in found:
            node = self._team.nodes.node(rank)
            bad = node if name in self._held[node] else self._from[node, name]
            wrong.add((bad, name))
        for bad, name in wrong:
            self._held[bad].pop(name, None)
        self._say(
            f"on {self._hosts[bad]}: {name} is damaged: its checksum does not match" for bad, name in wrong
        )
        return bool(found) and all(any(name in held for held in self._held) for _, name in found)

    def whole(self, names: Iterable[str]) -> list[Range]:
        """Return the ranges of whole files."""
        return [(name, 0, self._sizes.get(name, 0)) for name in names]

    def close(self) -> None:
        """End loading from this folder."""
        end(self.folder)

    def _transfers(self, everyones: list[list[Range]]) -> list[Transfer]:
        """Plan the transfers; what several ranks of a node need is sent once."""
        transfers, taken = [], set()
        for rank, lacking in enumerate(everyones):
            node = self._team.nodes.node(rank)
            for one in lacking:
                if (node, one) in taken:
                    continue
                taken.add((node, one))
                holders = [n for n, held in enumerate(self._held) if one[0] in held]
                if not holders:
                    raise EnvironmentProblem(f"no node has {one[0]}")
                senders = self._team.nodes.ranks[holders[rank % len(holders)]]
                transfers.append(Transfer(senders[rank % len(senders)], rank, *one))
        return transfers

    def _furnish(self, source: Path, small: dict[str, bytes]) -> None:
        shutil.rmtree(self._team.memory.loading, ignore_errors=True)
        self.folder.mkdir(parents=True, mode=0o700)
        held = self._held[self._team.nodes.node(self._team.rank)]
        for name, data in small.items():
            (self.folder / name).write_bytes(data)
        for name, size in self._sizes.items():
            if name in held and name not in small:
                os.link(source / name, self.folder / name)
            elif name not in small:
                with open(self.folder / name, "xb") as file:
                    file.truncate(size)


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Merge ranges that overlap or adjoin."""
    joined: list[Range] = []
    for name, start, stop in sorted(ranges):
        if joined and joined[-1][0] == name and joined[-1][2] >= start:
            joined[-1] = (name, joined[-1][1], max(stop, joined[-1][2]))
        else:
            joined.append((name, start, stop))
    return joined

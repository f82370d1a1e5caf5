"""Copies of a run's state, each rank's in the memory of its own node and of the next one."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.planner import WriteItem

from titancli.checkpoint.format.disk import size_text, write_file
from titancli.checkpoint.format.hashed import Digest, file_digest
from titancli.checkpoint.format.manifest import MANIFEST, last_serial, manifest_bytes
from titancli.checkpoint.format.plan import SavePlan
from titancli.checkpoint.format.storage import Pieces, write_pieces
from titancli.checkpoint.peers.memory import (
    KEPT,
    Copy,
    Memory,
    forget,
    identity_of,
    outdated,
    read_record,
    write_record,
)
from titancli.checkpoint.peers.nodes import Nodes, Team, Transfer, exchange, prepare
from titancli.checkpoint.peers.sources import Sources
from titancli.checkpoint.save import Draft
from titancli.distributed.process_group import patient_group
from titancli.distributed.together import Ranks
from titancli.errors import EnvironmentProblem, TitanError

logger = logging.getLogger(__name__)

COPYING = "copying the state into memory"


class Copies:
    """Keeps the newest state of a run in the memory of its nodes, and finds it there. All methods are
    collective.

    A copy is a checkpoint whose files are spread over the nodes. It counts once it is complete on all nodes
    and the run folder names it; until then the one before it does.
    """

    def __init__(self, root: Path, checkpoints: Path, run_id: str, attempt: int) -> None:
        """
        Args:
            root: a folder in memory, on every node.
            checkpoints: those of the run, on the disk that all nodes share.
            attempt: the number of the run's attempt.

        Raises:
            EnvironmentProblem: the folder cannot be written on a node; on all ranks.
        """

        def open_memory() -> str:
            self._memory = Memory(root, run_id, checkpoints.parent)
            return self._memory.identity

        self._nodes = Nodes.of(Ranks().each(f"opening {root}", open_memory))
        self._checkpoints, self._attempt = checkpoints, attempt
        self._serial: int | None = None
        """On rank 0: of the newest checkpoint on the disk; None: it is to be looked up."""
        self._step: int | None = None
        """Of the copy that counts, if there is one."""
        self._sources: Sources | None = None
        team = self._team(None)
        if team.is_first:
            self._memory.sweep()

    def newest(self, *, wanted: bool) -> Path | None:
        """Return the folder that the copy which counts can be loaded from until `loaded` is called; None:
        the run continues from elsewhere, and there is no copy any longer.

        Args:
            wanted: whether the newest state is; else somebody has asked this attempt for another one, and
                only its own copies may take the place of that.
        """
        team = self._team(patient_group())
        try:
            copy = team.one("looking for a copy in memory", lambda: self._counts(wanted))
            if copy is not None:
                self._sources, self._step = Sources(team, copy), copy.step
                return self._sources.folder
        except EnvironmentProblem as error:
            if team.rank == 0:
                logger.warning("the copy in memory cannot be used: %s", error.message)
        self.discard()
        return None

    @property
    def folder(self) -> Path | None:
        """Return what `newest` has returned, until `loaded` or `discard` is called."""
        return self._sources.folder if self._sources is not None else None

    def loaded(self) -> bool:
        """Return whether a copy was there to be loaded, and give back the memory that this took. Called after
        a load that has succeeded."""
        if self._sources is None:
            return False
        if self._team(None).rank == 0:
            sent = self._sources.sent
            logger.info(
                "step %s was loaded from the memory of the nodes%s",
                self._step,
                f"; they sent each other {size_text(sent)}" if sent else "",
            )
        self._let_go()
        return True

    def discard(self) -> None:
        """Have no copy count any longer, and delete what this node has."""
        self._step = None
        Ranks().one("discarding the copy in memory", lambda: forget(self._checkpoints))
        self._let_go()

    def _let_go(self) -> None:
        if self._sources is not None:
            self._sources.close()
            self._sources = None
        if self._team(None).is_first:
            self._memory.tidy(self._step)

    def end(self) -> None:
        """Delete everything: the run has saved its state on the disk."""
        self.discard()
        Ranks().gather(None)  # who shares this memory may be deleting in it
        if self._team(None).is_first:
            self._memory.remove()

    def close(self) -> None:
        """Let go of the memory, which keeps what it holds."""
        self._memory.close()

    def saved(self) -> None:
        """Take note that a checkpoint was saved on the disk."""
        self._serial = None

    def reserve(self, pieces: Pieces, plan: SavePlan, group: dist.ProcessGroup | None) -> None:
        """Ensure that there is room for the copies that are to come.

        Raises:
            EnvironmentProblem: there is not, on a node; on all ranks.
            TitanError: an entry is no tensor.
        """
        team = self._team(group)
        needed = self._needed(plan.agree(COPYING, pieces.items, team), team)
        team.on_nodes(COPYING, lambda: self._memory.need(KEPT * needed[team.rank] - self._memory.used()))
        if team.rank == 0:
            nodes = len(self._nodes.ranks)
            logger.info(
                "a copy of the state takes %s of memory on each node%s",
                size_text(max(needed)),
                "" if nodes > 1 else "; with one node alone it does not survive the loss of the node",
            )

    def make(self, pieces: Pieces, draft: Draft, plan: SavePlan, group: dist.ProcessGroup | None) -> None:
        """Copy the state, after which this copy counts.

        Raises:
            EnvironmentProblem: a memory is too small, or refuses; on all ranks. The copy before it counts.
        """
        team, began = self._team(group), time.perf_counter()
        if draft.step == self._step:
            return
        draft.ranks = team.size
        items = plan.agree(COPYING, pieces.items, team)
        needed = self._needed(items, team)[team.rank]
        name = team.one(COPYING, lambda: secrets.token_hex(4))
        hidden = self._memory.folder / f".step-{draft.step}.tmp-{name}"
        try:
            team.on_nodes(COPYING, lambda: self._make_room(hidden, needed))
            written, small = team.reduce(
                COPYING,
                lambda: write_pieces(hidden, team.rank, items, pieces.resolve),
                lambda written: (written, self._describe(written, draft, plan)),
            )
            self._send(hidden, written, team)
            team.reduce(
                COPYING,
                lambda: self._complete(hidden, small, draft.folder.name) if team.is_first else None,
                lambda done: self._name(draft, small[MANIFEST]),
            )
        except TitanError:  # of anything else nobody knows whether this copy counts by now
            if team.is_first:
                self._memory.tidy(self._step)
            raise
        self._step = draft.step
        if team.is_first:
            self._memory.tidy(self._step)
        if team.rank == 0:
            logger.debug("step %d was copied in %.2f s", draft.step, time.perf_counter() - began)

    def _team(self, group: dist.ProcessGroup | None) -> Team:
        return Team(self._memory, self._nodes, group)

    def _counts(self, wanted: bool) -> Copy | None:
        """On rank 0: the copy that the run folder names, if it is what the run continues from."""
        copy = read_record(self._checkpoints)
        if copy is None:
            return None
        other = not wanted and copy.attempt != self._attempt
        why = "another checkpoint was asked for" if other else outdated(self._checkpoints, copy)
        if why is not None:
            logger.info("the copy of step %d in memory is not used: %s", copy.step, why)
            return None
        return copy

    def _needed(self, items: Sequence[WriteItem], team: Team) -> list[int]:
        """Bytes of a copy on the node of each rank."""
        mine = sum(
            math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
            for item in items
            if item.tensor_data is not None
        )
        bytes_of = team.gather(mine)
        return [sum(bytes_of[r] for r in self._nodes.written_for(rank)) for rank in range(len(bytes_of))]

    def _make_room(self, hidden: Path, needed: int) -> None:
        self._memory.tidy(self._step)
        self._memory.need(needed)
        hidden.mkdir(mode=0o700)

    def _describe(self, written: list[dict[str, Digest]], draft: Draft, plan: SavePlan) -> dict[str, bytes]:
        """On rank 0: the files that every node gets."""
        small = draft.description(plan.groups)
        files = {name: digest for files in written for name, digest in files.items()}
        files |= {n: Digest(len(data), xxhash.xxh3_64(data).hexdigest()) for n, data in small.items()}
        if self._serial is None:
            self._serial = last_serial(self._checkpoints)
        return {**small, MANIFEST: manifest_bytes(draft.manifest(files, self._serial))}

    def _send(self, hidden: Path, written: list[dict[str, Digest]], team: Team) -> None:
        """Send each rank's files to the next node, which compares their checksums."""
        transfers = [
            Transfer(rank, partner, name, 0, digest.size)
            for rank, files in enumerate(written)
            if (partner := self._nodes.partner(rank)) is not None
            for name, digest in files.items()
        ]
        if not transfers:
            return
        prepared = []
        team.local(COPYING, lambda: prepared.extend(prepare(hidden, transfers, team.rank)))
        exchange(prepared, team.rank, team.group)
        team.local(COPYING, lambda: _compare(hidden, written, transfers, team.rank))

    def _complete(self, hidden: Path, small: dict[str, bytes], name: str) -> None:
        for file, data in small.items():
            write_file(hidden / file, data)
        hidden.rename(self._memory.folder / name)

    def _name(self, draft: Draft, manifest: bytes) -> None:
        """On rank 0, once all nodes have it: the run folder names it."""
        if draft.claim is not None:
            draft.claim.check()
        serial = 0 if self._serial is None else self._serial
        write_record(self._checkpoints, Copy(draft.step, identity_of(manifest), serial, self._attempt))


def _compare(
    folder: Path, written: list[dict[str, Digest]], transfers: Sequence[Transfer], rank: int
) -> None:
    for sender, receiver, name, _, _ in transfers:
        if receiver == rank and file_digest(folder / name) != written[sender][name]:
            raise EnvironmentProblem(f"{name} is not what rank {sender} sent: its checksum does not match")

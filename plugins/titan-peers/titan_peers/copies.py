"""Copies of a run's state; each rank's files are in the memory of its own node and of the next one."""

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

from titan_peers import KEPT, Peers
from titan_peers.memory import (
    Copy,
    Memory,
    forget,
    identity_of,
    outdated,
    read_record,
    write_record,
)
from titan_peers.nodes import Nodes, Team, Transfer, exchange, prepare
from titan_peers.sources import Sources
from titancli.checkpoint.format.disk import size_text, write_file
from titancli.checkpoint.format.hashed import Digest, file_digest
from titancli.checkpoint.format.manifest import MANIFEST, last_serial, manifest_bytes
from titancli.checkpoint.format.plan import SavePlan
from titancli.checkpoint.format.storage import Pieces, write_pieces
from titancli.checkpoint.save import Draft
from titancli.distributed.process_group import patient_group
from titancli.distributed.together import Ranks
from titancli.errors import EnvironmentProblem, TitanError

logger = logging.getLogger(f"titancli.plugins.{__name__}")

COPYING = "copying the state into memory"


class Copies:
    """Keeps the newest state of a run in the memory of its nodes, and finds it there. All methods are
    collective.

    A copy is a checkpoint whose files are spread over the nodes. It is valid once it is complete on all nodes
    and recorded in the run folder; until then the previous one is.
    """

    def __init__(
        self, root: Path, checkpoints: Path, run_id: str, attempt: int, *, interval: int = 1
    ) -> None:
        """Open this node's memory; collective.

        Args:
            root: a folder in memory, on every node.
            checkpoints: the run's folder of checkpoints, on the disk that all nodes share.
            attempt: the number of the run's attempt.
            interval: steps between two copies.

        Raises:
            EnvironmentProblem: the folder cannot be written on a node; on all ranks.
        """

        def open_memory() -> str:
            self._memory = Memory(root, run_id, checkpoints.parent)
            return self._memory.identity

        self._nodes = Nodes.of(Ranks().allgather_call(f"opening {root}", open_memory))
        self._checkpoints, self._attempt, self.interval = checkpoints, attempt, interval
        self._serial: int | None = None
        """On rank 0: the serial number of the newest checkpoint on the disk; None: not known."""
        self._step: int | None = None
        """The step of the valid copy, if there is one."""
        self._sources: Sources | None = None
        team = self._team(None)
        if team.is_first:
            self._memory.sweep()

    def newest(self, *, wanted: bool) -> Path | None:
        """Return a folder from which the valid copy can be loaded until `loaded` is called; None: there is
        no usable copy, and all copies have been discarded.

        Args:
            wanted: whether the run continues from its newest state. If not, this attempt was started from
                another checkpoint, and only copies that this attempt made are used.
        """
        team = self._team(patient_group())
        try:
            copy = team.broadcast_call("looking for a copy in memory", lambda: self._valid(wanted))
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
        """Return the folder that `newest` returned, until `loaded` or `discard` is called."""
        return self._sources.folder if self._sources is not None else None

    def loaded(self) -> bool:
        """Return whether the load, which has succeeded, was from a copy, and free the memory that it used."""
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
        """Invalidate all copies, and delete those on this node."""
        self._step = None
        Ranks().broadcast_call("discarding the copy in memory", lambda: forget(self._checkpoints))
        self._let_go()

    def _let_go(self) -> None:
        if self._sources is not None:
            self._sources.close()
            self._sources = None
        if self._team(None).is_first:
            self._memory.tidy(self._step)

    def end(self) -> None:
        """Delete everything, once the run has saved its state on the disk."""
        self.discard()
        Ranks().gather(None)  # other ranks of the node may still be deleting in it
        if self._team(None).is_first:
            self._memory.remove()

    def close(self) -> None:
        """Release the memory; its contents stay."""
        self._memory.close()

    def saved(self) -> None:
        """Note that a checkpoint was saved on the disk."""
        self._serial = None

    def reserve(self, pieces: Pieces, plan: SavePlan, group: dist.ProcessGroup | None) -> None:
        """Ensure that there is room for copies of these pieces.

        Raises:
            EnvironmentProblem: a node has too little memory; raised on all ranks.
            TitanError: an entry is not a tensor.
        """
        team = self._team(group)
        needed = self._needed(plan.agree(COPYING, pieces.items, team), team)
        team.on_nodes(COPYING, lambda: self._memory.need(KEPT * needed[team.rank] - self._memory.used()))
        if team.rank == 0:
            nodes = len(self._nodes.ranks)
            logger.info(
                "a copy of the state takes %s of memory on each node%s",
                size_text(max(needed)),
                "" if nodes > 1 else "; there is only one node, and if it is lost, so is the copy",
            )

    def make(self, pieces: Pieces, draft: Draft, plan: SavePlan, group: dist.ProcessGroup | None) -> None:
        """Copy the state; the new copy replaces the previous one.

        Raises:
            EnvironmentProblem: a node's memory is too small or cannot be written; raised on all ranks. The
                previous copy stays valid.
        """
        team, began = self._team(group), time.perf_counter()
        if draft.step == self._step:
            return
        draft.ranks = team.size
        items = plan.agree(COPYING, pieces.items, team)
        needed = self._needed(items, team)[team.rank]
        name = team.broadcast_call(COPYING, lambda: secrets.token_hex(4))
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
                lambda done: self._record(draft, small[MANIFEST]),
            )
        except TitanError:  # after any other error it is unknown whether this copy is valid
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

    def _valid(self, wanted: bool) -> Copy | None:
        """Return the copy that the run folder records, if the run continues from it; called on rank 0."""
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
        """Return the bytes of a copy on the node of each rank."""
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
        """Return the files that every node stores, by name; called on rank 0."""
        small = draft.description(plan.groups)
        files = {name: digest for files in written for name, digest in files.items()}
        files |= {n: Digest(len(data), xxhash.xxh3_64(data).hexdigest()) for n, data in small.items()}
        if self._serial is None:
            self._serial = last_serial(self._checkpoints)
        return {**small, MANIFEST: manifest_bytes(draft.manifest(files, self._serial))}

    def _send(self, hidden: Path, written: list[dict[str, Digest]], team: Team) -> None:
        """Send each rank's files to the next node, which verifies their checksums."""
        transfers = [
            Transfer(rank, partner, name, 0, digest.size)
            for rank, files in enumerate(written)
            if (partner := self._nodes.partner(rank)) is not None
            for name, digest in files.items()
        ]
        if not transfers:
            return
        prepared = []
        team.call(COPYING, lambda: prepared.extend(prepare(hidden, transfers, team.rank)))
        exchange(prepared, team.rank, team.group)
        team.call(COPYING, lambda: _compare(hidden, written, transfers, team.rank))

    def _complete(self, hidden: Path, small: dict[str, bytes], name: str) -> None:
        for file, data in small.items():
            write_file(hidden / file, data)
        hidden.rename(self._memory.folder / name)

    def _record(self, draft: Draft, manifest: bytes) -> None:
        """Record the copy in the run folder, once it is complete on all nodes; called on rank 0."""
        if draft.claim is not None:
            draft.claim.check()
        serial = 0 if self._serial is None else self._serial
        write_record(self._checkpoints, Copy(draft.step, identity_of(manifest), serial, self._attempt))


def build(config: Peers, *, checkpoints: Path, run_id: str, attempt: int) -> Copies:
    """Open the copies of a run; collective.

    Raises:
        EnvironmentProblem: the folder cannot be written on a node; on all ranks.
    """
    return Copies(config.folder, checkpoints, run_id, attempt, interval=config.interval)


def _compare(
    folder: Path, written: list[dict[str, Digest]], transfers: Sequence[Transfer], rank: int
) -> None:
    for sender, receiver, name, _, _ in transfers:
        if receiver == rank and file_digest(folder / name) != written[sender][name]:
            raise EnvironmentProblem(f"{name} is not what rank {sender} sent: its checksum does not match")

"""Copies of a run's state in the memory of its nodes. This file has the config and imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from annotated_types import Gt

from titancli import component, hookimpl

KEPT = 2
"""Copies in memory at once: the valid one, and the one that is being written."""


@component("copies", "peers", target="titan_peers.copies:build")
class Peers:
    """Copies in memory: each node keeps the state of its own ranks and of another node's, from which a run
    continues in seconds, also after the loss of a node."""

    interval: Annotated[int, Gt(0)] = 20
    """Steps between two copies."""
    folder: Path = Path("/dev/shm")
    """Folder in the memory of each node."""

    def recorded(self, checkpoints: Path) -> bool:
        """Return whether the run folder names a copy."""
        from titan_peers.memory import read_record

        return read_record(checkpoints) is not None

    def states(self, nodes: int) -> int:
        """Return how many times a node's share of the state is in its memory: twice its own ranks' and that
        of the previous node."""
        return KEPT * min(2, nodes)


@hookimpl
def titan_components() -> list[type]:
    return [Peers]

"""A run folder that is a local disk on several nodes is noticed before anything is trained."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.ranks import Ranks
from titancli.distributed.shared_folder import require_shared
from titancli.errors import EnvironmentProblem

pytestmark = pytest.mark.ranks


def probe(folders: Sequence[Path], nodes: Sequence[int]) -> tuple[str | None, list[str]]:
    """What a rank is told, and what is left in its folder; `nodes`: of each rank, by its number."""
    import torch.distributed as dist

    rank = dist.get_rank()
    folder, node = folders[rank], nodes[rank]
    told = None
    try:
        require_shared(folder, f"node{node}", first_of_node=rank == list(nodes).index(node), patience=1.0)
    except EnvironmentProblem as error:
        told = str(error)
    dist.barrier()
    return told, sorted(path.name for path in folder.glob(".probe-*"))


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name / "run" / "logs" for name in "abc"]
    for path in made:
        path.mkdir(parents=True)
    return made


def test_a_shared_folder_passes_and_nothing_is_left_in_it(ranks: Ranks, disks: list[Path]) -> None:
    assert ranks(3, probe, [disks[0]] * 3, [0, 0, 1]) == [(None, [])] * 3


def test_ranks_of_one_node_write_nothing(ranks: Ranks, disks: list[Path]) -> None:
    missing = disks[0] / "none"
    assert ranks(2, probe, [missing, missing], [0, 0]) == [(None, [])] * 2


def test_local_disks_are_named_by_their_hosts_on_every_rank(ranks: Ranks, disks: list[Path]) -> None:
    told = ranks(3, probe, [disks[0], disks[0], disks[1]], [0, 1, 2])
    for message, _ in told:
        assert message is not None and "is not shared: node2 and node0 do not see" in message
        assert "--run-dir on storage that all nodes share" in message
    assert [left for _, left in told] == [[]] * 3


def test_a_folder_that_cannot_be_written_on_one_node_is_named(ranks: Ranks, disks: list[Path]) -> None:
    told = ranks(2, probe, [disks[0], disks[1] / "none"], [0, 1])
    for message, _ in told:
        assert message is not None and "cannot be written on node1: No such file or directory" in message
    assert told[0][1] == []


def test_a_disk_that_shows_files_late_is_waited_for(ranks: Ranks, disks: list[Path]) -> None:
    assert ranks(2, late_probe, disks[:2]) == [None, None]


def late_probe(folders: Sequence[Path]) -> str | None:
    """The same, where each rank sees the other's folder, but only after a while."""
    import torch.distributed as dist

    from titancli.distributed import shared_folder

    rank = dist.get_rank()
    seen, begin = shared_folder._has, time.monotonic()

    def has(path: Path, text: str) -> bool:
        other = folders[1 - rank] / path.name
        return seen(other, text) and time.monotonic() - begin > 0.4

    shared_folder._has = has
    try:
        require_shared(folders[rank], f"node{rank}", first_of_node=True, patience=30.0)
    except EnvironmentProblem as error:
        return str(error)
    finally:
        shared_folder._has = seen
    return None

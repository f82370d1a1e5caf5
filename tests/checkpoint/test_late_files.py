"""A network disk shows what another node wrote only after a while: saves, loads and restarts wait for it."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.tensors import RUN
from titancli.checkpoint import load_checkpoint, save_checkpoint
from titancli.checkpoint.format import files
from titancli.checkpoint.format.manifest import faults, newest_good, read_manifest
from titancli.distributed import shared_folder
from titancli.errors import TitanError

LATE = 0.7
OTHERS = "rank-00001.safetensors"


def _tensors(rank: int) -> dict[str, torch.Tensor]:
    return {f"model.of_{rank}": torch.full((3, 5), float(rank + 1))}


@contextmanager
def _patience(seconds: float) -> Iterator[None]:
    usual, shared_folder.PATIENCE = shared_folder.PATIENCE, seconds
    try:
        yield
    finally:
        shared_folder.PATIENCE = usual


def _shown_late(path: Path, after: float | None) -> None:
    """Hide a file or a folder; it comes back in its own time, or never."""
    hidden = path.parent.parent / f"hidden-{path.name}"
    path.rename(hidden)
    if after is not None:
        threading.Timer(after, hidden.rename, [path]).start()


def _save(folder: str, after: float | None, patience: float) -> str:
    """Save, where rank 0 does not see at once what rank 1 has written."""
    import torch.distributed as dist

    from titancli.checkpoint import save

    write = save.write_pieces

    def written(hidden: Path, *given: Any) -> Any:
        found = write(hidden, *given)
        if dist.get_rank() == 1:
            _shown_late(hidden / OTHERS, after)
        return found

    save.write_pieces = written
    try:
        with _patience(patience):
            save_checkpoint(Path(folder), _tensors(dist.get_rank()), {}, lock_text="", run_id=RUN)
    except TitanError as error:
        return error.message
    finally:
        save.write_pieces = write
    return "saved"


@pytest.mark.ranks
def test_a_save_waits_for_the_other_ranks_files(ranks: Any, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints/step-1"
    assert ranks(2, _save, str(folder), LATE, 30.0) == ["saved"] * 2
    assert not faults(folder, read_manifest(folder))


@pytest.mark.ranks
def test_a_save_whose_file_never_comes_fails_by_its_name(ranks: Any, tmp_path: Path) -> None:
    for told in ranks(2, _save, str(tmp_path / "checkpoints/step-1"), None, 0.3):
        assert f"differs from what was written: {OTHERS} is missing" in told
    assert not (tmp_path / "checkpoints/step-1").exists()


def _load(folder: str, late: str, whose: int, after: float | None, patience: float) -> str:
    """Load, each rank from a folder of its own; one of them is late."""
    import torch.distributed as dist

    rank = dist.get_rank()
    own = Path(folder) / f"node{rank}/step-1"
    if rank == whose:
        _shown_late(own / late if late else own, after)
    dist.barrier()
    tensors = {name: torch.zeros_like(tensor) for name, tensor in _tensors(1 - rank).items()}
    try:
        with _patience(patience):
            load_checkpoint(own, tensors)
    except TitanError as error:
        return error.message
    return "loaded" if all(torch.equal(tensors[n], t) for n, t in _tensors(1 - rank).items()) else "wrong"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("late", "whose"),
    [(OTHERS, 0), ("rank-00000.safetensors", 1), ("manifest.json", 1), ("metadata.json", 1), ("", 1)],
)
def test_a_load_waits_for_what_a_node_does_not_see_yet(
    ranks: Any, tmp_path: Path, late: str, whose: int
) -> None:
    _on_both_nodes(ranks, tmp_path)
    assert ranks(2, _load, str(tmp_path), late, whose, LATE, 30.0) == ["loaded"] * 2


def _on_both_nodes(ranks: Any, folder: Path) -> None:
    assert ranks(2, _save, str(folder / "node0/step-1"), 0.0, 30.0) == ["saved"] * 2
    shutil.copytree(folder / "node0", folder / "node1")


@pytest.mark.ranks
@pytest.mark.parametrize(("late", "whose"), [(OTHERS, 0), ("rank-00000.safetensors", 1), ("", 1)])
def test_a_load_does_not_wait_for_ever(ranks: Any, tmp_path: Path, late: str, whose: int) -> None:
    _on_both_nodes(ranks, tmp_path)
    for told in ranks(2, _load, str(tmp_path), late, whose, None, 0.3):
        assert f"node{whose}/step-1" in told and ("is missing" in told or "read" in told), told


def test_one_rank_waits_for_nothing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "step-1", _tensors(0), {}, lock_text="", run_id=RUN)
    (tmp_path / "step-1/rank-00000.safetensors").unlink()
    began = time.monotonic()
    with pytest.raises(TitanError, match="is missing"):
        load_checkpoint(tmp_path / "step-1", _tensors(0))
    assert time.monotonic() - began < shared_folder.PATIENCE


def test_who_looks_for_the_newest_waits_for_its_files_as_well(tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path / f"c/step-{step}", _tensors(0), {}, lock_text="", run_id=RUN)
    _shown_late(tmp_path / "c/step-2/rank-00000.safetensors", LATE)
    assert newest_good(tmp_path / "c", verify="size") == tmp_path / "c/step-1"
    with files.waiting_for_late_files(30):
        assert newest_good(tmp_path / "c", verify="size") == tmp_path / "c/step-2"
    assert files._waits == []

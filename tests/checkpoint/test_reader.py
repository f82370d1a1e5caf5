"""Which rank reads what, and that all of it is checked, needed or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tests.checkpoint.tensors import RUN
from titancli.checkpoint import load_checkpoint, save_checkpoint
from titancli.checkpoint.format.hashed import Digest
from titancli.checkpoint.format.layout import Chunk, TensorLayout
from titancli.checkpoint.format.reader import Reader
from titancli.errors import EnvironmentProblem

FILES = {f"rank-{i}.safetensors": Digest(100 - i, "0" * 16) for i in range(4)}


def _checks(*needs: list[tuple[int, int]], checksums: tuple[str, ...] = ("0" * 16,)) -> list[list[str]]:
    """Who checks which file, where ranks need these ranges of a tensor that lies in files of 4 elements."""
    chunks = tuple(Chunk((4 * i,), (4,), file, "a", checksums) for i, file in enumerate(FILES))
    reader = Reader(Path(), {"a": TensorLayout("F32", (16,), chunks)}, FILES)
    stored = reader.read_metadata().state_dict_metadata["a"]
    plans = []
    for ranges in needs:
        wanted = [ChunkStorageMetadata(torch.Size([a]), torch.Size([b - a])) for a, b in ranges]
        plans.append(LoadPlan(create_read_items_for_chunk_list("a", stored, wanted)))
    return [[file[5:6] for file in plan.storage_data] for plan in reader.prepare_global_plan(plans)]


@pytest.mark.parametrize(
    "needs, checks",
    [
        ([[(0, 8)], [(8, 16)]], [["0", "1"], ["2", "3"]]),
        ([[(8, 16)], [(0, 8)]], [["2", "3"], ["0", "1"]]),
        ([[(0, 16)], [(0, 16)]], [["0", "3"], ["1", "2"]]),  # replicas share the work
        ([[(0, 3)], [(3, 16)]], [["0"], ["1", "2", "3"]]),  # most of it counts
        ([[], [(0, 4)]], [["1", "2"], ["0", "3"]]),  # what nobody needs is checked too
    ],
)
def test_a_file_is_checked_by_the_rank_that_needs_most_of_it(
    needs: list[list[tuple[int, int]]], checks: list[list[str]]
) -> None:
    assert _checks(*needs) == checks


def test_a_file_without_checksums_of_its_pieces_is_checked_by_all_who_need_it() -> None:
    assert _checks([(0, 3)], [(3, 16)], checksums=()) == [["0"], ["0", "1", "2", "3"]]


def test_what_is_not_asked_for_is_checked_all_the_same(tmp_path: Path) -> None:
    saved = {"model.a": torch.ones(9), "optimizer.a.step": torch.ones(1 << 22), "model.b": torch.ones(9)}
    save_checkpoint(tmp_path / "step-1", saved, {}, lock_text="", run_id=RUN)
    weights = {"model.a": torch.zeros(9), "model.b": torch.zeros(9)}
    load_checkpoint(tmp_path / "step-1", weights)
    assert all(tensor.eq(1).all() for tensor in weights.values())
    path = tmp_path / "step-1" / "rank-00000.safetensors"
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\1")
    with pytest.raises(EnvironmentProblem, match=r"rank-00000\.safetensors is damaged"):
        load_checkpoint(tmp_path / "step-1", weights)
    load_checkpoint(tmp_path / "step-1", weights, verify="size")

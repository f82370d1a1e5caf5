"""What a rank reads: its own bytes, each once, hashed on their way; and checkpoints of earlier formats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint.tensors import RUN
from titancli.checkpoint import load_checkpoint, save_checkpoint
from titancli.checkpoint.format import hashed, metadata, reader, storage
from titancli.checkpoint.format.manifest import read_manifest
from titancli.checkpoint.format.metadata import open_metadata
from titancli.checkpoint.format.reader import Part, Reader
from titancli.errors import EnvironmentProblem


def test_what_is_not_asked_for_is_not_read(tmp_path: Path) -> None:
    saved = {"model.a": torch.ones(9), "optimizer.a.step": torch.ones(1 << 22), "model.b": torch.ones(9)}
    save_checkpoint(tmp_path / "step-1", saved, {}, lock_text="", run_id=RUN)
    weights = {"model.a": torch.zeros(9), "model.b": torch.zeros(9)}
    load_checkpoint(tmp_path / "step-1", weights)
    assert all(tensor.eq(1).all() for tensor in weights.values())
    path = tmp_path / "step-1" / "rank-00000.safetensors"
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\1")
    load_checkpoint(tmp_path / "step-1", weights)
    everything = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    with pytest.raises(EnvironmentProblem, match=r"rank-00000\.safetensors is damaged"):
        load_checkpoint(tmp_path / "step-1", everything)
    load_checkpoint(tmp_path / "step-1", everything, verify="size")


BOXES = [
    ((0, 0, 0), (5, 300, 7)),
    ((1, 0, 0), (2, 300, 7)),
    ((0, 17, 0), (5, 3, 7)),
    ((2, 299, 3), (3, 1, 2)),
    ((0, 0, 6), (5, 300, 1)),
    ((4, 0, 0), (1, 100, 7)),
]


@pytest.mark.parametrize("room", [1 << 25, 300])
def test_any_part_is_read_in_little_memory_and_in_few_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    for module in (hashed, metadata, storage):
        monkeypatch.setattr(module, "PIECE", 64)
    monkeypatch.setattr(reader, "_ROOM", room)
    whole = torch.randn(5, 300, 7)
    folder = tmp_path / "step-1"
    save_checkpoint(folder, {"model.a": whole}, {}, lock_text="", run_id=RUN)
    files = read_manifest(folder).files
    layouts = open_metadata(folder, files).layouts({"model.a": None})
    for offsets, sizes in BOXES:
        made = torch.zeros(sizes, dtype=torch.float64)  # so that it cannot be read into
        reading = Reader(folder, layouts, files)
        reading.fill([Part("model.a", (offsets, sizes), made)])
        wanted = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        assert torch.equal(made, wanted.double())
        assert reading._scratch.numel() <= room + 2 * 64
        if room > 300 and sizes[2] > 1:  # of single numbers of each row all is read
            ranges = reading.ranges([Part("model.a", (offsets, sizes), made)])
            assert sum(high - low for _, low, high in ranges) <= 4 * made.numel() + 128 * sizes[0]

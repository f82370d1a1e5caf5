"""Files that are hashed on their way: each byte once, in order, whatever the sizes of the pieces."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import xxhash

from tests.checkpoint.tensors import same, save, zeros
from titancli.checkpoint import load_checkpoint
from titancli.checkpoint.format.hashed import BLOCK, Digest, HashedReader, HashedWriter, file_digest
from titancli.errors import EnvironmentProblem

SIZES = [0, 1, 7, 1 << 16, (1 << 16) - 1, BLOCK, 2 * BLOCK + 5, 3, 3 * BLOCK, 12]


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(0).randbytes(sum(SIZES))


def digest_of(data: bytes) -> Digest:
    return Digest(len(data), xxhash.xxh3_64(data).hexdigest())


def test_what_is_written_is_what_is_hashed(tmp_path: Path, data: bytes) -> None:
    scratch = bytearray(max(SIZES))  # used again for each piece, as conversions do
    start = 0
    with HashedWriter(tmp_path / "file") as file:
        for size in SIZES:
            scratch[:size] = data[start : start + size]
            file.write(memoryview(scratch)[:size])
            file.settle()
            start += size
        assert file.finish() == digest_of(data)
    assert (tmp_path / "file").read_bytes() == data
    assert file_digest(tmp_path / "file") == digest_of(data)


def test_what_is_read_is_what_is_hashed(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    pieces = [bytearray(size) for size in SIZES]
    with HashedReader(tmp_path / "file") as file:
        for piece in pieces[:4]:
            file.readinto(memoryview(piece))
        file.skip(SIZES[4] + SIZES[5], memoryview(bytearray(1000)))
        for piece in pieces[6:]:
            file.readinto(memoryview(piece))
        assert file.digest() == digest_of(data)
    ends = [sum(SIZES[: i + 1]) for i in range(len(SIZES))]
    for index in (*range(4), *range(6, len(SIZES))):
        assert pieces[index] == data[ends[index] - SIZES[index] : ends[index]]


def test_a_file_that_ends_too_soon_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(BLOCK))
    with HashedReader(tmp_path / "file") as file:
        file.readinto(memoryview(bytearray(3 * BLOCK)))
        with pytest.raises(EnvironmentProblem, match="file is damaged: it ends at byte 4194304"):
            file.digest()


def test_a_disk_that_cannot_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(2 * BLOCK))

    def broken(*given: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(EnvironmentProblem, match="file cannot be read: Input/output error"):
        file_digest(tmp_path / "file")


def test_a_load_that_verifies_reads_each_byte_of_the_data_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = save(tmp_path / "step-1")
    path = tmp_path / "step-1" / "rank-00000.safetensors"
    identity = os.stat(path).st_ino
    really = os.preadv
    read: list[tuple[int, int]] = []

    def counting(file: int, buffers: list[memoryview], offset: int) -> int:
        count = really(file, buffers, offset)
        if os.fstat(file).st_ino == identity:
            read.append((offset, offset + count))
        return count

    monkeypatch.setattr(os, "preadv", counting)
    monkeypatch.setattr("mmap.mmap", None)  # nor is it mapped
    loaded = zeros(tensors)
    load_checkpoint(tmp_path / "step-1", loaded)
    assert same(loaded, tensors)
    read.sort()
    assert [start for start, _ in read] == [0, *(end for _, end in read[:-1])]
    assert read[-1][1] == path.stat().st_size

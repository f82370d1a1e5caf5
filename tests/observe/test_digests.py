"""The files of digests: written in place, read whatever has happened to them."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from titan_proof.digests import differing_values, read_digests, read_starts
from titancli.errors import EnvironmentProblem
from titancli.observe.digests import RECORD, DigestWriter, path_of

NAMES = ["a", "b", "c"]


def writer(folder: Path, attempt: int = 1, rank: int = 0, world: int = 1, **more: Any) -> DigestWriter:
    header = {"attempt": attempt, "restart": 0, "rank": rank, "world": world, "dp_rank": rank}
    return DigestWriter(folder, {**header, "mesh": {"dp_shard": world}, "names": NAMES, **more})


def fill(to: DigestWriter, *steps: int, **changed: Any) -> None:
    for step in steps:
        values = {"loss": float(step), "grad_norm": 0.5, "skipped": 0, "rows": 2**64 - step}
        to.write(step, **{**values, "gradients": (step, 2**32 - 1), "weights": (7, 8), **changed})
    to.close()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    fill(writer(tmp_path), 1, 2, 3)
    fill(writer(tmp_path, 2), 4, loss=float("nan"), skipped=1)
    found = read_digests(tmp_path)
    assert list(found) == [1, 2, 3, 4] and RECORD.itemsize == 44
    assert (found[2].loss, found[2].grad_norm, found[2].rows, found[2].skipped) == (2, 0.5, 2**64 - 2, False)
    assert found[2].ranks == {0: ((2, 2**32 - 1), (7, 8))} and found[4].skipped
    assert differing_values(found[4], found[4]) == []  # NaN is the same as NaN
    assert read_digests(tmp_path / "none") == {}


def test_the_weights_that_attempts_began_with_are_read(tmp_path: Path) -> None:
    for attempt, step in ((1, 1), (2, 5), (3, 3)):
        for rank in (0, 1):
            one = writer(tmp_path, attempt, rank, world=2)
            one.start_with((attempt, rank), sampled=rank == 1)
            fill(one, step)
    found = read_starts(tmp_path)
    assert {step: start.ranks for step, start in found.items()} == {
        0: {0: (1, 0), 1: (1, 1)},
        2: {0: (3, 0), 1: (3, 1)},  # it has repeated what came after
    }
    assert found[0].layout == read_digests(tmp_path)[1].layout and found[0].layout.sampled
    fill(writer(tmp_path, 4), 1)  # of a rank that has not said
    assert list(read_starts(tmp_path)) == [0, 2]


def test_a_resumed_run_counts_for_the_steps_that_it_repeats(tmp_path: Path) -> None:
    fill(writer(tmp_path), *range(1, 9))
    fill(writer(tmp_path, 2), 5, 6, loss=50.0)
    fill(writer(tmp_path, 10), 6, loss=60.0)  # after 2, not before it
    found = read_digests(tmp_path)
    assert {step: digest.loss for step, digest in found.items()} == {1: 1, 2: 2, 3: 3, 4: 4, 5: 50, 6: 60}
    assert {step: digest.loss for step, digest in read_digests(tmp_path, 4, 5).items()} == {4: 4, 5: 50}
    assert list(read_digests(tmp_path, 6)) == [6] and read_digests(tmp_path, 7, 8) == {}
    fill(writer(tmp_path, 11), 1, loss=0.0)  # from scratch
    assert list(read_digests(tmp_path)) == [1]


def test_a_file_cut_off_at_any_byte_has_whole_steps_only(tmp_path: Path) -> None:
    fill(writer(tmp_path), 1, 2, 3)
    path = path_of(tmp_path, 1, 0, 0)
    data = path.read_bytes()
    begin = len(data) - 3 * RECORD.itemsize
    for size in range(len(data)):
        path.write_bytes(data[:size])
        assert len(read_digests(tmp_path)) == max(0, size - begin) // RECORD.itemsize


def test_ranks_are_joined_and_a_step_that_one_has_not_written_is_left_out(tmp_path: Path) -> None:
    fill(writer(tmp_path, rank=0, world=3), 1, 2)
    fill(writer(tmp_path, rank=1, world=3), 1, rows=5)
    assert read_digests(tmp_path) == {}  # the third has written nothing
    fill(writer(tmp_path, rank=2, world=3, dp_rank=1), 1, rows=5)
    found = read_digests(tmp_path)
    assert list(found) == [1] and found[1].rows == 4 and list(found[1].ranks) == [0, 1, 2]


def test_a_full_disk_leaves_a_hole_is_reported_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, to = os.pwrite, writer(tmp_path)

    def full(file: int, data: bytes, place: int) -> int:
        if failing:
            real(file, data[:13], place)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, place)

    monkeypatch.setattr(os, "pwrite", full)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 7):
            failing = step in (3, 4)
            to.write(step, loss=1.0, gradients=(step, 0))
    to.close()
    assert [record.getMessage().count("No space left") for record in caplog.records] == [1]
    assert list(read_digests(tmp_path)) == [1, 2, 5, 6]


def test_a_folder_that_cannot_be_written_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "digests").write_text("in the way")
    fill(writer(tmp_path), 1, 2)
    assert len(caplog.records) == 1 and "the run continues without it" in caplog.text


@pytest.mark.parametrize("line", [b'{"format": 1}\n', b"[]\n", b"text\n"])
def test_a_file_of_another_version_is_refused(tmp_path: Path, line: bytes) -> None:
    fill(writer(tmp_path), 1)
    path_of(tmp_path, 1, 0, 0).write_bytes(line + bytes(40))
    with pytest.raises(EnvironmentProblem, match="no digests that this version of titan can read"):
        read_digests(tmp_path)

"""The words for a disk, or a machine, that refuses a write."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from titancli.checkpoint.format.disk import refusal
from titancli.errors import EnvironmentProblem
from titancli.observe.profiler import is_out_of_memory
from titancli.runs import write_atomically


@pytest.fixture
def no_inodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every disk have room for bytes, and for no further file."""
    real = os.statvfs(".")
    full = os.statvfs_result([*real[:5], 1000, 0, 0, *real[8:]])
    monkeypatch.setattr(os, "statvfs", lambda folder: full)


def told(number: int, folder: Path) -> EnvironmentProblem:
    error = OSError(number, os.strerror(number))
    return refusal(error, folder / "step-2", 10, kept="Earlier ones are safe.", remedy="free some space")


def test_out_of_inodes_is_named(tmp_path: Path, no_inodes: None) -> None:
    error = told(errno.ENOSPC, tmp_path)
    assert "all 1,000 inodes of that disk are in use" in error.message and "df -i" in str(error.hint)
    assert "bytes" not in error.message


def test_room_for_files_is_no_matter(tmp_path: Path) -> None:
    error = told(errno.ENOSPC, tmp_path)
    assert "It needs 10 bytes" in error.message and "inodes" not in error.message


def test_record_without_inodes(tmp_path: Path, no_inodes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with pytest.raises(EnvironmentProblem, match="inodes"):
        write_atomically(tmp_path / "run.json", "{}")


def test_out_of_memory_is_named(tmp_path: Path) -> None:
    error = told(errno.ENOMEM, tmp_path)
    assert "out of memory" in str(error.hint) and "writable" not in str(error.hint)
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(OSError(errno.ENOMEM, "no memory"))
    assert not is_out_of_memory(OSError(errno.ENOSPC, "no room"))

"""A large corpus is told from others by every byte of it, and is read only once for that."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from tests.data.helpers import make
from titancli import fingerprint
from titancli.data import TextFiles
from titancli.errors import EnvironmentProblem
from titancli.fingerprint import chunk_sums


@pytest.fixture(autouse=True)
def small_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything above 1 KiB is large."""
    monkeypatch.setenv("TITAN_CACHE", str(tmp_path / "cache"))
    for name, size in (("WHOLE_BYTES", 1024), ("CHUNK_BYTES", 512), ("BLOCK_BYTES", 128), ("END_BYTES", 64)):
        monkeypatch.setattr(fingerprint, name, size)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in "ab":
        (folder / name).write_text(name * 1500)
    return folder


def edit_in_the_middle(file: Path) -> None:
    text = file.read_text()
    file.write_text(text[:700] + "x" + text[701:])


def test_an_edit_in_the_middle_of_a_large_corpus_is_noticed(corpus: Path) -> None:
    config = TextFiles(paths=[corpus])
    state = make(config).state_dict()
    assert state["data"]["contents"].startswith("merkle:")
    make(config).load_state_dict(state)
    edit_in_the_middle(corpus / "b")
    with pytest.raises(EnvironmentProblem, match="contents was merkle:"):
        make(config).load_state_dict(state)


def test_a_checkpoint_from_before_knows_a_large_corpus_by_its_ends(corpus: Path) -> None:
    dataset = make(TextFiles(paths=[corpus]))
    files = [(str(file), file.name, 1500) for file in sorted(corpus.iterdir())]
    state = dataset.state_dict()
    old = {**state, "data": {**state["data"], "contents": fingerprint.fingerprint(files)}}
    dataset.load_state_dict(old)
    assert dataset.state_dict() == state, "the next checkpoint has the new digest"
    (corpus / "a").write_text("z" * 1500)
    with pytest.raises(EnvironmentProblem, match="contents was"):
        make(TextFiles(paths=[corpus])).load_state_dict(old)


def test_a_file_is_read_again_only_when_its_size_or_time_changes(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(corpus / "a")
    sums = chunk_sums(file)
    assert len(sums) == 3 * fingerprint.SUM_DIGITS
    before = os.stat(file)
    with monkeypatch.context() as broken:
        broken.setattr(fingerprint, "file_sums", lambda path: pytest.fail("read again"))
        assert chunk_sums(file) == sums
    edit_in_the_middle(corpus / "a")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    changed = chunk_sums(file)
    assert changed[:16] == sums[:16] and changed[16:32] != sums[16:32] and changed[32:] == sums[32:]


def test_a_cache_that_is_damaged_or_cannot_be_written_changes_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sums = chunk_sums(str(corpus / "a"))
    [entry] = (tmp_path / "cache" / "checksums").iterdir()
    entry.write_text(entry.read_text()[:20])
    assert chunk_sums(str(corpus / "a")) == sums
    monkeypatch.setenv("TITAN_CACHE", str(corpus / "a"))
    assert chunk_sums(str(corpus / "a")) == sums
    assert "checksums cannot be kept" in caplog.text


def test_a_full_disk_of_the_cache_changes_nothing(corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # nothing can be written, as on a full disk
    try:
        sums = chunk_sums(str(corpus / "a"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "checksums cannot be kept" in caplog.text
    assert chunk_sums(str(corpus / "a")) == sums

"""Checkpoints under URLs: whole or absent, never another run's, and back again bit for bit."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry as registry

from tests.checkpoint.tensors import RUN, same, save, some_tensors, zeros
from titancli.checkpoint import load_checkpoint, newest_good, read_manifest
from titancli.checkpoint.format.manifest import CHECKSUM, FORMAT, faults, steps
from titancli.checkpoint.remote import leases
from titancli.checkpoint.remote.fsspec_store import FsspecStore
from titancli.checkpoint.remote.leases import mark_name
from titancli.checkpoint.remote.requests import Unreachable
from titancli.checkpoint.remote.store import RemotePath, at
from titancli.checkpoint.remote.transfer import newest_of_both, probe, upload
from titancli.checkpoint.remote.uploads import Uploads
from titancli.errors import EnvironmentProblem, TitanError


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A folder of a store in this process's memory."""
    yield f"memory://{tmp_path.name}/runs/r"
    fsspec.filesystem("memory").store.clear()


def _objects(url: str) -> dict[str, bytes]:
    store, key = fsspec.core.url_to_fs(url)
    return {name.removeprefix(f"{key}/"): store.cat_file(name) for name in store.find(key)}


def _put(url: str, name: str, data: bytes) -> None:
    store, key = fsspec.core.url_to_fs(url)
    store.pipe_file(f"{key}/{name}", data)


def _saved(folder: Path, *numbers: int) -> None:
    for number in numbers:
        save(folder / f"step-{number}", seed=number)


def _take(url: str, folder: Path, run_id: str | None = RUN) -> tuple[Path | None, list[str]]:
    lines: list[str] = []
    found = newest_of_both(at(url), folder, run_id=run_id, rejected=lines.append, say=lambda line: None)
    return found, lines


def test_what_goes_up_comes_back_bit_for_bit(tmp_path: Path, url: str) -> None:
    _saved(tmp_path / "here", 4)
    upload(tmp_path / "here/step-4", at(url) / "step-4")
    here = {path.name: path.read_bytes() for path in (tmp_path / "here/step-4").iterdir()}
    assert _objects(f"{url}/step-4") == here
    found, lines = _take(url, tmp_path / "there")
    assert (found, lines) == (tmp_path / "there/step-4", [])
    assert {path.name: path.read_bytes() for path in found.iterdir()} == here
    loaded = zeros(some_tensors(4))
    load_checkpoint(found, loaded)
    assert same(loaded, some_tensors(4))
    assert [path.name for path in (tmp_path / "there").iterdir() if path.name != ".taking"] == ["step-4"]


@pytest.mark.parametrize("after", range(6))
def test_an_upload_that_is_cut_off_anywhere_is_no_checkpoint(
    tmp_path: Path, url: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _saved(tmp_path, 2, 4)
    upload(tmp_path / "step-2", at(url) / "step-2")
    writes = 0
    for name in ("put", "write_bytes"):
        original = getattr(RemotePath, name)

        def broken(self: RemotePath, *given: Any, original: Any = original, **more: Any) -> None:
            nonlocal writes
            if writes == after:
                raise Unreachable("the line is dead")
            writes += 1
            original(self, *given, **more)

        monkeypatch.setattr(RemotePath, name, broken)
    assert len(list((tmp_path / "step-4").iterdir())) == 5
    with pytest.raises(Unreachable):
        upload(tmp_path / "step-4", at(url) / "step-4")
    monkeypatch.undo()
    assert newest_good(at(url)) is not None
    found, lines = _take(url, tmp_path / "there")
    assert found == tmp_path / "there/step-2"
    # A store has no empty folders: of nothing that arrived nothing is told.
    assert [line for line in lines if "step-4" in line and "manifest.json" in line] == lines
    assert len(lines) == (1 if after > 1 else 0)
    upload(tmp_path / "step-4", at(url) / "step-4")
    assert not faults(at(url) / "step-4", read_manifest(at(url) / "step-4"))


def test_a_damaged_checkpoint_does_not_replace_what_the_store_has(tmp_path: Path, url: str) -> None:
    for seed, folder in enumerate((tmp_path / "first", tmp_path / "again")):
        save(folder / "step-4", seed=seed)
    upload(tmp_path / "first/step-4", at(url) / "step-4")
    there = _objects(f"{url}/step-4")
    file = tmp_path / "again/step-4/rank-00000.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(TitanError, match=r"again/step-4 is damaged \(rank-0.*stays as it was"):
        upload(tmp_path / "again/step-4", at(url) / "step-4")
    assert _objects(f"{url}/step-4") == there
    file.write_bytes(data)
    upload(tmp_path / "again/step-4", at(url) / "step-4")


@pytest.mark.parametrize("harm", ["flipped", "short", "missing", "extra", "manifest"])
def test_a_bad_one_is_named_in_a_line_and_the_one_before_taken(tmp_path: Path, url: str, harm: str) -> None:
    _saved(tmp_path, 2, 4)
    for step in ("step-2", "step-4"):
        upload(tmp_path / step, at(url) / step)
    name = {"extra": "other.txt", "manifest": "manifest.json"}.get(harm, "rank-00000.safetensors")
    data = _objects(f"{url}/step-4").get(name, b"hello")
    if harm in ("flipped", "manifest"):
        data = data[:-1] + bytes([data[-1] ^ 1])
    _put(f"{url}/step-4", name, data[:-1] if harm == "short" else data)
    if harm == "missing":
        store, key = fsspec.core.url_to_fs(url)
        store.rm_file(f"{key}/step-4/{name}")
    found, lines = _take(url, tmp_path / "there")
    assert found == tmp_path / "there/step-2"
    [line] = lines
    assert "step-4 is skipped" in line and name in line and url in line
    assert not [path for path in (tmp_path / "there").iterdir() if "step-4" in path.name]


def test_the_newer_one_is_taken_wherever_it_lies(tmp_path: Path, url: str) -> None:
    here = tmp_path / "here"
    _saved(here, 2, 4)
    upload(here / "step-4", at(url) / "step-4")
    shutil.rmtree(here / "step-4")
    assert _take(url, here) == (here / "step-4", [])
    _saved(here, 6)
    assert _take(url, here) == (here / "step-6", [])
    (here / "step-6/metadata.json").write_text("{}")
    found, [line] = _take(url, here)
    assert found == here / "step-4" and "step-6" in line
    _, [line] = _take(url, tmp_path / "there", run_id="another")
    assert "step-4 is skipped: it was written by another run" in line


def test_a_damaged_folder_gives_way_to_the_stores(tmp_path: Path, url: str) -> None:
    _saved(tmp_path, 4)
    upload(tmp_path / "step-4", at(url) / "step-4")
    (tmp_path / "step-4/metadata.json").write_text("{}")
    found, [line] = _take(url, tmp_path)
    assert found == tmp_path / "step-4" and "metadata.json" in line
    assert not faults(found, read_manifest(found))


def test_another_runs_checkpoint_is_left_alone(tmp_path: Path, url: str) -> None:
    save(tmp_path / "other/step-4", run_id="other")
    upload(tmp_path / "other/step-4", at(url) / "step-4")
    before = _objects(url)
    _saved(tmp_path / "mine", 4)
    with pytest.raises(TitanError, match="written by another run"):
        upload(tmp_path / "mine/step-4", at(url) / "step-4")
    assert _objects(url) == before

    _, rest = before["step-4/manifest.json"].decode().split("\n", 1)
    newer = rest.replace(f'"format": {FORMAT}', '"format": 99')
    _put(url, "step-4/manifest.json", CHECKSUM.put(newer).encode())
    before = _objects(url)
    with pytest.raises(TitanError, match="has format 99, but this version of titan reads"):
        upload(tmp_path / "mine/step-4", at(url) / "step-4")
    assert _objects(url) == before


def _uploads(folder: Path, url: str, keep: int, limit: float = 60) -> Uploads:
    return Uploads(folder, at(url, limit), RUN, keep)


def test_uploads_follow_the_folder_and_keep_as_many_of_this_run(tmp_path: Path, url: str) -> None:
    folder = tmp_path / "here"
    save(tmp_path / "other/step-1", run_id="other")
    upload(tmp_path / "other/step-1", at(url) / "step-1")
    uploads = _uploads(folder, url, keep=2)
    for step in (2, 4, 6):
        _saved(folder, step)
        uploads.wake()
        uploads.settle()
    assert sorted(path.name for path in steps(at(url))) == ["step-1", "step-4", "step-6"]
    save(folder / "step-6", seed=7)  # a run that went back does a step again
    uploads.finish()
    assert _objects(f"{url}/step-6") == {p.name: p.read_bytes() for p in (folder / "step-6").iterdir()}


def test_a_store_that_has_folders_keeps_no_empty_one(tmp_path: Path) -> None:
    uploads = _uploads(tmp_path / "here", f"file://{tmp_path}/store", keep=1)
    for step in (1, 2, 4):
        _saved(tmp_path / "here", step)
        uploads.finish()
        if step == 1:
            (tmp_path / "store/step-1/notes.txt").write_text("a user's own")
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["step-1", "step-4"]


def test_what_an_upload_that_was_cut_off_left_is_deleted_with_the_next(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else: what merely looks like half a checkpoint may be a whole one."""
    _saved(tmp_path, 2, 4)
    mark = mark_name("step-2", RUN)
    own = {"notes/step-2.txt": b"a user's own", "step-1/rank-00000.safetensors": b"half of whose?"}
    for name, data in own.items():
        _put(url, name, data)
    with monkeypatch.context() as patch, pytest.raises(Unreachable):
        patch.setattr("titancli.checkpoint.remote.transfer.manifest_bytes", _no)
        upload(tmp_path / "step-2", at(url) / "step-2")
    assert mark in _objects(url) and "step-2/metadata.json" in _objects(url)
    shutil.rmtree(tmp_path / "step-2")
    _uploads(tmp_path, url, keep=0).finish()
    assert {name for name in _objects(url) if not name.startswith("step-4")} == set(own)
    assert [path.name for path in steps(at(url))] == ["step-4"]


def test_what_another_run_is_uploading_is_neither_deleted_nor_overwritten(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs of one name, in the middle of an upload each."""
    save(tmp_path / "other/step-2", run_id="run-2")
    _saved(tmp_path / "here", 2, 4)
    told: list[str] = []

    monkeypatch.setattr(leases, "RENEWED", 0.05)

    def put(self: RemotePath, source: Path, *given: Any, original: Any = RemotePath.put, **more: Any) -> None:
        original(self, source, *given, **more)
        if "other" in source.parts and not told:
            with pytest.raises(TitanError, match="step-2 is being uploaded by another run") as caught:
                upload(tmp_path / "here/step-2", at(url) / "step-2")
            told.append(caught.value.message)
            _uploads(tmp_path / "here", url, keep=1).finish()  # deletes what was cut off

    monkeypatch.setattr(RemotePath, "put", put)
    upload(tmp_path / "other/step-2", at(url) / "step-2")
    assert told and sorted(path.name for path in steps(at(url))) == ["step-2", "step-4"]
    assert read_manifest(at(url) / "step-2").run_id == "run-2"
    assert not faults(at(url) / "step-2", read_manifest(at(url) / "step-2"))
    assert not [name for name in _objects(url) if "upload" in name]


@pytest.mark.parametrize("body", [b"", b"0123456789abcdef\n"])
def test_the_mark_of_an_upload_that_is_gone_blocks_nobody(
    tmp_path: Path,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    body: bytes,
) -> None:
    """Of a run of the same name that was killed in the middle of its first upload."""
    monkeypatch.setattr(leases, "GONE", 0.2)
    _saved(tmp_path / "here", 2)
    _put(url, mark_name("step-2", "run-2"), body)
    _put(url, "step-2/rank-00007.safetensors", b"half")
    with caplog.at_level(logging.WARNING, "titancli"):
        _uploads(tmp_path / "here", url, keep=0).finish()
    assert "left behind by another run" in caplog.text
    assert _objects(url).keys() == {f"step-2/{path.name}" for path in (tmp_path / "here/step-2").iterdir()}


def test_who_was_taken_for_gone_writes_no_manifest(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _saved(tmp_path, 2)

    def taken(self: RemotePath, *given: Any, original: Any = RemotePath.put, **more: Any) -> None:
        original(self, *given, **more)
        (self.parent.parent / mark_name("step-2", RUN)).unlink()

    monkeypatch.setattr(RemotePath, "put", taken)
    with pytest.raises(TitanError, match="is gone, or was replaced: another process"):
        upload(tmp_path / "step-2", at(url) / "step-2")
    assert not steps(at(url))


def test_a_file_that_is_closed_while_its_progress_is_read_is_uploaded(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread may end between two looks at one number, which then is nobody's."""

    class Closing(BytesIO):
        def tell(self) -> int:
            looked.set()
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def slowly(self: Any, key: str, source: Any, original: Any = FsspecStore.write) -> None:
        assert looked.wait(10)
        original(self, key, source)

    looked, place = threading.Event(), at(url) / "closing"
    monkeypatch.setattr(place._line, "limit", 1.0)  # then it looks, if it has not yet
    monkeypatch.setattr(FsspecStore, "write", slowly)
    place._write("writing it", lambda: Closing(b"all of it"))
    assert looked.is_set() and place.read_bytes() == b"all of it"


def test_a_run_that_went_back_keeps_what_it_does_now(tmp_path: Path, url: str) -> None:
    _saved(tmp_path / "before", 2, 4, 6)
    upload(tmp_path / "before/step-6", at(url) / "step-6")
    _saved(tmp_path / "now", 3)
    _uploads(tmp_path / "now", url, keep=1).finish()
    assert [path.name for path in steps(at(url))] == ["step-3"]


def test_what_fails_is_told_at_once_and_tried_again_with_the_next(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uploads = _uploads(tmp_path, url, keep=0)
    _saved(tmp_path, 2)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "titancli"):
        patch.setattr(RemotePath, "put", _no)
        uploads.wake()
        uploads.settle()
        [record] = [record for record in caplog.records if record.name.startswith("titancli")]
        assert "the next save tries again" in record.message and "no such day" in record.message
        with pytest.raises(TitanError, match=r"uploaded to memory://.*no such day"):
            uploads.finish()
    _saved(tmp_path, 4)
    uploads.wake()
    uploads.settle()
    assert sorted(path.name for path in steps(at(url))) == ["step-2", "step-4"]
    uploads.finish()


def _no(self: object, *given: Any, **more: Any) -> None:
    raise Unreachable("no such day")


def test_a_slow_store_does_not_hold_up_who_saves(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    going, go = threading.Event(), threading.Event()
    put = RemotePath.put

    def slow(self: RemotePath, *given: Any, **more: Any) -> None:
        going.set()
        assert go.wait(60)
        put(self, *given, **more)

    monkeypatch.setattr(RemotePath, "put", slow)
    uploads = _uploads(tmp_path, url, keep=1)
    for step in (2, 4, 6):
        _saved(tmp_path, step)
        uploads.wake()  # returns, though nothing gets through
        assert going.wait(60)
    assert uploads.busy == tmp_path / "step-2"
    go.set()
    uploads.finish()
    assert [path.name for path in steps(at(url))] == ["step-6"]


def test_an_upload_is_waited_for_while_it_moves_and_no_longer(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, go = "fsspec.implementations.memory.MemoryFileSystem.put_file", threading.Event()
    put = MemoryFileSystem.put_file

    def slow(self: Any, source: str, target: str, callback: Any, **more: Any) -> None:
        for _ in range(15 if source.endswith(".safetensors") else 0):
            time.sleep(0.1)
            callback.relative_update(1)
        put(self, source, target, callback=callback, **more)

    monkeypatch.setattr(store, slow)
    _saved(tmp_path, 2)
    _uploads(tmp_path, url, keep=1, limit=1.2).finish()  # a file alone takes longer than the limit
    assert [path.name for path in steps(at(url))] == ["step-2"]
    monkeypatch.setattr(store, lambda *given, **more: go.wait(60))
    _saved(tmp_path, 4)
    uploads = _uploads(tmp_path, url, keep=1, limit=1)  # every other request has to keep to it
    uploads.wake()
    uploads.settle()
    assert "uploading it has made no progress for 1 seconds" in str(uploads._error)
    monkeypatch.setattr(store, put)
    with pytest.raises(
        TitanError, match=r"writing it was not started, because an earlier request is still unanswered"
    ):
        uploads.finish()  # what hangs might still change what is there
    go.set()
    for _ in range(500):
        if not any(thread.is_alive() for thread in uploads._place._line.stuck):
            break
        time.sleep(0.02)
    uploads.finish()
    assert [path.name for path in steps(at(url))] == ["step-4"]


@pytest.mark.parametrize(
    ("method", "doing"),
    [
        ("ls", "listing it"),
        ("info", "looking at it"),
        ("cat_file", "reading it"),
        ("get_file", "downloading it"),
        ("pipe_file", "writing it"),
    ],
)
def test_a_store_that_hangs_is_left_after_the_limit(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, method: str, doing: str
) -> None:
    """By place, by what was asked of it, and by the setting; what comes then is not touched by it."""
    go, place = threading.Event(), at(url, 0.1)
    _put(url, "x", b"1234")
    with monkeypatch.context() as patch:
        patch.setattr(f"fsspec.implementations.memory.MemoryFileSystem.{method}", lambda *a, **k: go.wait(60))
        calls: dict[str, Callable[[], object]] = {
            "ls": lambda: list(place.iterdir()),
            "info": lambda: (place / "x").stat(),
            "cat_file": lambda: (place / "x").read_bytes(),
            "get_file": lambda: (place / "x").get(tmp_path / "x"),
            "pipe_file": lambda: probe(place),
        }
        with pytest.raises(TitanError) as caught:
            calls[method]()
        go.set()
    assert f"{doing} has made no progress for 0.1 seconds" in caught.value.message
    assert f"{url}/" in caught.value.message.replace(f"{url} ", f"{url}/")
    assert "checkpoint.remote_timeout_seconds" in caught.value.message
    there = at(url) / "x"
    assert there.read_bytes() == b"1234" and there.digest().size == 4


def test_a_place_that_cannot_be_written_is_told_with_its_url(tmp_path: Path, url: str) -> None:
    probe(at(url))
    assert _objects(url) == {}
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match=r"no checkpoint can be uploaded: file:///.*/file/x"):
        probe(at(f"file://{tmp_path}/file/x"))


def test_a_store_that_does_not_answer_is_not_taken_for_an_empty_one(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _saved(tmp_path, 2)
    upload(tmp_path / "step-2", at(url) / "step-2")

    def dead(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("endpoint")

    monkeypatch.setattr("titancli.checkpoint.remote.store.BRIEFLY", 0.0)
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.cat_file", dead)
    with pytest.raises(Unreachable, match=r"step-2/manifest.json cannot be reached: RuntimeError: endpoint"):
        _take(url, tmp_path / "there")


def test_a_package_that_is_missing_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for protocol in ("s3", "s3a"):  # as if no URL of this kind had been used yet
        monkeypatch.delitem(registry, protocol, raising=False)
    with pytest.raises(EnvironmentProblem) as caught:
        at("s3://bucket/prefix")
    assert caught.value.hint == "pip install 'titancli[s3]'"
    with pytest.raises(EnvironmentProblem, match="nosuch://x is not the URL of a store"):
        at("nosuch://x")

"""Uploads to a real S3 server: requests that fail, and bytes that are not those that were sent."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import s3fs

from tests.checkpoint.tensors import RUN, save
from titancli.checkpoint.format.hashed import file_digest
from titancli.checkpoint.format.manifest import faults, read_manifest, steps
from titancli.checkpoint.remote import fsspec_store, requests, store
from titancli.checkpoint.remote.requests import Unreachable
from titancli.checkpoint.remote.store import RemotePath, at
from titancli.checkpoint.remote.transfer import upload
from titancli.checkpoint.remote.uploads import Uploads
from titancli.errors import TitanError

Wrong = Callable[[str, dict[str, Any]], None]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Wrong]:
    """Put a function there, and it is called before each request to S3; it may raise, or change it."""
    wrongs: list[Wrong] = []
    call = s3fs.S3FileSystem._call_s3

    async def changed(self: Any, method: str, *given: Any, **more: Any) -> Any:
        for wrong in wrongs:
            wrong(method, more)
        return await call(self, method, *given, **more)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", changed)
    monkeypatch.setattr(requests, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(requests, "LONGEST_PAUSE", 0.05)
    return wrongs


def _is_good(place: Path) -> bool:
    return not faults(place, read_manifest(place))


def test_two_failed_heads_delete_nothing(tmp_path: Path, s3: str, calls: list[Wrong]) -> None:
    place, own = at(s3, 60, patience=0.0), tmp_path / "step-3"
    for step in (1, 2, 3):
        save(tmp_path / f"step-{step}", seed=step)
        upload(tmp_path / f"step-{step}", place / f"step-{step}")
        if step < 3:
            (tmp_path / f"step-{step}").rename(tmp_path / f"gone-{step}")

    def wrong(method: str, given: dict[str, Any]) -> None:
        if method == "head_object" and given["Key"].endswith(("-1/manifest.json", "-2/manifest.json")):
            raise OSError("503 Slow Down")

    calls.append(wrong)
    uploads = Uploads(tmp_path, place, RUN, 0)
    uploads.wake()
    uploads.settle()
    with pytest.raises(Unreachable, match="503 Slow Down"):
        (place / "step-1/manifest.json").is_file()
    calls.clear()
    assert [path.name for path in steps(place)] == ["step-3", "step-2", "step-1"]
    assert all(_is_good(place / f"step-{step}") for step in (1, 2, 3)) and own.exists()


def test_where_30_percent_of_requests_fail_every_save_arrives(
    tmp_path: Path, s3: str, calls: list[Wrong]
) -> None:
    chance, failed = random.Random(0), [0]

    def wrong(method: str, given: dict[str, Any]) -> None:
        if chance.random() < 0.3:
            failed[0] += 1
            raise OSError("503 Slow Down")

    calls.append(wrong)
    uploads = Uploads(tmp_path, at(s3, 60, patience=20), RUN, 0)
    for step in range(1, 9):
        save(tmp_path / f"step-{step}", seed=step)
        uploads.wake()
        uploads.settle()
        assert uploads._error is None
    calls.clear()
    assert failed[0] > 50 and len(steps(at(s3))) == 8
    assert all(_is_good(path) for path in steps(at(s3)))


def _flips(times: int, methods: tuple[str, ...] = ("put_object", "upload_part")) -> Wrong:
    def wrong(method: str, given: dict[str, Any]) -> None:
        nonlocal times
        if method in methods and times and len(given["Body"]) > 1000:
            times -= 1
            given["Body"] = given["Body"][:-1] + bytes([given["Body"][-1] ^ 1])

    return wrong


def test_right_size_and_wrong_bytes_are_sent_again(tmp_path: Path, s3: str, calls: list[Wrong]) -> None:
    save(tmp_path / "step-1")
    calls.append(_flips(1))
    upload(tmp_path / "step-1", at(s3) / "step-1")
    assert _is_good(at(s3) / "step-1")
    save(tmp_path / "step-2")
    calls[:] = [_flips(99)]
    with pytest.raises(TitanError, match="does not contain what was uploaded, 3 times"):
        upload(tmp_path / "step-2", at(s3) / "step-2")
    assert [path.name for path in steps(at(s3))] == ["step-1"]


def _reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    read: list[str] = []
    digest = RemotePath.digest
    monkeypatch.setattr(RemotePath, "digest", lambda self: read.append(self.name) or digest(self))
    return read


def test_a_file_in_parts_is_compared_by_the_checksum_of_parts(
    tmp_path: Path, s3: str, calls: list[Wrong], monkeypatch: pytest.MonkeyPatch
) -> None:
    part, read = 5 << 20, _reads(monkeypatch)
    monkeypatch.setattr("s3fs.core.calculate_chunksize", lambda size, **more: part)
    monkeypatch.setattr(store, "_PART", part)
    source = tmp_path / "large"
    source.write_bytes(random.Random(0).randbytes(2 * part + 100))
    there = at(s3) / "large"
    there.put(source, file_digest(source))
    assert not read
    calls.append(_flips(1))
    there.put(source, file_digest(source))
    assert read == ["large"]  # it is wrong indeed, so it was sent again
    assert there.digest() == file_digest(source)


def test_a_checksum_that_is_not_of_the_bytes_is_not_relied_on(
    tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of an object which the store encrypts with a key of its own (SSE-KMS)."""
    read = _reads(monkeypatch)
    monkeypatch.setattr(fsspec_store, "_md5_in", lambda row: "0" * 32)
    save(tmp_path / "step-1")
    upload(tmp_path / "step-1", at(s3) / "step-1")
    assert len(read) == 1 and _is_good(at(s3) / "step-1")


def test_the_checksum_of_google_cloud_storage_is_understood() -> None:
    assert fsspec_store._md5_in({"md5Hash": "XUFAKrxLKna5cZ2REBfFkg=="}) == "5d41402abc4b2a76b9719d911017c592"
    assert fsspec_store._md5_in({"size": 3}) is None


@pytest.mark.parametrize("read_back", [False, True])
def test_a_store_without_checksums_is_read_back_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_back: bool
) -> None:
    from fsspec.implementations.local import LocalFileSystem

    put, times = LocalFileSystem.put_file, iter(range(99))

    def flips_once(self: Any, source: str, target: str, **more: Any) -> None:
        put(self, source, target, **more)
        if next(times) == 0:
            data = Path(target).read_bytes()
            Path(target).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    monkeypatch.setattr(LocalFileSystem, "put_file", flips_once)
    save(tmp_path / "step-1")
    place = at(f"file://{tmp_path}/store/step-1")
    upload(tmp_path / "step-1", place, read_back=read_back)
    assert _is_good(place) is read_back

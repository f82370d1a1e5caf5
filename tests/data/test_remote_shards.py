"""Token shards in an object store: the same rows, each range read once, and a cache that may be read-only."""

from __future__ import annotations

import errno
import gc
import json
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.data.helpers import global_rows, make, rows_of
from titancli.data import ByteTokenizer, TokenShards, shards
from titancli.data.shards import eviction, reader, remote
from titancli.data.shards.sources import Options, open_inputs
from titancli.data.shards.tokenize import Job, tokenize
from titancli.errors import EnvironmentProblem

TEXTS = [f"{number}: " + "xyz" * (number * 5 % 11) for number in range(60)]
ORDERS: list[dict[str, Any]] = [
    {},
    {"shuffle": "documents"},
    {"shuffle": "documents", "document_mask": True, "packing": "best_fit"},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TITAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "BLOCK", 256)
    return tmp_path / "cache"


@pytest.fixture
def local(tmp_path: Path) -> Path:
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    inputs = open_inputs([str(tmp_path / "corpus.jsonl")], Options())
    tokenize(Job(inputs, ByteTokenizer(), tmp_path / "out", 500, 1))
    return tmp_path / "out"


@pytest.fixture
def store(local: Path) -> Iterator[Any]:
    found = fsspec.filesystem("memory")
    found.put(str(local), "/bucket/out", recursive=True)
    yield found
    found.store.clear()
    found.pseudo_dirs[:] = [""]


URL = Path("memory://bucket/out")


def ranges(store: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    asked: list[tuple[str, int]] = []
    real = type(store).cat_file

    def counted(self: Any, path: str, start: int | None = None, end: int | None = None) -> bytes:
        if start is not None:
            asked.append((path, start))
        return real(self, path, start, end)

    monkeypatch.setattr(type(store), "cat_file", counted)
    return asked


@pytest.mark.parametrize("fields", ORDERS)
def test_rows_are_those_of_the_folder_and_each_range_is_read_once(
    local: Path, store: Any, monkeypatch: pytest.MonkeyPatch, cache: Path, fields: dict[str, Any]
) -> None:
    asked = ranges(store, monkeypatch)
    near, far = (TokenShards(paths=[path], **fields) for path in (local, URL))
    wanted, state = global_rows(near, 60, dp_size=1, rows=2)
    assert global_rows(far, 60, dp_size=2, rows=1) == (wanted, state), "the identity is that of the data"
    assert asked and len(asked) == len(set(asked))
    asked.clear()
    for folder in [*cache.rglob("*/"), cache]:
        folder.chmod(0o500)
    for file in cache.rglob("*.*"):
        file.chmod(0o400)
    monkeypatch.setattr(remote.fcntl, "lockf", None)  # which a read-only cache does not need
    assert global_rows(far, 60, dp_size=1, rows=2)[0] == wanted and not asked


def test_a_rank_reads_no_more_than_its_rows(store: Any, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    asked = ranges(store, monkeypatch)
    next(iter(make(TokenShards(paths=[URL], shuffle="off"), rows=1)))
    assert len(asked) == 1
    held = next(cache.rglob("00000.bin"))
    assert held.stat().st_size <= 256


def test_ranks_that_want_a_range_at_once_read_it_once(
    store: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fork = multiprocessing.get_context("fork")
    together, real = fork.Barrier(3), type(store).cat_file

    def slow(self: Any, path: str, start: int | None = None, end: int | None = None) -> bytes:
        if start is not None:
            with open(tmp_path / "asked", "a") as file:
                file.write(f"{path} {start}\n")
            time.sleep(0.1)
        return real(self, path, start, end)

    monkeypatch.setattr(type(store), "cat_file", slow)
    dataset = make(TokenShards(paths=[URL], shuffle="off"), rows=1)

    def rank() -> None:
        together.wait(60)
        next(iter(dataset))

    processes = [fork.Process(target=rank) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len((tmp_path / "asked").read_text().splitlines()) == 1


def test_the_cache_may_be_removed_while_it_is_used(store: Any, cache: Path, monkeypatch: Any) -> None:
    config = TokenShards(paths=[URL], shuffle="documents")
    wanted, _ = global_rows(config, 40, dp_size=1, rows=2)
    first, second = (make(config) for _ in range(2))
    streams = iter(first), iter(second)
    got = rows_of([next(streams[0])])
    for number in range(13):
        shutil.rmtree(cache / "shards")
        assert rows_of([next(streams[1])])  # which makes files that lack what the first has seen
        monkeypatch.setattr(reader, "OPEN_FILES", 1 + number % 3)
        got += rows_of([next(streams[0]) for _ in range(3)])
    assert got == wanted


def test_a_disk_without_locks_keeps_what_was_read(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    config = TokenShards(paths=[URL])
    wanted, _ = global_rows(config, 5, dp_size=1, rows=2)
    monkeypatch.setenv("TITAN_CACHE", os.environ["TITAN_CACHE"] + "2")
    monkeypatch.setattr(remote.fcntl, "lockf", none)
    assert global_rows(config, 5, dp_size=1, rows=2)[0] == wanted


def test_a_damaged_block_of_the_cache_is_read_again(store: Any, cache: Path) -> None:
    config = TokenShards(paths=[URL])
    wanted, _ = global_rows(config, 20, dp_size=1, rows=2)
    for file in cache.rglob("*.bin"):
        with open(file, "r+b") as opened:
            opened.write(b"\0\0\0\0")
    assert global_rows(config, 20, dp_size=1, rows=2)[0] == wanted


def test_what_is_wrong_is_named_before_the_first_step_where_it_can_be(
    store: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TokenShards(paths=[URL])
    with pytest.raises(EnvironmentProblem, match=r"memory://bucket/gone cannot be read: FileNotFoundError"):
        make(TokenShards(paths=[Path("memory://bucket/gone")]))
    with pytest.raises(
        EnvironmentProblem, match=r"'raw' are read from this machine only, not from memory://"
    ):
        make(TokenShards(paths=[URL], format="raw", dtype="uint8"))
    with pytest.raises(EnvironmentProblem, match=r"nope://x is not the URL of a store"):
        make(TokenShards(paths=[Path("nope://x")]))
    dataset = make(config)
    store.rm("/bucket/out/00000.bin")
    with pytest.raises(EnvironmentProblem, match=r"memory://bucket/out/00000.bin, from byte [\d,]+ on"):
        list(zip(range(99), dataset, strict=False))
    with pytest.raises(EnvironmentProblem, match=r"FileNotFoundError: /bucket/out/00000\.bin"):
        make(config)
    store.pipe("/bucket/out/00000.bin", b"x" * 10)
    with pytest.raises(EnvironmentProblem, match=r"out/00000\.bin is truncated at byte 10"):
        make(config)
    with pytest.raises(EnvironmentProblem, match=r"from byte 256 on requested, but 0 received"):
        dataset._tokens.files._files.ready(str(next(cache.rglob("index.json")).parent / "00000.bin"), 256, 1)
    cache.joinpath("shards").rename(cache / "away")
    (cache / "shards").write_text("a file")
    with pytest.raises(EnvironmentProblem, match="cannot be read: "):
        make(config)


NAMES = {
    "absolute": "/tmp/elsewhere/model",
    "above": "../../elsewhere",
    "above, in the middle": "a/../../../b",
    "a folder": "sub/00000",
    "backslashes": "..\\..\\b",
    "a drive": "C:00000",
    "NUL": "000\0",
    "a line": "0\n1",
    "nothing": "",
    "dot": ".",
    "hidden": ".ssh",
    "an option": "-rf",
    "very long": "a" * 201,
    "an escape": "\x1b[2J",
    "a number": 7,
    "a list": ["00000"],
}
FAULTS: dict[str, tuple[str, Any]] = {
    "tokens": ("tokens", -5),
    "many tokens": ("tokens", 10**30),
    "half a token": ("tokens", 10.5),
    "truth": ("documents", True),
    "an id": ("max_id", "3"),
    "sums of less": ("sums", ["", ""]),
    "sums": ("sums", ["zz" * 8, "0" * 16]),
    "one sum": ("sums", ["0" * 16]),
    "a time": ("modified", ["now", 3]),
}


@pytest.mark.parametrize("case", [*NAMES, *FAULTS, "twice", "twice in another case", "deep", "large"])
def test_an_index_names_no_file_outside_of_its_folder(
    store: Any, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    index = json.loads(store.cat("/bucket/out/index.json"))
    if case in NAMES:
        index["shards"][1]["name"] = NAMES[case]
    elif case in FAULTS:
        index["shards"][1].update([FAULTS[case]])
    elif case.startswith("twice"):
        index["shards"][0]["name"], index["shards"][1]["name"] = "a", "A" if "case" in case else "a"
    text = "[" * 100_000 if case == "deep" else json.dumps(index)
    if case == "large":
        for module in (shards, remote):
            monkeypatch.setattr(module, "INDEX_BYTES", 10)
    store.pipe("/bucket/out/index.json", text.encode())
    (tmp_path / "index.json").write_text(text)
    for path in (URL, tmp_path):
        with pytest.raises(
            EnvironmentProblem, match=r"index\.json (cannot be read: |has more than 10 bytes)"
        ) as told:
            make(TokenShards(paths=[path]))
        assert "\x1b" not in told.value.message and "\0" not in told.value.message
    found = {path for path in tmp_path.rglob("*") if path.is_file() and "out" not in path.parts}
    assert {path.name for path in found} <= {"index.json", "corpus.jsonl"}, "nothing was written elsewhere"


def test_a_link_in_the_cache_is_not_followed(store: Any, cache: Path, tmp_path: Path) -> None:
    dataset = make(TokenShards(paths=[URL]))
    (tmp_path / "model.bin").write_bytes(b"weights")
    [folder] = (cache / "shards").iterdir()
    for number in range(10):
        (folder / f"{number:05}.bin").symlink_to(tmp_path / "model.bin")
    with pytest.raises(
        EnvironmentProblem, match=r"cannot be kept in .*\.bin: Too many levels of symbolic links"
    ):
        next(iter(dataset))
    assert (tmp_path / "model.bin").read_bytes() == b"weights"


def _kept(cache: Path) -> int:
    """Bytes of a cache."""
    return sum(512 * file.stat().st_blocks for file in (cache / "shards").glob("*/0*"))


def _limited(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setenv(eviction.LIMIT, str(size / 1e9))
    monkeypatch.setattr(remote, "EVERY", 1)


def test_a_cache_grows_no_further_than_its_limit_and_what_is_in_use_stays(
    store: Any, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = TokenShards(paths=[URL], shuffle="documents")
    wanted, _ = global_rows(config, 40, dp_size=1, rows=2)
    gc.collect()  # closes the files
    whole = _kept(cache)
    first, second, third = sorted(cache.rglob("*.bin"))
    for age, file in enumerate((second, third, first)):
        os.utime(file, (1e9 - age, 1e9 - age))
    _limited(monkeypatch, whole // 2)
    with open(first, "rb") as used:  # as another process does
        eviction.use(used.fileno(), str(first))
        os.utime(first, (1, 1))
        assert eviction.evict(cache / "shards", whole - 1) < whole
        assert first.exists() and second.exists() and not third.exists()
        assert eviction.evict(cache / "shards", 0) > 0
        assert first.exists() and not second.exists() and not Path(f"{second}.sums").exists()
    asked = ranges(store, monkeypatch)
    monkeypatch.setattr(reader, "OPEN_FILES", 1)
    ranks = [iter(make(config, dp_rank=rank, dp_size=2, rows=1)) for rank in range(2)]
    found = []
    for _ in range(40):
        found += rows_of([next(rank) for rank in ranks])
        assert _kept(cache) < whole
    assert found == wanted and asked and not caplog.messages
    monkeypatch.setattr(reader, "OPEN_FILES", 64)
    _limited(monkeypatch, 1)
    assert global_rows(config, 40, dp_size=1, rows=2)[0] == wanted
    [told] = {line for line in caplog.messages if eviction.LIMIT in line}
    assert "are in use" in told


def test_processes_that_make_room_at_once_read_what_they_ought_to(
    store: Any, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = TokenShards(paths=[URL], shuffle="documents")
    wanted, _ = global_rows(config, 60, dp_size=1, rows=2)
    _limited(monkeypatch, 1)
    monkeypatch.setattr(reader, "OPEN_FILES", 1)
    fork = multiprocessing.get_context("fork")
    together = fork.Barrier(3)

    def read(number: int) -> None:
        together.wait(60)
        found, _ = global_rows(config, 60, dp_size=1, rows=2)
        (tmp_path / f"{number}.rows").write_text(str(found))

    processes = [fork.Process(target=read, args=(number,)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [(tmp_path / f"{number}.rows").read_text() == str(wanted) for number in range(3)] == [True] * 3


def test_a_limit_that_cannot_be_kept_is_said(
    store: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = TokenShards(paths=[URL])
    for said in ("500 GB", "0", "-1", "nan", "inf"):
        monkeypatch.setenv(eviction.LIMIT, said)
        with pytest.raises(EnvironmentProblem, match=f"{eviction.LIMIT}='{said}' is not a number of GB"):
            make(config)
    _limited(monkeypatch, 1)

    def none(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(eviction.fcntl, "flock", none)
    next(iter(make(config)))
    assert len(caplog.messages) == 1 and "Function not implemented" in caplog.text


class Ranges(SimpleHTTPRequestHandler):
    """Files, and ranges of them, as stores answer."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        asked = self.headers.get("Range")
        if asked is None or not path.is_file():
            super().do_GET()
            return
        first, last = (int(number) for number in asked.removeprefix("bytes=").split("-"))
        data = path.read_bytes()[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Range", f"bytes {first}-{first + len(data) - 1}/{path.stat().st_size}")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def test_over_http(local: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranges, directory=str(local.parent))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = Path(f"http://127.0.0.1:{server.server_address[1]}/out")
        wanted = global_rows(TokenShards(paths=[local]), 30, dp_size=1, rows=2)
        assert global_rows(TokenShards(paths=[url]), 30, dp_size=1, rows=2) == wanted
        server.shutdown()

"""JSON Lines: every row once, from any place; bad ones are skipped and counted, or refused by their line."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path

import pytest

from tests.data.helpers import global_rows, make, rows_of, stream
from titancli.data import JsonLines, row_index
from titancli.errors import EnvironmentProblem, TitanError
from titancli.observe.metrics import collector

BAD = {
    "invalid UTF-8": (b'{"text": "caf\xe9"}', "it is not UTF-8: byte 13 is invalid"),
    "empty": (b"", "it is empty"),
    "empty text": (b'{"text": ""}', "'text' is empty"),
    "10 MB line": (b'{"text": "' + b"x" * 10_000_000 + b'"}', "it is longer than 8388608 bytes"),
    "missing key": (b'{"content": "x"}', "it has no key 'text', only 'content'"),
    "no object": (b"[1, 2]", "it is list, not an object"),
    "half a pair": (b'{"text": "a\\ud83d b"}', r"'text' contains \ud83d, an unpaired surrogate"),
    "no text": (b'{"text": 3}', "'text' is int, not a string"),
    "cut": (b'{"text": "the disk was fu', "it is not JSON: Unterminated string"),
    "nested": (b'{"text": ' + b"[" * 100_000, "it is not JSON"),
    "NUL": (b'{"text": "a\0b"}', "it is not JSON: Invalid control character"),
}


def row(text: str) -> bytes:
    return json.dumps({"n": 1, "text": text}, ensure_ascii=False).encode()


TEXTS = [f"row {number} of the first, ü" + "." * (number % 7) for number in range(20)]
MORE = [f"{number}th of the second" for number in range(9)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b"\n".join(map(row, TEXTS)) + b"\n")
    (folder / "b.jsonl").write_bytes(b"\r\n".join(map(row, MORE)))  # no end of line at its end
    return folder


def tokens_of(config: JsonLines) -> list[int]:
    """All tokens but the last, of a dataset that does not repeat."""
    return [t for tokens, _ in rows_of(list(make(config, seq_len=1, rows=1))) for t in tokens]


def documents(config: JsonLines) -> list[str]:
    """The texts of one epoch, in the order that they come in."""
    text = bytes(token if token < 256 else 0 for token in tokens_of(config))
    return text.decode().rstrip("\0").split("\0")


def test_every_row_comes_once_in_order(corpus: Path) -> None:
    config = JsonLines(paths=[corpus], shuffle=False, repeat=False)
    assert tokens_of(config) == stream(TEXTS + MORE)[:-1]


def test_shuffled_rows_are_the_same_ones(corpus: Path) -> None:
    config = JsonLines(paths=[corpus], repeat=False)
    found = documents(config)
    assert found != TEXTS + MORE
    assert sorted(found) == sorted(TEXTS + MORE)
    assert documents(config) == found


@pytest.mark.parametrize("shuffle", [False, True])
def test_stopping_anywhere_and_going_on_with_other_ranks_changes_nothing(corpus: Path, shuffle: bool) -> None:
    with open(corpus / "a.jsonl", "ab") as file:
        file.write(b"not a row\n" + row("the last of the first") + b"\n")
    config = JsonLines(paths=[corpus], shuffle=shuffle)
    whole, _ = global_rows(config, 24, dp_size=1, rows=2)
    for cut in (4, 9, 17):
        first, state = global_rows(config, cut, dp_size=1, rows=2)
        state = json.loads(json.dumps(state))
        rest, _ = global_rows(config, 24 - cut, dp_size=2, rows=1, state=state)
        assert first + rest == whole


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_skipped_counted_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, shuffle: bool
) -> None:
    data, reason = BAD[name]
    file = tmp_path / "a.jsonl"
    end = b"" if name == "cut" else b"\n" + row("after")
    file.write_bytes(row("before") + b"\n" + data + end)
    config = JsonLines(paths=[file], shuffle=shuffle, repeat=False)
    with caplog.at_level(logging.WARNING):
        found = documents(config)
    assert sorted(found) == (["before"] if name == "cut" else ["after", "before"])
    assert collector.drain()["bad_rows"].value == 1
    [told] = caplog.messages
    assert told.startswith(f"skipped a row: {file}, line 2: {reason}")
    assert len(told) < 400


@pytest.mark.parametrize("name", BAD)
def test_where_strict_a_bad_row_is_an_error_with_file_and_line(tmp_path: Path, name: str) -> None:
    data, reason = BAD[name]
    file = tmp_path / "a.jsonl"
    file.write_bytes(row("before") + b"\n" + data + b"\n" + row("after"))
    with pytest.raises(EnvironmentProblem) as caught:
        documents(JsonLines(paths=[file], shuffle=False, repeat=False, strict=True))
    assert caught.value.message.startswith(f"{file}, line 2: {reason}")
    assert "dataset.strict = false" in str(caught.value.hint)


def test_many_bad_rows_are_told_briefly_and_all_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"bad\n" * 100 + row("good"))
    with caplog.at_level(logging.WARNING):
        assert documents(JsonLines(paths=[tmp_path], shuffle=False, repeat=False)) == ["good"]
    assert len(caplog.messages) == 5
    assert caplog.messages[-1].endswith("further skipped rows are only counted (bad_rows)")
    assert collector.drain()["bad_rows"].value == 100


def test_a_long_row_is_not_held_in_memory(tmp_path: Path) -> None:
    import tracemalloc

    (tmp_path / "a.jsonl").write_bytes(b"x" * 50_000_000 + b"\n" + row("good"))
    config = JsonLines(paths=[tmp_path], shuffle=False, repeat=False, max_bytes=1000)
    tracemalloc.start()
    try:
        assert documents(config) == ["good"]
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_other_rows_or_another_key_are_refused_on_resume(corpus: Path) -> None:
    dataset = make(JsonLines(paths=[corpus]))
    next(iter(dataset))
    state = dataset.state_dict()
    with open(corpus / "b.jsonl", "ab") as file:
        file.write(b"\n" + row("new"))
    for config in (JsonLines(paths=[corpus]), JsonLines(paths=[corpus], text="n")):
        with pytest.raises(TitanError):
            make(config).load_state_dict(state)


def test_a_file_that_shrinks_while_it_is_read_is_told(corpus: Path) -> None:
    dataset = make(JsonLines(paths=[corpus]), seq_len=1, rows=1)
    (corpus / "a.jsonl").write_bytes(row(TEXTS[0]))
    with pytest.raises(EnvironmentProblem, match=r"a\.jsonl has changed since the run began"):
        list(zip(range(10_000), dataset, strict=False))


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    with pytest.raises(EnvironmentProblem, match="every file is empty"):
        make(JsonLines(paths=[tmp_path]))
    with pytest.raises(EnvironmentProblem, match="does not exist"):
        make(JsonLines(paths=[tmp_path / "gone.jsonl"]))


def test_where_rows_begin_is_kept_until_the_file_changes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = JsonLines(paths=[corpus], repeat=False)
    expected = documents(config)
    monkeypatch.setenv("TITAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(row_index, "KEPT_BYTES", 10)
    assert documents(config) == expected
    with monkeypatch.context() as patched:
        patched.setattr(row_index, "_found", lambda path: pytest.fail("read again"))
        assert documents(config) == expected
    status = (corpus / "a.jsonl").stat()
    (corpus / "a.jsonl").write_bytes(b"\n".join(map(row, reversed(TEXTS))) + b"\n")
    os.utime(corpus / "a.jsonl", ns=(status.st_atime_ns, status.st_mtime_ns))  # only the sample differs
    assert sorted(documents(config)) == sorted(expected)
    for entry in (tmp_path / "cache" / "rows").glob("*.npy"):
        data = bytearray(entry.read_bytes())
        data[-8] ^= 1  # the last row would begin a byte later
        entry.write_bytes(data)
    assert sorted(documents(config)) == sorted(expected)
    for size in (50, 0):
        for entry in (tmp_path / "cache" / "rows").glob("*.npy"):
            entry.write_bytes(entry.read_bytes()[:size])
        caplog.clear()
        assert sorted(documents(config)) == sorted(expected)
        assert "is read again" in caplog.text
    with monkeypatch.context() as patched:  # as on a disk of another machine

        def refused(file: object, operation: int) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        patched.setattr("fcntl.flock", refused)
        assert sorted(documents(config)) == sorted(expected)
    monkeypatch.setenv("TITAN_CACHE", str(corpus / "a.jsonl"))
    assert sorted(documents(config)) == sorted(expected)
    assert "an index cannot be kept" in caplog.text


def test_a_mark_of_the_encoding_is_no_text(tmp_path: Path) -> None:
    rows = b'{"text": "one"}\n{"text": "two and a half"}\n'
    for name, data in (("plain", rows), ("marked", b"\xef\xbb\xbf" + rows)):
        (tmp_path / f"{name}.jsonl").write_bytes(data)
    plain, marked = (JsonLines(paths=[tmp_path / f"{name}.jsonl"]) for name in ("plain", "marked"))
    assert global_rows(marked, 9, dp_size=1, rows=2)[0] == global_rows(plain, 9, dp_size=1, rows=2)[0]

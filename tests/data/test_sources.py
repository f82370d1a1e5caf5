"""Rows and texts are read from files of every kind, alike, exactly from any place, and damage is named."""

from __future__ import annotations

import codecs
import csv
import errno
import gzip
import io
import json
import logging
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.data.helpers import global_rows, make
from titancli.data import Chat, JsonLines, TextFiles, jsonl, tables
from titancli.data.compressed import Damaged
from titancli.data.files import find_files
from titancli.data.formats import kind_of_rows
from titancli.data.tables import lines_of
from titancli.errors import EnvironmentProblem
from titancli.observe.metrics import collector

ROWS = [{"instruction": f'{i}+1?\n"é"', "output": "x" * (i % 7) + str(i + 1)} for i in range(40)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def table(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def columns(rows: list[dict[str, Any]]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([{**row, "image": b"x"} for row in rows]), out, row_group_size=7)
    return out.getvalue()


FILES = {
    "a.jsonl": LINES,
    "a.json": json.dumps(ROWS).encode(),
    "b.json": json.dumps(ROWS, indent=2, ensure_ascii=False).encode(),
    "c.json": LINES,
    "a.jsonl.gz": gzip.compress(LINES),
    "b.jsonl.gz": gzip.compress(LINES[:500]) + gzip.compress(LINES[500:]),
    "a.jsonl.zst": zstandard.compress(LINES),
    "a.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "b.json.zst": zstandard.compress(json.dumps(ROWS).encode()),
    "a.csv": table(ROWS),
    "a.csv.gz": gzip.compress(table(ROWS)),
    "a.tsv": table(ROWS, "\t"),
    "semicolons.csv": table(ROWS, ";"),
    "a.parquet": columns(ROWS),
    "mark.jsonl": codecs.BOM_UTF8 + LINES,
    "mark.json": codecs.BOM_UTF8 + json.dumps(ROWS).encode(),
    "mark.csv": codecs.BOM_UTF8 + table(ROWS),
    "lines.jsonl": LINES.replace(b"\n", b"\r\n"),
    "no suffix, a table": table(ROWS),
    "no suffix, a list": json.dumps(ROWS).encode(),
    "no suffix, columns": columns(ROWS),
    "no suffix, packed": gzip.compress(LINES),
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache beside the data, and no count that is left from other tests."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("TITAN_CACHE", str(folder))
    collector.drain()
    yield folder
    collector.drain()


def conversations(path: Path, count: int = 30, **options: Any) -> list[Any]:
    config = Chat(path=str(path), pack=False, **options)
    return global_rows(config, count, dp_size=1, rows=2, seq_len=64)[0]


@pytest.mark.parametrize("name", FILES)
def test_rows_of_every_kind_of_file_are_the_same_in_the_same_order(tmp_path: Path, name: str) -> None:
    (tmp_path / "reference.jsonl").write_bytes(LINES)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / name).write_bytes(FILES[name])
    for shuffle in (True, False):
        expected = conversations(tmp_path / "reference.jsonl", shuffle=shuffle)
        assert conversations(tmp_path / "d" / name, shuffle=shuffle) == expected
    assert conversations(tmp_path / "d", shuffle=False) == expected, "the folder is its file"
    assert conversations(tmp_path / "d" / name, shuffle=False, length_index=True) == expected
    texts = JsonLines(paths=[tmp_path / "d"], text="output", shuffle=False)
    lines = JsonLines(paths=[tmp_path / "reference.jsonl"], text="output", shuffle=False)
    found, state = global_rows(texts, 4, dp_size=2, rows=2)
    assert found == global_rows(lines, 8, dp_size=1, rows=2)[0]
    rest, _ = global_rows(texts, 4, dp_size=1, rows=4, state=state)
    assert found + rest == global_rows(lines, 16, dp_size=1, rows=2)[0]


def test_a_position_of_two_ranks_is_one_of_one_rank(tmp_path: Path) -> None:
    for name in ("a.json", "a.csv", "a.jsonl.zst", "a.parquet"):
        (tmp_path / name).write_bytes(FILES[name])
    config = Chat(path=str(tmp_path), pack=False)
    alone, _ = global_rows(config, 100, dp_size=1, rows=2, seq_len=64)
    first, state = global_rows(config, 11, dp_size=2, rows=2, seq_len=64)
    rest, _ = global_rows(config, 78, dp_size=1, rows=2, seq_len=64, state=state)
    assert first + rest == alone and state["data"]["files"] == 4


def test_a_folder_named_after_splits_or_with_other_files_is_read_by_datasets(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_bytes(table(ROWS[:3]))
    (tmp_path / "test.csv").write_bytes(table(ROWS[3:]))
    rows = conversations(tmp_path, 9, repeat=False)
    assert len([1 for _, targets in rows if max(targets) >= 0]) == 3
    part = conversations(tmp_path / "train.csv", 9, split="train[:1]", repeat=False)
    assert len([1 for _, targets in part if max(targets) >= 0]) == 1


DAMAGED = {
    "a.jsonl.gz": (gzip.compress(LINES)[:-20], "Compressed file ended|CRC"),
    "a.csv": (table(ROWS) + b"\xff\xfe,x\n", "is not UTF-8: byte 0xff is invalid"),
    "quote.csv": (table(ROWS) + b'"open', "unexpected end of data"),
    "a.json": (json.dumps(ROWS).encode()[:-200], "ends within a list|has no end"),
    "b.json": (b'[{"text": "x"} {"text": "y"}]', "a comma is missing"),
    "a.parquet": (columns(ROWS)[:-30], "Parquet"),
    "a.jsonl.zst": (zstandard.compress(LINES)[:-20], "truncated"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_of_rows_is_refused_by_name_or_skipped_and_counted(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    data, reason = DAMAGED[name]
    (tmp_path / name).write_bytes(data)
    (tmp_path / "good.jsonl").write_bytes(LINES)
    for config in (Chat(path=str(tmp_path)), JsonLines(paths=[tmp_path], text="output")):
        with pytest.raises(Damaged, match=rf"{name}.*({reason})") as told:
            make(config)
        assert "dataset.skip_damaged = true" in str(told.value.hint) or "make it readable" in str(
            told.value.hint
        )
    assert conversations(tmp_path, skip_damaged=True) == conversations(tmp_path / "good.jsonl")
    assert "skipped a file: " in caplog.text and name in caplog.text
    make(JsonLines(paths=[tmp_path], text="output", shuffle=False, skip_damaged=True))
    assert collector.drain()["damaged_files"].value == 1
    (tmp_path / "good.jsonl").unlink()
    with pytest.raises(EnvironmentProblem, match="all 1 files are damaged"):
        make(Chat(path=str(tmp_path), skip_damaged=True))


@pytest.mark.parametrize(
    "data",
    [b"caf\xe9", gzip.compress(b"x" * 999)[:-12], gzip.compress(b"caf\xe9"), b"\x1f\x8b"],
    ids=["no UTF-8", "truncated", "no UTF-8, packed", "a beginning"],
)
def test_a_damaged_text_is_refused_by_name_or_skipped_and_counted(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.txt").write_text("a text of several words, and more")
    (tmp_path / "b.txt.gz").write_bytes(data)
    with pytest.raises(Damaged, match=r"b\.txt\.gz"):
        make(TextFiles(paths=[tmp_path]))
    found = make(TextFiles(paths=[tmp_path], skip_damaged=True, repeat=False))
    assert found.state_dict()["data"]["files"] == 1 and list(found)
    assert collector.drain()["damaged_files"].value == 1


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_compressed_text_is_read_as_it_is_and_goes_on_from_any_place(tmp_path: Path, pack: Any) -> None:
    text = ("a line of text é\n" * 200_000).encode()  # several pieces
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for n in (1, 2):
        (tmp_path / "a" / f"{n}.txt").write_bytes(text[n:])
        (tmp_path / "b" / f"{n}.txt").write_bytes(pack(text[n:]))
    plain, packed = (TextFiles(paths=[tmp_path / name], shuffle=False) for name in "ab")
    options: Any = {"dp_size": 1, "rows": 1, "seq_len": 1 << 20}
    expected, _ = global_rows(plain, 6, **options)
    first, state = global_rows(packed, 3, **options)
    rest, _ = global_rows(packed, 3, **options, state=state)
    assert first + rest == expected
    assert make(packed).epoch_tokens() is None, "its size is not known"


def test_an_empty_file_is_no_row_and_an_empty_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    for name in ("b.jsonl", "c.csv"):
        (tmp_path / name).write_bytes(b"")
    assert conversations(tmp_path, shuffle=False) == conversations(tmp_path / "a.jsonl", shuffle=False)
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    with pytest.raises(EnvironmentProblem, match="has no files"):
        make(Chat(path=str(tmp_path)))
    (tmp_path / "a.jsonl").write_bytes(b"")
    with pytest.raises(EnvironmentProblem, match="every file is empty"):
        make(Chat(path=str(tmp_path)))


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.jsonl.gz", "a.parquet"])
def test_a_file_that_changes_ends_the_run_and_is_read_anew_by_the_next(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name])
    batches = iter(make(Chat(path=str(path), pack=False), rows=2, seq_len=64))
    next(batches)
    path.write_bytes(FILES[name][:-1] + b" ")
    with pytest.raises(EnvironmentProblem, match=rf"{name} has changed since the run began"):
        for _ in range(200):
            next(batches)
    made = {"a.json": json.dumps(ROWS[:2]).encode(), "a.csv": table(ROWS[:2]), "a.parquet": columns(ROWS[:2])}
    two = b"".join(LINES.splitlines(keepends=True)[:2])
    path.write_bytes(made.get(name) or gzip.compress(two))
    rows = conversations(path, 9, repeat=False)
    assert len([1 for _, targets in rows if max(targets) >= 0]) == 2


def test_bad_rows_are_named_by_their_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.csv").write_bytes(table(ROWS[:2]) + b"one\r\n" + table(ROWS[2:4]).split(b"\r\n", 1)[1])
    (tmp_path / "a.json").write_text(json.dumps([ROWS[0], 3, ROWS[1]]))
    for name, reason in (("a.csv", "row 3: it is list, not an object"), ("a.json", "row 2: it is int")):
        conversations(tmp_path / name, 9, repeat=False, shuffle=False)
        assert f"{name}, {reason}" in caplog.text


def test_several_processes_convert_a_file_once_and_nothing_is_left_of_one_that_fails(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.json").write_bytes(FILES["a.json"])
    [file] = find_files(tmp_path / "a.json")
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: lines_of(file, "json"), range(4)))
    assert len(set(paths)) == 1 and caplog.text.count("reading the rows of") == 1
    (tmp_path / "a.json").write_bytes(FILES["a.json"][:-5])
    [file] = find_files(tmp_path / "a.json")
    with pytest.raises(Damaged):
        lines_of(file, "json")
    assert [one.name for one in (cache / "lines").iterdir() if one.suffix not in (".lock", ".jsonl")] == []
    (tmp_path / "a.json").write_bytes(FILES["b.json"])
    [file] = find_files(tmp_path / "a.json")
    killed = Path(paths[0]).with_suffix(".1.part")
    killed.write_text("of a process that was killed")
    found = lines_of(file, "json")
    assert not killed.exists()
    assert [str(one) for one in (cache / "lines").glob("*.jsonl")] == [found]


@pytest.mark.parametrize("damage", ["cut at a row", "bad bit", "no sums", "cut sums", "sums of a list"])
def test_damaged_lines_are_written_again(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    (tmp_path / "a.json").write_bytes(FILES["a.json"])
    expected = conversations(tmp_path / "a.json", shuffle=False)
    [lines] = (cache / "lines").glob("*.jsonl")
    [sums] = (cache / "lines").glob("*.sums")
    data = lines.read_bytes()
    if damage == "cut at a row":
        lines.write_bytes(data[: data.index(b"\n", len(data) // 2) + 1])
    elif damage == "bad bit":
        lines.write_bytes(data.replace(b"x", b"y", 1))
    elif damage == "no sums":
        sums.unlink()
    else:
        sums.write_text("[12" if damage == "cut sums" else "7")
    assert conversations(tmp_path / "a.json", shuffle=False) == expected
    assert f"{lines} is damaged, and is written again" in caplog.text
    assert lines.read_bytes() == data
    caplog.clear()
    assert conversations(tmp_path / "a.json", shuffle=False) == expected and not caplog.text


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_bytes(FILES["a.json"])
    (tmp_path / "closed").write_text("")
    monkeypatch.setenv("TITAN_CACHE", str(tmp_path / "closed"))
    with pytest.raises(EnvironmentProblem, match=r"rows of .*a\.json cannot be written") as told:
        make(Chat(path=str(tmp_path / "a.json")))
    assert "TITAN_CACHE" in str(told.value.hint)


def test_a_disk_that_is_full_at_the_end_is_named_and_nothing_is_left(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.json").write_bytes(FILES["a.json"])

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tables.os, "replace", full)
    with pytest.raises(EnvironmentProblem, match=r"a\.json cannot be written to .*: No space left"):
        make(Chat(path=str(tmp_path / "a.json")))
    assert {one.suffix for one in (cache / "lines").iterdir()} == {".lock"}


def test_two_columns_of_a_name_and_a_long_line_that_is_no_row_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("instruction,output,output\na,b,c\n")
    with pytest.raises(Damaged, match="two columns are called 'output'"):
        make(Chat(path=str(tmp_path / "a.csv")))
    (tmp_path / "a.txt").write_text('{"messages": "' + "x" * 200_000)
    assert kind_of_rows(str(tmp_path / "a.txt")) == "text"


def test_each_file_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes(LINES)
    seen: list[str] = []
    monkeypatch.setattr(jsonl, "kind_of_rows", lambda path: seen.append(path) or "jsonl")
    make(Chat(path=str(tmp_path / "*.jsonl")))
    assert len(seen) == 2


def test_without_zstandard_what_to_install_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.jsonl.zst").write_bytes(FILES["a.jsonl.zst"])
    for options in ({}, {"skip_damaged": True}):
        with pytest.raises(EnvironmentProblem, match="needs the package zstandard") as told:
            make(Chat(path=str(tmp_path / "a.jsonl.zst"), **options))
        assert 'pip install "titancli[zstd]"' in str(told.value.hint)

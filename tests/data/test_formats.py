"""A file is read as what it holds, whatever it is called; what is not read is refused by name."""

from __future__ import annotations

import codecs
import gzip
import json
import logging
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.cli.conftest import Titan, titan  # noqa: F401 - a fixture
from tests.data.helpers import make
from titancli.data import ByteTokenizer, JsonLines, TextFiles
from titancli.data.formats import HEAD_BYTES, ROW_BYTES, format_of, kind_of_rows
from titancli.data.shards.sources import Options, open_inputs
from titancli.data.shards.tokenize import Job, tokenize
from titancli.errors import EnvironmentProblem

TEXTS = ["a document", 'braces {"text": 1}', "http://example.org"]
ROWS = "".join(json.dumps({"text": text, "url": "http://example.org"}) + "\n" for text in TEXTS).encode()
LIST = json.dumps([{"text": text} for text in TEXTS]).encode()
CODE = b'{\n  "name": "a package",\n  "n": 1\n}\n'


def parquet(path: Path) -> bytes:
    pq.write_table(pa.table({"text": TEXTS}), path)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("name", "data", "read_as"),
    [
        ("c4-train.00000.json", ROWS, "jsonl"),
        ("c4-train.00000-of-01024.json.gz", gzip.compress(ROWS, mtime=0), "jsonl"),
        ("part-00000", ROWS, "jsonl"),
        ("part-00000.log", ROWS, "jsonl"),
        ("part-00000.csv", ROWS, "jsonl"),
        ("rows.zstd", zstandard.compress(ROWS), "jsonl"),
        ("rows.json", b"\xef\xbb\xbf" + ROWS, "jsonl"),
        ("rows.json", b'{"text": "one row"}', "jsonl"),
        ("rows.json", codecs.BOM_UTF8 + b'{"text": "' + b"x" * ROW_BYTES + b'"}', "jsonl"),
        ("rows.json", ROWS.replace(b"\n", b"\r\n"), "jsonl"),
        ("rows.json", b"\n\nno JSON\n" + ROWS, "jsonl"),
        ("rows.json", json.dumps({"text": "x" * 3 * HEAD_BYTES}).encode() + b"\n" + ROWS, "jsonl"),
        ("rows.jsonl", b"no JSON\n" * 30, "jsonl"),
        ("rows.JSONL", ROWS, "jsonl"),
        ("empty.jsonl", b"", "jsonl"),
        ("empty.json", b"", "text"),
        ("a.txt", ROWS, "text"),
        ("a.md", LIST, "text"),
        ("a.txt", b"PAR1 is how Parquet begins", "text"),
        ("a.py", b"x = {}\ny = {'a': 1}\n", "text"),
        ("package.js", CODE, "text"),
        ("a", b"{\\bf LaTeX}\n" * 20, "text"),
        ("alpaca.json", LIST, "json"),
        ("rows.jsonl", LIST, "json"),
        ("rows", LIST, "json"),
        ("a", gzip.compress(LIST, mtime=0), "json"),
        ("a.csv", b"text,url\nhello,http\n", "csv"),
        ("a.tsv.gz", gzip.compress(b"text\turl\nhello\thttp\n", mtime=0), "csv"),
        ("a.txt.gz", gzip.compress(b"a text", mtime=0), "text"),
        ("a", ("ü" * 2 * HEAD_BYTES).encode(), "text"),
        ("rows.jsonl", b'{"text": "a\0b"}\n{"text": "c"}\n', "jsonl"),
    ],
)
def test_a_file_is_what_it_holds(tmp_path: Path, name: str, data: bytes, read_as: str) -> None:
    (tmp_path / name).write_bytes(data)
    assert format_of(str(tmp_path / name)).name == read_as


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("package.json", CODE, "is JSON that is neither one object a line nor a list"),
        ("deep.json", b"[" * 60_000, "is JSON that is neither one object a line nor a list"),
        ("a", b"a\0b\0", "is binary data"),
        ("a.txt", b"a\0b\0", "is binary data"),
        ("a.bin", b"text", "is binary data"),
        ("a.txt", "a text".encode("utf-16"), "is in UTF-16"),
        ("rows.jsonl", ROWS.decode().encode("utf-16"), "is in UTF-16"),
        ("rows.jsonl", ROWS.decode().encode("utf-16-le"), "is binary data"),
        ("paper", b"%PDF-1.7\n", "is a PDF"),
        ("a.docx", b"PK\x03\x04" + b"\0" * 30, "is a ZIP archive"),
        ("data.arrow", b"ARROW1\0\0", "is an Arrow file"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    for read in (
        lambda: open_inputs([str(path)], Options()),
        lambda: make(TextFiles(paths=[path])),
        lambda: make(JsonLines(paths=[path])),
    ):
        with pytest.raises(EnvironmentProblem, match=said) as told:
            read()
        assert str(path) in told.value.message and told.value.hint
    assert "dataset.format" not in str(told.value.hint), "which jsonl does not have"


def test_parquet_is_known_by_its_content(tmp_path: Path) -> None:
    parquet(tmp_path / "a.data")
    assert format_of(str(tmp_path / "a.data")).name == "parquet"
    [one] = open_inputs([str(tmp_path / "a.data")], Options())
    assert [piece.text for piece in one.source.read(0, None)] == TEXTS
    with pytest.raises(EnvironmentProblem, match=r"a\.data holds Parquet") as told:
        make(TextFiles(paths=[tmp_path / "a.data"]))
    assert 'dataset.type = "parquet"' in str(told.value.hint)


def documents(folder: Path, name: str, data: bytes, **options: Any) -> int:
    (folder / name).write_bytes(data)
    inputs = open_inputs([str(folder / name)], Options(**options))
    return tokenize(Job(inputs, ByteTokenizer(), folder / f"out-{name}", 1 << 20, 1)).documents


def test_tokenize_reads_each_row_whatever_the_suffix(tmp_path: Path) -> None:
    assert documents(tmp_path, "c4-train.00000.json", ROWS) == len(TEXTS)
    assert documents(tmp_path, "c4-train.00001.json.gz", gzip.compress(ROWS, mtime=0)) == len(TEXTS)
    assert documents(tmp_path, "rows.txt", ROWS) == 1
    assert documents(tmp_path, "more.txt", ROWS, format="jsonl") == len(TEXTS)
    assert documents(tmp_path, "package.json", CODE, format="text") == 1


def test_text_files_takes_rows_for_one_text_only_where_it_is_asked_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rows.json").write_bytes(ROWS)
    with pytest.raises(EnvironmentProblem, match=r"rows\.json holds JSON Lines, and would be read") as told:
        make(TextFiles(paths=[tmp_path]))
    assert 'dataset.type = "jsonl"' in str(told.value.hint) and 'dataset.format = "text"' in str(
        told.value.hint
    )
    batch = next(iter(make(TextFiles(paths=[tmp_path], format="text"), rows=1)))
    assert bytes(batch["tokens"][0].tolist()) == ROWS[:16]
    assert not caplog.records
    (tmp_path / "rows.json").rename(tmp_path / "rows.txt")
    make(TextFiles(paths=[tmp_path]))
    [record] = caplog.records
    assert record.levelno == logging.WARNING and "rows.txt looks like JSON Lines" in record.getMessage()


def test_rows_of_any_name_are_read_and_shuffled(tmp_path: Path) -> None:
    (tmp_path / "c4.00000.json").write_bytes(ROWS)
    assert make(JsonLines(paths=[tmp_path])).skip(1) == 1
    (tmp_path / "c4.00001.json").write_bytes(gzip.compress(ROWS, mtime=0))  # no suffix says so
    for shuffle in (False, True):
        batches = iter(make(JsonLines(paths=[tmp_path], shuffle=shuffle, repeat=False), rows=1))
        tokens = [token for batch in batches for token in batch["tokens"].flatten().tolist()]
        assert bytes(t for t in tokens if t < 256).decode().count(TEXTS[0]) == 2


def test_a_file_that_is_gone_or_closed_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").symlink_to("a.json")
    for path in (tmp_path / "gone", tmp_path / "a.json"):
        with pytest.raises(EnvironmentProblem, match=rf"cannot read the file {path}"):
            kind_of_rows(os.fspath(path))


def test_the_command_counts_rows_of_lines_and_of_tables(
    titan: Titan,  # noqa: F811
    tmp_path: Path,
) -> None:
    path = tmp_path / "c4-train.00000.json"
    path.write_bytes(ROWS)
    done = titan(
        "data", "tokenize", str(path), str(tmp_path / "out"), "--tokenizer", "byte", "--workers", "1"
    )
    assert done.code == 0 and "of 3 documents in 1 shard" in done.out
    (tmp_path / "a.csv").write_text("text\nhello\n")
    done = titan("data", "tokenize", str(tmp_path / "a.csv"), str(tmp_path / "csv"), "--tokenizer", "byte")
    assert done.code == 0 and "6 tokens of 1 documents" in done.out
    (tmp_path / "paper").write_bytes(b"%PDF-1.7\n")
    done = titan("data", "tokenize", str(tmp_path / "paper"), str(tmp_path / "pdf"), "--tokenizer", "byte")
    assert done.code == 5 and "is a PDF" in done.err
    assert "--format text" in done.err and "dataset." not in done.err

"""Files that `datasets` is about to read: good ones pass, once; others are named with a way out."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import zipfile
from pathlib import Path

import pytest

from titancli.data import HFDataset, hf_files, hf_look
from titancli.data.hf_files import require_small
from titancli.errors import EnvironmentProblem


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_CACHE", str(tmp_path / "cache"))


def make(folder: Path) -> None:
    """Files of each kind, as people publish them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    rows = [{"text": f"row {n} of some text", "label": n % 3} for n in range(3000)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "a.jsonl").write_text(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "c.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    (folder / "list.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    pq.write_table(pa.Table.from_pylist(rows), folder / "d.parquet")
    with zipfile.ZipFile(folder / "e.zip", "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("a.jsonl", lines)
    card = "---\nconfigs: &a [1, 2]\nmore: *a\n---\n# A set\n---\n"
    (folder / "README.md").write_text(card)
    (folder / "empty.jsonl").touch()


def test_good_files_pass_and_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "d")
    require_small(str(tmp_path / "d"))
    for magic in hf_files._LOOKS:
        monkeypatch.setitem(hf_files._LOOKS, magic, lambda path, limit: pytest.fail(path))
    require_small(str(tmp_path / "d"))


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"text": "a"}\n'))
    require_small(str(file))
    file.write_bytes(gzip.compress(b"{}\n" * (1 << 25), 9))
    with pytest.raises(EnvironmentProblem, match=r"a\.jsonl\.gz cannot be read: it expands"):
        require_small(str(file))


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.txt", gzip.compress(b"x" * (1 << 26) + b"y", 0), "a line has more than"),
        ("a.jsonl", b"\x04\x22\x4d\x18....", "decompress it first"),
        ("a.zip", b"PK\x03\x04....", "damaged"),
        ("a.parquet", b"PAR1....", "damaged"),
        ("a.jsonl.xz", b"\xfd7zXZ\0...", "damaged"),
        ("README.md", b"---\na: [\n---\n", "its YAML is damaged"),
        (".huggingface.yaml", b"a: &a [1]\n" + b"b: " + b"[" * 200, "nested more than 100 deep"),
        ("state.json", b"[" * 10_000, "nested too deeply"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(EnvironmentProblem, match=words) as caught:
        require_small(str(tmp_path))
    assert str(tmp_path / name) in str(caught.value)


def test_a_fifo_as_description(tmp_path: Path) -> None:
    """The library opens it, although its name is hidden."""
    os.mkfifo(tmp_path / ".huggingface.yaml")
    with pytest.raises(EnvironmentProblem, match="is not a regular file"):
        require_small(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "text"),
    [("README.md", "---\n{}\n---\n"), (".huggingface.yaml", "{}\n")],
)
def test_a_look_fetches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    """A folder that names addresses is left to the start of a run."""
    there = "configs: [{config_name: default, data_files: https://example.com/a.jsonl}]"
    (tmp_path / name).write_text(text.format(there))
    monkeypatch.setattr(hf_look, "open_local", lambda *some, **more: pytest.fail("opened"))
    hf_look.look(HFDataset(path=str(tmp_path)), 2.0, column=True)
    (tmp_path / name).write_text(text.format("license: mit"))
    with pytest.raises(pytest.fail.Exception):
        hf_look.look(HFDataset(path=str(tmp_path)), 2.0, column=True)


def test_a_zip_that_expands(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("a.jsonl", bytes(1 << 27))
    with pytest.raises(EnvironmentProblem, match="it expands to more than"):
        require_small(str(tmp_path))


def test_holes(tmp_path: Path) -> None:
    """A file with small holes is one of a disk that compresses, or was copied with them."""
    file = tmp_path / "a.jsonl"
    with open(file, "wb") as out:
        for _ in range(4):
            out.write(b'{"text": "a"}\n' * 1000)
            out.seek(1 << 16, os.SEEK_CUR)
    require_small(str(file))
    os.truncate(file, 1 << 40)
    with pytest.raises(EnvironmentProblem, match="are stored"):
        require_small(str(file))


def test_files_are_left_unread_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After some time, as for a terabyte; what was read before is known."""
    make(tmp_path / "d")
    monkeypatch.setattr(hf_files, "PATIENCE", -1.0)
    require_small(str(tmp_path / "d"))
    assert "5 of its compressed files and tables were not read" in caplog.text
    caplog.clear()
    monkeypatch.setattr(hf_files, "PATIENCE", 60.0)
    require_small(str(tmp_path / "d"))
    monkeypatch.setattr(hf_files, "PATIENCE", -1.0)
    require_small(str(tmp_path / "d"))
    assert not caplog.text

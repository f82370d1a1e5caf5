"""Which files a dataset reads, how it reads large ones, and what it says of bad ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.data.helpers import make, rows_of, stream
from titancli import fingerprint
from titancli.data import PythonStdlib, TextFiles, files
from titancli.errors import EnvironmentProblem


def names(found: list[files.TextFile]) -> list[str]:
    return [file.name for file in found]


def test_folders_files_and_globs_are_found_sorted_without_hidden_ones(corpus: Path) -> None:
    (corpus / ".git").mkdir()
    (corpus / ".git" / "HEAD").write_text("x")
    (corpus / ".hidden").write_text("x")
    numbered = [f"{i}.txt" for i in range(6)]
    assert names(files.find_files(corpus)) == [
        *numbered,
        "deep/empty.txt",
        "deep/er/code.md",
        "deep/greek.txt",
    ]
    assert names(files.find_files(corpus / "3.txt")) == ["3.txt"]
    assert names(files.find_files(corpus / "*.txt")) == numbered
    assert names(files.find_files(corpus / "**" / "*.md")) == ["deep/er/code.md"]


def test_a_file_whose_name_looks_like_a_glob_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("x")
    assert names(files.find_files(tmp_path / "a[1].txt")) == ["a[1].txt"]


def test_paths_are_relative_to_the_current_folder(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(corpus)
    assert files.find_files(Path("0.txt"))[0].path == str(corpus / "0.txt")


def test_a_file_named_twice_is_read_once(corpus: Path) -> None:
    dataset = make(TextFiles(paths=[corpus / "1.txt", corpus, corpus / "*.txt"]))
    assert dataset.state_dict()["data"]["files"] == 9


def test_python_stdlib_is_the_library_without_packages_and_tests() -> None:
    dataset = make(PythonStdlib())
    found = [file.name for file in dataset._source._files]
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= set(found)
    assert found == sorted(found)
    parts = {part for name in found for part in name.split("/")[:-1]}
    assert not parts & {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    assert all(name.endswith(".py") for name in found)
    assert dataset.state_dict()["data"]["bytes"] > 5e6
    next(iter(dataset))


@pytest.mark.parametrize("text", ["line of text\n" * 60, "ж" * 501, "ab" * 400, "日本語\n\nтекст " * 40])
def test_a_large_file_is_read_in_pieces_without_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 100)
    path = tmp_path / "large.txt"
    path.write_text(text, newline="")
    [known] = files.find_files(path)
    pieces = list(files.pieces(known, 0, 0))
    assert "".join(piece.text for piece in pieces) == text
    assert max(len(piece.text.encode()) for piece in pieces) <= 100
    assert [piece.begins for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    for i, piece in enumerate(pieces):
        assert list(files.pieces(known, 0, piece.mark["byte"])) == pieces[i:]


def test_a_large_file_is_one_document_and_resumes_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 64)
    (tmp_path / "a.txt").write_text(text := "".join(f"line {i}\n" for i in range(100)))
    config = TextFiles(paths=[tmp_path], repeat=False, document_mask=True)
    dataset = make(config, rows=1)
    batches, states = [], []
    for batch in dataset:
        batches.append(batch)
        states.append(dataset.state_dict())
    tokens = stream([text])
    assert [t for row, _ in rows_of(batches) for t in row][: len(tokens)] == tokens
    assert all(batch["document_ids"].max() == 0 for batch in batches)
    for i, state in enumerate(states):
        resumed = make(config, rows=1)
        resumed.load_state_dict(state)
        assert rows_of(list(resumed)) == rows_of(batches[i + 1 :])


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    assert next(iter(make(TextFiles(paths=[tmp_path]))))["tokens"][0, :5].tolist() == [97, 98, 99, 256, 97]


def test_bad_paths_are_named_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe")
    for name, said in {
        "missing.txt": "missing.txt does not exist",
        "nothing": "nothing has no files",
        "*.py": r"no file matches .*\*\.py",
        "dangling": "cannot read the file .*dangling: No such file",
        "pipe": "pipe is not a regular file",
    }.items():
        with pytest.raises(EnvironmentProblem, match=said) as error:
            make(TextFiles(paths=[tmp_path / name]))
        assert error.value.hint
        assert "\n" not in error.value.message


def test_empty_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(EnvironmentProblem, match=r"every file is empty, for example .*a\.txt"):
        make(TextFiles(paths=[tmp_path]))
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(EnvironmentProblem, match="all documents are empty"):
        next(iter(make(TextFiles(paths=[tmp_path]))))


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_not_utf8_is_named_with_its_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    if not whole:
        monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 10)
        monkeypatch.setenv("TITAN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_bytes(b"x" * 1000 + "é".encode("latin-1") + b"x" * 1000)
    with pytest.raises(EnvironmentProblem, match=r"a\.txt is not UTF-8 text: byte 1000 "):
        next(iter(make(TextFiles(paths=[tmp_path]))))


def test_a_character_cut_by_a_block_is_still_checked_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 64)
    (tmp_path / "a.txt").write_bytes(b"x" * 63 + "日".encode() + b"\n" + b"y" * 60 + "日".encode()[:2])
    with pytest.raises(EnvironmentProblem, match="byte 127 "):
        make(TextFiles(paths=[tmp_path]))


def test_a_file_that_cannot_be_read_is_named(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make(TextFiles(paths=[corpus], shuffle=False), rows=1, seq_len=32)
    batches = iter(dataset)
    (corpus / "0.txt").unlink()
    with pytest.raises(EnvironmentProblem, match=r"cannot read the file .*0\.txt: No such file"):
        next(batches)

"""Parquet files: every row once, from any place, in an order that follows from the seed and the epoch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.helpers import global_rows, make, rows_of, stream
from titancli.data import Parquet, trial
from titancli.data.first_look import look
from titancli.errors import EnvironmentProblem, RecipeError

TEXTS = [f"row {number}, ü" + "." * (number % 7) for number in range(30)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    pq.write_table(pa.table({"n": range(20), "text": TEXTS[:20]}), folder / "a.parquet", row_group_size=7)
    pq.write_table(pa.table({"text": [*TEXTS[20:], None, ""]}), folder / "b.parquet")
    return folder


def tokens_of(config: Parquet, **options: int) -> list[int]:
    return [t for tokens, _ in rows_of(list(make(config, seq_len=1, rows=1, **options))) for t in tokens]


def test_every_row_comes_once_in_order(corpus: Path) -> None:
    assert tokens_of(Parquet(paths=[corpus], shuffle=False, repeat=False)) == stream(TEXTS)[:-1]


def test_shuffled_rows_are_the_same_ones_in_another_order_each_epoch(corpus: Path) -> None:
    size = len(stream(TEXTS))
    found, _ = global_rows(Parquet(paths=[corpus]), 2 * size, dp_size=1, rows=1, seq_len=1)
    tokens = [t for row, _ in found for t in row]
    epochs = [tokens[:size], tokens[size:]]
    texts = [bytes(t % 256 for t in epoch).decode().split("\0") for epoch in epochs]
    assert sorted(texts[0]) == sorted(texts[1]) == sorted([*TEXTS, ""])
    assert texts[0] != texts[1] and texts[0][:-1] != TEXTS
    assert tokens_of(Parquet(paths=[corpus], repeat=False), seed=8) != epochs[0][:-1]


@pytest.mark.parametrize("shuffle", [False, True])
def test_stopping_anywhere_and_going_on_with_other_ranks_changes_nothing(corpus: Path, shuffle: bool) -> None:
    config = Parquet(paths=[corpus], shuffle=shuffle)
    whole, _ = global_rows(config, 90, dp_size=1, rows=1)
    got, state = [], None
    for dp_size, rows in [(1, 3), (3, 1), (2, 2), (1, 1), (2, 4), (4, 2), (1, 7)] * 2:
        part, state = global_rows(config, 1, dp_size=dp_size, rows=rows, state=state)
        got += part
    assert got == whole[: len(got)] and state["epoch"] > 0


def test_dictionary_encoded_column(corpus: Path) -> None:
    """pandas writes a categorical column so."""
    encoded = pa.array([*TEXTS[20:], None, "", TEXTS[20]]).dictionary_encode()
    pq.write_table(pa.table({"text": encoded}), corpus / "b.parquet", row_group_size=5)
    found = tokens_of(Parquet(paths=[corpus], shuffle=False, repeat=False))
    assert found == stream([*TEXTS, "", "", TEXTS[20]])[:-1]
    pq.write_table(pa.table({"text": pa.array([1, 2]).dictionary_encode()}), corpus / "b.parquet")
    with pytest.raises(RecipeError, match=r"column .text. has the type int64"):
        make(Parquet(paths=[corpus]))


def test_what_cannot_be_read_is_named(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"b\.parquet has no column 'n'"):
        make(Parquet(paths=[corpus / "b.parquet"], text="n"))
    with pytest.raises(RecipeError, match=r"a\.parquet: column 'n' has the type int64"):
        make(Parquet(paths=[corpus / "a.parquet"], text="n"))
    data = (corpus / "b.parquet").read_bytes()
    (corpus / "b.parquet").write_bytes(data[:-9])
    with pytest.raises(EnvironmentProblem, match=r"cannot read the Parquet file .*b\.parquet"):
        make(Parquet(paths=[corpus]))
    (corpus / "b.parquet").write_bytes(b"XXXX" + b"\xff" * 100 + data[104:])
    with pytest.raises(EnvironmentProblem, match=r"cannot read the Parquet file .*b\.parquet"):
        list(make(Parquet(paths=[corpus], repeat=False)))


def test_a_name_that_arrow_does_not_take_is_an_error_in_words(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"a\xff.parquet")
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet")
    (tmp_path / "a.parquet").rename(odd)
    with pytest.raises(EnvironmentProblem, match="cannot read the Parquet file"):
        make(Parquet(paths=[tmp_path]))


def test_no_byte_of_a_footer_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column whose type contradicts what else the footer says makes pyarrow abort."""
    monkeypatch.setenv("TITAN_CACHE", str(tmp_path / "cache"))
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "good", store_schema=False)
    data = (tmp_path / "good").read_bytes()
    for place in range(len(data) - 8 - int.from_bytes(data[-8:-4], "little"), len(data) - 8):
        changed = data[:place] + bytes((data[place] ^ 4,)) + data[place + 1 :]
        (tmp_path / f"{place}.parquet").write_bytes(changed)
    code = f"""
from glob import glob
from titancli.data.parquet_file import open_parquet, try_parquet
print(*try_parquet(paths := glob("{tmp_path}/*.parquet")), sep="\\n")
for path in paths:
    try:
        with open_parquet(path) as file:
            file.read()
    except (OSError, ValueError):
        pass
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for path in done.stdout.split()[:2]:
        with pytest.raises(EnvironmentProblem, match=f"{path}: it ends the process"):
            make(Parquet(paths=[Path(path)]))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes of trials."""
    found, run = [], trial.subprocess.run

    def counted(*given: Any, **named: Any) -> Any:
        found.append(given)
        return run(*given, **named)

    monkeypatch.setattr(trial.subprocess, "run", counted)
    return found


@pytest.mark.parametrize("cache", ["cache", "0.parquet/cache"], ids=["", "no cache can be written"])
def test_good_footers_are_tried_once_and_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[Any], cache: str
) -> None:
    monkeypatch.setenv("TITAN_CACHE", str(tmp_path / cache))
    for number in range(8):
        pq.write_table(pa.table({"text": ["a"] * (number + 1)}), tmp_path / f"{number}.parquet")
    for _ in range(2):
        tokens_of(Parquet(paths=[tmp_path / "*.parquet"], repeat=False))
        assert len(started) == 1


def test_a_look_tries_footers_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[Any]
) -> None:
    monkeypatch.setenv("TITAN_CACHE", str(tmp_path / "cache"))
    for number in range(8):
        pq.write_table(pa.table({"other": ["b"] * (number + 1)}), tmp_path / f"{number}.parquet")
    with pytest.raises(RecipeError, match="has no column 'text'"):
        look(Parquet(paths=[tmp_path / "*.parquet"]))
    assert len(started) == 1

"""Rows by lengths that are measured once: the same as without, and each rank prepares its own only."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.helpers import global_rows, make, rows_of, same
from tests.data.test_workers import loader
from titan_preference import Preference
from titancli.data import Chat, lengths
from titancli.data.chat import ConversationReader
from titancli.data.lengths import BAD, CHUNK, row_lengths
from titancli.data.row_check import FIRST
from titancli.errors import EnvironmentProblem
from titancli.observe.metrics import collector

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def chats(tmp_path: Path) -> str:
    """800 rows in two files, one in ten of them none."""
    draw = random.Random(0)
    for name in ("a", "b"):
        rows: list[Any] = []
        for number in range(400):
            said = [{"role": "user", "content": f"{name}{number}"}]
            said.append({"role": "assistant", "content": "x" * draw.randint(1, 60)})
            rows.append({"messages": said if draw.random() > 0.1 else "none"})
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return str(tmp_path / "*.jsonl")


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_and_positions_are_those_without_an_index(chats: str, shuffle: bool, pack: bool) -> None:
    plain = Chat(path=chats, shuffle=shuffle, pack=pack)
    indexed = replace(plain, length_index=True)
    whole, _ = global_rows(plain, 330, dp_size=1, rows=3, seq_len=48)
    readings = collector.drain()
    assert global_rows(indexed, 330, dp_size=1, rows=3, seq_len=48)[0] == whole
    now = collector.drain()
    assert now["bad_rows"].value == readings["bad_rows"].value > 20
    assert now.get("wasted_tokens") == readings.get("wasted_tokens") and ("wasted_tokens" in now) == pack
    draw, got, state = random.Random(1), [], None
    while len(got) < 900:  # to and fro between both, over the end of an epoch
        config, dp_size, rows = draw.choice([plain, indexed]), draw.choice([1, 2, 4]), draw.choice([1, 5])
        part, state = global_rows(
            config, draw.randint(1, 40), dp_size=dp_size, rows=rows, state=state, seq_len=48
        )
        state, got = json.loads(json.dumps(state)), got + part
    assert got[:900] == whole[:900]


def test_each_rank_makes_its_own_examples_and_lengths_are_measured_once(
    chats: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0
    real = ConversationReader.__call__

    def counted(self: Any, row: Any) -> Any:
        nonlocal made
        made += 1
        return real(self, row)

    monkeypatch.setattr(ConversationReader, "__call__", counted)
    config = Chat(path=chats, pack=False, length_index=True, repeat=False)
    global_rows(config, 5, dp_size=4, rows=8, seq_len=96)
    assert made == FIRST + 800 + 5 * 32, "the check, lengths, by all ranks together, and rows"
    made = 0
    last = make(config, dp_rank=3, dp_size=4, rows=8, seq_len=96)
    assert last.skip(64) == 64
    batches = [batch for _, batch in zip(range(3), last, strict=False)]
    assert made == 3 * 8
    plain = make(replace(config, length_index=False), rows=32, seq_len=96)
    rows = rows_of([batch for _, batch in zip(range(5), plain, strict=False)])
    assert rows_of(batches) == [row for n in (2, 3, 4) for row in rows[32 * n + 24 : 32 * n + 32]]


def test_pairs_and_a_data_set_on_disk(tmp_path: Path, chats: str) -> None:
    import datasets

    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines() if line]
    good = [row for row in rows if row["messages"] != "none"]
    datasets.Dataset.from_list(good).save_to_disk(str(tmp_path / "saved"))
    for plain in (Preference(path="titan:sums_pairs"), Chat(path=str(tmp_path / "saved"), shuffle=False)):
        indexed = replace(plain, length_index=True)
        wanted = global_rows(plain, 70, dp_size=1, rows=4, seq_len=64)
        assert global_rows(indexed, 70, dp_size=2, rows=2, seq_len=64) == wanted


def test_workers_prepare_conversations(chats: str) -> None:
    config = Chat(path=chats, length_index=True)
    alone, workers = loader(config, 0, seq_len=96), loader(config, 2, seq_len=96)
    assert all(same(next(alone), next(workers)) and alone.state == workers.state for _ in range(12))
    alone.close()
    workers.close()


def test_a_bad_row_ends_a_strict_run_before_its_first_batch(chats: str) -> None:
    dataset = make(Chat(path=chats, length_index=True, strict=True), seq_len=96)
    for _ in range(2):  # and it is no end of the data
        with pytest.raises(EnvironmentProblem, match=r"[ab]\.jsonl, line \d+: 'messages' is str"):
            next(iter(dataset))


def test_other_limits_have_lengths_of_their_own(chats: str) -> None:
    for limits in ({"max_bytes": 130}, {}):  # in the first, most rows are too long
        plain = Chat(path=chats, **limits)
        wanted, _ = global_rows(plain, 9, dp_size=1, rows=4, seq_len=96)
        indexed = replace(plain, length_index=True)
        assert global_rows(indexed, 9, dp_size=1, rows=4, seq_len=96)[0] == wanted
    with pytest.raises(EnvironmentProblem, match="'messages' is str"):
        next(iter(make(replace(indexed, strict=True), seq_len=96)))


def test_a_tokenizer_that_changes_its_mind_is_noticed(chats: str) -> None:
    config = Chat(path=chats, length_index=True)
    dataset = make(config, seq_len=96)
    next(iter(dataset))
    dataset._lengths = dataset._lengths + (dataset._lengths != BAD)
    dataset.load_state_dict(dataset.state_dict())
    with pytest.raises(EnvironmentProblem, match="is no longer as long as when it was measured"):
        next(iter(dataset))


# ---------------------------------------------------------------------------------------------- measuring


def test_what_was_measured_is_kept_when_measuring_raises(cache: Path) -> None:
    asked: list[int] = []
    count = 3 * CHUNK + 5

    def measure(row: int) -> int:
        asked.append(row)
        if len(asked) == 2 * CHUNK + 1:
            raise EnvironmentProblem("stop")
        return BAD if row % 7 == 0 else row

    def each(rows: range) -> list[int]:
        return [measure(row) for row in rows]

    wanted = [BAD if row % 7 == 0 else row for row in range(count)]
    with pytest.raises(EnvironmentProblem, match="stop"):
        row_lengths({"a": 1}, count, each)
    assert row_lengths({"a": 1}, count, each).tolist() == wanted
    twice = {row // CHUNK for row, times in Counter(asked).items() if times > 1}
    assert len(twice) == 1, "only the chunk that raised is measured again"
    asked.clear()
    assert row_lengths({"a": 1}, count, each).tolist() == wanted and not asked
    cache.chmod(0o500)
    assert row_lengths({"a": 1}, count, each).tolist() == wanted and not asked
    assert row_lengths({"a": 2}, 3, each).tolist() == wanted[:3], "other rows, other lengths"


@pytest.mark.parametrize("damage", ["cut", "bad bit", "older form", "empty"])
def test_damaged_lengths_are_measured_again(
    cache: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    row_lengths({"a": 1}, 5, list)
    [path] = (cache / "lengths").iterdir()
    data = bytearray(path.read_bytes())
    data[0] ^= damage == "bad bit"
    path.write_bytes(data[: {"cut": 9, "older form": 20, "empty": 0}.get(damage)])
    assert row_lengths({"a": 1}, 5, list).tolist() == [0, 1, 2, 3, 4]
    assert "is damaged, and its rows are measured again" in caplog.text
    caplog.clear()
    assert row_lengths({"a": 1}, 5, lambda rows: pytest.fail("measured")).tolist() == [0, 1, 2, 3, 4]
    assert not caplog.text


def test_processes_share_the_work_and_take_over_from_one_that_dies(tmp_path: Path) -> None:
    count = 6 * CHUNK
    fork = multiprocessing.get_context("fork")
    together = fork.Barrier(3)

    def part(number: int) -> None:
        def measure(rows: range) -> range:
            with open(tmp_path / f"{number}.rows", "a") as file:
                file.writelines(f"{row}\n" for row in rows)
            time.sleep(0.05)
            if number == 0:
                os._exit(1)
            return rows

        (tmp_path / f"{number}.rows").touch()
        together.wait(60)
        found = row_lengths({"a": 1}, count, measure)
        np.save(tmp_path / f"{number}.npy", found)

    processes = [fork.Process(target=part, args=(number,)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [1, 0, 0]
    measured = [len((tmp_path / f"{n}.rows").read_text().split()) for n in (1, 2)]
    assert sum(measured) == count, "none is measured twice"
    assert all(np.load(tmp_path / f"{n}.npy").tolist() == list(range(count)) for n in (1, 2))


def test_a_disk_that_is_full_costs_time_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lengths.os, "pwrite", lambda descriptor, data, place: len(data) // 2)
    assert row_lengths({"a": 1}, 5, list).tolist() == [0, 1, 2, 3, 4]
    assert "lengths cannot be kept" in caplog.text


def test_a_cache_that_cannot_be_written_costs_time_alone(
    chats: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file")
    plain = Chat(path=chats)
    assert global_rows(replace(plain, length_index=True), 3, dp_size=1, rows=4, seq_len=64) == global_rows(
        plain, 3, dp_size=1, rows=4, seq_len=64
    )
    assert "lengths cannot be kept" in caplog.text

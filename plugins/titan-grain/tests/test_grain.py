"""Rows from ArrayRecord files: each once an epoch, on any number of ranks, and from any place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from tests.data.helpers import global_rows, make, rows_of
from titan_grain import Grain
from titan_testing import check_plugin
from titancli.data import ByteTokenizer
from titancli.data.loader import Loader
from titancli.data.workers import Rebuild, Workers
from titancli.errors import EnvironmentProblem
from titancli.observe.metrics import collector

TEXTS = [f"record {number}: " + "x" * (number % 7) for number in range(23)]


@pytest.fixture(autouse=True)
def nothing_reported() -> Iterator[None]:
    collector.drain()
    yield
    collector.drain()


def write(path: Path, records: list[bytes]) -> Path:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, part in (("a", TEXTS[:9]), ("b", TEXTS[9:])):
        write(tmp_path / f"{name}.array_record", [text.encode() for text in part])
    return tmp_path / "*.array_record"


def texts(rows: list[Any]) -> list[str]:
    return [bytes(t for t in tokens if t < 256).decode() for tokens, _ in rows]


def test_the_kit_finds_nothing(files: Path) -> None:
    check_plugin("titan-grain", configs={"dataset/grain": {"paths": [str(files)]}})


def test_each_epoch_has_each_record_once_in_another_order(files: Path) -> None:
    rows, state = global_rows(Grain(paths=[files]), 23, dp_size=1, rows=2, seq_len=32)
    epochs = texts(rows[:23]), texts(rows[23:])
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(TEXTS) and epochs[0] != epochs[1]
    assert state["epoch"] == 2 and state["row"] == 46
    listed, _ = global_rows(Grain(paths=[files], shuffle=False), 12, dp_size=2, rows=1, seq_len=32)
    assert texts(listed)[:23] == TEXTS


@pytest.mark.parametrize("repeat", [True, False])
def test_ranks_stops_and_workers_change_nothing(files: Path, repeat: bool) -> None:
    config = Grain(paths=[files], repeat=repeat)
    whole, _ = global_rows(config, 20, dp_size=1, rows=4, seq_len=32)
    head, state = global_rows(config, 3, dp_size=2, rows=2, seq_len=32)
    tail, _ = global_rows(config, 17, dp_size=4, rows=1, seq_len=32, state=state)
    assert head + tail == whole and len(whole) == (80 if repeat else 24)
    rebuild = Rebuild(config, ByteTokenizer(), 32, 4, 0, 1, 7)
    dataset = rebuild()
    loader = Loader(dataset, device="cpu", workers=Workers(rebuild, dataset, count=2, depth=1))
    assert rows_of([batch for _, batch in zip(range(5), loader, strict=False)]) == whole[:20]
    loader.close()


def test_ids_are_read_cut_and_counted(tmp_path: Path) -> None:
    ids = np.arange(40, dtype="<u2")
    path = write(tmp_path / "ids.array_record", [ids.tobytes(), ids[:5].tobytes()])
    batch = next(iter(make(Grain(paths=[path], records="uint16", shuffle=False))))
    assert batch["tokens"][0].tolist() == list(range(16)) and batch["targets"][0, -1] == 16
    assert batch["targets"][1].tolist() == [1, 2, 3, 4] + [-100] * 12
    assert collector.drain()["grain_cut_rows"].value == 1


@pytest.mark.parametrize(("record", "kind"), [(b"\xff\xfe", "text"), (b"abc", "uint16")])
def test_records_that_are_none_are_named(tmp_path: Path, record: bytes, kind: Any) -> None:
    path = write(tmp_path / "bad.array_record", [b"ab", record])
    with pytest.raises(EnvironmentProblem, match="row 1 of epoch 0 cannot be read"):
        next(iter(make(Grain(paths=[path], records=kind, shuffle=False))))


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.array_record").write_bytes(b"not one")
    with pytest.raises(EnvironmentProblem, match=r"a\.array_record cannot be read"):
        make(Grain(paths=[tmp_path / "a.array_record"]))


def test_a_resume_on_other_records_is_refused(files: Path, tmp_path: Path) -> None:
    state = make(Grain(paths=[files])).state_dict()
    write(tmp_path / "a.array_record", [b"other"])
    with pytest.raises(EnvironmentProblem, match="is not the data that the checkpoint was trained on"):
        make(Grain(paths=[files])).load_state_dict(state)

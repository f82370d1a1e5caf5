"""Data that change while a run reads them are named; until then every row is one of the data of before."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.helpers import make, rows_of
from tests.data.test_token_shards import write_megatron
from titancli.data import ByteTokenizer, Chat, HFDataset, JsonLines, Parquet, TextFiles, TokenShards
from titancli.data.hf_datasets import MappedFiles
from titancli.data.shards import reader
from titancli.data.shards.sources import Options, open_inputs
from titancli.data.shards.tokenize import Job, tokenize
from titancli.data.unchanged import SECOND, Stamp
from titancli.errors import EnvironmentProblem

TEXTS = [f"{number}: " + "abc" * (20 + number * 5 % 11) for number in range(300)]
TALKS = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": text}] for text in TEXTS]
PAST = 1_600_000_000 * SECOND + 123_456_789
BATCHES = 250
SIZES = {"seq_len": 128}


def text(folder: Path, **fields: Any) -> TextFiles:
    for number in range(0, len(TEXTS), 10):
        (folder / f"{number:03}.txt").write_text("\n".join(TEXTS[number : number + 10]))
    return TextFiles(paths=[folder], **fields)


def lines(folder: Path, **fields: Any) -> JsonLines:
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return JsonLines(paths=[folder], **fields)


def packed_lines(folder: Path) -> JsonLines:
    rows = lines(folder, shuffle=False)
    data = os.urandom(1 << 19).hex()  # so that one block does not hold all that is read
    whole = (folder / "a.jsonl").read_bytes() + json.dumps({"text": data}).encode() + b"\n"
    (folder / "a.jsonl").write_bytes(gzip.compress(whole * 4))
    return rows


def table(folder: Path, **fields: Any) -> Parquet:
    pq.write_table(pa.table({"text": TEXTS}), folder / "a.parquet", row_group_size=20)
    return Parquet(paths=[folder], **fields)


def shards(folder: Path, **fields: Any) -> TokenShards:
    lines(folder.parent)
    inputs = open_inputs([str(folder.parent / "a.jsonl")], Options())
    tokenize(Job(inputs, ByteTokenizer(), folder, 4000, 1))
    return TokenShards(paths=[folder], **fields)


def megatron(folder: Path) -> TokenShards:
    write_megatron(folder / "m", [[*text.encode(), 256] for text in TEXTS])
    return TokenShards(paths=[folder / "m.bin"], format="megatron", shuffle="documents")


def raw(folder: Path) -> TokenShards:
    np.frombuffer("".join(TEXTS).encode(), np.uint8).tofile(folder / "r.bin")
    return TokenShards(paths=[folder], format="raw", dtype="uint8")


def saved(folder: Path, **fields: Any) -> HFDataset:
    import datasets

    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(folder), num_shards=2)
    return HFDataset(path=str(folder), **fields)


def saved_talks(folder: Path) -> Chat:
    import datasets

    datasets.Dataset.from_dict({"messages": TALKS}).save_to_disk(str(folder))
    return Chat(path=str(folder))


def talks(folder: Path) -> Chat:
    (folder / "a.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    return Chat(path=str(folder / "a.jsonl"))


SETS: dict[str, Callable[[Path], Any]] = {
    "text_files": text,
    "text_files, best fit": lambda folder: text(folder, packing="best_fit", document_mask=True),
    "jsonl": lines,
    "jsonl as listed": lambda folder: lines(folder, shuffle=False),
    "jsonl.gz": packed_lines,
    "parquet": table,
    "token_shards": shards,
    "token_shards, documents": lambda folder: shards(folder, shuffle="documents"),
    "token_shards as listed": lambda folder: shards(folder, shuffle="off"),
    "megatron": megatron,
    "raw": raw,
    "hf": saved,
    "chat": talks,
    "chat of hf": saved_talks,
}


def change(path: Path, how: str) -> None:
    data = path.read_bytes()
    if path.suffix == ".parquet" and how in ("rewritten", "replaced"):
        path.unlink() if how == "replaced" else None
        pq.write_table(pa.table({"text": [text[::-1] for text in TEXTS]}), path, row_group_size=20)
    elif how == "rewritten":
        with open(path, "r+b") as file:
            file.write(data.translate(bytes.maketrans(b"abc", b"cab")))
    elif how == "longer":
        with open(path, "ab") as file:
            file.write(data[:64])
    elif how == "shorter":
        os.truncate(path, len(data) - 3)
    elif how == "replaced":
        path.with_name("new").write_bytes(data.translate(bytes.maketrans(b"abc", b"cab")))
        path.with_name("new").rename(path)
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["rewritten", "longer", "shorter", "replaced", "removed"])
@pytest.mark.parametrize("name", SETS)
def test_a_change_is_named_and_nothing_of_it_is_trained_on(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    monkeypatch.setattr(reader, "OPEN_FILES", 2)
    folder = tmp_path / "data"
    folder.mkdir()
    config = SETS[name](folder)
    data = [path for path in folder.iterdir() if path.suffix not in (".json", ".lock")]
    for path in data:
        os.utime(path, ns=(PAST, PAST))
    wanted = rows_of([batch for _, batch in zip(range(BATCHES), make(config, **SIZES), strict=False)])
    found: list[Any] = []
    batches = iter(make(config, **SIZES))
    found += rows_of([next(batches)])
    for path in data:
        change(path, how)
    said = None
    try:
        for _, batch in zip(range(BATCHES - 1), batches, strict=False):
            found += rows_of([batch])
    except EnvironmentProblem as error:
        said = error
    assert found == wanted[: len(found)], "every row is one of before"
    if said is None:
        assert how in ("replaced", "removed"), "what is open stays what it was"
        return
    assert any(str(path) in said.message for path in data) and said.hint
    if how == "rewritten":
        assert "has changed since the run began" in said.message and "now" in said.message


@pytest.mark.parametrize("name", SETS)
def test_other_contents_are_refused_on_a_resume(tmp_path: Path, cache: Path, name: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    config = SETS[name](folder)
    state = make(config).state_dict()
    path = max(
        (path for path in folder.iterdir() if path.suffix not in (".json", ".lock")),
        key=lambda path: path.name,
    )
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(PAST, PAST))
    with pytest.raises(
        EnvironmentProblem,
        match=r"is not the data that the checkpoint|the data differ from index|the one before it ends",
    ):
        make(config).load_state_dict(state)


def test_a_run_from_before_goes_on_in_a_saved_folder(tmp_path: Path, cache: Path) -> None:
    dataset = make(saved(tmp_path / "data"))
    state = dataset.state_dict()
    own = state["data"]["contents"].split()[0]
    dataset.load_state_dict({**state, "data": {**state["data"], "contents": own}})
    shutil.move(tmp_path / "data", tmp_path / "moved")
    make(HFDataset(path=str(tmp_path / "moved"))).load_state_dict(state)


@pytest.mark.parametrize(("rows", "reads"), [(64, 3), (1, 18)])
def test_of_many_mapped_files_each_is_asked_in_turn(tmp_path: Path, rows: int, reads: int) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path), num_shards=80)
    mapped = MappedFiles(datasets.load_from_disk(str(tmp_path)))
    os.utime(sorted(tmp_path.glob("*.arrow"))[70], ns=(PAST, PAST))
    for _ in range(reads - 1):
        with mapped.unchanged(rows):
            pass
    with (
        pytest.raises(EnvironmentProblem, match=r"data-00070-of-00080\.arrow has changed"),
        mapped.unchanged(rows),
    ):
        pass


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ((3, PAST), (3, PAST), True),
        ((3, PAST), (4, PAST), False),
        ((3, PAST), (3, PAST + 1), False),
        ((3, PAST), (3, PAST - PAST % 100), True),
        ((3, PAST), (3, PAST - PAST % 100 + 100), False),
        ((3, PAST), (3, PAST - PAST % 10**3), True),
        ((3, PAST), (3, PAST - PAST % 10**6), True),
        ((3, PAST), (3, PAST - PAST % 10**6 - 10**6), False),
        ((3, PAST), (3, PAST - PAST % SECOND), True),
        ((3, PAST), (3, PAST - PAST % SECOND + SECOND), False),
        ((3, PAST), (4, PAST - PAST % SECOND), False),
    ],
)
def test_a_disk_may_keep_less_of_a_time(one: tuple[int, int], other: tuple[int, int], same: bool) -> None:
    assert Stamp(*one).same(Stamp(*other)) is Stamp(*other).same(Stamp(*one)) is same

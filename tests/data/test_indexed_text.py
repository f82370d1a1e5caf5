"""Text by lengths that are measured once: the same rows, and each rank tokenizes its own only."""

from __future__ import annotations

import gzip
import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.helpers import global_rows, make, rows_of, same
from tests.data.test_workers import loader
from titancli.data import ByteTokenizer, HFDataset, JsonLines, Parquet, TextFiles
from titancli.data.byte_tokenizer import build as byte_tokenizer
from titancli.errors import EnvironmentProblem
from titancli.observe.metrics import collector

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """200 rows in two files: bad, empty, short, and far longer than a row."""
    draw = random.Random(0)
    for name in ("a", "b"):
        rows = []
        for _ in range(100):
            text = "".join(draw.choice("abcé\n") for _ in range(draw.choice([1, 3, 20, 300])))
            rows.append("no JSON" if draw.random() < 0.1 else json.dumps({"text": text}))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path / "*.jsonl"


class Counting:
    """A byte tokenizer that counts its documents."""

    def __init__(self) -> None:
        self._own, self.documents = byte_tokenizer(ByteTokenizer()), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def encode_arrays(self, texts: list[str]) -> Any:
        self.documents += sum(1 for text in texts if text)
        return self._own.encode_arrays(texts)


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    """80 rows in three files, one with row groups of 7, one with none; some without a text."""
    draw = random.Random(0)
    for name, size in (("a", 7), ("b", 99), ("c", 1)):
        rows = ["x" * draw.choice([0, 1, 20, 300]) or None for _ in range(40 if name < "c" else 0)]
        table = pa.table({"text": pa.array(rows, pa.string())})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=size)
    return tmp_path / "*.parquet"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """60 files; empty, with a mark of their encoding, and far longer than a row."""
    draw = random.Random(0)
    for number in range(60):
        text = "".join(draw.choice("abcé\n") for _ in range(draw.choice([0, 3, 20, 300])))
        (tmp_path / f"{number}.txt").write_text(text, encoding=draw.choice(["utf-8", "utf-8-sig"]))
    return tmp_path / "*.txt"


@pytest.mark.parametrize(
    ("kind", "packing", "mask", "shuffle"),
    [
        ("texts", "stream", False, True),
        ("texts", "stream", True, False),
        ("texts", "best_fit", True, True),
        ("texts", "best_fit", True, False),
        ("parquet", "stream", True, True),
        ("parquet", "best_fit", True, True),
        ("parquet", "best_fit", True, False),
        ("files", "stream", True, True),
        ("files", "best_fit", True, True),
    ],
)
def test_rows_are_those_without_an_index_to_and_fro(
    request: pytest.FixtureRequest, kind: str, packing: Any, mask: bool, shuffle: bool
) -> None:
    paths = [request.getfixturevalue(kind)]
    type_ = {"texts": JsonLines, "parquet": Parquet, "files": TextFiles}[kind]
    plain: Any = type_(paths=paths, shuffle=shuffle, packing=packing, document_mask=mask)
    indexed, shape = replace(plain, length_index=True), {"rows": 4, "seq_len": 32}
    whole, state = global_rows(plain, 150, dp_size=1, **shape)
    bad = collector.drain().get("bad_rows")
    assert state["epoch"] >= 1
    assert global_rows(indexed, 150, dp_size=1, **shape) == (whole, state)
    found = collector.drain().get("bad_rows")
    assert (0 < found.value <= bad.value) if bad else not found
    assert (kind == "texts") == bool(bad)
    batches = [[b for _, b in zip(range(9), make(c, **shape), strict=False)] for c in (plain, indexed)]
    assert all(map(same, *batches)), "positions and document ids too"
    draw, got, at = random.Random(1), [], None
    while len(got) < 500:
        config, dp_size, rows = draw.choice([plain, indexed]), draw.choice([1, 2, 4]), draw.choice([1, 5])
        part, at = global_rows(config, draw.randint(1, 40), dp_size=dp_size, rows=rows, state=at, seq_len=32)
        at, got = json.loads(json.dumps(at)), got + part
    assert got[:500] == whole[:500]
    once = replace(plain, repeat=False)
    ends = [global_rows(c, 999, dp_size=2, **shape) for c in (once, replace(once, length_index=True))]
    assert ends[0][0] == ends[1][0]
    assert global_rows(once, 9, dp_size=1, state=ends[1][1], **shape)[0] == [], "the end is the end"


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_each_rank_tokenizes_its_own_documents_and_what_is_skipped_costs_nothing(
    tmp_path: Path, packing: Any
) -> None:
    lines = [json.dumps({"text": f"{n:015d}"}) for n in range(2048)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    config = JsonLines(paths=[tmp_path / "a.jsonl"], length_index=True, packing=packing, document_mask=True)
    tokenizer = Counting()
    shape = {"rows": 4, "seq_len": 64, "dp_rank": 1, "dp_size": 4, "tokenizer": tokenizer}
    next(iter(make(config, **shape)))
    assert 2048 <= tokenizer.documents <= 2048 + 4 * 5 + 1, "lengths, and rows of about four documents"
    tokenizer.documents = 0
    again = make(config, **shape)
    assert again.skip(160) == 160 and tokenizer.documents == 0
    batches = [batch for _, batch in zip(range(3), again, strict=False)]
    assert tokenizer.documents <= 3 * 4 * 5 + 1
    plain = make(replace(config, length_index=False), rows=16, seq_len=64)
    rows = rows_of([batch for _, batch in zip(range(13), plain, strict=False)])
    assert rows_of(batches) == [row for n in (10, 11, 12) for row in rows[16 * n + 4 : 16 * n + 8]]


def test_a_document_of_many_rows_is_tokenized_once(tmp_path: Path) -> None:
    long = json.dumps({"text": "x" * 20_000})
    (tmp_path / "a.jsonl").write_text(f'{long}\n{{"text": "y"}}\n')
    tokenizer = Counting()
    for packing in ("stream", "best_fit"):
        config = JsonLines(
            paths=[tmp_path / "a.jsonl"], length_index=True, packing=packing, document_mask=True, repeat=False
        )
        tokenizer.documents = 0
        assert len(list(make(config, rows=2, seq_len=50, tokenizer=tokenizer))) > 199
        assert tokenizer.documents == {"stream": 4, "best_fit": 2}[packing], "lengths, once, and rows"


def test_a_dataset_on_disk(tmp_path: Path) -> None:
    import datasets

    rows = [{"text": "x" * (n % 50) if n % 9 else None} for n in range(300)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    for shuffle in (True, False):
        plain = HFDataset(path=str(tmp_path / "saved"), shuffle=shuffle)
        wanted = global_rows(plain, 70, dp_size=1, rows=4)
        assert global_rows(replace(plain, length_index=True), 70, dp_size=2, rows=2) == wanted


EMPTY = [
    ["", "abc" * 5, "", "x" * 9, ""],
    ["", "", "a" * 31],
    ["a" * 15, "", "", "b" * 7, ""],
    ["", *["a" * 7, ""] * 20, "", ""],
]


@pytest.mark.parametrize("repeat", [True, False])
@pytest.mark.parametrize("packing", ["stream", "best_fit"])
@pytest.mark.parametrize("texts", EMPTY)
def test_empty_documents_leave_no_trace_in_positions(
    tmp_path: Path, texts: list[str], packing: Any, repeat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titancli.data.shards.streams.BLOCK", 2)
    for number, text in enumerate(texts):
        (tmp_path / f"{number:02}.txt").write_text(text)
    plain = TextFiles(
        paths=[tmp_path / "*.txt"], shuffle=False, repeat=repeat, packing=packing, document_mask=True
    )
    indexed = replace(plain, length_index=True)
    for batches in range(1, 8):
        wanted = global_rows(plain, batches, dp_size=1, rows=6, seq_len=8)
        for dp_size in (1, 2, 3, 6):
            found = global_rows(indexed, batches, dp_size=dp_size, rows=6 // dp_size, seq_len=8)
            assert found == wanted, dp_size
    for seed in range(5 if repeat else 0):
        shuffled = replace(indexed, shuffle=True)
        states = [
            global_rows(shuffled, 6, dp_size=ranks, rows=6 // ranks, seq_len=8, seed=seed)
            for ranks in (1, 2, 3)
        ]
        assert states[0] == states[1] == states[2]


@pytest.mark.slow  # what workers need is `skip`, above; that they give its rows is in test_workers.py
def test_workers_tokenize(texts: Path) -> None:
    config = JsonLines(paths=[texts], length_index=True)
    alone, workers = loader(config, 0, seq_len=96), loader(config, 2, seq_len=96)
    assert all(same(next(alone), next(workers)) and alone.state == workers.state for _ in range(12))
    alone.close()
    workers.close()


def test_errors(texts: Path, tmp_path: Path) -> None:
    indexed = JsonLines(paths=[texts], length_index=True)
    next(iter(make(indexed)))
    for _ in range(2):  # lengths that were measured otherwise are no excuse, and an error is no end
        with pytest.raises(EnvironmentProblem, match=r"[ab]\.jsonl, line \d+: it is not JSON"):
            next(iter(make(replace(indexed, strict=True))))
    dataset = make(indexed, rows=64)
    before = (tmp_path / "a.jsonl").stat().st_mtime_ns
    (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text().replace("\\u00e9", "abcdef"))
    os.utime(tmp_path / "a.jsonl", ns=(before, before))  # as on a disk with a slow clock
    with pytest.raises(EnvironmentProblem, match="is no longer as long as when it was measured"):
        list(zip(range(99), dataset, strict=False))
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n' * 3)
    with pytest.raises(EnvironmentProblem, match="all documents are empty"):
        next(iter(make(JsonLines(paths=[tmp_path / "empty.jsonl"], length_index=True))))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n'))
    with pytest.raises(EnvironmentProblem, match="cannot be shuffled or indexed"):
        make(JsonLines(paths=[tmp_path / "a.jsonl.gz"], length_index=True, shuffle=False))
    (tmp_path / "long.txt").write_text("x" * ((1 << 20) + 1))
    with pytest.raises(EnvironmentProblem, match=r"long\.txt has 1,048,577 bytes, and only files of at most"):
        make(TextFiles(paths=[tmp_path / "long.txt"], length_index=True))

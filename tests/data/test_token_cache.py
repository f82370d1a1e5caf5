"""Text that is tokenized once, into token shards in the cache (`cache_tokens`)."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.helpers import global_rows, make, same
from tests.data.test_workers import loader
from titancli.data import ByteTokenizer, HFDataset, JsonLines, Parquet, TextFiles, TokenShards
from titancli.data.byte_tokenizer import build as byte_tokenizer
from titancli.data.shards import INDEX, tokenize
from titancli.errors import EnvironmentProblem

pytestmark = pytest.mark.usefixtures("cache")
SHAPE: dict[str, Any] = {"seq_len": 32}


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Any]:
    """The same kind of documents, empty, short and far longer than a row; some rows are none."""
    import datasets

    draw = random.Random(0)
    texts = ["".join(draw.choice("abcé\n") for _ in range(draw.choice([0, 3, 20, 300]))) for _ in range(80)]
    (tmp_path / "text").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "text" / f"{number:02}.txt").write_text(
            text, encoding=draw.choice(["utf-8", "utf-8-sig"])
        )
    lines = [json.dumps({"text": text}) if draw.random() > 0.1 else "no JSON" for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    pq.write_table(
        pa.table({"text": [text or None for text in texts]}), tmp_path / "a.parquet", row_group_size=7
    )
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path / "saved"))
    return {
        "text_files": TextFiles(paths=[tmp_path / "text"], shuffle=False),
        "jsonl": JsonLines(paths=[tmp_path / "a.jsonl"], shuffle=False),
        "jsonl.gz": JsonLines(paths=[tmp_path / "a.jsonl.gz"], shuffle=False),
        "parquet": Parquet(paths=[tmp_path / "a.parquet"], shuffle=False),
        "hf": HFDataset(path=str(tmp_path / "saved")),
    }


class Counting:
    """A byte tokenizer that counts its documents."""

    def __init__(self) -> None:
        self._own, self.documents = byte_tokenizer(ByteTokenizer()), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def encode_arrays(self, texts: list[str]) -> Any:
        self.documents += len(texts)
        return self._own.encode_arrays(texts)


def folders(cache: Path) -> list[Path]:
    return sorted(path.parent for path in (cache / "tokens").glob(f"*/{INDEX}"))


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
@pytest.mark.parametrize("name", ["text_files", "jsonl", "jsonl.gz", "parquet", "hf"])
def test_rows_in_order_are_those_of_live_text(sources: dict[str, Any], name: str, packing: Any) -> None:
    live = replace(sources[name], packing=packing, document_mask=True)
    cached = replace(live, cache_tokens=True)
    wanted, _ = global_rows(live, 150, dp_size=1, rows=4, **SHAPE)
    assert global_rows(cached, 150, dp_size=2, rows=2, **SHAPE)[0] == wanted
    batches = [[b for _, b in zip(range(9), make(c, **SHAPE), strict=False)] for c in (live, cached)]
    assert all(map(same, *batches)), "positions and document ids too"
    once = replace(live, repeat=False)
    ends = [global_rows(c, 999, dp_size=2, rows=2, **SHAPE) for c in (once, replace(once, cache_tokens=True))]
    assert ends[0][0] == ends[1][0]


def test_they_are_token_shards(sources: dict[str, Any], cache: Path) -> None:
    """Shuffled as these, and a run may be resumed with these."""
    config = replace(sources["jsonl"], cache_tokens=True, shuffle=True)
    whole, _ = global_rows(config, 60, dp_size=1, rows=4, **SHAPE)
    head, state = global_rows(config, 20, dp_size=2, rows=2, **SHAPE)
    [folder] = folders(cache)
    shards = TokenShards(paths=[folder], shuffle="documents")
    assert head + global_rows(shards, 40, dp_size=4, rows=1, state=state, **SHAPE)[0] == whole
    assert global_rows(replace(config, shuffle=False), 60, dp_size=1, rows=4, **SHAPE)[0] != whole
    assert folders(cache) == [folder], "one for every order"
    with pytest.raises(EnvironmentProblem, match=r"does not belong|is not the data"):
        make(sources["jsonl"], **SHAPE).load_state_dict(state)


def test_each_document_is_tokenized_once_by_all_ranks_and_runs(sources: dict[str, Any]) -> None:
    tokenizer = Counting()
    config = replace(sources["text_files"], cache_tokens=True)
    for _ in range(2):
        global_rows(config, 9, dp_size=4, rows=2, tokenizer=tokenizer, **SHAPE)
    assert tokenizer.documents == 80


@pytest.mark.slow  # that workers give the rows of `skip` is in test_workers.py
def test_workers_read_the_cache(sources: dict[str, Any]) -> None:
    config = replace(sources["jsonl"], cache_tokens=True, shuffle=True)
    alone, workers = loader(config, 0, seq_len=96), loader(config, 2, seq_len=96)
    assert all(same(next(alone), next(workers)) and alone.state == workers.state for _ in range(12))
    alone.close()
    workers.close()


def test_what_was_interrupted_goes_on(
    sources: dict[str, Any], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, _ = global_rows(sources["text_files"], 40, dp_size=1, rows=4, **SHAPE)
    monkeypatch.setattr(tokenize, "GROUP_PIECES", 10)
    monkeypatch.setattr(tokenize, "COMMIT_SECONDS", 0.0)
    config, tokenizer = replace(sources["text_files"], cache_tokens=True), Counting()
    real = Counting.encode_arrays

    def stops(self: Counting, texts: list[str]) -> Any:
        if self.documents >= 50:
            raise KeyboardInterrupt
        return real(self, texts)

    monkeypatch.setattr(Counting, "encode_arrays", stops)
    with pytest.raises(KeyboardInterrupt):
        make(config, tokenizer=tokenizer, **SHAPE)
    assert not folders(cache), "what is not whole is not read"
    monkeypatch.setattr(Counting, "encode_arrays", real)
    tokenizer.documents = 0
    assert global_rows(config, 40, dp_size=1, rows=4, tokenizer=tokenizer, **SHAPE)[0] == wanted
    assert 30 <= tokenizer.documents < 80, "not from the start"


def test_two_runs_at_once_fill_one_cache(sources: dict[str, Any], cache: Path, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    together, config = fork.Barrier(3), replace(sources["text_files"], cache_tokens=True)

    def run(number: int) -> None:
        tokenizer = Counting()
        together.wait(60)
        rows, _ = global_rows(config, 20, dp_size=1, rows=4, tokenizer=tokenizer, **SHAPE)
        (tmp_path / f"{number}.json").write_text(json.dumps([tokenizer.documents, rows]))

    processes = [fork.Process(target=run, args=(number,)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    found = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(3)]
    assert sorted(documents for documents, _ in found) == [0, 0, 80]
    assert found[0][1] == found[1][1] == found[2][1] and len(folders(cache)) == 1


def test_other_contents_and_limits_have_shards_of_their_own(
    sources: dict[str, Any], cache: Path, tmp_path: Path
) -> None:
    config = replace(sources["jsonl"], cache_tokens=True)
    _, state = global_rows(config, 3, dp_size=1, rows=2, **SHAPE)
    live = replace(sources["jsonl"], max_bytes=100)
    wanted, _ = global_rows(live, 9, dp_size=1, rows=2, **SHAPE)
    assert global_rows(replace(live, cache_tokens=True), 9, dp_size=1, rows=2, **SHAPE)[0] == wanted
    for _ in range(2):
        with pytest.raises(EnvironmentProblem, match=r"a\.jsonl, line \d+: it is not JSON"):
            make(replace(config, strict=True))
    assert len(folders(cache)) == 2
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write('\n{"text": "one more"}\n')
    changed = make(config, **SHAPE)
    assert len(folders(cache)) == 3
    with pytest.raises(EnvironmentProblem, match="is not the data that the checkpoint was trained on"):
        changed.load_state_dict(state)


def test_a_source_that_changes_while_it_is_tokenized_is_refused(
    sources: dict[str, Any], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tokenize.pieces

    def changed(*arguments: Any) -> Any:
        with open(tmp_path / "text" / "70.txt", "a") as file:
            file.write("more")
        return real(*arguments)

    monkeypatch.setattr(tokenize, "pieces", changed)
    with pytest.raises(EnvironmentProblem, match=r"70\.txt has changed since the run began"):
        make(replace(sources["text_files"], cache_tokens=True))
    assert not folders(cache)


def test_a_read_only_cache_serves_what_it_has(sources: dict[str, Any], cache: Path) -> None:
    config = replace(sources["jsonl"], cache_tokens=True)
    wanted, _ = global_rows(config, 9, dp_size=1, rows=2, **SHAPE)
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    if os.geteuid():  # root writes everywhere
        for folder in (cache, cache / "tokens", *folders(cache)):
            folder.chmod(0o500)
    assert global_rows(config, 9, dp_size=1, rows=2, **SHAPE)[0] == wanted
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


def test_a_cache_that_cannot_be_written_is_named(sources: dict[str, Any], cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(EnvironmentProblem, match=r"token shards cannot be written to .*tokens") as raised:
        make(replace(sources["jsonl"], cache_tokens=True))
    assert "TITAN_CACHE" in str(raised.value.hint)


def test_a_source_without_text(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "empty.parquet").unlink(missing_ok=True)
    pq.write_table(pa.table({"text": pa.array(["", None], pa.string())}), tmp_path / "empty.parquet")
    for _ in range(2):
        with pytest.raises(EnvironmentProblem, match="all documents are empty"):
            make(Parquet(paths=[tmp_path / "empty.parquet"], cache_tokens=True))
    assert not folders(cache)

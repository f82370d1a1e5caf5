"""Best-fit packing of text: documents are whole and apart, and every token is predicted once."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.helpers import global_rows, make
from titancli.cli import main
from titancli.data import (
    ByteTokenizer,
    FillInTheMiddle,
    HFDataset,
    HFTokenizer,
    JsonLines,
    Mix,
    Parquet,
    TextFiles,
    TokenShards,
    files,
)
from titancli.data.shards.sources import Options, open_inputs
from titancli.data.shards.tokenize import Job, tokenize
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.observe.metrics import collector
from titancli.protocols.batch import IGNORE
from titancli.registry.component import build

TEXTS = [chr(97 + number % 26) * (number * 7 % 40) for number in range(200)]
S = 16


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def configs(tmp_path: Path) -> dict[str, Any]:
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS if text))
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet", row_group_size=30)
    (tmp_path / "text").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "text" / f"{number:03}.txt").write_text(text)
    tokenize(Job(open_inputs([str(lines)], Options()), ByteTokenizer(), tmp_path / "shards", 900, 1))
    fields: dict[str, Any] = {"packing": "best_fit", "document_mask": True, "shuffle": False, "repeat": False}
    return {
        "token_shards": TokenShards(paths=[tmp_path / "shards"], **{**fields, "shuffle": "documents"}),
        "jsonl": JsonLines(paths=[lines], **fields),
        "parquet": Parquet(paths=[tmp_path / "a.parquet"], **fields),
        "text_files": TextFiles(paths=[tmp_path / "text"], **fields),
        "hf": HFDataset(path=str(lines), **fields),
    }


def predictions(texts: list[str], longest: int) -> Counter[tuple[int, int, int]]:
    """Place in its piece, input and target of every token that is predicted."""
    found: Counter[tuple[int, int, int]] = Counter()
    for text in filter(None, texts):
        ids = [*text.encode(), 256]
        found.update((at % longest, ids[at], ids[at + 1]) for at in range(len(ids) - 1))
    return found


LONG = [(f"{chr(97 + number)}bcd\n" * (number * 37 % 60)) + "end" * (number % 3) for number in range(20)]
"""Documents that are read in pieces of 50 bytes."""


@pytest.fixture
def pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TextFiles:
    monkeypatch.setattr(files, "PIECE_BYTES", 50)
    (tmp_path / "long").mkdir()
    for number, text in enumerate(LONG):
        (tmp_path / "long" / f"{number:03}.txt").write_text(text)
    fields: dict[str, Any] = {"packing": "best_fit", "document_mask": True, "shuffle": False, "repeat": False}
    return TextFiles(paths=[tmp_path / "long"], **fields)


def targets(batches: Any) -> Counter[tuple[int, int, int]]:
    """Position, input and target of every target."""
    found: Counter[tuple[int, int, int]] = Counter()
    for batch in batches:
        columns = (batch[name].flatten().tolist() for name in ("positions", "tokens", "targets"))
        found.update(one for one in zip(*columns, strict=True) if one[2] != IGNORE)
    return found


@pytest.mark.parametrize("longest", [None, 1, 7])
def test_pieces_of_a_file_lose_no_target(pieces: TextFiles, longest: int | None) -> None:
    """Rows are those of the same documents read whole."""
    config = replace(pieces, max_document_length=longest)
    assert targets(make(config, seq_len=S, rows=2)) == predictions(LONG, longest or S)
    cached = replace(config, cache_tokens=True)
    whole, _ = global_rows(config, 999, dp_size=1, rows=2, seq_len=S)
    assert whole == global_rows(cached, 999, dp_size=1, rows=2, seq_len=S)[0]


def test_stops_within_pieces_change_nothing(pieces: TextFiles) -> None:
    config = replace(pieces, max_document_length=7, repeat=True, shuffle=True)
    whole, _ = global_rows(config, 300, dp_size=1, rows=1, seq_len=S)
    got: list[Any] = []
    state = None
    while len(got) < 290:
        part, state = global_rows(config, 1, dp_size=1, rows=1 + len(got) % 3, seq_len=S, state=state)
        state = json.loads(json.dumps(state))
        got += part
    assert got[:290] == whole[:290] and state is not None and state["epoch"] > 0


def test_a_mix_of_pieces_loses_no_target(pieces: TextFiles, configs: Any) -> None:
    mixed = Mix(
        datasets={"long": pieces, "short": configs["jsonl"]},
        weights={"long": 1, "short": 1},
        exhausted="continue",
    )
    counted = targets(make(mixed, seq_len=S, rows=2))
    assert counted == predictions(LONG, S) + predictions(TEXTS, S)


@pytest.mark.parametrize("name", ["jsonl", "parquet", "text_files", "hf", "token_shards"])
@pytest.mark.parametrize("longest", [None, 5])
def test_every_token_is_predicted_once_within_its_document(
    configs: Any, name: str, longest: int | None
) -> None:
    config = type(configs[name])(**{**vars(configs[name]), "max_document_length": longest})
    found: Counter[tuple[int, int, int]] = Counter()
    places = 0
    for batch in make(config, seq_len=S, rows=2):
        rows = zip(
            *(batch[n].tolist() for n in ("tokens", "targets", "positions", "document_ids")), strict=True
        )
        for tokens, targets, positions, ids in rows:
            places += S * (set(targets) != {IGNORE})
            assert [p == 0 for p in positions] == [at == 0 or ids[at] != ids[at - 1] for at in range(S)]
            found.update(
                (position, token, target)
                for token, target, position in zip(tokens, targets, positions, strict=True)
                if target != IGNORE
            )
    assert found == predictions(TEXTS, longest or S)
    waste = 1 - found.total() / places
    assert collector.drain()["wasted_tokens"].value == pytest.approx(waste, abs=1e-6)
    assert waste < (0.02 if longest is None else 0.07), "three pieces of 5 in a row of 16"


@pytest.mark.parametrize("name", [pytest.param("jsonl", marks=pytest.mark.slow), "token_shards"])
def test_ranks_and_stops_change_nothing(configs: Any, name: str) -> None:
    shuffle = "documents" if name == "token_shards" else True
    config = type(configs[name])(**{**vars(configs[name]), "repeat": True, "shuffle": shuffle})
    whole, _ = global_rows(config, 600, dp_size=1, rows=1)
    got: list[Any] = []
    state = None
    while len(got) < 580:
        for dp_size, rows, batches in [(1, 3, 5), (3, 1, 3), (2, 2, 5), (4, 2, 1)]:
            part, state = global_rows(config, batches, dp_size=dp_size, rows=rows, state=state)
            state = json.loads(json.dumps(state))
            got += part
    assert got[:580] == whole[:580] and state is not None and state["epoch"] > 0
    with pytest.raises(EnvironmentProblem, match="longest was 16 and is 5"):
        make(type(config)(**{**vars(config), "max_document_length": 5})).load_state_dict(state)


@pytest.mark.parametrize("longest", [None, 5])
def test_shards_in_their_order_make_the_rows_of_live_text(configs: Any, longest: int | None) -> None:
    fields = {"max_document_length": longest, "repeat": True}
    shards = TokenShards(**{**vars(configs["token_shards"]), **fields, "shuffle": "off"})
    live = JsonLines(**{**vars(configs["jsonl"]), **fields})
    assert (
        global_rows(shards, 300, dp_size=2, rows=1, seq_len=S)[0]
        == global_rows(live, 300, dp_size=1, rows=2, seq_len=S)[0]
    )


def unfilled(ids: list[int], prefix: int, middle: int, suffix: int) -> list[int]:
    """The document that was rearranged."""
    first, behind = ids[0], ids.index(middle)
    if ids[1] == suffix and ids.count(prefix) == 1 and first == prefix:
        end = ids[2:behind]
        return ids[behind + 1 :] + end
    at = ids.index(suffix)
    return ids[1:at] + ids[behind + 1 :] + ids[at + 1 : behind]


def test_middles_are_filled_in_at_the_rates_asked_for(configs: Any, bpe_folder: Path, tmp_path: Path) -> None:
    tokenizer = build(HFTokenizer(path=bpe_folder))
    lines = tmp_path / "many.jsonl"
    texts = [f"{number} return document the end {number * 7}" for number in range(600)]
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenize(
        Job(open_inputs([str(lines)], Options()), HFTokenizer(path=bpe_folder), tmp_path / "out", 9000, 1)
    )
    names = {"prefix": "<|begin|>", "middle": "<|user|>", "suffix": "<|late|>"}
    marks = [tokenizer.token_id(names[name]) for name in ("prefix", "middle", "suffix")]
    fields: dict[str, Any] = {**vars(configs["token_shards"]), "paths": [tmp_path / "out"]}
    config = TokenShards(**{**fields, "fim": FillInTheMiddle(rate=0.4, spm_rate=0.25, **names)})
    kinds: Counter[str] = Counter()
    found: list[list[int]] = []
    for batch in make(config, tokenizer=tokenizer, seq_len=64, rows=2):
        for tokens, targets, ids in zip(
            *(batch[n].tolist() for n in ("tokens", "targets", "document_ids")), strict=True
        ):
            for number in range(ids[-1] + 1):
                places = [at for at, own in enumerate(ids) if own == number and targets[at] != IGNORE]
                if not places:
                    continue
                document = [tokens[at] for at in places]
                assert targets[places[-1]] == tokenizer.eos_id
                if marks[1] in document:
                    kinds["spm" if document[1] == marks[2] and document[0] == marks[0] else "psm"] += 1
                    document = unfilled(document, *marks)
                else:
                    kinds["plain"] += 1
                found.append(document)
    assert sorted(found) == sorted(tokenizer.encode(text) for text in texts), "each document once"
    assert 0.33 < (kinds["spm"] + kinds["psm"]) / 600 < 0.47
    assert 0.15 < kinds["spm"] / (kinds["spm"] + kinds["psm"]) < 0.36
    whole, _ = global_rows(config, 40, dp_size=1, rows=2, tokenizer=tokenizer, seq_len=64)
    head, state = global_rows(config, 13, dp_size=2, rows=1, tokenizer=tokenizer, seq_len=64)
    tail, _ = global_rows(
        config, 27, dp_size=1, rows=2, tokenizer=tokenizer, seq_len=64, state=json.loads(json.dumps(state))
    )
    assert head + tail == whole
    with pytest.raises(
        RecipeError, match=r"dataset.fim.prefix = '<\|begin\|>': the tokenizer has no such token"
    ):
        make(TokenShards(**{**vars(configs["token_shards"]), "fim": config.fim}))


@pytest.mark.parametrize("name", ["jsonl", "parquet", "text_files", "hf"])
def test_middles_of_cached_text_are_those_of_shards_in_their_order(
    configs: Any, name: str, bpe_folder: Path, tmp_path: Path
) -> None:
    """What `token_shards` gives is shown above."""
    inputs = open_inputs([str(tmp_path / "a.jsonl")], Options())
    tokenize(Job(inputs, HFTokenizer(path=bpe_folder), tmp_path / "out", 900, 1))
    fim = FillInTheMiddle(rate=0.5, prefix="<|begin|>", middle="<|user|>", suffix="<|late|>")
    same: dict[str, Any] = {"fim": fim, "repeat": True, "shuffle": False}
    config = type(configs[name])(**{**vars(configs[name]), **same, "cache_tokens": True})
    shards = {**vars(configs["token_shards"]), **same, "shuffle": "off", "paths": [tmp_path / "out"]}
    options: dict[str, Any] = {"tokenizer": build(HFTokenizer(path=bpe_folder)), "seq_len": 40}
    whole, _ = global_rows(TokenShards(**shards), 100, dp_size=1, rows=2, **options)
    head, state = global_rows(config, 70, dp_size=2, rows=1, **options)
    assert state["epoch"] >= 1
    tail, _ = global_rows(config, 30, dp_size=1, rows=2, state=json.loads(json.dumps(state)), **options)
    assert head + tail == whole
    with pytest.raises(EnvironmentProblem, match="fim was"):
        make(config, seed=8, **options).load_state_dict(state)


def test_settings_that_do_nothing_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["validate", "llama3_debug", "dataset.packing=best_fit", "dataset.max_document_length=5"]) == 3
    )
    assert "set document_mask = true" in "".join(capsys.readouterr())
    assert main(["validate", "llama3_debug", "dataset.max_document_length=5"]) == 3
    assert 'with packing = "best_fit" only' in "".join(capsys.readouterr())
    shards = ["dataset.type=token_shards", 'dataset.paths=["x"]', "dataset.document_mask=true"]
    assert main(["validate", "llama3_debug", *shards, "dataset.packing=best_fit"]) == 3
    assert 'set it to "documents" or "off"' in "".join(capsys.readouterr())
    fim = ["dataset.fim.prefix=a", "dataset.fim.middle=b", "dataset.fim.suffix=c"]
    assert main(["validate", "llama3_debug", *shards, *fim]) == 3
    assert "middles are filled in with packing" in "".join(capsys.readouterr())
    text = ["dataset.type=text_files", 'dataset.paths=["x"]', "dataset.document_mask=true", *fim]
    assert main(["validate", "llama3_debug", *text, "dataset.packing=best_fit"]) == 3
    assert "set cache_tokens = true" in "".join(capsys.readouterr())
    assert main(["validate", "llama3_debug", "dataset.type=jsonl", "dataset.length_index=true"]) == 3
    assert "in titan: dataset.cache_tokens=true" in "".join(capsys.readouterr())
    chosen = ["dataset.packing=best_fit", "dataset.document_mask=true", "dataset.max_document_length=5"]
    assert main(["validate", "llama3_debug", *chosen]) == 0

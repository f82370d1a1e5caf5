"""Which tokens a row has, who gets which row, and that a position leads back to it exactly."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from tests.data.helpers import global_rows, make, rows_of, same, stream
from titancli.data import TextFiles
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.protocols.batch import IGNORE

S = 16


def texts(corpus: Path) -> list[str]:
    """In the order in which a folder is listed."""
    files = (path for path in corpus.rglob("*") if path.is_file())
    return [path.read_text() for path in sorted(files, key=lambda p: p.relative_to(corpus).as_posix())]


def test_rows_are_the_concatenated_documents_and_their_successors(corpus: Path) -> None:
    tokens = stream(texts(corpus)) * 2
    rows = rows_of(
        [b for b, _ in zip(make(TextFiles(paths=[corpus], shuffle=False)), range(20), strict=False)]
    )
    assert len(rows) * S < len(tokens)
    for r, (inputs, targets) in enumerate(rows):
        assert inputs == tokens[r * S : (r + 1) * S]
        assert targets == tokens[r * S + 1 : (r + 1) * S + 1]


def test_batch_has_the_contracts_shapes_and_types(corpus: Path) -> None:
    batch = next(iter(make(TextFiles(paths=[corpus], document_mask=True), rows=3)))
    assert {name: (t.dtype, tuple(t.shape)) for name, t in batch.items()} == {
        "tokens": (torch.int64, (3, S)),
        "targets": (torch.int64, (3, S)),
        "positions": (torch.int64, (3, S)),
        "document_ids": (torch.int32, (3, S)),
    }
    plain = next(iter(make(TextFiles(paths=[corpus]), rows=3)))
    assert "document_ids" not in plain
    assert torch.equal(plain["positions"], torch.arange(S).repeat(3, 1))


def test_document_mask_restarts_positions_and_ids_after_each_end_marker(tmp_path: Path) -> None:
    for name, text in (("a", "abcde"), ("b", "f"), ("c", "ghijklmnopqrstuvwxyz")):
        (tmp_path / name).write_text(text)
    batch = next(iter(make(TextFiles(paths=[tmp_path], shuffle=False, document_mask=True), seq_len=8)))
    assert batch["document_ids"].tolist() == [[0] * 6 + [1] * 2, [0] * 8]
    assert batch["positions"].tolist() == [[0, 1, 2, 3, 4, 5, 0, 1], list(range(8))]


@pytest.mark.parametrize("repeat", [True, False])
def test_ranks_deal_the_same_global_rows_whatever_their_number(corpus: Path, repeat: bool) -> None:
    config = TextFiles(paths=[corpus], repeat=repeat)
    one, state = global_rows(config, 12, dp_size=1, rows=4)
    for dp_size, rows in ((2, 2), (4, 1)):
        assert global_rows(config, 12, dp_size=dp_size, rows=rows) == (one, state)


def test_stopping_anywhere_and_going_on_with_other_ranks_changes_nothing(corpus: Path) -> None:
    config = TextFiles(paths=[corpus])
    whole, _ = global_rows(config, 240, dp_size=1, rows=1)
    draw = random.Random(0)
    for _ in range(6):
        got, state = [], None
        while len(got) < 200:
            dp_size, rows = draw.choice([1, 2, 3]), draw.choice([1, 2, 4])
            part, state = global_rows(config, draw.randint(1, 6), dp_size=dp_size, rows=rows, state=state)
            state = json.loads(json.dumps(state))
            got += part
        assert got[:200] == whole[:200]
    assert state["epoch"] > 1, "the test must cross the end of an epoch"


def test_document_ids_are_resumed_too(corpus: Path) -> None:
    config = TextFiles(paths=[corpus], document_mask=True)
    dataset = make(config)
    batches = iter(dataset)
    for _ in range(30):
        state = dataset.state_dict()
        batch = next(batches)
        resumed = make(config)
        resumed.load_state_dict(state)
        assert same(next(iter(resumed)), batch)


def test_each_epoch_has_every_document_once_in_another_order(corpus: Path) -> None:
    size = len(stream(texts(corpus)))
    dataset = make(TextFiles(paths=[corpus]), seq_len=1, rows=1)
    batches = iter(dataset)
    epochs = [[next(batches)["tokens"].item() for _ in range(size)] for _ in range(3)]
    documents = [
        sorted(bytes(e).split(b"\xff")) for e in ([t if t < 256 else 255 for t in e] for e in epochs)
    ]
    assert documents[0] == documents[1] == documents[2]
    assert epochs[0] != epochs[1] != epochs[2]
    assert dataset.state_dict()["epoch"] == 3


def test_order_follows_from_the_seed_alone(corpus: Path) -> None:
    config = TextFiles(paths=[corpus])
    first = global_rows(config, 3, dp_size=1, rows=2, seed=1)
    assert first == global_rows(config, 3, dp_size=1, rows=2, seed=1)
    assert first[0] != global_rows(config, 3, dp_size=1, rows=2, seed=2**62 + 1)[0]


def test_without_repeat_every_token_is_predicted_once_and_ranks_end_together(corpus: Path) -> None:
    config = TextFiles(paths=[corpus], repeat=False, shuffle=False)
    tokens = stream(texts(corpus))
    for dp_size, rows in ((1, 1), (2, 2), (3, 4), (8, 5)):
        got, state = global_rows(config, 1000, dp_size=dp_size, rows=rows)
        assert [t for _, targets in got for t in targets if t != IGNORE] == tokens[1:]
        assert len(got) % (dp_size * rows) == 0
        assert global_rows(config, 1, dp_size=1, rows=1, state=state)[0] == [], (
            "an ended run stays at its end"
        )


def test_the_last_rows_are_filled_with_end_markers_that_are_no_targets(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 20)
    batches = list(make(TextFiles(paths=[tmp_path], repeat=False), rows=3))
    assert len(batches) == 1
    assert batches[0]["tokens"][1].tolist() == [ord("x")] * 4 + [256] * 12
    assert batches[0]["targets"][1].tolist() == [ord("x")] * 3 + [256] + [IGNORE] * 12
    assert batches[0]["targets"][2].tolist() == [IGNORE] * 16


def test_a_corpus_smaller_than_a_row_repeats_or_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    batch = next(iter(make(TextFiles(paths=[tmp_path]))))
    assert batch["tokens"][0].tolist() == [97, 98, 99, 256] * 4
    with pytest.raises(RecipeError, match=r"4 tokens in total.*seq_len = 16 needs 17"):
        next(iter(make(TextFiles(paths=[tmp_path], repeat=False))))


def test_resuming_reads_nothing_that_lies_before(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from titancli.data import files

    config = TextFiles(paths=[corpus], shuffle=False)
    dataset = make(config, rows=1)
    batches = iter(dataset)
    while dataset.state_dict()["mark"] is None or dataset.state_dict()["mark"]["document"] < 7:
        next(batches)
    resumed = make(config, rows=1)
    read = []
    pieces = files.pieces
    monkeypatch.setattr(
        files, "pieces", lambda file, *at: read.append(Path(file.path).name) or pieces(file, *at)
    )
    resumed.load_state_dict(dataset.state_dict())
    assert same(next(iter(resumed)), next(batches))
    assert read == ["code.md", "greek.txt"], "the position's document and what a group takes along"


def test_a_state_of_other_data_or_another_tokenizer_or_seed_is_refused(
    corpus: Path, bpe_folder: Path
) -> None:
    from titancli.data import HFTokenizer
    from titancli.registry.component import build

    config = TextFiles(paths=[corpus])
    state = make(config).state_dict()
    with pytest.raises(EnvironmentProblem, match="order was shuffled by seed 7 and is shuffled by seed 8"):
        make(config, seed=8).load_state_dict(state)
    with pytest.raises(EnvironmentProblem, match="tokenizer was byte and is hf:"):
        make(config, tokenizer=build(HFTokenizer(path=bpe_folder))).load_state_dict(state)
    (corpus / "0.txt").write_text("dOcument 0 ")
    with pytest.raises(EnvironmentProblem, match=r"dataset text_files is not the data .*: contents was"):
        make(config).load_state_dict(state)
    (corpus / "new.txt").write_text("more")
    with pytest.raises(EnvironmentProblem, match="files was 9 and is 10, bytes was"):
        make(config).load_state_dict(state)
    with pytest.raises(EnvironmentProblem, match="does not belong to dataset text_files"):
        make(config).load_state_dict({"step": 3})


def test_a_corpus_may_be_moved_between_two_parts_of_a_run(corpus: Path) -> None:
    dataset = make(TextFiles(paths=[corpus]))
    batches = iter(dataset)
    next(batches)
    state, expected = dataset.state_dict(), next(batches)
    moved = corpus.rename(corpus.parent / "elsewhere")
    resumed = make(TextFiles(paths=[moved]))
    resumed.load_state_dict(state)
    assert same(next(iter(resumed)), expected)


def test_the_tokens_of_an_epoch_are_counted_or_estimated_from_the_first_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the position stays; an empty document has no end marker."""
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text("ä" * (number + 50))
    (tmp_path / "empty.txt").touch()
    exact = sum(2 * (number + 50) + 1 for number in range(40))
    small = make(TextFiles(paths=[tmp_path]))
    before = small.state_dict()
    assert small.epoch_tokens() == (exact, True)
    assert small.state_dict() == before
    monkeypatch.setattr("titancli.data.packing.SAMPLE", 500)
    estimated, counted = small.epoch_tokens()
    assert not counted and estimated == pytest.approx(exact, rel=0.02)

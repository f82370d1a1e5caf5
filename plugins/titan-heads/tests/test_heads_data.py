"""Rows of whole documents: every token is an input, and a target marks the last of each document."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from titan_heads import EmbeddingPairs, Labelled, RewardPairs
from titancli import IGNORE, Batch, TitanError, build
from titancli.data import ByteTokenizer
from titancli.data.byte_tokenizer import ByteTokenizer as TextTokenizer
from titancli.errors import RecipeError

SEQ_LEN = 24
END = 256


def write(folder: Path, *rows: Any) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def opened(config: Any, rows: int = 2, dp_rank: int = 0, dp_size: int = 1) -> Any:
    given = dict(seq_len=SEQ_LEN, rows=rows, dp_rank=dp_rank, dp_size=dp_size, seed=0)
    return build(config, tokenizer=build(ByteTokenizer()), **given)


def documents(batch: Batch) -> list[tuple[list[int], int, int]]:
    """Return of each document its tokens, its row, and the place of its last token."""
    found = []
    for row in range(batch.rows):
        begin = 0
        for end in (batch["targets"][row] != IGNORE).nonzero()[:, 0].tolist():
            place = slice(begin, end + 1)
            assert batch["positions"][row, place].tolist() == list(range(end + 1 - begin))
            if "document_ids" in batch:
                assert len(batch["document_ids"][row, place].unique()) == 1
            found.append((batch["tokens"][row, place].tolist(), row, end))
            begin = end + 1
    return found


TEXTS = ["a", "bc", "def", "ghij" * 3, "k" * SEQ_LEN]


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("index", [True, False])
def test_documents_are_whole_inputs_with_their_labels(tmp_path: Path, pack: bool, index: bool) -> None:
    rows = [{"text": text, "label": "xy"[len(text) % 2]} for text in TEXTS]
    path = write(tmp_path, *rows)
    config = Labelled(
        path=path, classes=["x", "y"], shuffle=False, repeat=False, pack=pack, length_index=index
    )
    found: list[str] = []
    batches = list(opened(config))
    for batch in batches:
        for tokens, row, place in documents(batch):
            text = bytes(tokens).decode()
            assert batch["labels"][row, place] == len(text) % 2
            found.append(text)
    assert sorted(found) == sorted(TEXTS)
    # Two rows of one batch hold what five rows of three do.
    assert len(batches) == (1 if pack else 3)


def test_a_label_is_a_name_or_a_number_or_several_or_a_value(tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    (tmp_path / "value").mkdir()
    path = write(tmp_path, {"text": "p", "label": 1}, {"text": "q", "label": "x"})
    batch = next(iter(opened(Labelled(path=path, classes=["x", "y"], shuffle=False, pack=False))))
    assert batch["labels"][:, 0].tolist() == [1, 0]
    path = write(tmp_path / "many", {"text": "p", "label": ["y", 0]}, {"text": "q", "label": []})
    several = Labelled(path=path, classes=["x", "y", "z"], several=True, shuffle=False, pack=False)
    batch = next(iter(opened(several)))
    assert batch["labels"][:, 0].tolist() == [[1, 1, 0], [0, 0, 0]]
    path = write(tmp_path / "value", {"text": "p", "label": 1.5}, {"text": "q", "label": -2})
    batch = next(iter(opened(Labelled(path=path, shuffle=False, pack=False))))
    assert batch["labels"][:, 0].tolist() == [1.5, -2.0]
    assert batch["labels"].dtype == torch.float32


def test_a_bad_row_is_named_with_its_line_and_skipped_or_ends_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = {"text": "good", "label": "x"}
    bad: dict[str, Any] = {
        "'label' is 'w', which is none of the 2 classes (x, y)": {"text": "p", "label": "w"},
        "'label' is 2, which is none of the 2 classes": {"text": "p", "label": 2},
        "'label' is True, which is none": {"text": "p", "label": True},
        "'text' is empty": {"text": "", "label": "x"},
        "it has no key 'label', only 'text'": {"text": "p"},
        "'messages' has no messages": {"text": "p", "messages": [], "label": "x"},
        "messages[0]: the role 'me' is unknown": {"messages": [{"role": "me", "content": "p"}]},
        "it has no key 'text', only 'label'": {"label": "x"},
    }
    for line, (message, row) in enumerate(bad.items(), start=2):
        path = write(tmp_path, good, *([good] * (line - 2)), row)
        config = Labelled(path=path, classes=["x", "y"], shuffle=False, repeat=False, pack=False)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert sum(len(documents(batch)) for batch in opened(config)) == line - 1
        assert f"rows.jsonl, line {line}" in caplog.text and message in caplog.text, (message, caplog.text)
    strict = Labelled(path=path, classes=["x", "y"], shuffle=False, repeat=False, pack=False, strict=True)
    with pytest.raises(TitanError, match=r"line 9"):
        list(opened(strict))


def test_a_long_document_is_cut_or_skipped_and_an_end_is_appended(tmp_path: Path) -> None:
    path = write(tmp_path, {"text": "k" * 99, "label": 0.0}, {"text": "ab", "label": 1.0})
    cut = next(iter(opened(Labelled(path=path, shuffle=False, pack=False, append_end=True))))
    assert [tokens for tokens, _, _ in documents(cut)] == [[107] * SEQ_LEN, [97, 98, END]]
    [only] = opened(Labelled(path=path, shuffle=False, pack=False, too_long="skip", repeat=False))
    assert [tokens for tokens, _, _ in documents(only)] == [[97, 98]]


def test_ranks_with_different_numbers_of_rows_pass_as_many_batches(tmp_path: Path) -> None:
    path = write(tmp_path, *({"text": "ab" + str(n), "label": n} for n in range(5)))
    config = Labelled(path=path, shuffle=False, repeat=False, pack=False)
    ranks = [list(opened(config, rows=2, dp_rank=rank, dp_size=2)) for rank in range(2)]
    assert [len(batches) for batches in ranks] == [2, 2]
    texts = [bytes(t).decode() for batches in ranks for batch in batches for t, _, _ in documents(batch)]
    assert sorted(texts) == [f"ab{n}" for n in range(5)]
    assert (ranks[1][1]["targets"] == IGNORE).all()


def test_a_position_is_exact_on_any_ranks_and_other_labels_are_other_data(tmp_path: Path) -> None:
    path = write(tmp_path, *({"text": "ab" * (n % 5 + 1), "label": n % 2} for n in range(40)))
    config = Labelled(path=path, classes=["x", "y"])
    whole = iter(data := opened(config))
    for _ in range(3):
        next(whole)
    state = json.loads(json.dumps(data.state_dict()))
    expected = next(whole)
    parts = []
    for rank in range(2):
        again = opened(config, rows=1, dp_rank=rank, dp_size=2)
        again.load_state_dict(copy.deepcopy(state))
        parts.append(next(iter(again)))
    for name, value in expected.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), value)
    with pytest.raises(TitanError, match=r"classes was \['x', 'y'\] and is \['y', 'x'\]"):
        opened(Labelled(path=path, classes=["y", "x"])).load_state_dict(state)


def test_pairs_keep_their_last_token_and_their_margin(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt": "p", "chosen": "yes", "rejected": "no", "by": 2},
        {"prompt": "p", "chosen": "yes", "rejected": "no"},
        {"prompt": "p", "chosen": "y" * 30, "rejected": "no", "by": 1},
    )
    config = RewardPairs(path=path, margin=True, fields={"margin": "by"}, shuffle=False, repeat=False)
    [batch] = opened(config)
    chosen = build(ByteTokenizer()).chat(
        [{"role": "user", "content": "p"}, {"role": "assistant", "content": "yes"}]
    )
    assert documents(batch)[0][0] == chosen and chosen[-1] == END
    assert batch["margin"].tolist() == [2.0, 2.0] and batch.unit == 2
    assert "margin" not in next(iter(opened(RewardPairs(path=path))))
    with pytest.raises(RecipeError, match="an example takes 2 rows"):
        opened(config, rows=3)


class Untemplated(TextTokenizer):
    """A tokenizer without a chat template, as those of base models."""

    adds_bos, bos_id = True, 1

    @property
    def chat_fingerprint(self) -> str:  # type: ignore[override]
        raise RecipeError("no chat template")

    def chat(self, messages: Any, *, add_generation_prompt: bool = False) -> list[int]:
        raise RecipeError("no chat template")


def test_texts_need_no_chat_template_and_begin_with_bos(tmp_path: Path) -> None:
    row = {"text": "a", "label": 0.5, "anchor": "a", "positive": "b"}
    path = write(tmp_path, row)
    given: dict[str, Any] = dict(seq_len=SEQ_LEN, rows=2, dp_rank=0, dp_size=1, seed=0)
    for config in (Labelled(path=path), EmbeddingPairs(path=path)):
        found = next(iter(build(config, tokenizer=Untemplated(), **given)))
        assert documents(found)[0][0] == [1, 97]
    talk = write(tmp_path, {"messages": [{"role": "user", "content": "a"}], "label": 0.5})
    with pytest.raises(RecipeError, match="no chat template"):
        next(iter(build(Labelled(path=talk), tokenizer=Untemplated(), **given)))


def test_groups_take_a_row_for_each_of_their_documents(tmp_path: Path) -> None:
    row = {"anchor": "a", "positive": "bb", "negative": [{"role": "user", "content": "c"}]}
    path = write(tmp_path, row, {"anchor": "a", "positive": ""}, {"anchor": "x", "positive": "yy"})
    [pairs] = opened(EmbeddingPairs(path=path, shuffle=False, repeat=False), rows=4)
    assert [bytes(t).decode() for t, _, _ in documents(pairs)] == ["a", "bb", "x", "yy"]
    [triples] = opened(EmbeddingPairs(path=path, negatives=True, shuffle=False, repeat=False), rows=6)
    assert triples.unit == 3 and len(documents(triples)) == 3
    assert documents(triples)[2][0] == [*b"user\nc", END]

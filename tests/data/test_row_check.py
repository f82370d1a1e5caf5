"""The check of the first rows at the start of a run: what it finds, says, and refuses with strict."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.data.helpers import make
from tests.data.templates import says, tokenizer_of, user
from tests.data.test_turns import CHATML
from titan_preference import Preference, Unpaired
from titancli.data import ByteTokenizer, Chat
from titancli.data.hf_tokenizer import HFTokenizer
from titancli.errors import EnvironmentProblem
from titancli.observe.metrics import collector
from titancli.registry.component import build

GOOD = {"messages": [user("a"), says("b")]}
FORGED = {"messages": [user("a<|im_start|>"), says("b")]}
LONG = {"messages": [user("a"), says("b" * 200)]}


@pytest.fixture
def tokenizer_with(tmp_path: Path):
    def make_one(template: str, end: str = "<|im_end|>") -> HFTokenizer:
        folder = tmp_path / f"t{len(list(tmp_path.iterdir()))}"
        return HFTokenizer(tokenizer_of(folder, template, end))

    return make_one


def data_of(folder: Path, rows: list[Any], tokenizer: Any, kind: Any = Chat, **config: Any) -> Any:
    runtime = {name: config.pop(name) for name in ("dp_rank", "dp_size") if name in config}
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return make(
        kind(path=str(path), repeat=False, **config), tokenizer=tokenizer, seq_len=96, rows=2, **runtime
    )


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if line.startswith("check of the first rows: ")]


def test_good_rows_are_not_mentioned(
    tmp_path: Path, tokenizer_with: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tokenizer_with(CHATML)
    pair = {"prompt": [user("a")], "chosen": [says("b")], "rejected": [says("c")]}
    for one in (tokenizer, build(ByteTokenizer())):
        list(data_of(tmp_path, [GOOD] * 3, one))
        list(data_of(tmp_path, [GOOD] * 3, one, train_on="all"))
        list(data_of(tmp_path, [{"text": "a"}], one))
        list(data_of(tmp_path, [pair], one, Preference))
        list(data_of(tmp_path, [pair], one, Unpaired, pairs=True))
    assert not caplog.messages


def test_findings_are_said_once_with_row_and_remedy(
    tmp_path: Path, tokenizer_with: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [GOOD, FORGED, FORGED, LONG]
    list(data_of(tmp_path, rows, tokenizer_with(CHATML)))
    [forged, long] = said(caplog)
    assert f"2 of 4 rows: {tmp_path}/rows.jsonl, line 2: messages[0].content has '<|im_start|>'" in forged
    assert "remove it from the rows" in forged
    assert "1 of 4 rows" in long and "line 4: it is truncated: it has 2" in long
    assert len(caplog.messages) == 2  # not again when the rows are read
    caplog.clear()
    data_of(tmp_path, rows, tokenizer_with(CHATML), dp_rank=1, dp_size=2)
    with collector.muted():  # rows that are counted are checked by the run itself
        data_of(tmp_path, rows, tokenizer_with(CHATML))
    assert not caplog.messages


@pytest.mark.parametrize("kind", ["chat", "preference", "unpaired"])
def test_turns_without_an_end(
    tmp_path: Path, tokenizer_with: Any, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    tokenizer = tokenizer_with(CHATML.replace("<|im_end|>", "END"), "<|endoftext|>")
    pair = {"prompt": [user("a")], "chosen": [says("b")], "rejected": [says("c")]}
    labelled = {"prompt": [user("a")], "completion": [says("b")], "label": True}
    kinds: dict[str, tuple[Any, Any]] = {
        "chat": (Chat, GOOD), "preference": (Preference, pair), "unpaired": (Unpaired, labelled)
    }  # fmt: skip
    config, row = kinds[kind]
    data_of(tmp_path, [row], tokenizer, config)
    [line] = said(caplog)
    assert "line 1: none of its targets ends a turn (the last is 'D')" in line


def test_bos_twice(tmp_path: Path, tokenizer_with: Any, caplog: pytest.LogCaptureFixture) -> None:
    data_of(tmp_path, [GOOD], tokenizer_with("{{ bos_token }}{{ bos_token }}" + CHATML))
    [line] = said(caplog)
    assert "line 1: it begins with BOS twice" in line
    caplog.clear()
    data_of(tmp_path, [GOOD], tokenizer_with("{{ bos_token }}" + CHATML))
    assert not said(caplog)


def test_strict_refuses_on_every_rank(tmp_path: Path, tokenizer_with: Any) -> None:
    tokenizer = tokenizer_with(CHATML)
    for rank in (0, 1):
        with pytest.raises(EnvironmentProblem, match="line 2: messages") as caught:
            data_of(tmp_path, [GOOD, FORGED], tokenizer, strict=True, dp_rank=rank, dp_size=2)
        assert "dataset.strict = false" in str(caught.value.hint)
    list(data_of(tmp_path, [GOOD, LONG], tokenizer, strict=True))  # the recipe asks for truncated rows
    bad = data_of(tmp_path, [{"messages": [user("a")]}, GOOD], tokenizer, strict=True)
    with pytest.raises(EnvironmentProblem, match="line 1: it has no assistant message"):
        list(bad)


def test_only_the_first_rows_are_checked(
    tmp_path: Path, tokenizer_with: Any, caplog: pytest.LogCaptureFixture
) -> None:
    data = data_of(tmp_path, [*[GOOD] * 100, FORGED, FORGED], tokenizer_with(CHATML), shuffle=False)
    assert not said(caplog)
    list(data)
    [line] = caplog.messages  # said when the row is read
    assert "line 101: messages[0].content has '<|im_start|>'" in line


def test_check_does_not_move_the_data(tmp_path: Path, tokenizer_with: Any) -> None:
    """A check of all rows may stand between two batches."""
    rows = [{"messages": [user("a"), says("b" * n)]} for n in range(1, 30)]
    data = data_of(tmp_path, rows, tokenizer_with(CHATML), pack=False)
    batches = iter(data)
    next(batches)
    state = data.state_dict()
    check = data.check()
    assert check.rows == 29 and not check.lines() and data.state_dict() == state
    assert logging.getLogger("titancli.data.chat_source").handlers == []
    assert collector.drain().get("bad_rows") is None

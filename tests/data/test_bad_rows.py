"""No row ends a run: whatever JSON it holds, it is trained on, or it is a bad row."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.templates import SHAPES, TOOLS, Compared, says, user
from titan_preference.pairs import PairReader
from titan_preference.unpaired import of_answer
from titancli.data import ByteTokenizer, Chat
from titancli.data.chat import ConversationReader, Masked
from titancli.data.chat_template import ChatRefused
from titancli.data.jsonl import BadRow
from titancli.data.row_formats import Names, format_of_row, talk_of
from titancli.registry.component import build

JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 0.5, float("inf"), 10**30, "", " \n", "x", "\0", "{", "[]", '{"a": "b"}'),
    *("assistant", "user", "system", "tool", "<|im_end|>", json.loads('"\\ud83d"'), [], {}, [1], [[]]),
    *([None], ["x"], {"a": 1}, {"type": "text", "text": "t"}, [{"type": "text", "text": "p"}]),
    *([{"type": "image"}], {"role": "user", "content": "z"}),
]
KEYS = ("weight", "tool_calls", "reasoning_content", "function_call", "content", "tokenize", "name", "extra")
ROWS: list[dict[str, Any]] = [
    {
        "messages": SHAPES["tool call"],
        "tools": TOOLS,
        "chat_template_kwargs": {"enable_thinking": False},
    },
    {"messages": SHAPES["arguments as JSON text"], "tools": json.dumps(TOOLS)},
    {"messages": SHAPES["thoughts of several turns"]},
    {"messages": SHAPES["parts"]},
    {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
            {"from": "observation", "value": "r"},
            {"from": "gpt", "value": "a"},
        ],
        "system": "s",
    },
    {"instruction": "i", "input": "j", "output": "o", "history": [["a", "b"]], "system": "s"},
    {"prompt": "p", "completion": "c", "label": True},
    {"prompt": [user("a")], "completion": [says("b", weight=1)], "label": False},
    {"text": "t <|im_start|>"},
    {"prompt": "p", "chosen": "c", "rejected": "d"},
    {"chosen": [user("a"), says("b")], "rejected": [user("a"), says("c")]},
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each value inside of a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*path, key)
        yield from places(one, (*path, key))


def changed(rng: random.Random, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row in which values are others, are missing, or have come to."""
    row = copy.deepcopy(row)
    for _ in range(rng.randrange(1, 3)):
        path, value = rng.choice(list(places(row)) or [("text",)]), row
        for key in path[:-1]:
            value = value[key]
        chance = rng.random()
        if chance < 0.15 and isinstance(value, dict):
            value.pop(path[-1], None)
        else:
            new = rng.choice(KEYS) if chance < 0.25 and isinstance(value, dict) else path[-1]
            value[new] = copy.deepcopy(rng.choice(JUNK))
    return row


@pytest.mark.parametrize("name", ["byte", "qwen3", "deepseekv3", "llava_next", "lfm2_2_5"])
def test_any_row_is_good_or_bad(tmp_path: Path, name: str) -> None:
    tokenizer: Any = build(ByteTokenizer()) if name == "byte" else Compared(name, tmp_path).ours
    masked, config = Masked(tokenizer), Chat(path="/rows.jsonl")

    def chat(row: dict[str, Any], mask: Masked | None) -> Any:
        form = format_of_row(row, Names()) or "messages"
        return ConversationReader(config, tokenizer, 4096, mask, lambda one: talk_of(one, form, Names()))(row)

    readers = {
        "chat": lambda row: chat(row, masked),
        "all": lambda row: chat(row, None),
        "pairs": PairReader(masked, 4096, Names(), reference=False),
        "unpaired": of_answer(masked, 4096, Names()),
    }
    rng, found = random.Random(name), Counter[str]()
    for _ in range(150):
        row = changed(rng, rng.choice(ROWS))
        for read in readers.values():
            try:
                read(row)
            except (BadRow, ChatRefused):
                found["bad"] += 1
            else:
                found["good"] += 1
    assert found["good"] > 20 and found["bad"] > 20

"""Rows of every format become the same conversations; tools and thoughts are given to the chat template as
transformers and TRL give them."""

from __future__ import annotations

import json
import logging
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.data.helpers import global_rows, make
from titan_preference import Preference
from titancli.data import Chat, HFTokenizer
from titancli.data.chat_template import ChatRefused
from titancli.data.jsonl import BadRow
from titancli.data.remarks import remarks
from titancli.data.row_formats import Names, talk_of
from titancli.errors import EnvironmentProblem
from titancli.observe.metrics import collector
from titancli.protocols.batch import IGNORE
from titancli.registry.component import build

ASKED, ANSWERED = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
MESSAGES = {"messages": [ASKED, ANSWERED]}
SHAREGPT = {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}
ALPACA = {"instruction": "2+2?", "input": "", "output": "4"}
PAIR = {"prompt": "2+2?", "completion": "4"}
SAME = {
    "messages": MESSAGES,
    "sharegpt": SHAREGPT,
    "alpaca": ALPACA,
    "prompt_completion": PAIR,
}
BYTES = b"user\n2+2?\0assistant\n4"


def lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(row + "\n" if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def shown(config: Any, **options: Any) -> list[tuple[bytes, bytes]]:
    """The tokens and the targets of each row; end markers are zeros."""

    def text(ids: list[int]) -> bytes:
        return bytes(0 if i == 256 else i for i in ids if i >= 0)

    batches = make(config, seq_len=64, rows=2, **options)
    return [
        (text(tokens.tolist()).rstrip(b"\0"), text(targets.tolist()).rstrip(b"\0"))
        for batch in batches
        for tokens, targets in zip(batch["tokens"], batch["targets"], strict=True)
        if (targets != IGNORE).any()
    ]


@pytest.mark.parametrize("name", SAME)
def test_a_row_of_any_format_is_the_same_conversation_and_its_format_is_said(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = lines(tmp_path / "rows.jsonl", [SAME[name]])
    with caplog.at_level(logging.INFO):
        for chosen in ("auto", name):
            config: Any = {"path": path, "format": chosen, "repeat": False, "pack": False}
            assert shown(Chat(**config)) == [(BYTES, b"4")]
    needs = {"messages": "messages, from `messages`", "sharegpt": "ShareGPT, from `conversations`"}
    said = [line for line in caplog.messages if line.startswith("rows: ")]
    assert said == [f"rows: {needs[name]}"] * 2 if name in needs else len(set(said)) == 1
    caplog.clear()
    make(Chat(path=path), rows=2, dp_rank=1, dp_size=2)  # one rank says it
    assert "rows:" not in caplog.text


def test_fields_and_roles_may_have_other_names(tmp_path: Path) -> None:
    dialogue = [{"speaker": "Customer", "says": "2+2?"}, {"speaker": "bot", "says": "4"}]
    path = lines(tmp_path / "rows.jsonl", [{"dialogue": dialogue}])
    fields = {"conversations": "dialogue", "from": "speaker", "value": "says"}
    roles = {"Customer": "user", "bot": "assistant"}
    assert shown(Chat(path=path, fields=fields, roles=roles, repeat=False)) == [(BYTES, b"4")]
    path = lines(tmp_path / "alpaca.jsonl", [{"question": "2+2?", "answer": "4"}])
    fields = {"instruction": "question", "output": "answer"}
    assert shown(Chat(path=path, fields=fields, repeat=False)) == [(BYTES, b"4")]


def test_system_history_and_input_of_a_row_are_messages(tmp_path: Path) -> None:
    row = {**ALPACA, "input": "in words", "system": "s", "history": [["a", "b"]]}
    path = lines(tmp_path / "rows.jsonl", [row])
    [(tokens, targets)] = shown(Chat(path=path, repeat=False))
    assert tokens == b"system\ns\0user\na\0assistant\nb\0user\n2+2?\nin words\0assistant\n4"
    assert targets == b"b\x004"


def test_only_the_completion_is_trained_on_and_all_of_a_text(tmp_path: Path) -> None:
    row = {"prompt": [ASKED, {"role": "assistant", "content": "?"}, ASKED], "completion": [ANSWERED]}
    assert [t for _, t in shown(Chat(path=lines(tmp_path / "a.jsonl", [row]), repeat=False))] == [b"4"]
    path = lines(tmp_path / "b.jsonl", [{"text": "plain"}])
    assert shown(Chat(path=path, repeat=False)) == [(b"plain", b"lain")]


BAD = {
    "another format": (ALPACA, "it is Alpaca, but the first rows are ShareGPT (conversations): move it to"),
    "no field": ({"id": 1}, "it has no key 'conversations', only 'id'"),
    "nothing said": ({"conversations": []}, "'conversations' has no messages"),
    "no value": ({"conversations": [{"from": "gpt"}]}, "conversations[0] has no 'value', only 'from'"),
    "a role": (
        {"conversations": [{"from": "narrator", "value": "x"}]},
        "conversations[0]: the role 'narrator' is unknown; if it is right, say which one it is, for example "
        'dataset.roles = { "narrator" = "assistant" }',
    ),
    "the last turn": (
        {"conversations": [*SHAREGPT["conversations"], {"from": "human", "value": "x"}]},
        "its last message is of 'user', with no answer to learn: remove the message, or train on all tokens",
    ),
    "a call": (
        {"conversations": [{"from": "function_call", "value": "f()"}]},
        "'conversations[0].value' is not JSON",
    ),
    "a speaker": ({"conversations": [{"from": ["gpt"], "value": "x"}]}, "conversations[0].from is list"),
    "tools": ({**SHAREGPT, "tools": "["}, "'tools' is not JSON"),
    "tools for bytes": ({**SHAREGPT, "tools": [{}]}, "the tokenizer's chat template takes no 'tools'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_with_its_file_and_line(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    row, reason = BAD[name]
    path = lines(tmp_path / "rows.jsonl", [*[SHAREGPT] * 16, row])
    config: Any = {"path": path, "shuffle": False, "repeat": False, "format": "auto"}
    assert len(shown(Chat(**config, pack=False))) == 16
    assert f"skipped a row: {path}, line 17: {reason}" in caplog.text
    assert collector.drain()["bad_rows"].value == 1
    with pytest.raises(EnvironmentProblem, match="line 17"):
        shown(Chat(**config, strict=True))


def test_first_rows_of_two_formats_or_of_none_are_refused_unless_one_is_named(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", ["no JSON", SHAREGPT, ALPACA])
    with pytest.raises(EnvironmentProblem, match=r"line 2 is ShareGPT, .*, line 3 is Alpaca") as caught:
        make(Chat(path=path))
    assert 'dataset.format = "sharegpt"' in str(caught.value.hint)
    assert len(shown(Chat(path=path, format="sharegpt", repeat=False))) == 1
    path = lines(tmp_path / "odd.jsonl", [{"question": "q"}])
    with pytest.raises(EnvironmentProblem, match=r"not known: .*, line 1 has 'question'") as caught:
        make(Chat(path=path))
    assert "dataset.fields" in str(caught.value.hint)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
        {"conversations": SHAREGPT["conversations"][:1], "chosen": {"from": "gpt", "value": "4"},
         "rejected": {"from": "gpt", "value": "5"}},
        {"messages": [ASKED], "chosen": [ANSWERED], "rejected": [{**ANSWERED, "content": "5"}]},
        {"instruction": "2+2?", "chosen": "4", "rejected": "5"},
        {"chosen": SHAREGPT["conversations"],
         "rejected": [SHAREGPT["conversations"][0], {"from": "gpt", "value": "5"}]},
    ],
    ids=["text", "sharegpt", "messages", "alpaca", "whole sharegpt"],
)  # fmt: skip
def test_pairs_of_any_format_are_the_same_pair(tmp_path: Path, row: dict[str, Any]) -> None:
    path = lines(tmp_path / "pairs.jsonl", [row])
    assert shown(Preference(path=path, repeat=False)) == [(BYTES, b"4"), (BYTES[:-1] + b"5", b"5")]


def test_two_ranks_read_the_same_rows_and_go_on_exactly(tmp_path: Path) -> None:
    rows = [{**ALPACA, "output": "x" * n} for n in range(1, 30)]
    config = Chat(path=lines(tmp_path / "rows.jsonl", rows), pack=False)
    alone, _ = global_rows(config, 20, dp_size=1, rows=2, seq_len=64)
    first, state = global_rows(config, 5, dp_size=2, rows=2, seq_len=64)
    rest, _ = global_rows(config, 10, dp_size=1, rows=2, seq_len=64, state=state)
    assert first + rest == alone and state["data"]["format"] == "alpaca"


# -------------------------------------------------------- as transformers and TRL tokenize tools and thoughts

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Where"}},
                       "required": ["city"]},
    },
}  # fmt: skip
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
TOOLS = {
    "messages": [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "content": "sun"},
        {"role": "assistant", "content": "Sun in Rome."},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "Still."},
    ],
    "tools": [WEATHER],
}
THOUGHTS = {
    "messages": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "reasoning_content": "two and two", "content": "4"},
        {"role": "user", "content": "3+3?"},
        {"role": "assistant", "reasoning_content": "three and three", "content": "6"},
    ]
}
IN_TEXT = {
    "messages": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>\ntwo\n</think>\n\n4"},
        {"role": "user", "content": "3+3?"},
        {"role": "assistant", "content": "<think>\nthree\n</think>\n\n6"},
    ]
}
TALKS = {"plain": MESSAGES, "tools": TOOLS, "thoughts": THOUGHTS, "thoughts in text": IN_TEXT}
TEMPLATES = Path(str(find_spec("trl").origin)).parent / "chat_templates"  # type: ignore[union-attr]
MARKED = sorted(path.stem for path in TEMPLATES.glob("*_training.jinja"))
OF_PARTS = {f"{name}_training" for name in ("idefics3", "llava_next", "smolvlm")}
"""Templates that read contents only as lists of parts."""
LEAVES_OUT = {
    (f"{name}_training", "tools")
    for name in (
        "deepseek_r1_distill",
        "idefics3",
        "lfm2",
        "llama3",
        "phi3",
        "phi3_5",
        "qwen2_5_vl",
        "smolvlm",
    )
}
"""Templates that accept calls of tools and leave them out."""


def tokenizer_with(folder: Path, bpe_folder: Path, template: str) -> Any:
    folder.mkdir()
    text = (TEMPLATES / f"{template}.jinja").read_text()
    config = json.loads((bpe_folder / "tokenizer_config.json").read_text())
    tokenizer = Tokenizer.from_file(str(bpe_folder / "tokenizer.json"))
    tokenizer.add_special_tokens(sorted(set(re.findall(r"<[|｜][\w▁]+[|｜]>|<end_of_turn>|<turn\|>", text))))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": text}))
    return build(HFTokenizer(path=folder))


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("template", MARKED)
def test_a_mask_is_the_one_of_transformers(
    tmp_path: Path, bpe_folder: Path, template: str, talk: str
) -> None:
    from transformers import PreTrainedTokenizerFast

    row = TALKS[talk]
    tokenizer = tokenizer_with(tmp_path / "t", bpe_folder, template)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "t")
    options = {"tools": row["tools"]} if "tools" in row else None
    if template in OF_PARTS:
        parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in row["messages"]]
        row = {**row, "messages": parts}
    asked: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    if (template, talk) in LEAVES_OUT:
        with pytest.raises(ChatRefused, match="leaves out"):
            tokenizer.chat_with_mask(row["messages"], options=options)
        return
    try:
        found = theirs.apply_chat_template(row["messages"], **asked, **(options or {}))
    except Exception:
        with pytest.raises(ChatRefused):
            tokenizer.chat_with_mask(row["messages"], options=options)
        return
    ids, mask = tokenizer.chat_with_mask(row["messages"], options=options, trailing_newline=True)
    assert ids == found["input_ids"] == tokenizer.chat(row["messages"], options=options)
    assert [int(flag) for flag in mask] == found["assistant_masks"] and any(mask)


@pytest.mark.parametrize("template", ["qwen3", "qwen2_5", "llama3_1", "gemma3", "glm4moe", "gptoss"])
def test_prompt_and_completion_are_tokenized_as_trl_tokenizes_them(
    tmp_path: Path, bpe_folder: Path, template: str
) -> None:
    from transformers import PreTrainedTokenizerFast
    from trl.data_utils import _tokenize, common_prefix_length

    tokenizer = tokenizer_with(tmp_path / "t", bpe_folder, template)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "t")
    row = {"prompt": [ASKED], "completion": [ANSWERED], "tools": json.dumps([WEATHER])}
    if template == "gemma3":
        row.pop("tools")
    options = {"tools": json.loads(row["tools"])} if "tools" in row else {}
    prompt = _tokenize(theirs, row["prompt"], add_generation_prompt=True, **options)["input_ids"]
    ids = _tokenize(theirs, [*row["prompt"], *row["completion"]], **options)["input_ids"]
    begin = common_prefix_length(prompt, ids)
    config = Chat(path=lines(tmp_path / "rows.jsonl", [row]), trailing_newline=True, repeat=False)
    [batch] = make(config, tokenizer=tokenizer, seq_len=2048, rows=1)
    count = len(ids) - 1
    assert batch["tokens"][0, :count].tolist() == ids[:-1]
    labels = [IGNORE] * (begin - 1) + ids[begin:]
    assert batch["targets"][0, :count].tolist() == labels


# ---------------------------------------------------------------------------------- files of other projects


def test_functions_are_tools() -> None:
    """OpenAI's earlier files have `functions` and `function_call`, with null contents."""
    f = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    call = {"name": "f", "arguments": "{}"}
    old = {
        "messages": [ASKED, {"role": "assistant", "content": None, "function_call": call}, ANSWERED],
        "functions": [f],
    }
    talk = talk_of(old, "messages", Names())
    assert talk.options == {"tools": [{"type": "function", "function": f}]}
    assert talk.messages[1] == {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}
    with pytest.raises(BadRow, match="both 'tools' and 'functions'"):
        talk_of({**old, "tools": [f]}, "messages", Names())


@pytest.mark.parametrize("key", ["train", "loss"])
def test_unread_weights_are_named(key: str) -> None:
    for value, kinds in ((False, {"unread"}), (0, {"unread"}), (True, set()), (None, set())):
        with remarks() as found:
            talk_of({"messages": [ASKED, {**ANSWERED, key: value}]}, "messages", Names())
        assert set(found) == kinds


def test_role_that_is_likely_meant() -> None:
    with pytest.raises(BadRow, match=re.escape('dataset.roles = { "Human" = "user" }')):
        talk_of({"messages": [{"role": "Human", "content": "a"}]}, "messages", Names())

"""Conversations: which tokens are the assistant's, rows that hold each once, bad rows, and the position."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.helpers import global_rows, make, same
from titancli.data import ByteTokenizer, Chat, HFTokenizer
from titancli.data.chat_template import MARKERS, ChatRefused
from titancli.data.fitting import best_fit
from titancli.errors import EnvironmentProblem, RecipeError
from titancli.observe.metrics import collector
from titancli.protocols.batch import IGNORE
from titancli.recipe import load_recipe
from titancli.registry.component import build

TURN = "<|{{ m['role'] }}|>{{ m['content'] | trim }}<|end|>"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>"
    "{% generation %}{{ m['content'] | trim }}<|end|>{% endgeneration %}{% else %}" + TURN + "{% endif %}"
    "{% endfor %}" + PROMPT
)
# As Qwen 3's: the last turn has more than it has once others follow.
THINKING = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m['content'] }}<|end|>{% endfor %}" + PROMPT
)
PROMPTED = PLAIN.replace("<|assistant|>{% endif %}", "<|assistant|><think>{% endif %}")
NUMBERED = "{% for m in messages %}{{ messages | length }}" + TURN + "{% endfor %}" + PROMPT

RENAMED = PLAIN.replace(
    "m['role'] }}|>", "m['role'] if loop.last or m['role'] != 'assistant' else 'bot' }}|>"
)


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


TALK = [
    said("system", "be document"),
    said("user", "def f"),
    said("assistant", " return it "),
    said("user", "of the end"),
    said("assistant", "the end"),
]


@pytest.fixture
def tokenizer_with(bpe_folder: Path, tmp_path: Path):
    def make_one(template: str) -> Any:
        folder = tmp_path / f"t{abs(hash(template))}"
        folder.mkdir()
        (folder / "tokenizer.json").write_bytes((bpe_folder / "tokenizer.json").read_bytes())
        config = json.loads((bpe_folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
        return build(HFTokenizer(path=folder))

    return make_one


def trained(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    """The stretches of a conversation that are trained on, as text with special tokens."""
    ids, mask = tokenizer.chat_with_mask(messages, **options)
    whole = tokenizer.chat(messages)
    # After a last turn that ends with the next role's marker, the marker is added.
    assert ids[: len(whole)] == whole and ids[len(whole) :] in ([], [*tokenizer.turn_ends])
    assert len(mask) == len(ids)
    found, before = [], False
    for token, flag in zip(ids, mask, strict=True):
        if flag:
            found = [*found[:-1], [*found[-1], token]] if before else [*found, [token]]
        before = flag
    return [tokenizer._tokenizer.decode(part, skip_special_tokens=False) for part in found]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_what_the_assistant_says_and_its_end_are_found_with_markers_and_without(
    tokenizer_with: Any, template: str
) -> None:
    tokenizer = tokenizer_with(template)
    assert bool(MARKERS.search(template)) == (template is MARKED)
    assert trained(tokenizer, TALK) == ["return it<|end|>", "the end<|end|>"]
    assert trained(tokenizer, TALK, first=4) == ["the end<|end|>"]


def test_a_last_turn_that_has_more_than_others_is_found_by_its_end(tokenizer_with: Any) -> None:
    tokenizer = tokenizer_with(THINKING)
    assert trained(tokenizer, TALK) == [" return it <|end|>", "<think></think>the end<|end|>"]
    for short in ("e", "<", "<|end|>"):  # what stands in the end as well
        talk = [*TALK[:2], said("assistant", short), *TALK[3:]]
        assert trained(tokenizer, talk) == [f"{short}<|end|>", "<think></think>the end<|end|>"]


def test_a_turn_begins_where_it_diverges_from_the_prompt_to_generate_it(tokenizer_with: Any) -> None:
    tokenizer = tokenizer_with(PROMPTED)
    assert trained(tokenizer, TALK) == ["return it<|end|>", "the end<|end|>"]


def test_context_may_change_when_others_follow(tokenizer_with: Any) -> None:
    assert trained(tokenizer_with(NUMBERED), TALK) == ["return it<|end|>", "the end<|end|>"]


def test_unclear_turn_is_refused(tokenizer_with: Any, tmp_path: Path) -> None:
    """An earlier turn has another header than the generation prompt."""
    with pytest.raises(
        ChatRefused, match=r"no \{% generation %\} markers, and the tokens of turn 3"
    ) as caught:
        tokenizer_with(RENAMED).chat_with_mask(TALK)
    assert "train_on" in str(caught.value.hint)
    path = lines(tmp_path / "rows.jsonl", [{"messages": TALK}] * 3)
    with pytest.raises(EnvironmentProblem, match="has no rows to train on"):
        next(iter(make(Chat(path=path), tokenizer=tokenizer_with(RENAMED + " "))))
    assert next(iter(make(Chat(path=path, train_on="all"), tokenizer=tokenizer_with(RENAMED + "  "))))


CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CHATML_MARKED = CHATML.replace(
    "{{ m['content'] | trim }}<|end|>\n",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim }}<|end|>\n{% endgeneration %}"
    "{% else %}{{ m['content'] | trim }}<|end|>\n{% endif %}",
)
LLAMA3 = "{{ '<|begin|>' }}" + CHATML.replace("<|end|>\n", "<|end|>").replace("|>\n", "|>\n\n")
# An end marker in letters, which a tokenizer may merge with the line break; and none but the next role's.
LETTERS = CHATML.replace("<|end|>\n", " END\n")
NOTHING = CHATML.replace("<|end|>\n", "\n\n")


@pytest.mark.parametrize(
    ("template", "marker", "behind"),
    [
        (CHATML, "<|end|>", "\n"),
        (CHATML_MARKED, "<|end|>", "\n"),
        (CHATML.replace("<|end|>\n", "<|end|> \n\n"), "<|end|>", " \n\n"),
        (LLAMA3, "<|end|>", ""),
        (LETTERS, " END", "\n"),
        (NOTHING, "\n\n<|user|>", ""),
    ],
    ids=["chatml", "chatml, marked", "more space", "llama 3", "letters", "no marker"],
)
def test_a_turn_ends_with_its_end_marker_and_the_line_break_behind_it_only_on_demand(
    tokenizer_with: Any, template: str, marker: str, behind: str
) -> None:
    tokenizer = tokenizer_with(template)
    turns = ["return it" + marker, "the end" + marker]
    assert trained(tokenizer, TALK) == turns
    assert trained(tokenizer, TALK, first=4) == turns[1:]
    assert trained(tokenizer, TALK, trailing_newline=True) == [turn + behind for turn in turns]


@pytest.mark.parametrize("content", ["", "<|end|>", "x\n", "END", "]"])
@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, LETTERS], ids=["chatml", "marked", "letters"])
def test_what_a_turn_says_does_not_change_where_it_ends(
    tokenizer_with: Any, template: str, content: str
) -> None:
    talk = [*TALK[:2], said("assistant", content), *TALK[3:]]
    [first, last] = trained(tokenizer_with(template), talk)
    marker = " END" if template is LETTERS else "<|end|>"
    assert (first, last) == (content.strip() + marker, "the end" + marker)


def test_a_token_of_the_marker_and_the_line_break_is_the_turns(tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = Tokenizer(
        models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens([AddedToken("<|end|>", rstrip=True), "<|user|>", "<|assistant|>"])
    tokens.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": CHATML, "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = build(HFTokenizer(path=tmp_path))
    talk = [said("user", "q"), said("assistant", "a")]
    ids, mask = tokenizer.chat_with_mask(talk)
    assert [i for i, flag in zip(ids, mask, strict=True) if flag] == [
        *tokenizer.encode("a"),
        tokenizer.eos_id,
    ]
    assert (ids, mask) == tokenizer.chat_with_mask(talk, trailing_newline=True)


def test_targets_end_with_the_marker_unless_the_recipe_says_otherwise(
    tokenizer_with: Any, tmp_path: Path
) -> None:
    tokenizer = tokenizer_with(CHATML)
    path = lines(tmp_path / "rows.jsonl", [{"messages": TALK}])
    newline = tokenizer.encode("\n")
    for wanted in (False, True):
        config = Chat(path=path, trailing_newline=wanted, repeat=False)
        data = make(config, tokenizer=tokenizer, seq_len=128, rows=1)
        targets = [i for i in next(iter(data))["targets"].flatten().tolist() if i != IGNORE]
        assert targets.count(tokenizer.eos_id) == 2
        assert targets.count(newline[0]) == 2 * wanted
    with pytest.raises(RecipeError, match="trailing_newline: the chat template of ByteTokenizer"):
        make(Chat(path=path, trailing_newline=True))
    with pytest.raises(EnvironmentProblem, match="trailing_newline was False and is True"):
        state = make(Chat(path=path), tokenizer=tokenizer).state_dict()
        make(Chat(path=path, trailing_newline=True), tokenizer=tokenizer).load_state_dict(state)


def test_the_byte_tokenizers_template_ends_messages_with_what_no_text_holds() -> None:
    tokenizer = build(ByteTokenizer())
    ids, mask = tokenizer.chat_with_mask([said("user", "hé\n"), said("assistant", "ja")])
    assert ids == [*"user\nhé\n".encode(), 256, *b"assistant\nja", 256]
    assert [i for i, flag in zip(ids, mask, strict=True) if flag] == [*b"ja", 256]
    prompt = tokenizer.chat([said("user", "hé\n")], add_generation_prompt=True)
    assert ids[: len(prompt)] == prompt


# ---------------------------------------------------------------------------------------------------- rows


def lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def talks(count: int) -> list[list[dict[str, Any]]]:
    return [[said("user", f"q{n}" + "?" * (n * 7 % 19)), said("assistant", f"a{n}")] for n in range(count)]


@pytest.fixture
def chats(tmp_path: Path) -> str:
    return lines(tmp_path / "chats.jsonl", [{"messages": talk} for talk in talks(200)])


def documents(batches: list[Any]) -> list[tuple[list[int], list[int]]]:
    """Inputs and targets of each document of packed rows that has a target."""
    found = []
    for batch in batches:
        for row in range(batch.rows):
            ids = batch["document_ids"][row].numpy()
            for number in np.unique(ids):
                place = ids == number
                assert batch["positions"][row].numpy()[place].tolist() == list(range(place.sum()))
                targets = batch["targets"][row].numpy()[place].tolist()
                if any(target != IGNORE for target in targets):
                    found.append((batch["tokens"][row].numpy()[place].tolist(), targets))
    return found


def test_packed_rows_hold_every_conversation_once_and_whole(chats: str) -> None:
    tokenizer = build(ByteTokenizer())
    packed = list(make(Chat(path=chats, repeat=False), seq_len=96, rows=3))
    expected = []
    for talk in talks(200):
        ids, mask = tokenizer.chat_with_mask(talk)
        targets = [i if flag else IGNORE for i, flag in zip(ids[1:], mask[1:], strict=True)]
        expected.append((ids[:-1], targets))
    assert sorted(documents(packed)) == sorted(expected)
    used = sum(len(ids) for ids, _ in expected) / sum(batch["tokens"].numel() for batch in packed)
    assert used > 0.85


def test_one_conversation_a_row_without_packing(chats: str) -> None:
    batch = next(iter(make(Chat(path=chats, pack=False, shuffle=False), seq_len=64, rows=2)))
    assert set(batch) == {"tokens", "targets", "positions"}
    assert bytes(i for i in batch["tokens"][1].tolist() if i < 256) == b"user\nq1???????assistant\na1"
    assert [i for i in batch["targets"][1].tolist() if i != IGNORE] == [*b"a1", 256]


def test_all_tokens_are_targets_on_demand(chats: str) -> None:
    batch = next(iter(make(Chat(path=chats, pack=False, shuffle=False, train_on="all"), seq_len=64)))
    assert bytes(i for i in batch["targets"][0].tolist() if 0 <= i < 256) == b"ser\nq0assistant\na0"


def test_best_fit_fills_bins_and_keeps_the_order() -> None:
    assert best_fit([3, 9, 6, 1, 4, 10], 10) == [[0], [1, 3], [2, 4], [5]]


@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_do_not_depend_on_the_ranks_and_go_on_from_any_place(chats: str, shuffle: bool) -> None:
    config = Chat(path=chats, shuffle=shuffle)
    alone, _ = global_rows(config, 60, dp_size=1, rows=1, seq_len=96)
    first, state = global_rows(config, 4, dp_size=2, rows=2, seq_len=96)
    rest, _ = global_rows(config, 11, dp_size=4, rows=1, seq_len=96, state=json.loads(json.dumps(state)))
    assert first + rest == alone
    assert state["rows"] == 16 and "epoch" in state


def test_the_end_of_the_data_is_filled_up_on_every_rank(chats: str) -> None:
    rows, _ = global_rows(Chat(path=chats, repeat=False), 1000, dp_size=4, rows=2, seq_len=96)
    assert len(rows) % 8 == 0
    assert sum(target != IGNORE for _, targets in rows for target in targets) == sum(
        len(talk[1]["content"]) + 1 for talk in talks(200)
    )


@pytest.mark.parametrize(
    "change", [{"train_on": "all"}, {"pack": False}, {"too_long": "skip"}, {"seq_len": 80}, {"seed": 8}]
)
def test_a_resume_under_what_makes_other_rows_is_refused(chats: str, change: dict[str, Any]) -> None:
    options = {"seq_len": 96, "seed": 7}
    state = make(Chat(path=chats), **options).state_dict()
    runtime = {name: value for name, value in change.items() if name in options}
    config = {name: value for name, value in change.items() if name not in options}
    with pytest.raises(EnvironmentProblem, match="is not the data that the checkpoint was trained on"):
        make(Chat(path=chats, **config), **{**options, **runtime}).load_state_dict(state)


def test_a_hugging_face_folder_gives_the_same_rows(chats: str, tmp_path: Path) -> None:
    import datasets

    # A table fills keys that a message lacks with nothing.
    rows = [{"messages": [{**m, "name": None} for m in talk], "n": n} for n, talk in enumerate(talks(200))]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "hf"))
    ours = list(make(Chat(path=chats, repeat=False), seq_len=96))
    theirs = list(make(Chat(path=str(tmp_path / "hf"), repeat=False), seq_len=96))
    assert len(ours) == len(theirs) and all(map(same, ours, theirs))
    data = make(Chat(path=str(tmp_path / "hf"), fields={"messages": "n"}), seq_len=96)
    with pytest.raises(EnvironmentProblem, match="has no rows to train on"):
        next(iter(data))


# ------------------------------------------------------------------------------------------------ bad rows

GOOD = {"messages": [said("user", "q"), said("assistant", "a")]}
BAD: dict[str, tuple[Any, str]] = {
    "not JSON": ('{"messages": [', "it is not JSON: "),
    "no messages": ({"words": "x"}, "it has no key 'messages', only 'words'"),
    "no list": ({"messages": "x"}, "'messages' is str, not a list of messages"),
    "empty": ({"messages": []}, "'messages' has no messages"),
    "no object": ({"messages": ["x"]}, "messages[0] is str, not an object"),
    "no role": ({"messages": [{"content": "x"}]}, "messages[0] has no 'role', only 'content'"),
    "no content": ({"messages": [{"role": "user", "content": None}]}, "messages[0] has no 'content'"),
    "parts": (
        {"messages": [said("user", "q"), {"role": "assistant", "content": [{"type": "image", "url": "a"}]}]},
        "messages[1].content[0] is of type 'image', which is not supported: only text is trained on",
    ),
    "weight": (
        {"messages": [{**said("assistant", "a"), "weight": 0.5}]},
        "messages[0]: the weight 0.5 is not supported: use 0 or 1",
    ),
    "no weight": (
        {"messages": [said("user", "q"), {**said("assistant", "a"), "weight": 0}]},
        "none of its first 65 tokens is trained on",
    ),
    "no call": (
        {"messages": [said("user", "q"), {"role": "assistant", "tool_calls": [{"function": "f"}]}]},
        "messages[1].tool_calls[0] is not a call of a tool",
    ),
    "no arguments": (
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}]},
        "messages[0].tool_calls[0]: 'arguments' is list, not an object",
    ),
    "half a call": (
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
        "'messages[0].tool_calls[0].arguments' is not JSON",
    ),
    "a thought": (
        {"messages": [{**said("assistant", "a"), "reasoning_content": ["x"]}]},
        "messages[0]: 'reasoning_content' is list, not a string",
    ),
    "an argument": (
        {**GOOD, "chat_template_kwargs": {"tokenize": False}},
        "'chat_template_kwargs' has 'tokenize', which is no argument of a chat template",
    ),
    "tools of numbers": ({**GOOD, "tools": [1]}, "'tools' is not a list of tools"),
    "half a pair": (
        '{"messages": [{"role": "assistant", "content": "\\ud83d"}]}',
        r"'messages[0].content' contains \ud83d",
    ),
    "no answer": ({"messages": [said("user", "q")]}, "it has no assistant message"),
    "too long": (
        {"messages": [said("user", "q" * 99), said("assistant", "a")]},
        "none of its first 65 tokens is trained on",
    ),
    "tools": (
        {"messages": [said("user", "q"), {"role": "assistant", "tool_calls": [{"name": "f"}]}]},
        "the byte tokenizer's chat template supports only text",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_told_with_file_line_and_reason_and_skipped_or_refused(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    row, reason = BAD[name]
    path = lines(tmp_path / "rows.jsonl", [GOOD, row, GOOD])
    with caplog.at_level(logging.WARNING):
        [batch] = list(make(Chat(path=path, shuffle=False, repeat=False), seq_len=64, rows=1))
    assert f"skipped a row: {path}, line 2: {reason}" in caplog.text
    assert int((batch["targets"] != IGNORE).sum()) == 4
    assert collector.drain()["bad_rows"].value == 1
    with pytest.raises(EnvironmentProblem) as caught:
        list(make(Chat(path=path, shuffle=False, repeat=False, strict=True), seq_len=64, rows=1))
    assert f"{path}, line 2: {reason}" in caught.value.message


def test_a_long_conversation_is_cut_and_counted_or_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = {"messages": [said("user", "q"), said("assistant", "a" * 99)]}
    path = lines(tmp_path / "rows.jsonl", [long, GOOD])
    batch = next(iter(make(Chat(path=path, shuffle=False, pack=False, repeat=False), seq_len=64)))
    assert batch["targets"][0].tolist()[16:] == [ord("a")] * 48
    assert collector.drain()["cut_rows"].value == 1
    batches = list(make(Chat(path=path, shuffle=False, too_long="skip", repeat=False), seq_len=64))
    assert len(documents(batches)) == 1
    assert "line 1: it has 117 tokens, but a row holds 65 (training.seq_len)" in caplog.text


def test_names_of_titans_own_data_are_told() -> None:
    with pytest.raises(EnvironmentProblem, match="titan has no bundled data 'titan:sum'") as caught:
        make(Chat(path="titan:sum"))
    assert "titan:sums" in str(caught.value.hint)
    assert next(iter(make(Chat(path="titan:sums"), seq_len=128))).rows == 2


def test_packed_rows_cannot_be_padded_to_the_longest() -> None:
    with pytest.raises(RecipeError, match="packed rows are filled up"):
        load_recipe("sft_debug", ["dataset.padding=longest"])
    load_recipe("sft_debug", ["dataset.padding=longest", "dataset.pack=false"])

"""Tasks and the place reached among their prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.data.small_tokenizers import chatml
from titan_rl import Digit, Prompts, Sum
from titan_rl.tasks import Made
from titancli.data import HFTokenizer
from titancli.data.byte_tokenizer import ByteTokenizer
from titancli.errors import EnvironmentProblem, TitanError
from titancli.protocols.samples import Prompt
from titancli.registry.component import build
from titancli.rl.prompts import PromptSource


@pytest.mark.parametrize("config", [Digit(), Sum()])
def test_a_made_prompt_follows_from_seed_and_number(config: Any) -> None:
    task, again, other = build(config, seed=3), build(config, seed=3), build(config, seed=4)
    asked = [task.prompt(n) for n in range(60)]
    assert asked == [again.prompt(n) for n in reversed(range(60))][::-1]
    assert asked != [other.prompt(n) for n in range(60)]
    for prompt in asked:
        numbers = [int(c) for c in prompt.text if c.isdigit()]
        assert prompt.answer == str(sum(numbers) % 10)
    assert len({prompt.text for prompt in asked}) >= 9


def rows(folder: Path, *written: object) -> Path:
    path = folder / "p.jsonl"
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in written))
    return path


def test_rows_come_once_an_epoch_in_another_order(tmp_path: Path) -> None:
    path = rows(tmp_path, *({"prompt": f"q{n}", "answer": n, "extra": [n]} for n in range(20)))
    task = build(Prompts(path=str(path)), seed=1)
    epochs = [[task.prompt(20 * epoch + n).text for n in range(20)] for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]
    assert task.prompt(5).text == epochs[0][5]
    found = build(Prompts(path=str(path), shuffle=False), seed=1).prompt(22)
    assert (found.text, found.answer, found.row["extra"]) == ("q2", "2", [2])


def test_a_bad_row_is_skipped_or_ends_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = rows(tmp_path, {"prompt": "a"}, "{no json\n", {"question": "b"}, {"prompt": 3}, {"prompt": "c"})
    task = build(Prompts(path=str(path), shuffle=False), seed=0)
    assert [task.prompt(n).text for n in range(3)] == ["a", "c", "a"]
    assert "line 2: it is not JSON" in caplog.text and "line 3: it has no key 'prompt'" in caplog.text
    with pytest.raises(EnvironmentProblem, match="line 2: it is not JSON"):
        build(Prompts(path=str(path), strict=True), seed=0)
    with pytest.raises(EnvironmentProblem, match=r"no row of .* has a prompt"):
        build(Prompts(path=str(path), prompt="nothing"), seed=0)


def test_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    path = rows(tmp_path, {"prompt": "hi", "answer": "ho"})
    task = build(Prompts(path=str(path), chat=True, system="Be kind."), seed=0)
    tokenizer = ByteTokenizer()
    (asked,) = PromptSource(task, tokenizer, longest=200).take(1)
    wanted = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    assert asked.tokens == tokenizer.chat(wanted, add_generation_prompt=True)
    assert asked.prompt.text == "system: Be kind.\nuser: hi"


def test_a_rows_tools_reach_the_template(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    asked = {"prompt": [{"role": "user", "content": "hi"}]}
    more = {"tools": json.dumps(tools), "chat_template_kwargs": {"enable_thinking": False}}
    path = rows(tmp_path, {**asked, **more}, {**asked, "tools": "no JSON"}, {"prompt": "a text", **more})
    task = build(Prompts(path=str(path), shuffle=False), seed=0)
    assert [task.prompt(number).options for number in range(2)] == [
        {"tools": tools, "enable_thinking": False},
        {},
    ]
    assert task.count == 2 and "'tools' is not JSON" in caplog.text
    assert "line 3: it has 'tools', but its prompt is a text" in caplog.text
    folder = chatml(tmp_path / "t")
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    said = theirs.apply_chat_template(
        asked["prompt"], tools=tools, enable_thinking=False, add_generation_prompt=True, return_dict=False
    )
    assert PromptSource(task, build(HFTokenizer(path=folder)), longest=900).take(1)[0].tokens == said


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("3+9=", "the task Made returned a str as prompt 0"),
        (None, "returned a NoneType"),
        (Prompt(None), "not a NoneType"),  # type: ignore[arg-type]
        (Prompt(""), "prompt 0 of the task Made has no tokens: ''"),
    ],
)
def test_what_is_no_prompt_is_told(made: Any, words: str) -> None:
    class WithoutEnd(ByteTokenizer):
        eos_id = None  # type: ignore[assignment]

    task = Made("mine", lambda numbers: made, 0)
    with pytest.raises(TitanError, match=words):
        PromptSource(task, WithoutEnd(), longest=9).take(1)


def test_an_empty_prompt_begins_after_the_end_of_a_text() -> None:
    source = PromptSource(Made("mine", lambda numbers: Prompt(""), 0), ByteTokenizer(), longest=9)
    assert source.take(1)[0].tokens == [ByteTokenizer.eos_id]


def test_a_place_is_gone_back_to_and_long_prompts_are_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = rows(tmp_path, {"prompt": "aa"}, {"prompt": "b" * 9}, {"prompt": "cc"}, {"prompt": "dd"})

    def source(**settings: Any) -> PromptSource:
        return PromptSource(
            build(Prompts(path=str(path), shuffle=False, **settings), seed=0), ByteTokenizer(), longest=4
        )

    one, other = source(), source()
    assert [asked.prompt.text for asked in one.take(2)] == ["aa", "cc"]
    assert "prompt 1: it has 9 tokens" in caplog.text and one.too_long == 1
    other.load_state(json.loads(json.dumps(one.state)))
    assert other.take(3) == one.take(3) and [a.prompt.text for a in other.first(1)] == ["aa"]
    # An evaluation of more prompts than there are takes none of them twice.
    assert (
        [a.prompt.text for a in other.first(3)]
        == ["aa", "cc", "dd"]
        == [a.prompt.text for a in other.first(9)]
    )
    path.write_text(json.dumps({"prompt": "other"}) + "\n")
    with pytest.raises(
        EnvironmentProblem, match=r"loop\.task is not the data that the checkpoint was trained on"
    ):
        source().load_state(one.state)
    with pytest.raises(EnvironmentProblem, match=r"does not belong to loop\.task"):
        one.load_state({"version": 1, "epoch": 0})
    with pytest.raises(TitanError, match=r"has 5 tokens, but .* room for 4"):
        source().take(1)

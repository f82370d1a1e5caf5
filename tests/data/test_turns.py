"""Turns of the assistant under public chat templates, compared with transformers and TRL."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.data.templates import (
    FOLDER,
    NAMES,
    SHAPES,
    TOOLS,
    Compared,
    Outcome,
    says,
    table,
    tokenizer_of,
    user,
)
from titancli.data.chat_template import ChatRefused
from titancli.data.hf_tokenizer import HFTokenizer
from titancli.data.remarks import remarks
from titancli.errors import RecipeError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [user("Hello"), says("Yes."), user("And?"), says("No.")]


@pytest.fixture
def tokenizer_with(tmp_path: Path):
    def make(template: str) -> HFTokenizer:
        folder = tmp_path / f"t{len(list(tmp_path.iterdir()))}"
        return HFTokenizer(tokenizer_of(folder, template, "<|im_end|>"))

    return make


def trained(tokenizer: HFTokenizer, messages: Any, **options: Any) -> list[str]:
    """Return the stretches that are trained on; check the ids against transformers."""
    from transformers import PreTrainedTokenizerFast

    ids, mask = tokenizer.chat_with_mask(messages, **options)
    theirs = PreTrainedTokenizerFast.from_pretrained(tokenizer._folder)
    asked = options.get("options") or {}
    whole = theirs.apply_chat_template(messages, return_dict=False, **asked)
    # After a last turn that ends with the next role's marker, the marker is added.
    assert ids[: len(whole)] == whole and ids[len(whole) :] in ([], [tokenizer.turn_ends[0]])
    found: list[list[int]] = []
    for number, (token, flag) in enumerate(zip(ids, mask, strict=True)):
        if flag:
            found = found if number and mask[number - 1] else [*found, []]
            found[-1].append(token)
    return [theirs.decode(part) for part in found]


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], Outcome]:
    return table()


def test_table_of_public_templates(outcomes: dict[tuple[str, str], Outcome]) -> None:
    """Of 41 templates and 16 shapes, titan trains on all that can be trained on."""
    assert len(outcomes) == len(NAMES) * len(SHAPES) == 41 * 16
    assert Counter(one.kind for one in outcomes.values()) == {"same": 359, "better": 211, "refused": 86}
    refused = Counter(one.why for one in outcomes.values() if one.kind == "refused")
    assert refused == {
        "the template rejects it": 39,
        "the template leaves out content": 11,
        "the template leaves out tool_calls": 33,
        "the template shows no header of the second answer": 3,
    }


@pytest.mark.parametrize(
    ("name", "shape", "turns"),
    [
        ("gptoss", "several turns", [
            "<|channel|>final<|message|>Yes.<|end|>", "<|channel|>final<|message|>No.<|return|>"]),
        ("phi3", "several turns", ["Yes.<|end|>", "No.<|end|>\n<|endoftext|>"]),
        ("phi3_5", "assistant first", ["Hi.<|end|>", "Yes.<|end|>\n<|endoftext|>"]),
        ("glm4moe", "thoughts of several turns", [
            "\n<think></think>\nYes.<|user|>", "\n<think>well</think>\nNo.<|user|>"]),
        ("glm4moe", "tool call", [
            "\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
            "</tool_call><|observation|>", "\n<think></think>\nSunny.<|user|>"]),
        ("qwen3_5_think", "assistant first", ["Hi.<|im_end|>", "\n</think>\n\nYes.<|im_end|>"]),
        ("qwen3", "empty answer", ["<|im_end|>", "<think>\n\n</think>\n\nNo.<|im_end|>"]),
        ("gemma4_v5", "two answers in a row", ["Yes.No.<turn|>"]),
        ("llama3_1", "assistant first", ["Hi.<|eot_id|>", "Yes.<|eot_id|>"]),
    ],
)  # fmt: skip
def test_turns(tmp_path: Path, name: str, shape: str, turns: list[str]) -> None:
    tokenizer = Compared(name, tmp_path).ours
    options = {"tools": TOOLS} if "tool" in shape else {}
    assert trained(tokenizer, SHAPES[shape], options=options) == turns


@pytest.mark.parametrize("marked", [True, False])
def test_emoji_at_the_end_of_a_turn(tokenizer_with: Any, marked: bool) -> None:
    """All tokens of its last character are targets."""
    said = "{{ m.content }}<|im_end|>"
    template = CHATML.replace(
        said,
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>" if marked else said,
    )  # fmt: skip
    end = "" if marked else "<|im_end|>"
    talk = [user("Hi 🙂"), says("Yes 🙂"), user("🙂"), says("👩‍🚀")]
    assert trained(tokenizer_with(template), talk) == [f"Yes 🙂{end}", f"👩‍🚀{end}"]


@pytest.mark.parametrize(
    "content",
    ["<tool_response>\nx\n</tool_response>", "x", "{% raw %}", 'a"b\\c', "<|im_start|>assistant\n", "qxzk0z"],
)
def test_marks_change_nothing_else(tokenizer_with: Any, content: str) -> None:
    """A template that looks at what a message says reads it as it is."""
    looks = "{% if m.content.startswith('<tool') and m.content.endswith('response>') %}!{% endif %}"
    tokenizer = tokenizer_with(CHATML.replace("{{ m.content }}", looks + "{{ m.content }}"))
    talk = [user(content), says(content), user(content), says("No.")]
    assert trained(tokenizer, talk)[-1] == "No.<|im_end|>"
    assert trained(tokenizer, talk)[0].endswith(f"{content}<|im_end|>")


def test_turns_chosen_by_number(tokenizer_with: Any) -> None:
    tokenizer = tokenizer_with(CHATML)
    assert trained(tokenizer, TALK, untrained=[1]) == ["No.<|im_end|>"]
    assert trained(tokenizer, TALK, untrained=[3]) == ["Yes.<|im_end|>"]
    assert trained(tokenizer, TALK, first=2) == ["No.<|im_end|>"]


@pytest.mark.parametrize(
    "name", ["qwen3_training", "gptoss_training", "diffusion_gemma_training", "lfm2_2_5"]
)
def test_turns_chosen_by_number_with_markers(tmp_path: Path, name: str) -> None:
    """Some templates mark several spans in a turn."""
    folder = tokenizer_of(tmp_path / "t", (FOLDER / f"{name}.jinja").read_text(), "<|im_end|>")
    tokenizer, talk = HFTokenizer(folder), SHAPES["call, then a question"]
    options = {"tools": TOOLS}
    whole, parts = (trained(tokenizer, talk, options=options, **more) for more in ({}, {"untrained": [1, 5]}))
    assert len(whole) == 3 and parts == whole[1:2]
    assert trained(tokenizer, talk, options=options, first=5) == whole[2:]


def test_left_out_is_refused(tokenizer_with: Any) -> None:
    """What a template drops, shortens or prints as Python does is no row to learn."""
    only = CHATML.replace("<|im_start|>", "{% if m.role != 'developer' %}<|im_start|>", 1).replace(
        "<|im_end|>\n{% endfor", "<|im_end|>\n{% endif %}{% endfor"
    )
    talk = [{"role": "developer", "content": "Be kind."}, *TALK]
    for call in (tokenizer_with(only).chat, tokenizer_with(only).chat_with_mask):
        with pytest.raises(ChatRefused, match=r"leaves out messages\[0\].content of 'developer', 'Be kind.'"):
            call(talk)
    short = tokenizer_with(CHATML.replace("{{ m.content }}", "{{ m.content[:4] }}"))
    with pytest.raises(ChatRefused, match=r"leaves out messages\[0\].content of 'user'"):
        short.chat(TALK)
    called = [user("Rome?"), says("", tool_calls=[{"function": {"name": "f", "arguments": {"a": "b"}}}])]
    with pytest.raises(ChatRefused, match=r"leaves out messages\[1\].tool_calls\[0\].function.name"):
        tokenizer_with(CHATML).chat(called)
    prints = CHATML.replace("<|im_end|>\n{% endfor", "{{ m.tool_calls or '' }}<|im_end|>\n{% endfor")
    with pytest.raises(ChatRefused, match="as Python does"):
        tokenizer_with(prints).chat(called)


def test_arguments_in_the_form_of_the_template(tokenizer_with: Any) -> None:
    """JSON text becomes an object, and an object JSON text where the template joins it to a text."""
    shows = (
        "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ WAY }}]{% endfor %}<|im_end|>\n{% endfor"
    )
    for way in ("c.function.arguments | tojson", "'=' + c.function.arguments"):
        tokenizer = tokenizer_with(CHATML.replace("<|im_end|>\n{% endfor", shows.replace("WAY", way)))
        texts = []
        for arguments in ({"city": "Köln"}, '{"city": "Köln"}'):
            call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
            ids = tokenizer.chat([user("?"), says("", tool_calls=[call])])
            texts.append(tokenizer.decode(ids))
        assert texts[0] == texts[1] and '{"city": "Köln"}' in texts[0]


def test_parts_in_the_form_of_the_template(tokenizer_with: Any) -> None:
    """Parts are given as they are to a template that reads them, as text to others, and the other way."""
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "you"}]
    text = [{"role": "user", "content": "Hello you"}, says("Yes.")]
    given = [{"role": "user", "content": parts}, says("Yes.")]
    plain = tokenizer_with(CHATML)
    assert plain.chat(given) == plain.chat(text)
    each = "{% for part in m.content %}{{ part.text }}|{% endfor %}"
    reads = tokenizer_with(CHATML.replace("{{ m.content }}", each))
    assert "Hello |you|" in reads.decode(reads.chat(given))
    assert "Hello you|" in reads.decode(reads.chat(text)) and "Yes.|" in reads.decode(reads.chat(text))


def test_text_of_a_conversation_has_its_ids(tokenizer_with: Any) -> None:
    """Evaluation harnesses render a conversation first, and encode it later."""
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "you"}]
    talk = [{"role": "user", "content": parts}, says("Yes."), user("And?")]
    tokenizer = tokenizer_with(CHATML)
    text = tokenizer.chat_text(talk, add_generation_prompt=True)
    assert "Hello you" in text
    assert tokenizer.encode_special(text) == tokenizer.chat(talk, add_generation_prompt=True)


def test_template_that_is_none(tokenizer_with: Any) -> None:
    """A template with a mistake in it is one error of the folder, not one of each row."""
    with pytest.raises(RecipeError, match="is not a template of Jinja: line 1") as caught:
        tokenizer_with("{% for m in messages %}{{ m.content }").chat(TALK)
    assert not isinstance(caught.value, ChatRefused)


def test_half_a_character_is_refused(tokenizer_with: Any) -> None:
    tokenizer = tokenizer_with(CHATML + "{{ tools | length if tools else '' }}{{ note }}")
    with pytest.raises(ChatRefused, match="surrogate"):
        tokenizer.chat_with_mask(TALK, options={"note": json.loads('"\\ud83d"')})


def test_form_is_no_matter_of_other_rows(tokenizer_with: Any) -> None:
    """A text that shows a call's arguments as Python does is no reason to print them as JSON text, in its row
    or in later ones; nor are messages that share an object."""
    calls = "{% for c in m.tool_calls or [] %}[{{ c.function | tojson }}]{% endfor %}<|im_end|>\n{% endfor"
    tokenizer = tokenizer_with(CHATML.replace("<|im_end|>\n{% endfor", calls))

    def asked(text: str, *arguments: Any) -> str:
        made = [{"type": "function", "function": {"name": "f", "arguments": one}} for one in arguments]
        return tokenizer.decode(tokenizer.chat([user(text), says("", tool_calls=made)]))

    for arguments in ({"city": "Rome"}, {"n": 1}):
        assert f'"arguments": {json.dumps(arguments)}' in asked(f"Call {arguments}.", arguments)
    rome = {"city": "Rome"}
    assert asked("Twice?", rome, rome).count('"arguments": {"city": "Rome"}') == 2
    assert '"arguments": {"city": "Rome"}' in asked("Rome?", rome)


def test_form_of_the_template_is_kept(tokenizer_with: Any) -> None:
    """A row that the template cannot show in its form is refused, not shown in another."""
    shows = (
        "{% for c in m.tool_calls or [] %}{% if c.function.arguments is mapping and c.function.arguments.x %}"
    )
    shows += (
        "{{ raise_exception('x') }}{% endif %}[{{ c.function | tojson }}]{% endfor %}<|im_end|>\n{% endfor"
    )
    tokenizer = tokenizer_with(CHATML.replace("<|im_end|>\n{% endfor", shows))
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "1"}}}
    with pytest.raises(ChatRefused, match="x"):
        tokenizer.chat([user("?"), says("", tool_calls=[call])])


def test_call_without_content(tokenizer_with: Any) -> None:
    """Null contents, as OpenAI's files have them beside calls, are empty to a template that needs a text."""
    needs = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '' + m.content }}"
    needs += (
        "{% for c in m.tool_calls or [] %}[{{ c.function | tojson }}]{% endfor %}<|im_end|>\n{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": "Rome"}}}
    made = {"role": "assistant", "tool_calls": [call]}
    tokenizer = tokenizer_with(needs)
    assert tokenizer.chat([user("?"), made]) == tokenizer.chat([user("?"), {**made, "content": ""}])


def test_thought_in_the_text_is_there(tmp_path: Path) -> None:
    """Qwen 3 takes a thought out of the text and puts it back, which is nothing to remark on; a template that
    leaves it out is."""
    said = [user("Hi"), says("<think>\nhm\n</think>\n\nYes.")]
    for name, kinds in (("qwen3", set()), ("deepseek_r1_distill", {"thoughts"})):
        folder = tokenizer_of(tmp_path / name, (FOLDER / f"{name}.jinja").read_text(), "<|im_end|>")
        with remarks() as found:
            HFTokenizer(folder).chat(said)
        assert set(found) == kinds


def test_template_of_rows_with_tools(tmp_path: Path) -> None:
    """A folder may have one template for tools and one for the rest, with markers in one of them."""
    marked = CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    for default, tools in ((CHATML, marked), (marked, CHATML)):
        folder = tokenizer_of(tmp_path / str(default == marked), CHATML, "<|im_end|>")
        config = json.loads((folder / "tokenizer_config.json").read_text())
        named = [
            {"name": "default", "template": default},
            {"name": "tool_use", "template": tools + "{# tools #}"},
        ]
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
        tokenizer = HFTokenizer(folder)
        for options, template in (({}, default), ({"tools": TOOLS}, tools)):
            ids, mask = tokenizer.chat_with_mask(TALK[:2], options=options)
            learned = tokenizer.decode_special([one for one, flag in zip(ids, mask, strict=True) if flag])
            assert learned == ("HelloYes." if template == marked else "Yes.<|im_end|>")

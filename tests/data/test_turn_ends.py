"""What ends a turn of the assistant is found by rendering, and is what a model is trained to write."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.data.small_tokenizers import CHATML, byte_level, chatml
from titancli.data import HFTokenizer
from titancli.registry.component import build

TEMPLATES = Path(str(find_spec("trl").origin)).parent / "chat_templates"  # type: ignore[union-attr]
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "<arg_value>")
# The ends of answers and of calls of tools, as the families' own generation_config.json list them.
ENDS = {
    "qwen3": {"<|im_end|>"},
    "llama3_1": {"<|eot_id|>"},
    "gemma3": {"<end_of_turn>"},
    "gemma4": {"<turn|>", "<|tool_response>"},
    "phi3": {"<|end|>"},
    "deepseekv3": {"<｜end▁of▁sentence｜>"},
    "cohere2": {"<|END_OF_TURN_TOKEN|>"},
    "gptoss": {"<|return|>", "<|call|>"},
    "glm4moe": {"<|user|>", "<|observation|>"},
    "glm4moe_training": {"<|user|>", "<|observation|>"},
}
USER, OTHER = {"role": "user", "content": "Hello"}, {"role": "user", "content": "And?"}
SAYS: dict[str, Any] = {"role": "assistant", "content": "Yes."}
CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "x"}}}],
}
RESULT = {"role": "tool", "content": "sunny"}
TALKS = {
    "one turn": [USER, SAYS],
    "two turns": [USER, SAYS, OTHER, SAYS],
    "a system message within": [USER, SAYS, {"role": "system", "content": "Be kind."}, OTHER, SAYS],
    "tools": [USER, CALLS, RESULT, SAYS],
    "a call at the end": [USER, CALLS],
}


def family(folder: Path, name: str, template: str | None = None) -> Path:
    """Write a tokenizer with a public template and the special tokens that the template names."""
    text = (TEMPLATES / f"{template or name}.jinja").read_text()
    named = (TEMPLATES / f"{name}.jinja").read_text()
    specials = set(re.findall(r"<\|?\w+\|?>|<｜[^>']+｜>|</s>|\[gMASK\]", named)) - set(PLAIN)
    plain = [token for token in PLAIN if token in named]
    names = ("<bos>", "<eos>", *sorted(specials))
    return byte_level(folder, names, eos="<eos>", bos="<bos>", template=text, plain=plain)


@pytest.mark.parametrize("name", ENDS)
def test_ends_of_public_templates(name: str, tmp_path: Path) -> None:
    tokenizer = build(HFTokenizer(path=family(tmp_path / "t", name)))
    assert {tokenizer.decode_special([one]) for one in tokenizer.turn_ends} == ENDS[name]


@pytest.mark.parametrize("name", TALKS)
def test_masks_of_trl(name: str, tmp_path: Path) -> None:
    """GLM's turns end in the next role's marker, which is trained on, as in TRL's template for training."""
    ours = build(HFTokenizer(path=family(tmp_path / "t", "glm4moe")))
    theirs = PreTrainedTokenizerFast.from_pretrained(
        family(tmp_path / "u", "glm4moe", template="glm4moe_training")
    )
    found = theirs.apply_chat_template(
        TALKS[name], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = ours.chat_with_mask(TALKS[name])
    newline = ours.encode("\n")[0]  # TRL's template has one more at the beginning of turns, as a target
    wanted = [i for i, flag in zip(found["input_ids"], found["assistant_masks"], strict=True) if flag]
    assert [i for i in ids if i != newline] == [i for i in found["input_ids"] if i != newline]
    trained = [i for i, flag in zip(ids, mask, strict=True) if flag]
    assert [i for i in trained if i != newline] == [i for i in wanted if i != newline]


def test_only_wanted_turns_are_ended(tmp_path: Path) -> None:
    tokenizer = build(HFTokenizer(path=family(tmp_path / "t", "glm4moe")))
    ids, mask = tokenizer.chat_with_mask(TALKS["two turns"], first=2)
    users = [at for at, i in enumerate(ids) if i == tokenizer.token_id("<|user|>")]
    assert [mask[at] for at in users] == [False, False, True] and users[-1] == len(ids) - 1
    assert tokenizer.chat(TALKS["two turns"]) == ids[:-1]
    ids, mask = tokenizer.chat_with_mask([USER, SAYS, OTHER])
    assert len(ids) == len(mask) and tokenizer.chat([USER, SAYS, OTHER]) == ids and not mask[-1]


def test_one_marker_for_all_roles(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ '<|im_start|>' + m.role + ': ' + m.content }}{% endfor %}"
    prompt = "{% if add_generation_prompt %}{{ '<|im_start|>assistant: ' }}{% endif %}"
    folder = chatml(tmp_path / "t")
    (folder / "chat_template.jinja").write_text(template + prompt)
    tokenizer = build(HFTokenizer(path=folder))
    start = tokenizer.token_id("<|im_start|>")
    assert tokenizer.turn_ends == (start,)
    ids, mask = tokenizer.chat_with_mask(TALKS["two turns"])
    flags = [flag for one, flag in zip(ids, mask, strict=True) if one == start]
    assert flags == [False, False, True, False, True]


def test_templates_without_ends(tmp_path: Path) -> None:
    folder = chatml(tmp_path / "t")
    template = folder / "chat_template.jinja"
    found = {}
    for name, text in {
        "plain text": "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}",
        "contents are left out": "{{ '<|im_start|>' }}",
        "the end is eos": CHATML.replace("<|im_end|>", "<|endoftext|>"),
        "all is rejected": "{{ raise_exception('no') }}",
    }.items():
        template.write_text(text)
        found[name] = build(HFTokenizer(path=folder)).turn_ends
    eos = build(HFTokenizer(path=folder)).eos_id
    assert found == {
        "plain text": (),
        "contents are left out": (),
        "the end is eos": (eos,),
        "all is rejected": (),
    }
    template.unlink()
    assert build(HFTokenizer(path=folder)).turn_ends is None

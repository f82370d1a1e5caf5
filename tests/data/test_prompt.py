"""A prompt has the same ids in training, in rollouts, and when text is generated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.data.helpers import make
from tests.data.small_tokenizers import chatml
from tests.generate.models import make_checkpoint
from titancli.cli import main
from titancli.data import ByteTokenizer, Chat, HFTokenizer, JsonLines
from titancli.data.prompt import answered, prompt_ids
from titancli.errors import EnvironmentProblem, RecipeError, TitanError
from titancli.generate.source import encode, encode_chat, find_source
from titancli.protocols.samples import Prompt
from titancli.registry.component import build
from titancli.rl.prompts import PromptSource

TEXT = "Once <|begin|> upon"
KINDS: dict[str, dict[str, Any]] = {
    "no BOS": {},
    "the post-processor adds BOS": {"bos": "<|begin|>", "adds_bos": True},
    "only the template writes BOS": {"bos": "<|begin|>", "writes_bos": True},
    "both": {"bos": "<|begin|>", "adds_bos": True, "writes_bos": True},
}
USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
OPTIONS = {"tools": TOOLS, "enable_thinking": False}


class Asks:
    """A task with one prompt."""

    count = None

    def __init__(self, *prompts: Prompt) -> None:
        self._prompts, self.identity = prompts, {}

    def prompt(self, number: int) -> Prompt:
        return self._prompts[number % len(self._prompts)]


def asked(prompt: Prompt, tokenizer: Any) -> list[int]:
    return PromptSource(Asks(prompt), tokenizer, longest=999).take(1)[0].tokens


def first_row(config: Any, tokenizer: Any, count: int) -> list[int]:
    return next(iter(make(config, tokenizer=tokenizer, seq_len=400)))["tokens"][0].tolist()[:count]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("cache")
def test_one_prompt_everywhere(kind: str, tmp_path: Path) -> None:
    folder = chatml(tmp_path / "t", **KINDS[kind])
    tokenizer, theirs = build(HFTokenizer(path=folder)), PreTrainedTokenizerFast.from_pretrained(folder)
    text = TEXT.replace("<|begin|>", "")  # its name in a text is text here, and not there
    wanted = theirs(text)["input_ids"]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": text}) + "\n")
    settings = ("model.vocab_size=300", "tokenizer.type=hf", f"tokenizer.path={folder}")
    step = tmp_path / "run/checkpoints/step-1"
    make_checkpoint(step, *settings)
    assert main(["convert-checkpoint", str(step), str(tmp_path / "hf"), "--to", "hf"]) == 0
    sources = [find_source(src, tokenizer=None, component=None, say=print) for src in (step, tmp_path / "hf")]
    found = {
        "sft": first_row(Chat(path=str(rows), format="text", pack=False), tokenizer, len(wanted)),
        "pretrain": first_row(JsonLines(paths=[rows]), tokenizer, len(wanted)),
        "rollouts": asked(Prompt(text), tokenizer),
        "generate RUN": encode(sources[0], [text])[0],
        "generate HF": encode(sources[1], [text])[0],
    }
    assert found == dict.fromkeys(found, wanted)
    wanted = theirs.apply_chat_template(USER, add_generation_prompt=True, return_dict=False)
    assert wanted.count(tokenizer.bos_id) == ("writes_bos" in KINDS[kind])
    found = {
        "rollouts": asked(Prompt("", messages=tuple(USER)), tokenizer),
        "generate RUN": encode_chat(sources[0], ["hi"])[0],
        "generate HF": encode_chat(sources[1], ["hi"])[0],
    }
    assert found == dict.fromkeys(found, wanted)


def test_rollouts_have_a_rows_tools(tmp_path: Path) -> None:
    folder = chatml(tmp_path / "t")
    tokenizer, theirs = build(HFTokenizer(path=folder)), PreTrainedTokenizerFast.from_pretrained(folder)
    wanted = theirs.apply_chat_template(USER, add_generation_prompt=True, return_dict=False, **OPTIONS)
    assert asked(Prompt("", messages=tuple(USER), options=OPTIONS), tokenizer) == wanted
    assert len(wanted) > len(asked(Prompt("", messages=tuple(USER)), tokenizer)) + 50


def test_bos_of_the_recipe(tmp_path: Path) -> None:
    """A run's prompts begin as its training text did, against the tokenizer's files."""
    folder = chatml(tmp_path / "t", bos="<|begin|>", adds_bos=True)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "ab"}\n')
    own = ["model.vocab_size=300", "tokenizer.type=hf", f"tokenizer.path={folder}"]
    texts = f'{{type="jsonl", paths=["{rows}"], add_bos=false}}'
    recipes = {"jsonl": [f"dataset={texts}"]}
    recipes["mix"] = [f'dataset={{type="mix", weights={{a=1.0}}, datasets={{a={texts}}}}}']
    for kind, data in recipes.items():
        make_checkpoint(tmp_path / kind / "step-1", *own, *data)
        source = find_source(tmp_path / kind / "step-1", tokenizer=None, component=None, say=print)
        assert [len(encode(source, ["ab"], bos=bos)[0]) for bos in (None, True)] == [2, 3], kind


def test_a_resume_keeps_bos(tmp_path: Path) -> None:
    """Prompts of a checkpoint from before they began with BOS are other prompts."""
    tokenizer = build(HFTokenizer(path=chatml(tmp_path / "t", bos="<|begin|>", adds_bos=True)))
    for prompt, is_text in ((Prompt("a"), True), (Prompt("", messages=tuple(USER)), False)):
        source = PromptSource(Asks(prompt), tokenizer, longest=99)
        source.take(1)
        state = json.loads(json.dumps(source.state))
        source.load_state(state)
        assert state["data"].pop("bos", None) == (tokenizer.bos_id if is_text else None)
        if is_text:
            with pytest.raises(EnvironmentProblem, match="bos was"):
                source.load_state(state)


def test_rejected_prompts_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    refuses += "{{ messages[0].content }}"
    (folder := chatml(tmp_path / "t")).joinpath("chat_template.jinja").write_text(refuses)
    tokenizer = build(HFTokenizer(path=folder))
    bad = Prompt("", messages=({"role": "system", "content": "s"},))
    source = PromptSource(Asks(bad, Prompt("", "1", tuple(USER)), bad), tokenizer, longest=9)
    assert [one.prompt.answer for one in source.take(2)] == ["1", "1"] and source.rejected == 3
    assert caplog.text.count("skipped prompt") == 1 and "no system" in caplog.text
    with pytest.raises(TitanError, match=r"1000 prompts in a row were skipped; .*no system"):
        PromptSource(Asks(bad), tokenizer, longest=9).take(1)


def test_what_a_text_does_not_take(tmp_path: Path) -> None:
    tokenizer = build(ByteTokenizer())
    for more in ({"system": "s"}, {"options": OPTIONS}):
        with pytest.raises(RecipeError, match="need messages, but the prompt is a text"):
            prompt_ids(tokenizer, "a", **more)
    with pytest.raises(RecipeError, match="no BOS token"):
        prompt_ids(tokenizer, "a", bos=True)
    source = PromptSource(Asks(Prompt("", messages=tuple(USER), options=OPTIONS)), tokenizer, longest=99)
    with pytest.raises(TitanError, match="takes no 'tools' or 'enable_thinking'"):
        source.take(1)


def test_answer_that_has_begun(tmp_path: Path) -> None:
    """A prompt that ends with the assistant's words is continued, as TRL and transformers do."""
    folder = chatml(tmp_path / "t")
    tokenizer, theirs = build(HFTokenizer(path=folder)), PreTrainedTokenizerFast.from_pretrained(folder)
    talk = [*USER, {"role": "assistant", "content": "Let me see.\n<think>"}]
    whole = theirs.apply_chat_template(talk, continue_final_message=True, return_dict=False)
    assert asked(Prompt("", messages=tuple(talk)), tokenizer) == whole
    assert tokenizer.decode_special(whole).endswith("<think>")
    parts = [{"type": "text", "text": "Let me "}, {"type": "text", "text": "see."}]
    assert answered([*USER, {**talk[-1], "content": parts}], " 4")[-1]["content"] == "Let me see. 4"
    assert answered(USER, "4") == [*USER, {"role": "assistant", "content": "4"}]
    with pytest.raises(TitanError, match="takes no 'continue_final_message'"):
        asked(Prompt("", messages=tuple(talk)), build(ByteTokenizer()))

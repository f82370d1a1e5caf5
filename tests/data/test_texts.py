"""Weights and parts of messages, rows without a chat template, and texts with special tokens in them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.helpers import make
from tests.data.templates import FOLDER, says, tokenizer_of, user
from titan_preference import Preference, Unpaired
from titancli.data import ByteTokenizer, Chat, JsonLines
from titancli.data.hf_tokenizer import HFTokenizer
from titancli.errors import EnvironmentProblem, RecipeError, TitanError
from titancli.protocols.batch import IGNORE
from titancli.registry.component import build

RENDERED = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
QWEN = (FOLDER / "qwen3.jinja").read_text()


@pytest.fixture
def qwen(tmp_path: Path) -> HFTokenizer:
    return HFTokenizer(tokenizer_of(tmp_path / "qwen", QWEN, "<|endoftext|>"))


@pytest.fixture(params=[False, True], ids=["no BOS", "BOS"])
def base(tmp_path: Path, request: pytest.FixtureRequest) -> HFTokenizer:
    """A base model's tokenizer: it has no chat template, and may begin texts with BOS."""
    folder = tokenizer_of(tmp_path / "base", "", "<eos>")
    if request.param:
        from tokenizers import Tokenizer, processors

        tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
        bos = tokens.token_to_id("<bos>")
        tokens.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", bos)]
        )
        tokens.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return HFTokenizer(folder)


def path_of(folder: Path, rows: list[Any]) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def encoded(folder: Path, rows: list[Any], tokenizer: Any, kind: Any = Chat, **config: Any) -> list[Any]:
    """Return the ids and the targets of each row."""
    config = {"pack": False, **config} if kind is Chat else config
    config = {"path": path_of(folder, rows), "repeat": False, "shuffle": False, **config}
    data = make(kind(**config), tokenizer=tokenizer, seq_len=192, rows=2)
    found = []
    for batch in data:
        for tokens, targets in zip(batch["tokens"].numpy(), batch["targets"].numpy(), strict=True):
            if len(places := np.flatnonzero(targets != IGNORE)):
                last = int(places[-1])
                ids = [*tokens[: last + 1].tolist(), int(targets[last])]
                found.append((ids, [int(one) for one in targets if one != IGNORE]))
    return found


# ------------------------------------------------------------------------------------------------- weights


def test_message_of_weight_0_is_no_target(tmp_path: Path, qwen: HFTokenizer) -> None:
    """OpenAI's form: 0 and 1, on the assistant's messages."""
    for tokenizer in (qwen, build(ByteTokenizer())):
        talk = [user("a"), says("no", weight=0), user("b"), says("yes", weight=1.0), user("c"), says("yes")]
        plain = [{key: value for key, value in one.items() if key != "weight"} for one in talk]
        [(ids, targets)] = encoded(tmp_path, [{"messages": talk}], tokenizer)
        [(whole, every)] = encoded(tmp_path, [{"messages": plain}], tokenizer)
        assert ids == whole and len(targets) < len(every)
        assert tokenizer.decode(targets).count("yes") == 2 and "no" not in tokenizer.decode(targets)


def test_weight_needs_a_tokenizer_that_knows_it(tmp_path: Path) -> None:
    tokenizer = build(ByteTokenizer())
    known = tokenizer.chat_with_mask
    tokenizer.chat_with_mask = lambda messages, *, first=0: known(messages, first=first)  # type: ignore[method-assign]
    row = {"messages": [user("a"), says("no", weight=0), user("b"), says("yes")]}
    with pytest.raises(EnvironmentProblem, match="cannot leave out single messages"):
        encoded(tmp_path, [row], tokenizer, strict=True)


def test_parts_of_text_are_a_text(tmp_path: Path, qwen: HFTokenizer) -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "you"}]
    for tokenizer in (qwen, build(ByteTokenizer())):
        rows = [[{"role": "user", "content": content}, says("Yes.")] for content in (parts, "Hello you")]
        one, other = encoded(tmp_path, [{"messages": row} for row in rows], tokenizer)
        assert one == other


def test_role_that_the_template_leaves_out(
    tmp_path: Path, qwen: HFTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """The message names the remedy, which works."""
    row = {"messages": [{"role": "developer", "content": "Be kind."}, user("a"), says("b")]}
    good = {"messages": [user("a"), says("b")]}
    assert len(encoded(tmp_path, [row, good], qwen)) == 1
    assert 'set dataset.roles = { "developer" = "system" }' in caplog.text
    [(ids, _)] = encoded(tmp_path, [row], qwen, roles={"developer": "system"})
    assert "system\nBe kind.<|im_end|>" in qwen.decode_special(ids)


# --------------------------------------------------------------------------------- without a chat template


def by_trl(tokenizer: HFTokenizer, prompt: str, completion: str) -> tuple[list[int], list[int]]:
    """Encode as TRL's SFTTrainer and DPOTrainer do."""
    from transformers import PreTrainedTokenizerFast
    from trl.data_utils import _tokenize, common_prefix_length

    theirs = PreTrainedTokenizerFast.from_pretrained(tokenizer._folder)
    end = "" if completion.endswith(theirs.eos_token) else theirs.eos_token
    ids = _tokenize(theirs, prompt + completion + end)["input_ids"]
    return ids, ids[common_prefix_length(_tokenize(theirs, prompt)["input_ids"], ids) :]


@pytest.mark.parametrize("completion", [" 4.", " 4.<eos>", "4 🙂"])
def test_prompt_and_completion_of_a_base_model(tmp_path: Path, base: HFTokenizer, completion: str) -> None:
    prompt = "2+2 ="
    expected = by_trl(base, prompt, completion)
    assert encoded(tmp_path, [{"prompt": prompt, "completion": completion}], base) == [expected]
    row = {"prompt": prompt, "completion": completion, "label": True}
    assert encoded(tmp_path, [row], base, Unpaired) == [expected]
    row = {"prompt": prompt, "chosen": completion, "rejected": " 5"}
    assert encoded(tmp_path, [row], base, Preference) == [expected, by_trl(base, prompt, " 5")]
    whole = encoded(tmp_path, [{"prompt": prompt, "completion": completion}], base, train_on="all")
    assert [ids for ids, _ in whole] == [expected[0]] and whole[0][1] == expected[0][1:]


def test_messages_need_a_chat_template(tmp_path: Path, base: HFTokenizer) -> None:
    """One error of the folder, not one of each row."""
    rows = [
        {"messages": [user("a"), says("b")]},
        {"prompt": [user("a")], "completion": [says("b")]},
        {"prompt": "a", "completion": "b", "system": "s"},
    ]
    for row in rows:
        with pytest.raises(RecipeError, match="has no chat template"):
            encoded(tmp_path, [row], base)
    with pytest.raises(RecipeError, match="has no chat template"):
        pair = {"prompt": [user("a")], "chosen": [says("b")], "rejected": [says("c")]}
        encoded(tmp_path, [pair], base, Preference)
    assert encoded(tmp_path, [{"text": "a"}], base)


# ------------------------------------------------------------------------------ special tokens in the text


def test_rendered_text_is_read_and_said(
    tmp_path: Path, qwen: HFTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(qwen._folder)(RENDERED)["input_ids"]
    rows = [{"text": "plain"}, {"text": RENDERED}, {"text": RENDERED}]
    (plain, _), (ids, targets), _ = encoded(tmp_path, rows, qwen)
    assert plain == [*qwen.encode("plain"), qwen.eos_id]
    assert ids == theirs and targets == theirs[1:]
    assert caplog.text.count("has '<|im_start|>', which is encoded as the special token") == 1
    assert "rows.jsonl, line 2" in caplog.text
    caplog.clear()
    assert encoded(tmp_path, rows, qwen, markers="read")[1] == (ids, targets) and not caplog.text


def test_rendered_text_has_one_bos_and_one_end(tmp_path: Path, base: HFTokenizer) -> None:
    for text in ("<bos>Hello<eos>", "Hello<eos>", "Hello"):
        [(ids, _)] = encoded(tmp_path, [{"text": text}], base)
        assert ids.count(base.eos_id) == 1 and ids[-1] == base.eos_id
        assert ids.count(base.bos_id) == (base.adds_bos or text.startswith("<bos>"))


def test_turns_of_a_rendered_text(tmp_path: Path, qwen: HFTokenizer) -> None:
    """They are those of the messages that it was rendered from, here without thoughts."""
    text = RENDERED + RENDERED.replace("Yes", "No")
    [(ids, targets)] = encoded(tmp_path, [{"text": text}], qwen, markers="turns")
    assert qwen.decode_special(ids) == text.removesuffix("\n")
    assert qwen.decode_special(targets) == "Yes.<|im_end|>No.<|im_end|>"
    with pytest.raises(EnvironmentProblem, match="has no turn of the assistant"):
        encoded(tmp_path, [{"text": "plain"}], qwen, markers="turns", strict=True)


@pytest.mark.parametrize("name", ["llama3_1", "phi3", "glm4moe", "gptoss", "deepseekv3", "nemotron_3_nano"])
def test_turns_of_texts_of_families(tmp_path: Path, name: str) -> None:
    folder = tokenizer_of(tmp_path / "t", (FOLDER / f"{name}.jinja").read_text(), "<|endoftext|>")
    tokenizer = HFTokenizer(folder)
    talk = [user("Hello"), says("Yes."), user("And?"), says("No."), user("Bye")]
    ids, mask = tokenizer.chat_with_mask(talk)
    text = tokenizer.chat_text(talk)
    found, marked = tokenizer.text_with_mask(text)
    assert found == ids and marked == mask


def test_turns_need_a_template_and_a_tokenizer(tmp_path: Path, base: HFTokenizer) -> None:
    with pytest.raises(TitanError, match="no chat template"):
        encoded(tmp_path, [{"text": "a"}], base, markers="turns")
    for markers in ("read", "turns"):
        with pytest.raises(RecipeError, match=f'dataset.markers = "{markers}": the tokenizer ByteTokenizer'):
            encoded(tmp_path, [{"text": "a"}], build(ByteTokenizer()), markers=markers)


def test_special_tokens_of_documents_are_characters(tmp_path: Path, qwen: HFTokenizer) -> None:
    """In a corpus, and in rows of text on demand."""
    [(ids, _)] = encoded(tmp_path, [{"text": RENDERED}], qwen, markers="plain")
    assert qwen.token_id("<|im_start|>") not in ids and ids[-1] == qwen.eos_id
    path = path_of(tmp_path, [{"text": RENDERED}])
    data = make(JsonLines(paths=[Path(path)], shuffle=False), tokenizer=qwen, seq_len=64, rows=1)
    tokens = next(iter(data))["tokens"]
    assert not (tokens == qwen.token_id("<|im_start|>")).any()


# ------------------------------------------------------------------------------------------------- remarks


def test_remarks_are_said_once(tmp_path: Path, qwen: HFTokenizer, caplog: pytest.LogCaptureFixture) -> None:
    plain = QWEN.replace("reasoning_content", "nothing").replace("tools", "nothing")
    tokenizer = HFTokenizer(tokenizer_of(tmp_path / "plain", plain, "<|endoftext|>"))
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    row = {"messages": [user("<|im_end|>"), says("b", reasoning_content="hm")], "tools": [tool]}
    with caplog.at_level(logging.WARNING):
        assert len(encoded(tmp_path, [row, row], tokenizer)) == 2
    assert caplog.text.count("leaves out messages[1].reasoning_content") == 1
    assert caplog.text.count("leaves out the row's tools (weather)") == 1
    assert caplog.text.count("messages[0].content has '<|im_end|>'") == 1
    caplog.clear()
    earlier = {"messages": [user("a"), says("b", reasoning_content="hm"), user("c"), says("d")]}
    assert encoded(tmp_path, [earlier], qwen) and not caplog.text

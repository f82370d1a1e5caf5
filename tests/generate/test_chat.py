"""`titan generate --chat`: the prompt is what a user says, under the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Titan
from titancli.data import ByteTokenizer
from titancli.generate.source import encode_chat, find_source
from titancli.registry.component import build

SHORT = ("--max-new-tokens", "8", "--temperature", "0")


def test_a_conversation_is_continued_where_the_answer_begins(
    generated: Callable[..., dict[str, Any]], checkpoint: Path
) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    ids = build(ByteTokenizer()).chat(messages, add_generation_prompt=True)
    source = find_source(checkpoint, tokenizer=None, component=None, say=print)
    assert encode_chat(source, ["hi"], system="s") == [ids]
    document = generated(checkpoint, "hi", "--chat", "--system", "s", *SHORT)
    assert document["prompts"][0]["tokens"] == len(ids)
    assert document["settings"]["chat"] is True and document["settings"]["system"] == "s"


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--system", "s"), "--system needs a chat"), (("--chat", "--bos"), "remove --bos")],
)
def test_what_does_not_go_together_is_refused(
    titan: Titan, checkpoint: Path, options: tuple[str, ...], said: str
) -> None:
    done = titan("generate", checkpoint, "hi", *options)
    assert done.code == 2 and said in done.err


def test_a_tokenizer_without_a_template_is_named(titan: Titan, hf_folder: Path) -> None:
    done = titan("generate", hf_folder, "hi", "--chat", *SHORT)
    assert done.code == 3 and "has no chat template" in done.err and "Traceback" not in done.err

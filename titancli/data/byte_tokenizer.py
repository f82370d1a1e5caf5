"""The `byte` tokenizer: a text's UTF-8 bytes are its ids, and 256 ends a document, or a message."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from titancli import data
from titancli.data.chat_template import ChatRefused


class ByteTokenizer:
    vocab_size = 257
    eos_id = 256
    files: Mapping[str, str | Path] = {}
    fingerprint = "byte"
    chat_fingerprint = "byte"

    def encode(self, text: str) -> list[int]:
        return list(_utf8(text))

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [list(_utf8(text)) for text in texts]

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text, uint8 [n], without a Python integer for each."""
        return [np.frombuffer(_utf8(text), np.uint8) for text in texts]

    def decode(self, ids: list[int]) -> str:
        """Text; end markers leave no trace, and bytes that make no character become U+FFFD."""
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")

    def chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> list[int]:
        """Ids of a conversation: each message is its role, an end of line, its content, and 256.

        No text can hold 256, so none can pass for the end of a message. The prompt to generate is
        `assistant` and an end of line.

        Raises:
            ChatRefused: a message has something else than text as its content.
        """
        ids = [i for message in messages for part in _parts(message) for i in part]
        return ids + list(b"assistant\n") * add_generation_prompt

    def chat_with_mask(
        self, messages: list[dict[str, Any]], *, first: int = 0
    ) -> tuple[list[int], list[bool]]:
        """The same, and which ids are of assistant turns among `messages[first:]`: content and end."""
        ids: list[int] = []
        mask: list[bool] = []
        for number, message in enumerate(messages):
            head, said = _parts(message)
            ids += head + said
            trained = number >= first and message["role"] == "assistant"
            mask += [False] * len(head) + [trained] * len(said)
        return ids, mask


def _parts(message: dict[str, Any]) -> tuple[list[int], list[int]]:
    """What stands before a message's content, and the content with its end."""
    content = message.get("content")
    if not isinstance(content, str) or "tool_calls" in message:
        raise ChatRefused("the byte tokenizer's chat template supports only text, no tool calls")
    return list(_utf8(f"{message['role']}\n")), [*_utf8(content), ByteTokenizer.eos_id]


def _utf8(text: str) -> bytes:
    return text.encode(errors="replace")  # a lone surrogate is no character


def build(config: data.ByteTokenizer) -> ByteTokenizer:
    return ByteTokenizer()

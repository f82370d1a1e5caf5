"""The `byte` tokenizer: ids are a text's UTF-8 bytes, and 256 ends a document or a message."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from titancli import data
from titancli.data.chat_template import ChatRefused
from titancli.data.forms import text_of
from titancli.protocols import TokenizerDefaults


class ByteTokenizer(TokenizerDefaults):
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
        """Return the ids of each text, uint8 [n], without creating a Python integer per id."""
        return [np.frombuffer(_utf8(text), np.uint8) for text in texts]

    def decode(self, ids: list[int]) -> str:
        """Return the text; end markers are dropped, and invalid bytes become U+FFFD."""
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")

    def decode_special(self, ids: list[int]) -> str:
        """Return the text with end markers as `<256>`."""
        pieces = (bytes([i]) if i < 256 else b"<%d>" % i for i in ids if i >= 0)
        return b"".join(pieces).decode(errors="replace")

    def chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> list[int]:
        """Return the ids of a conversation: each message is its role, a newline, its content, and 256.

        No text can contain 256, so none can imitate the end of a message. The generation prompt is
        `assistant` and a newline.

        Raises:
            ChatRefused: the content of a message is not text.
        """
        ids = [i for message in messages for part in _parts(message) for i in part]
        return ids + list(b"assistant\n") * add_generation_prompt

    def chat_with_mask(
        self, messages: list[dict[str, Any]], *, first: int = 0, untrained: Collection[int] = ()
    ) -> tuple[list[int], list[bool]]:
        """Return the ids, and which of them belong to assistant turns among `messages[first:]`, except the
        messages with the numbers in `untrained`: content and end marker."""
        ids: list[int] = []
        mask: list[bool] = []
        for number, message in enumerate(messages):
            head, said = _parts(message)
            ids += head + said
            trained = number >= first and message["role"] == "assistant" and number not in untrained
            mask += [False] * len(head) + [trained] * len(said)
        return ids, mask


def _parts(message: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return the ids before a message's content, and the ids of the content with its end marker."""
    if "content" not in message or "tool_calls" in message:
        raise ChatRefused("the byte tokenizer's chat template supports only text, no tool calls")
    content = text_of(message["content"])
    return list(_utf8(f"{message['role']}\n")), [*_utf8(content), ByteTokenizer.eos_id]


def _utf8(text: str) -> bytes:
    return text.encode(errors="replace")  # a lone surrogate is not a character


def build(config: data.ByteTokenizer) -> ByteTokenizer:
    return ByteTokenizer()

"""The `byte` tokenizer: a text's UTF-8 bytes are its ids, and 256 ends a document."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from titancli import data
from titancli.errors import RecipeError


class ByteTokenizer:
    vocab_size = 257
    eos_id = 256
    files: Mapping[str, str | Path] = {}
    fingerprint = "byte"

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

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        raise RecipeError(
            "the byte tokenizer has no chat template",
            hint='take a tokenizer of type "hf" whose folder has one',
        )


def _utf8(text: str) -> bytes:
    return text.encode(errors="replace")  # a lone surrogate is no character


def build(config: data.ByteTokenizer) -> ByteTokenizer:
    return ByteTokenizer()

"""The tokenizer of `tests.data.test_tokenize` as a plugin file."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from titancli import component, hookimpl


class Tokenizer:
    vocab_size, eos_id, fingerprint, files = 257, 256, "byte", ()

    def __init__(self, flag: Path) -> None:
        self._flag = flag

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        if self._flag.exists() and any("document 30," in text for text in texts):
            self._flag.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return [list(text.encode()) for text in texts]


@component("tokenizer", "deadly", target=f"{__name__}:build")
class Deadly:
    """Bytes; and the end of the process at the text of document 30, once."""

    flag: Path


def build(config: Any) -> Tokenizer:
    return Tokenizer(config.flag)


@hookimpl
def titan_components() -> list[type]:
    return [Deadly]

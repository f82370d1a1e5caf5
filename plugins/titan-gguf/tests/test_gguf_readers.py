"""What titan-gguf reads of a tokenizer, within bounds: see `tests/security/readers.py`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.security.readers import BRACKETS, Reader, fifo, require_bounds, sparse, text


def tokenizer(path: Path) -> Any:
    from titan_gguf.convert import _files
    from titan_gguf.tokens import vocabulary

    return vocabulary(_files(SimpleNamespace(files={path.name: path})), 8, [])


READERS = {
    "tokenizer": Reader(
        "tokenizers and chat templates",
        tokenizer,
        "tokenizer.json",
        sparse,
        text(f'{{"model": {BRACKETS}'),
        fifo,
        "titan_gguf.convert titan_gguf.tokens",
    ),
}


@pytest.mark.e2e
@pytest.mark.parametrize("name", READERS)
def test_small_files_cost_little(tmp_path: Path, name: str) -> None:
    require_bounds(__file__, name, tmp_path)

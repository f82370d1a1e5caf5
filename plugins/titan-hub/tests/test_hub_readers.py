"""What titan-hub reads of a model's folder, within bounds: see `tests/security/readers.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.security.readers import BRACKETS, Reader, fifo, require_bounds, sparse, text


def config(path: Path) -> Any:
    from titan_hub.files import File, without_local_paths

    return without_local_paths({path.name: File(path.name, path)}, None, print)


READERS = {
    "config.json": Reader(
        "weights of Hugging Face folders",
        config,
        "config.json",
        sparse,
        text(f'{{"_name_or_path": {BRACKETS}'),
        fifo,
        "titan_hub.files",
    ),
}


@pytest.mark.e2e
@pytest.mark.parametrize("name", READERS)
def test_small_files_cost_little(tmp_path: Path, name: str) -> None:
    require_bounds(__file__, name, tmp_path)

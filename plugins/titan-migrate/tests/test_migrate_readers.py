"""What titan-migrate reads of other trainers' configs, within bounds: see `tests/security/readers.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.security.readers import BRACKETS, Reader, fifo, merges, require_bounds, text


def config(path: Path) -> Any:
    from titan_migrate.document import read

    return read(path)


READERS = {
    "yaml": Reader(
        "recipes", config, "x.yaml", merges, text(f"a: {BRACKETS}"), fifo, "titan_migrate.document"
    ),
}


@pytest.mark.e2e
@pytest.mark.parametrize("name", READERS)
def test_small_files_cost_little(tmp_path: Path, name: str) -> None:
    require_bounds(__file__, name, tmp_path)

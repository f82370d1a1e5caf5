"""What titan-eval reads of lm-eval's task files, within bounds: see `tests/security/readers.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.security.readers import DEEP, HARMS, Reader, merges, require_bounds, sparse, text


def task(path: Path) -> Any:
    from titan_eval.trust import code_of

    return list(code_of([str(path)], []))


READERS = {
    "task": Reader("task files of lm-eval", task, "x.yaml", merges, text("- " * DEEP), sparse, "yaml"),
}


@pytest.mark.e2e
@pytest.mark.parametrize("name", READERS)
def test_small_files_cost_little(tmp_path: Path, name: str) -> None:
    """The faults of a file are returned, not raised."""
    require_bounds(__file__, name, tmp_path, HARMS)

"""What titan-eval reads of lm-eval, tasks and results, within bounds: see `tests/security/readers.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.security.readers import BRACKETS, DEEP, HARMS, Reader, fifo, merges, require_bounds, sparse, text


def task(path: Path) -> Any:
    from titan_eval.trust import code_of

    return list(code_of([str(path)], []))


def results(path: Path) -> Any:
    from titan_eval.command import _read
    from titancli.runs import RunFolder

    return _read(RunFolder(path.parent))


READERS = {
    "task": Reader("task files of lm-eval", task, "x.yaml", merges, text("- " * DEEP), sparse, "yaml"),
    "results": Reader(
        "requests and answers: profiles, replays, evaluations, rollouts, sweeps, jobs",
        results,
        "lm_eval.json",
        sparse,
        text(BRACKETS),
        fifo,
        "titan_eval.command",
    ),
}
WHOLE = {"task": HARMS}


@pytest.mark.e2e
@pytest.mark.parametrize("name", READERS)
def test_small_files_cost_little(tmp_path: Path, name: str) -> None:
    """The faults of a task are returned, not raised."""
    require_bounds(__file__, name, tmp_path, WHOLE.get(name, ()))

"""Bad rows of the data, in whole runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run.conftest import Finished
from titancli.observe.events import read_events

Train = Callable[..., Finished]
JSONL = ("dataset=jsonl", 'dataset.paths=["rows.jsonl"]', "dataset.shuffle=false")


@pytest.fixture
def rows(here: Path) -> Path:
    """Good rows for some steps, with three bad ones among the first."""
    good = [
        b'{"text": "a row that is long enough to be of use to somebody, number %d"}' % n for n in range(60)
    ]
    bad = [b'{"text": "caf\xe9"}', b'{"txt": "x"}', b'{"text": "cut']
    (here / "rows.jsonl").write_bytes(b"\n".join([good[0], *bad, *good[1:]]) + b"\n")
    return here / "rows.jsonl"


def test_a_run_skips_bad_rows_tells_of_them_and_counts_them(train: Train, here: Path, rows: Path) -> None:
    done = train("tiny.toml", *JSONL, "--run-dir", "r", "training.steps=3")
    assert done.code == 0, done.err
    for line, reason in ((2, "not UTF-8"), (3, "no key 'text'"), (4, "not JSON")):
        assert f"warning: skipped a row: {rows}, line {line}: it " in done.err
        assert reason in done.err
    steps = [event for event in read_events(here / "r/events.jsonl") if event["event"] == "step"]
    # All rows are read before the first step: a metric is told when it is reported.
    assert steps[0]["metrics"]["bad_rows"] == 3


def test_a_strict_run_ends_at_the_first_with_its_file_and_line(train: Train, rows: Path) -> None:
    done = train("tiny.toml", *JSONL, "dataset.strict=true", "--run-dir", "r")
    assert done.code == 5
    assert f"error: {rows}, line 2: it is not UTF-8: byte 13 is invalid" in done.err
    assert "Traceback" not in done.err

"""titan-sweep: its own files are JSON in ASCII; recipes and pages are made by titan and titan-report."""

from __future__ import annotations

from tests.security.writers import check_comments, check_rows

OWN = {
    "titan_sweep.command": "a page of titan-report",
    "titan_sweep.jobs": "the output of a run, as it is",
    "titan_sweep.sweep": "lock files of recipes, and JSON in ASCII",
}


def test_what_writes_has_a_reason() -> None:
    check_rows("titan_sweep", [], OWN)
    check_comments("titan_sweep", {})

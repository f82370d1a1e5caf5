"""titan-eval: what it writes is JSON in ASCII."""

from __future__ import annotations

from tests.security.writers import check_comments, check_rows

OWN = {
    "titan_eval.command": "samples of tasks, a line of JSON each",
    "titan_eval.loop": "results of tasks, as JSON in ASCII",
}


def test_what_writes_has_a_reason() -> None:
    check_rows("titan_eval", [], OWN)
    check_comments("titan_eval", {})

"""titan-proof: what it writes is JSON in ASCII, recipes, and what a run has kept."""

from __future__ import annotations

from tests.security.writers import check_comments, check_rows

OWN = {
    "titan_proof.probe titan_proof.prove.badge": "findings, as JSON in ASCII",
    "titan_proof.prove.pool": "the output of ranks, as it is",
    "titan_proof.prove.shrink titan_proof.replay": "a recipe, by tomli_w",
    "titan_proof.repeat titan_proof.reproduce": "the lock file of a run, as it is",
    "titan_proof.reproduction": "a record of JSON, and files that a run has kept, as they are",
}


def test_what_writes_has_a_reason() -> None:
    check_rows("titan_proof", [], OWN)
    check_comments("titan_proof", {})

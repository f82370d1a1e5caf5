"""titan-distil: what it writes is numbers, and JSON in ASCII."""

from __future__ import annotations

from tests.security.writers import check_comments, check_rows

OWN = {
    "titan_distil.store": "tensors, and their index as JSON in ASCII",
}


def test_what_writes_has_a_reason() -> None:
    check_rows("titan_distil", [], OWN)
    check_comments("titan_distil", {})

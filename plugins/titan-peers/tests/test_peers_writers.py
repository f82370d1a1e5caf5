"""titan-peers: what it writes is a checkpoint's own bytes, and JSON in ASCII."""

from __future__ import annotations

from tests.security.writers import check_comments, check_rows

OWN = {
    "titan_peers.copies": "bytes of a checkpoint",
    "titan_peers.memory": "the record of a copy, as JSON in ASCII",
    "titan_peers.sources": "bytes of a checkpoint",
}


def test_what_writes_has_a_reason() -> None:
    check_rows("titan_peers", [], OWN)
    check_comments("titan_peers", {})

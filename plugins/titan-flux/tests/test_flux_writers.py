"""titan-flux: what it writes is tensors."""

from __future__ import annotations

from tests.security.writers import check_comments, check_rows

OWN = {
    "titan_flux.shards": "latents under titan's own names",
}


def test_what_writes_has_a_reason() -> None:
    check_rows("titan_flux", [], OWN)
    check_comments("titan_flux", {})

"""Padding counts for nothing: a step is that of its samples, whatever rows they lie in and on which ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.engine.cases import Layout
from tests.ranks.padding import ALL, BOTH, LAYOUTS, SHARED_ROWS, SLOW, Place, differences, steps
from tests.rows import rows

pytestmark = pytest.mark.ranks
EVERY_LOSS = [name for name, place in LAYOUTS.items() if place.layout.config is BOTH and place.quick != ALL]


@pytest.fixture(scope="module")
def one_by_one(ranks: Any) -> Any:
    """The steps of one rank, of each model once."""
    known: dict[str, Any] = {}

    def of(config: Any, losses: Sequence[str]) -> Any:
        losses = ALL if config is BOTH else losses
        if str(config) not in known:
            [known[str(config)]] = ranks(1, steps, Layout(config=config), losses)
        return known[str(config)]

    return of


def check(ranks: Any, one_by_one: Any, place: Place, losses: Sequence[str]) -> None:
    expected = one_by_one(place.layout.config, losses)
    for found in ranks(place.ranks, steps, place.layout, losses):
        for (loss, kind), own in found.items():
            far = differences(own, expected[loss, "one by one"])
            if kind in SHARED_ROWS and getattr(place.layout.config, "n_mtp_layers", 0):
                # In a row of several documents, the last target of each is none of the tokens further ahead:
                # in text it is the next document's.
                far |= {"gradient": 0.0}
            assert far.pop("gradient") < 2e-5, (loss, kind)
            assert far.pop("loss") < 1e-5, (loss, kind)
            assert not any(far.values()), (loss, kind, far)


@pytest.mark.parametrize("name", rows(LAYOUTS, slow=SLOW))
def test_padding_counts_for_nothing(ranks: Any, one_by_one: Any, name: str) -> None:
    check(ranks, one_by_one, LAYOUTS[name], LAYOUTS[name].quick)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_LOSS)
def test_under_every_loss_too(ranks: Any, one_by_one: Any, name: str) -> None:
    check(ranks, one_by_one, LAYOUTS[name], ALL)

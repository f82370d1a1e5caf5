"""What `titan plan` proposes where a recipe does not fit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from titancli import load_recipe
from titancli.layout.degrees import Degrees
from titancli.observe.peaks import DEVICES
from titancli.optimizers import AdamW
from titancli.planning import advice
from titancli.planning.advice import _changes
from titancli.planning.estimate import estimate


@pytest.mark.parametrize("rounds", [True, False])
def test_moments_in_bfloat16_are_proposed_for_an_optimizer_under_which_they_decay(
    monkeypatch: pytest.MonkeyPatch, rounds: bool
) -> None:
    monkeypatch.setattr(AdamW, "rounds_stochastically", rounds)
    work = SimpleNamespace(degrees=Degrees(), reshard="always", device=DEVICES["H100"])
    found: Any = SimpleNamespace(work=work)
    proposed = [change.overrides for change in _changes(load_recipe("llama3_debug").recipe, found)]
    assert (("optimizer.state_dtype=bfloat16",) in proposed) == rounds


def test_the_fastest_change_that_fits_is_found_among_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are left out by what is scaled are none that would be chosen."""
    found = load_recipe("llama3_8b", ["model.n_layers=8", "training.local_batch_size=16"]).recipe
    as_it_is = estimate(found, found.degrees(8), DEVICES["H100"])
    assert as_it_is is not None
    small = replace(DEVICES["H100"], memory=0.6 * as_it_is.worst.total + 2 * 2**30)
    refused = estimate(found, found.degrees(8), small)
    assert refused is not None and refused.fits is False
    chosen = advice.remedy(found, refused)
    monkeypatch.setattr(advice, "ROUGHLY", 100.0)
    assert chosen is not None and chosen == advice.remedy(found, refused)

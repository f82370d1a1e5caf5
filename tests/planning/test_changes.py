"""What `titan plan` proposes where a recipe does not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from titancli import load_recipe
from titancli.layout.degrees import Degrees
from titancli.optimizers import AdamW
from titancli.planning.advice import _changes


@pytest.mark.parametrize("rounds", [True, False])
def test_moments_in_bfloat16_are_proposed_for_an_optimizer_under_which_they_decay(
    monkeypatch: pytest.MonkeyPatch, rounds: bool
) -> None:
    monkeypatch.setattr(AdamW, "rounds_stochastically", rounds)
    found: Any = SimpleNamespace(work=SimpleNamespace(degrees=Degrees(), reshard="always"))
    proposed = [change.overrides for change in _changes(load_recipe("llama3_debug").recipe, found)]
    assert (("optimizer.state_dtype=bfloat16",) in proposed) == rounds

"""What is said of a recipe that is not wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.recipe.conftest import BASE
from titancli.recipe.check import remarks
from titancli.recipe.load import Loaded, load_recipe


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["training.steps=3"], "shortened from 200 steps to 3, all of training.steps"),
        (
            ["lr_scheduler.total_steps=150"],
            "shortened from 200 steps to 150, all of lr_scheduler.total_steps",
        ),
        (
            ["training.steps=250", "lr_scheduler.decay_ratio=0.5"],
            "the decay is shortened from 125 steps to 50: training.steps = 250, and the warm-up takes 200",
        ),
        (["lr_scheduler.warmup_steps=500", "lr_scheduler.decay_ratio=0.5"], None),
        (["training.steps=200"], None),
        (
            ["training.dtype=bfloat16", "lr_scheduler.warmup_steps=0"],
            "updates smaller than 0.2 % of a weight are lost",
        ),
    ],
)
def test_what_is_not_wrong_and_worth_a_line(
    load: Callable[..., Loaded], overrides: list[str], words: str | None
) -> None:
    text = BASE.replace("warmup_steps = 0", "")
    found = remarks(load(text, *overrides).recipe)
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_adamw_rounds_stochastically_and_is_not_remarked_on() -> None:
    assert remarks(load_recipe("llama3_debug", ["training.dtype=bfloat16"]).recipe) == []

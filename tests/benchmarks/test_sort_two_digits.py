"""benchmarks/sort_two_digits.py: all 100 prompts are answered, by the script of the page and by recipes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import sort_two_digits


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("way", sort_two_digits.WAYS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rewards_teach_what_examples_left(way: str, seed: int, tmp_path: Path) -> None:
    found = sort_two_digits.WAYS[way](seed, tmp_path)
    assert found.examples < 100
    assert found.end == 100

"""A layout that a model cannot be cut into is told with the degree, before anything is made."""

from __future__ import annotations

import pytest

from titancli.errors import RecipeError
from titancli.recipe import load_recipe


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("mesh.tp=3", "n_heads 16 and n_kv_heads 16 must be divisible by mesh.tp 3"),
        ("mesh.pp=7", "7 pipeline stages (mesh.pp) are more than 6 layers"),
        ("mesh.cp=3", "rows of training.seq_len 256 cannot be cut into 3 (mesh.cp)"),
    ],
)
def test_a_degree_that_does_not_divide_is_told(override: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("llama3_debug", [override])
    assert any(said in problem.message for problem in caught.value.problems)
    assert all(problem.location for problem in caught.value.problems)

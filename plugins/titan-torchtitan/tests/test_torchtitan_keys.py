"""Keys and job configs of torchtitan, written where a recipe belongs."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_torchtitan.known_keys import KEYS
from titancli.errors import RecipeError
from titancli.recipe import load_recipe
from titancli.recipe.json_schema import override_keys
from titancli.registry import current


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("training.dataset=c4", "set type = … in [dataset]"),
        ("model.hf_assets_path=x", "set path = … in [tokenizer]"),
        ("tensor_parallel_degree=2", "in titan: mesh.tp=2"),
        ("parallelism.tensor_parallel_degree=2", "in titan: the degrees are in [mesh]"),
    ],
)
def test_key_of_torchtitan(override: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("llama3_debug", [override])
    assert str(caught.value.problems[0].hint).startswith(hint)


def test_no_key_is_titans_own() -> None:
    own = {key.rpartition(".")[2] for key in override_keys({}, current())}
    assert not own & {key for key in KEYS if "." not in key}


def test_job_config_is_named_once(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('[job]\ndump_folder = "out"\n[model]\nname = "llama3"\n[training]\ndataset = "c4"\n')
    with pytest.raises(RecipeError) as caught:
        load_recipe(job)
    [found] = caught.value.problems
    assert found.message == f"{job} is a config of torchtitan, not a recipe of titan"
    assert found.hint == f"convert it: titan recipe from-torchtitan {job} OUT.toml"

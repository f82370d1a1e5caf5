"""`titan new-recipe`: files that validate, from another recipe or from a torchtitan job config."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.conftest import Titan
from tests.recipe.torchtitan import jobs
from titancli.recipe import bundled_folder

NAMES = sorted(path.stem for path in bundled_folder().glob("*.toml"))


def config(titan: Titan, *recipe: object) -> dict:
    data = json.loads(titan("config", *recipe, "--json").out)["recipe"]
    return {key: value for key, value in data.items() if key not in ("name", "description")}


@pytest.mark.parametrize("name", NAMES)
def test_a_new_recipe_is_its_base_and_so_it_is_with_every_key_uncommented(titan: Titan, name: str) -> None:
    done = titan("new-recipe", "exp.toml", "--from", name)
    assert (done.code, done.out) == (0, "")
    text = Path("exp.toml").read_text()
    assert f'extends = "titan:{name}"' in text and "## Total number of optimizer steps" in text
    assert config(titan, "exp.toml") == config(titan, name)
    Path("all.toml").write_text(re.sub(r"^# (?=\[|\w+ = )", "", text, flags=re.MULTILINE))
    assert config(titan, "all.toml") == config(titan, name)
    assert Path("all.toml").read_text().count("\nsteps = ") == 1


def test_a_base_that_is_a_file_is_named_from_the_new_files_folder(titan: Titan) -> None:
    Path("a").mkdir()
    Path("b").mkdir()
    titan("new-recipe", "a/base.toml", "--from", "llama3_debug")
    assert titan("new-recipe", "b/exp.toml", "--from", "a/base.toml").code == 0
    assert 'extends = "../a/base.toml"' in Path("b/exp.toml").read_text()
    assert titan("validate", "b/exp.toml").code == 0


def test_arrays_of_components_are_listed_too(titan: Titan) -> None:
    Path("base.toml").write_text('extends = "titan:llama3_debug"\n[[loggers]]\ntype = "tensorboard"\n')
    titan("new-recipe", "exp.toml", "--from", "./base.toml")
    text = Path("exp.toml").read_text()
    assert '# [[loggers]]\n# type = "titan/tensorboard"' in text
    assert config(titan, "exp.toml") == config(titan, "base.toml")


def test_a_schema_that_lies_beside_the_file_is_named_in_it(titan: Titan) -> None:
    Path("titan.schema.json").write_text(titan("schema").out)
    titan("new-recipe", "exp.toml", "--from", "llama3_debug")
    assert Path("exp.toml").read_text().startswith("#:schema ./titan.schema.json\n")


def test_a_torchtitan_job_becomes_a_recipe_and_an_account(titan: Titan) -> None:
    Path("job.toml").write_text(jobs.LLAMA3_8B)
    done = titan("new-recipe", "exp.toml", "--from-torchtitan", "job.toml")
    assert done.code == 0
    assert done.out.startswith("job.toml:6: not carried over: profiling.enable_profiling = true: ")
    assert "fields carried over" in done.err
    assert titan("validate", "exp.toml").code == 0
    assert config(titan, "exp.toml")["training"]["seq_len"] == 8192


def test_a_job_whose_model_is_not_installed_is_written_and_told(titan: Titan) -> None:
    Path("job.toml").write_text(jobs.FLUX.replace('name = "flux"', 'name = "another"'))
    done = titan("new-recipe", "exp.toml", "--from-torchtitan", "job.toml")
    assert done.code == 3
    assert "no installed plugin provides the model 'another'" in done.out
    assert "exp.toml is not valid yet" in done.err
    fixed = ("model=llama3", "model.flavor=debugmodel", "dataset=python_stdlib")
    assert titan("validate", "exp.toml", *fixed).code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["exp.toml"],
        ["exp.toml", "--from", "llama3_debug", "--from-torchtitan", "job.toml"],
        ["exp.txt", "--from", "llama3_debug"],
        ["there.toml", "--from", "llama3_debug"],
    ],
    ids=" ".join,
)
def test_what_makes_no_sense_is_refused(titan: Titan, arguments: list[str]) -> None:
    Path("there.toml").write_text("mine\n")
    assert titan("new-recipe", *arguments).code == 2
    assert Path("there.toml").read_text() == "mine\n" and not Path("exp.toml").exists()


def test_a_base_or_a_job_that_is_not_there_leaves_no_file(titan: Titan) -> None:
    assert titan("new-recipe", "exp.toml", "--from", "nothing").code == 3
    assert titan("new-recipe", "exp.toml", "--from-torchtitan", "nothing.toml").code == 3
    assert not Path("exp.toml").exists()


def test_a_folder_that_is_not_there_is_named(titan: Titan) -> None:
    done = titan("new-recipe", "no/exp.toml", "--from", "llama3_debug")
    assert done.code == 5 and "folder no does not exist" in done.err and "mkdir -p no" in done.err

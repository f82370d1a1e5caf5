"""`titan recipe from-torchtitan`: the recipe is written, and each field is accounted for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torchtitan_jobs as jobs

from titan_testing import check_plugin, run_cli
from titancli import load_recipe


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_plugin_is_sound() -> None:
    check_plugin("titan-torchtitan")


def test_a_torchtitan_job_becomes_a_recipe_and_an_account(at: Path) -> None:
    Path("job.toml").write_text("[fault_tolerance]\nenable = true\n" + jobs.LLAMA3_8B)
    done = run_cli("recipe", "from-torchtitan", "job.toml", "exp.toml")
    assert done.code == 0
    assert done.stdout.startswith("job.toml:2: not carried over: fault_tolerance.enable = true: ")
    assert "fields carried over" in done.stderr
    assert run_cli("validate", "exp.toml", "--recipe-only").code == 0
    assert load_recipe("./exp.toml").recipe.training.seq_len == 8192


def test_a_job_whose_model_is_not_installed_is_written_and_told(at: Path) -> None:
    Path("job.toml").write_text(jobs.FLUX.replace('name = "flux"', 'name = "another"'))
    done = run_cli("recipe", "from-torchtitan", "job.toml", "exp.toml")
    assert done.code == 4
    assert "no installed plugin provides the model 'another'" in done.stdout
    assert "exp.toml is not valid yet" in done.stderr
    fixed = ("model=llama3", "model.flavor=debugmodel", "dataset=python_stdlib")
    assert run_cli("validate", "exp.toml", "--recipe-only", *fixed).code == 0


def test_a_job_that_is_not_there_leaves_no_file(at: Path) -> None:
    assert run_cli("recipe", "from-torchtitan", "nothing.toml", "exp.toml").code == 3
    assert not Path("exp.toml").exists()


@pytest.mark.parametrize("file", ["exp.txt", "there.toml"])
def test_a_file_that_cannot_be_written_anew_is_refused(at: Path, file: str) -> None:
    Path("job.toml").write_text(jobs.LLAMA3_8B)
    Path("there.toml").write_text("mine\n")
    assert run_cli("recipe", "from-torchtitan", "job.toml", file).code == 2
    assert Path("there.toml").read_text() == "mine\n"

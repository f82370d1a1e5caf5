"""What is installed works outside of the checkout: from the wheel, and as an editable install."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.packaging.conftest import CHECKOUT, Environment, run

pytestmark = pytest.mark.e2e
Titan = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(params=["wheel", "editable"])
def titan(request: pytest.FixtureRequest, tmp_path: Path) -> Titan:
    if request.param == "wheel":
        return request.getfixturevalue("plain").titan
    return lambda *arguments: run(Path(sys.executable).parent / "titan", *arguments, cwd=tmp_path)


def test_the_recipes_are_there(titan: Titan) -> None:
    listed = titan("recipe", "list", "--json")
    assert listed.returncode == 0, listed.stderr
    names = {recipe["name"] for recipe in json.loads(listed.stdout)["recipes"]}
    names = {name for name in names if ":" not in name}  # a plugin's have its name before theirs
    assert names == {file.stem for file in (CHECKOUT / "recipes").rglob("*.toml")}
    assert "llama3_debug" in names


def test_the_debug_recipe_is_valid(titan: Titan) -> None:
    done = titan("validate", "llama3_debug")
    assert (done.returncode, done.stdout) == (0, "ok: llama3_debug\n"), done.stderr


def test_the_wheel_is_what_runs(plain: Environment) -> None:
    where = run(plain.python, "-c", "import titancli; print(titancli.__file__)", cwd=plain.cwd).stdout
    assert where.startswith(str(plain.folder))


def test_python_m_titancli_is_titan(plain: Environment) -> None:
    module = run(plain.python, "-m", "titancli", "recipe", "list", cwd=plain.cwd)
    assert (module.returncode, module.stdout) == (0, plain.titan("recipe", "list").stdout)


def test_a_command_whose_plugin_is_not_there_says_what_to_install(plain: Environment) -> None:
    done = plain.titan("report", "RUN")
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == "error: titan report comes with titan-report: pip install titan-report\n"


@pytest.mark.slow
def test_titan_alone_trains_resumes_exports_generates_and_plans(plain: Environment) -> None:
    (plain.cwd / "few.txt").write_text("a text that was not trained on\n" * 20)
    few = ("training.seq_len=64", "training.local_batch_size=1", "metrics.log_freq=1", "model.n_layers=1")
    for words in (
        ("train", "llama3_debug", *few, "training.steps=1", "--run-dir", "r"),
        ("train", "r", "--resume", "training.steps=2"),
        ("convert-checkpoint", "r", "hf", "--to", "hf"),
        ("generate", "hf", "def", "--max-new-tokens", "2", "--tokenizer", "byte"),
        ("eval", "r", "--data", "few.txt"),
        ("plan", "llama3_8b", "--world-size", "8", "--gpu", "H100"),
    ):
        done = plain.titan(*words)
        assert done.returncode == 0, f"{words}\n{done.stderr}"
    assert (plain.cwd / "r" / "checkpoints" / "step-2").is_dir()


def test_the_wheel_carries_types_and_license_and_no_tests(titan_wheel: Path) -> None:
    names = zipfile.ZipFile(titan_wheel).namelist()
    assert "titancli/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "recipes/"))]

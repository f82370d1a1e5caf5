"""`run_cli` and `recipe`, and that importing the kit costs nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_testing import recipe, run_cli
from titan_testing.scaffold import new_plugin
from titancli.errors import EnvironmentProblem, UsageError
from titancli.recipe import load_recipe
from titancli.registry.kinds import KINDS


def test_a_command_runs_where_it_is_told_to(tmp_path: Path) -> None:
    done = run_cli("plugin", "new", "titan-here", "--kind", "loss", cwd=tmp_path)
    assert done.code == 0 and "titan-here/pyproject.toml" in done.stdout
    assert "next: pip install -e titan-here" in done.stderr
    assert (tmp_path / "titan-here" / "pyproject.toml").is_file()


def test_a_command_leaves_the_environment_as_it_was() -> None:
    before = dict(os.environ)
    assert run_cli("list-components", "--color", "always").code == 0
    assert dict(os.environ) == before


def test_a_command_that_fails_says_so() -> None:
    done = run_cli("validate", "nowhere.toml")
    assert (done.code, done.stdout) == (3, "") and "nowhere.toml" in done.stderr


def test_the_recipe_is_good_and_takes_what_is_laid_over_it(tmp_path: Path) -> None:
    found = load_recipe(recipe(tmp_path, "[training]\nsteps = 7")).recipe
    assert (found.training.steps, found.training.seq_len) == (7, 32)


def test_the_kit_imports_neither_torch_nor_pytest() -> None:
    code = "import sys, titan_testing; print({'torch', 'pytest', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_nothing_is_loaded_into_pytest() -> None:
    from importlib import metadata

    assert not [p for p in metadata.entry_points(group="pytest11") if p.value.startswith("titancli")]


def test_every_kind_has_a_template(tmp_path: Path) -> None:
    for kind in KINDS:
        files = new_plugin(f"titan-new-{kind}", [kind], tmp_path / kind)
        assert tmp_path / kind / f"titan_new_{kind}" / f"{kind}.py" in files


def test_a_plugin_of_every_kind_has_a_folder_for_each(tmp_path: Path) -> None:
    """Whose components are all registered, in recipes by the same name."""
    kinds = [word for kind in KINDS for word in ("--kind", kind)]
    done = run_cli("plugin", "new", "titan-every", *kinds, cwd=tmp_path)
    assert done.code == 0, done.stderr
    folder = tmp_path / "titan-every"
    assert {path.name for path in (folder / "titan_every").iterdir() if path.is_dir()} == set(KINDS)
    assert len(list((folder / "tests").iterdir())) == len(KINDS) + 1
    code = (
        "from titan_every import titan_components\n"
        "from titancli.registry.component import component_info, load_target\n"
        "infos = [component_info(one) for one in titan_components()]\n"
        "import sys; assert 'torch' not in sys.modules\n"
        "print(*sorted(f'{info.kind}/{info.name}' for info in infos if load_target(info.target)))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert found.stdout.split() == sorted(f"{kind}/every" for kind in KINDS), found.stderr
    readme = (folder / "README.md").read_text()
    assert readme.count("titan train") == len(KINDS) and "A model, a tokenizer" in readme


def test_a_kind_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    done = run_cli("plugin", "new", "titan-lab", "--kind", "loss", "--kind", "loss", cwd=tmp_path)
    assert done.code == 2 and "--kind loss is given twice" in done.stderr
    assert not (tmp_path / "titan-lab").exists()


@pytest.mark.parametrize(
    "name", ["Titan-Lab", "titan_-lab", "9lab", "titan", "class", "titan-9", "../x", "a b"]
)
def test_a_name_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        new_plugin(name, ["loss"], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(EnvironmentProblem, match="already exists"):
        new_plugin("titan-mine", ["loss"], tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", ["torch", "json", "titan_muon"])
def test_a_plugin_does_not_hide_an_installed_package(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name, reason="a plugin that need not be installed")
    with pytest.raises(UsageError, match="would hide the installed package"):
        new_plugin(name, ["loss"], tmp_path / "new")
    assert not (tmp_path / "new").exists()

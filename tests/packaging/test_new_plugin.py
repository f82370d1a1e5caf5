"""`titan plugin new` writes packages that install, are listed, and pass their own tests."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.packaging.conftest import CHECKOUT, Environment, checked, run, wheel_of

pytestmark = pytest.mark.e2e
KINDS = (
    *("model", "loss", "dataset", "tokenizer", "optimizer", "converter", "logger", "parallelize"),
    *("dispatcher", "store", "launcher", "loop", "task", "generator", "reward", "advantage"),
)
SEVERAL = ("launcher", "generator")
"""Those of one more plugin, which has all of them."""


@pytest.fixture(
    scope="module",
    params=[KINDS[:2], pytest.param(KINDS[2:], marks=pytest.mark.slow)],
    ids=" and ".join,
)
def kinds(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return request.param


@pytest.fixture(scope="module")
def made(titan_wheel: Path, tmp_path_factory: pytest.TempPathFactory, kinds: tuple[str, ...]) -> Environment:
    """One environment with a new plugin of each kind."""
    environment = Environment(tmp_path_factory.mktemp("made") / "venv")
    names = ("titan-testing", "titan-rl")  # the loop of generators, rewards, …
    wheels = [wheel_of(CHECKOUT / "plugins" / name, tmp_path_factory.mktemp(name)) for name in names]
    environment.install(titan_wheel, *wheels)
    for kind in kinds:
        done = environment.titan("plugin", "new", f"titan-new-{kind}", "--kind", kind)
        assert done.returncode == 0, done.stderr
    flags = [word for kind in SEVERAL for word in ("--kind", kind)]
    assert environment.titan("plugin", "new", "titan-several", *flags).returncode == 0
    folders = [environment.cwd / "titan-several", *(environment.cwd / f"titan-new-{kind}" for kind in kinds)]
    environment.install(*folders, build_isolation=False)
    return environment


def test_each_shows_in_list_components(made: Environment, kinds: tuple[str, ...]) -> None:
    done = made.titan("list-components", "--json")
    listed = {(row["kind"], row["name"]) for row in json.loads(done.stdout)["components"]}
    assert {(kind, f"titan-new-{kind}/new_{kind}") for kind in kinds} <= listed
    assert {(kind, "titan-several/several") for kind in SEVERAL} <= listed


def test_each_passes_its_own_tests(made: Environment, kinds: tuple[str, ...]) -> None:
    folders = [made.cwd / "titan-several" / "tests"]
    folders += [made.cwd / f"titan-new-{kind}" / "tests" for kind in kinds]
    done = run(made.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *folders, cwd=made.cwd)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


def test_each_is_clean_python(made: Environment, kinds: tuple[str, ...]) -> None:
    folders = [made.cwd / f"titan-new-{kind}" for kind in kinds]
    ruff = ("-m", "ruff", "check", "--isolated", "--select", "E,F,W,B,UP", "--line-length", "120")
    checked(made.python, *ruff, *folders, cwd=made.cwd)


def test_what_its_readme_says_to_type_is_right(made: Environment, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        lines = (made.cwd / f"titan-new-{kind}" / "README.md").read_text().splitlines()
        (show,) = (shlex.split(line) for line in lines if line.startswith("titan show"))
        (train,) = (shlex.split(line) for line in lines if line.startswith("titan train"))
        assert made.titan(*show[1:]).returncode == 0
        done = made.titan("validate", *train[2:])
        assert done.returncode == 0, done.stderr

"""The wheels of titan and of every plugin, as a release has them: installed together they load, and train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.packaging.conftest import CHECKOUT, Environment, wheel_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_the_wheels_of_a_release_install_and_train(titan_wheel: Path, tmp_path: Path) -> None:
    projects = sorted(file.parent for file in (CHECKOUT / "plugins").glob("*/pyproject.toml"))
    (tmp_path / "wheels").mkdir()
    wheels = [wheel_of(project, tmp_path / "wheels" / project.name) for project in projects]
    environment = Environment(tmp_path / "venv")
    environment.install(titan_wheel, *wheels)
    listed = json.loads(environment.titan("plugin", "list", "--json").stdout)["plugins"]
    states = {plugin["name"]: plugin["state"] for plugin in listed}
    assert states == dict.fromkeys(("titan", *(project.name for project in projects)), "ok")
    few = ("training.steps=2", "training.seq_len=64", "optimizer.lr=1e-3")
    for words in ((), ("optimizer=muon",)):
        done = environment.titan("train", "llama3_debug", *few, *words)
        assert done.returncode == 0 and "finished at step 2" in done.stderr, done.stderr

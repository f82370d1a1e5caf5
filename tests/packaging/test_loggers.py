"""titan-wandb, titan-trackio and titan-eval are packages of their own; none is imported where no recipe
names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.packaging.conftest import CHECKOUT, Environment, wheel_of

pytestmark = pytest.mark.e2e


def test_their_wheels_bring_the_components(titan_wheel: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv")
    names = ("titan-wandb", "titan-trackio", "titan-eval")
    wheels = [wheel_of(CHECKOUT / "plugins" / name, tmp_path / name) for name in names]
    environment.install(titan_wheel, *wheels)
    found = {
        p["name"]: p for p in json.loads(environment.titan("plugin", "list", "--json").stdout)["plugins"]
    }
    assert [found[name]["components"] for name in names] == [
        ["logger/wandb"],
        ["logger/trackio"],
        ["loop/lm_eval"],
    ]
    assert [(found[name]["state"], found[name]["torch"]) for name in names] == [("ok", False)] * 3

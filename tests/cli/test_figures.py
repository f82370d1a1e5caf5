"""What quick commands cost, counted in modules: a number that no slow neighbour changes.

In CPU-seconds (benchmarks/startup.py) the aims are: `--help` 0.12, `list-components` with 20 plugins 0.2,
`validate` 0.4.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "transformers", "datasets", "numpy", "rich", "safetensors", "tokenizers", "asyncio"}
PROBE = """
import json, sys
from titancli.cli import main
code = main(sys.argv[1:])
print(json.dumps({"code": code, "modules": sorted(sys.modules)}), file=sys.stderr)
"""
LIGHT = '''
from typing import Annotated

from annotated_types import Gt

from titancli import Command, component, hookimpl


@component("loss", "light_{n}", target="light_{n}:build")
class Light:
    """A light loss."""

    weight: Annotated[float, Gt(0)] = 1.0
    """How much it counts."""


@hookimpl
def titan_components():
    return [Light]


@hookimpl
def titan_commands():
    return [Command("light-{n}", "Do something light.", "light_{n}:command")]
'''


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty light plugins, as pip would leave them."""
    site = tmp_path_factory.mktemp("light") / "site"
    site.mkdir()
    for n in range(20):
        (site / f"light_{n}.py").write_text(LIGHT.replace("{n}", str(n)))
        info = site / f"light_{n}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: light-{n}\nVersion: 1.0\nRequires-Dist: titancli>=0.1\n"
        )
        (info / "entry_points.txt").write_text(f"[titancli]\nlight-{n} = light_{n}\n")
    return site


def modules(site: Path, *arguments: str) -> list[str]:
    """What is imported when the command has ended."""
    command = [sys.executable, "-c", PROBE, *arguments]
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=site.parent, env=env, capture_output=True, text=True, timeout=60)
    found = json.loads(done.stderr.splitlines()[-1])
    assert found["code"] == 0, done.stderr
    return found["modules"]


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        (("--help",), 265),
        (("list-components",), 330),
        (("validate", "llama3_debug"), 450),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_quick_command_imports_little(site: Path, arguments: tuple[str, ...], limit: int) -> None:
    found = modules(site, *arguments)
    assert not HEAVY & {name.partition(".")[0] for name in found}
    assert len(found) <= limit, f"{len(found)} modules"


def test_twenty_plugins_cost_one_module_each(site: Path) -> None:
    found = modules(site, "list-components")
    assert len([name for name in found if name.startswith("light_")]) == 20


def test_a_core_command_loads_no_plugin(site: Path) -> None:
    assert not [name for name in modules(site, "train", "--help") if name.startswith("light_")]

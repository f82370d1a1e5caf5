"""`[env]` reaches whatever a launcher starts, and `run.json`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli.conftest import Titan

LAUNCHER = """
import os
from titancli import component, hookimpl

@component("launcher", "shows", target="cli_shows:launch")
class Shows:
    "Starts nothing, and says what it would start it with."

def launch(config, *, request):
    print(os.environ["NCCL_DEBUG"], os.environ["FROM_SHELL"])
    return 0

@hookimpl
def titan_components():
    return [Shows]
"""


def test_workers_get_it_over_the_shells_and_the_run_records_it(
    titan: Titan, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("cli_shows.py").write_text(LAUNCHER)
    monkeypatch.setenv("FROM_SHELL", "kept")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.delenv("ONLY_HERE", raising=False)
    done = titan(
        *("train", "llama3_debug", "--run-dir", "r", "-p", "./cli_shows.py", "launcher=shows"),
        *("env.NCCL_DEBUG=WARN", "--env", "NCCL_DEBUG=INFO", "--env", "ONLY_HERE=x=y"),
    )
    assert (done.code, done.out) == (0, "INFO kept\n")
    assert json.loads(Path("r/run.json").read_text())["attempts"][0]["env"] == {
        "NCCL_DEBUG": "INFO",
        "ONLY_HERE": "x=y",
    }
    assert os.environ["NCCL_DEBUG"] == "WARN" and "ONLY_HERE" not in os.environ


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("HF_TOKEN=hunter2", "looks like a secret"),
        ("RANK=1", "set by the launcher"),
        ("CUDA_VISIBLE_DEVICES=0", "export CUDA_VISIBLE_DEVICES=…"),
        ("CXX", "write --env NAME=VALUE"),
    ],
)
def test_what_the_command_line_may_not_set_either(titan: Titan, variable: str, said: str) -> None:
    done = titan("train", "llama3_debug", "--dry-run", "--env", variable)
    assert done.code == 2
    assert said in done.err and "hunter2" not in done.err

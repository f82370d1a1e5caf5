"""What a launcher is asked to start: for plugins, for the command lines of ranks, and for run.json."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.run.conftest import Finished
from titancli.launch import LaunchRequest, rank_options
from titancli.launchers import Local
from titancli.launchers.local import in_place, launch
from titancli.launchers.torchrun import torchrun_command
from titancli.protocols import LauncherBuilder
from titancli.run.prepare import make_plan
from titancli.run.request import Request
from titancli.run.start import launch_request, prepared
from titancli.runs import ATTEMPT, ChangedMeanwhile

LAUNCHER = """
import json
from titancli import component, hookimpl

@component("launcher", "strict", target="strict_launcher:launch")
class Strict:
    "Prints what it is asked to start, and starts nothing."

def launch(config, *, request):
    record = json.loads(request.lock_file.with_name("run.json").read_text())
    print(json.dumps({"given": vars(request), "attempt": record["attempts"][-1]}, default=str))
    if request.nnodes == 7:
        raise ValueError("no such nodes")
    return 0

@hookimpl
def titan_components():
    return [Strict]
"""


@pytest.fixture
def strict(train: Callable[..., Finished], here: Path) -> Callable[..., Finished]:
    """`titan train tiny.toml --run-dir r …` with this launcher."""
    (here / "strict_launcher.py").write_text(LAUNCHER)
    sys.modules.pop("strict_launcher", None)  # each folder has a copy of its own
    chosen = ("tiny.toml", "-p", "./strict_launcher.py", "launcher=strict", "--run-dir", "r")
    return lambda *arguments: train(*chosen, *arguments)


def request(folder: Path, **changed: Any) -> LaunchRequest:
    plain = LaunchRequest(
        run_folder=folder,
        lock_file=folder / "recipe.lock.toml",
        checkpoint=None,
        plugin_files=[],
        nproc=1,
        nnodes=1,
        rdzv=None,
        json_events=False,
        traceback=False,
    )
    return dataclasses.replace(plain, **changed)


def test_a_launcher_takes_what_its_protocol_says() -> None:
    of_protocol = list(inspect.signature(LauncherBuilder.__call__).parameters)
    assert list(inspect.signature(launch).parameters) == of_protocol[1:]  # without self


def test_a_launcher_of_a_plugin_gets_the_request(strict: Callable[..., Finished], here: Path) -> None:
    done = strict("--nproc", "2", "--env", "NCCL_DEBUG=INFO")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["given"] == {
        "run_folder": str(here / "r"),
        "lock_file": str(here / "r/recipe.lock.toml"),
        "checkpoint": None,
        "plugin_files": [str(here / "strict_launcher.py")],
        "nproc": 2,
        "nnodes": 1,
        "rdzv": None,
        "json_events": False,
        "traceback": False,
        "env": {"NCCL_DEBUG": "INFO"},
        "min_nodes": None,
    }
    assert list(told["attempt"].items())[-7:] == [
        *(("nproc", 2), ("nnodes", 1), ("rdzv", None), ("world", 2)),
        *(("env", {"NCCL_DEBUG": "INFO"}), ("loaded", False), ("outcome", None)),
    ]


@pytest.mark.parametrize("nodes", [3, 7])
def test_on_several_nodes_it_gets_files_that_are_gone_afterwards(
    strict: Callable[..., Finished], here: Path, nodes: int
) -> None:
    done = strict("--nproc", "1", "--nnodes", str(nodes), "--rdzv", "n:1", "--json")
    assert (done.code == 0) == (nodes == 3), done.err
    told, *errors = (json.loads(line) for line in done.out.splitlines())
    assert len(errors) == (nodes == 7)
    given = told["given"]
    assert given["run_folder"] == str(here / "r")
    assert (given["nproc"], given["nnodes"], given["rdzv"], given["json_events"]) == (1, nodes, "n:1", True)
    assert told["attempt"]["world"] == nodes
    assert Path(given["lock_file"]).parent != here / "r" and not Path(given["lock_file"]).exists()
    assert not (here / "r").exists()


@pytest.mark.parametrize("prepared", [True, False])
def test_a_rank_reads_what_is_written_for_it(tmp_path: Path, prepared: bool) -> None:
    folder = tmp_path / "a run"
    files = [tmp_path / "one file.py", tmp_path / "--lock"]
    lock = {} if prepared else {"lock_file": tmp_path / "own/recipe.lock.toml"}
    made = request(folder, checkpoint=folder / "checkpoints/step-3", plugin_files=files, **lock)
    assert made.prepared == prepared
    expected = {
        "run_dir": folder,
        "lock_file": None if prepared else made.lock_file,
        "checkpoint": made.checkpoint,
        "plugin_files": files,
    }
    assert rank_options(made.rank_arguments()) == {**expected, "store": None}
    bare = {"run_dir": folder, "lock_file": None, "checkpoint": None, "store": None, "plugin_files": []}
    assert rank_options(request(folder).rank_arguments()) == bare == rank_options([str(folder)])
    words = torchrun_command(Local(), made, store=tmp_path / "one place")
    theirs = words[words.index("titancli.worker.rank") + 1 :]
    assert rank_options(theirs) == {**expected, "store": tmp_path / "one place"}


def test_a_rank_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["r", "--unknown"]):
        with pytest.raises(SystemExit) as caught:
            rank_options(words)
        assert caught.value.code == 2
    assert "titancli.worker.rank" in capsys.readouterr().err


def test_one_rank_runs_in_place_unless_it_may_be_started_again(tmp_path: Path) -> None:
    assert in_place(Local(), request(tmp_path))
    assert not in_place(Local(max_restarts=1), request(tmp_path))
    for several in ({"nproc": 2}, {"nnodes": 2}):
        assert not in_place(Local(), request(tmp_path, **several))


def test_the_command_of_several_nodes_says_where_they_meet(tmp_path: Path) -> None:
    command = torchrun_command(Local(), request(tmp_path, nproc=4, nnodes=2, rdzv="n0:1"))
    assert {"--nnodes=2", "--nproc-per-node=4", "--rdzv-endpoint=n0:1"} <= set(command)
    assert command[-2:] == ["titancli.worker.rank", str(tmp_path)]


def test_a_prepared_run_is_held_until_its_block_ends_and_is_prepared_once(here: Path) -> None:
    plan = make_plan(Request("tiny.toml", run_dir=here / "r", nproc=1, env={"NCCL_DEBUG": "INFO"}))
    asked = launch_request(plan)
    before = dict(os.environ)
    with pytest.raises(ZeroDivisionError), prepared(plan, asked) as run:
        assert run.folder.path == here / "r" and run.folder.in_use()
        assert os.environ["NCCL_DEBUG"] == "INFO" and os.environ[ATTEMPT]
        raise ZeroDivisionError
    assert run.folder.in_use() is False and os.environ == before
    with pytest.raises(ChangedMeanwhile), prepared(plan, asked):
        raise AssertionError("the plan is of a folder that had no attempt")
    assert len(run.folder.record()["attempts"]) == 1 and run.folder.in_use() is False

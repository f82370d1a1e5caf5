"""`titan train` under a launcher that starts it once for each rank: refused, with the command to type."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.run.conftest import Finished
from titancli.errors import UsageError
from titancli.launchers.others import refuse_other_launchers

Train = Callable[..., Finished]

VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE"),
)
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
REFUSED = {
    "torchrun": (TORCHRUN, 1, "--nproc 2"),
    "torchrun on two machines": ({**TORCHRUN, "WORLD_SIZE": "4"}, 1, "--nproc 2 --nnodes 2 --run-dir DIR"),
    "torchrun on two machines, as titan": ({**TORCHRUN, "WORLD_SIZE": "4"}, 2, "--nproc 2 --nnodes 2"),
    "accelerate": ({"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}, 1, "--nproc 8"),
    "machines without --nnodes": ({"RANK": "0", "WORLD_SIZE": "2"}, 1, "--nproc 1 --nnodes 2"),
    "mpirun": ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 1, "--nproc 4"),
    "srun": ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, 1, "--nproc 8"),
}
RIGHT = {
    "nothing": ({}, 1),
    "one rank": ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, 1),
    "an operator that counts machines": ({"RANK": "1", "WORLD_SIZE": "2"}, 2),
    "a job of titan's own": ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, 4),
    "one process of mpirun on each machine": (
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        2,
    ),
    "a world that is no number": ({"RANK": "0", "WORLD_SIZE": "many"}, 1),
}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_command(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    variables, nnodes, words = REFUSED[name]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys, "argv", ["/x/bin/titan", "train", "a b.toml", "training.steps=2"])
    with pytest.raises(UsageError, match="each would be a run of its own") as caught:
        refuse_other_launchers(nnodes)
    command = str(caught.value.hint).partition(": ")[2]
    assert command.startswith("titan train 'a b.toml' training.steps=2 ") and words in command
    monkeypatch.setattr(sys, "argv", ["/x/bin/titan", *shlex.split(command)[1:]])
    with pytest.raises(UsageError) as again:
        refuse_other_launchers(1)
    assert str(again.value.hint).count("--nproc") == 1


@pytest.mark.parametrize("name", RIGHT)
def test_one_process_on_each_machine(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    variables, nnodes = RIGHT[name]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    refuse_other_launchers(nnodes)


def test_no_run_is_made(train: Train, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in TORCHRUN.items():
        monkeypatch.setenv(variable, value)
    for more in ((), ("--dry-run",)):
        done = train("tiny.toml", "--run-dir", "r", *more)
        assert done.code == 2 and "titan starts the processes of a run itself" in done.err
    assert not (here / "r").exists()


@pytest.mark.e2e
@pytest.mark.cold
def test_under_torchrun(here: Path) -> None:
    titan = str(Path(sys.executable).with_name("titan"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    line = [*command, "--no-python", titan, "train", "tiny.toml", "training.steps=1"]
    done = subprocess.run(line, cwd=here, capture_output=True, text=True, timeout=200, env={**os.environ})
    assert done.returncode != 0 and "titan train tiny.toml training.steps=1 --nproc 2" in done.stderr
    assert not (here / "runs").exists()

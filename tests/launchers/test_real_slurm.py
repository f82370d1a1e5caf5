"""`titan launch slurm` under a real Slurm of three nodes, on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launchers import cluster
from tests.run.conftest import furnish
from titancli.observe.events import read_events

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(cluster.missing() is not None, reason=f"a real Slurm {cluster.missing()}"),
]
RUN = 'odd \'dir "x" $y #ü/run 1'


@pytest.fixture(scope="module")
def nodes() -> Iterator[None]:
    with cluster.cluster(3):
        yield


def titan(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "titancli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def status(folder: Path) -> tuple[str, int, str | None, int | None]:
    """State and restarts of the job; state and step of the run."""
    document = json.loads(titan(folder, "launch", "status", RUN, "--json").stdout)
    job, run = document["job"], document["run"] or {"state": None, "step": None}
    return job["state"], job["restarts"] or 0, run["state"], run["step"]


def test_a_job_is_requeued_resumed_and_cancelled(nodes: None, tmp_path: Path) -> None:
    folder = furnish(tmp_path)
    launch = ["launch", "slurm", "./tiny.toml", "--nodes", "2", "--run-dir", RUN, "launcher.nproc=1"]
    long = ["training.steps=100000", "checkpoint.interval=100000", "--detach"]
    run = folder / RUN
    done = titan(folder, *launch, *long)
    assert done.returncode == 0, done.stderr
    [job] = [entry["id"] for entry in json.loads((run / "slurm" / "jobs.json").read_text())["jobs"]]

    for restart in (0, 1, 2):  # the time limit comes near, twice; then it is cancelled
        cluster.until(lambda: status(folder)[1:3] == (restart, "running"), f"start {restart}", 120)  # noqa: B023
        before = status(folder)[3] or 0
        cluster.until(lambda: (status(folder)[3] or 0) > before + 20, f"steps of start {restart}", 120)  # noqa: B023
        again = titan(folder, *launch, *long, "--resume")
        assert again.returncode == 5 and f"job {job} of {run} is RUNNING" in again.stderr
        if restart < 2:
            subprocess.run(["scancel", "--signal=USR1", job], check=True)
        else:
            assert "saves and stops" in titan(folder, "launch", "cancel", RUN).stderr
    cluster.until(lambda: status(folder)[0] == "FAILED", "the end", 120)

    attempts = json.loads((run / "run.json").read_text())["attempts"]
    stops = [attempt["outcome"]["step"] for attempt in attempts]
    assert [attempt["outcome"]["why"] for attempt in attempts] == ["stopped"] * 3
    assert [Path(attempt["checkpoint"] or "none").name for attempt in attempts] == [
        "none", f"step-{stops[0]}", f"step-{stops[1]}"
    ]  # fmt: skip
    assert {attempt["world"] for attempt in attempts} == {2}
    steps = [event["step"] for event in read_events(run / "events.jsonl") if event["event"] == "step"]
    assert steps == list(range(1, stops[2] + 1))  # each once

    done = titan(folder, *launch, "--resume", f"training.steps={stops[2] + 3}", "checkpoint.interval=2")
    assert done.returncode == 0, done.stderr
    assert f"step {stops[2] + 3}/{stops[2] + 3}" in done.stdout and "COMPLETED" in done.stderr
    assert titan(folder, *launch, "--resume").stderr.count("nothing is submitted") == 1


def test_a_job_that_fails_is_not_requeued(nodes: None, tmp_path: Path) -> None:
    folder = furnish(tmp_path)
    launch = ["launch", "slurm", "./tiny.toml", "--nodes", "2", "--run-dir", RUN, "launcher.nproc=1"]
    done = titan(folder, *launch, "launcher.partition=gpu")
    assert done.returncode == 5 and "invalid partition" in done.stderr and not (folder / RUN).exists()
    faulty = ["loss.type=faulty", "loss.fault=error", "loss.call=2", "-p", "faulty.py"]
    done = titan(folder, *launch, *faulty, "--env", "OMP_NUM_THREADS=1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "requeued" not in done.stderr


LOSES = ("launcher.max_restarts=3", "launcher.node_timeout_seconds=8", "comm.train_timeout_seconds=4")


@pytest.mark.parametrize("harm", ["titan is killed", "the node is lost"])
def test_a_node_that_fails_is_replaced_within_the_job(nodes: None, tmp_path: Path, harm: str) -> None:
    """It is the one of rank 0. A titan that is killed is started again; a spare takes the place of a node."""
    folder = furnish(tmp_path)
    spare = 1 if harm == "the node is lost" else 0
    launch = ["launch", "slurm", "./tiny.toml", "--nodes", "2", "--run-dir", RUN, "launcher.nproc=1", *LOSES]
    long = ["training.steps=300", "checkpoint.interval=20", f"launcher.spare_nodes={spare}", "--detach"]
    done = titan(folder, *launch, *long)
    assert done.returncode == 0, done.stderr
    cluster.until(lambda: (status(folder)[3] or 0) > 40, "steps", 120)
    [attempt] = json.loads((folder / RUN / "run.json").read_text())["attempts"]
    if harm == "the node is lost":
        cluster.lose(attempt["host"])
    else:
        cluster.kill_titan(attempt["host"])
    cluster.until(lambda: status(folder)[0] not in ("RUNNING", "COMPLETING"), "the end", 240)
    logs = titan(folder, "launch", "logs", RUN).stdout
    assert status(folder) == ("COMPLETED", 0, "finished", 300), logs
    [attempt] = json.loads((folder / RUN / "run.json").read_text())["attempts"]
    assert attempt["restarts"] == 1

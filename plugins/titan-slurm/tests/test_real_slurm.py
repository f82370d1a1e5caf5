"""`titan launch slurm` under a real Slurm of four nodes, on this machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_cluster as cluster

from tests.run.conftest import furnish
from titancli.observe.events import read_events

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(900),  # nothing here is forked from a process that has torch: Slurm starts it
    cluster.NEEDS,
    cluster.NEEDS_ROOT,
]
RUN = 'odd \'dir "x" $y #ü/run 1'


@pytest.fixture(scope="module")
def nodes() -> Iterator[None]:
    with cluster.cluster(4):
        yield


def titan(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "titancli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)


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


@pytest.mark.parametrize(
    ("harm", "spare", "requeued"),
    [("titan is killed", 0, 1), ("another node is lost", 1, 0), ("the node of the script is lost", 0, 1)],
)
def test_a_run_outlives_what_happens_to_a_node(
    nodes: None, tmp_path: Path, harm: str, spare: int, requeued: int
) -> None:
    """A spare takes the place of a node. Where a titan is killed its ranks save, all stop, and the job starts
    anew; so it does elsewhere where Slurm loses the node on which the script runs, which has rank 0."""
    folder = furnish(tmp_path)
    launch = ["launch", "slurm", "./tiny.toml", "--nodes", "2", "--run-dir", RUN, "launcher.nproc=1", *LOSES]
    slow = ["-p", "faulty.py", "loss=faulty", "loss.sleep=0.1", "training.steps=120"]
    more = ["checkpoint.interval=20", f"launcher.spare_nodes={spare}", "--detach"]
    done = titan(folder, *launch, *slow, *more)
    assert done.returncode == 0, done.stderr
    cluster.until(lambda: (status(folder)[3] or 0) > 25, "steps", 120)
    [job] = json.loads((folder / RUN / "slurm" / "jobs.json").read_text())["jobs"]
    shown = cluster.told("scontrol", "show", "job", job["id"])
    script_on = re.findall(r"BatchHost=(\S+)", shown)[0]
    if harm == "titan is killed":
        cluster.kill_titan(script_on)
    else:
        cluster.lose(script_on if harm.startswith("the") else other_than(script_on))
    cluster.until(lambda: status(folder)[0] in ("COMPLETED", "FAILED"), "the end", 200)
    logs = titan(folder, "launch", "logs", RUN).stdout
    assert status(folder) == ("COMPLETED", requeued, "finished", 120), logs
    *_, attempt = attempts = json.loads((folder / RUN / "run.json").read_text())["attempts"]
    assert (len(attempts), attempt.get("restarts", 0)) == ((2, 0) if requeued else (1, 1))


def other_than(node: str) -> str:
    """Another node, which has a rank."""
    return next(
        name for name in cluster.daemons if name != node and cluster.running(name, b"titancli.worker.rank")
    )

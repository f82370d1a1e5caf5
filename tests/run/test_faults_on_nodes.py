"""Rows 20 to 23 of the fault matrix (tests/faults) as whole runs on nodes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.nodes import Cluster, Node
from tests.run.conftest import Command, Finished, losses
from tests.run.on_nodes import FAULTY, SLOW, Start, until_step, worlds
from tests.run.test_skipped_steps import contents
from titancli.runs import RunFolder

pytestmark = pytest.mark.e2e

MINUTES = 300
UNLOCKED = "import fcntl\nfcntl.flock = lambda file, kind: None\n"
"""A plugin: what is locked on one node is not on another, as on many a network disk."""


@pytest.mark.slow
def test_a_clock_that_is_minutes_off_neither_restarts_a_run_nor_hides_who_failed(
    cluster: Cluster, start: Start, reference: Any, here: Path
) -> None:
    """The node with the wrong clock is the first to fail, or the second."""
    a, b = cluster.node("a"), cluster.node("b", clock=-MINUTES)
    running = [start(node, *SLOW) for node in (a, b)]
    for done in [command.wait() for command in running]:
        assert done.code == 0, done.err
    assert worlds(here / "r") == [2] and losses(here / "r") == reference(2, "loss=faulty", *SLOW)[0]
    for rank in (0, 1):
        fault = ("--run-dir", f"e{rank}", "launcher.max_restarts=0", "loss.fault=error", f"loss.rank={rank}")
        for done in [command.wait() for command in [start(node, *fault) for node in (a, b)]]:
            assert done.code == 1 and f"rank {rank} of 2 on {'ab'[rank]} failed at step 3" in done.err
            assert "a row of 13 tokens" in done.err


@pytest.mark.slow
def test_local_disks_are_refused_at_the_start_by_their_names(cluster: Cluster, here: Path) -> None:
    a, b = cluster.node("a"), cluster.node("b")
    line = ("tiny.toml", "--run-dir", f"{cluster.local}/r", "--nnodes", "2", "--nproc", "1")
    met = [Command(here, *line, "--rdzv", "a:29400", on=node) for node in (a, b)]
    for done in [command.wait() for command in met]:
        assert done.code == 5 and "is not shared: b and a do not see what the other writes" in done.err
    alone = [Command(here, *line, "--resume", "launcher.join_timeout_seconds=3", on=node) for node in (a, b)]
    for done in [command.wait() for command in alone]:
        assert done.code == 1 and f"the nodes did not meet at {cluster.local}/r/rendezvous" in done.err
    assert not list(here.glob("r*"))


def older(node: Node, run: Path, kept: Path) -> None:
    """The node sees step 2 under the name of step 4."""
    shutil.copytree(run / "checkpoints/step-2", kept)
    node.run("mount", "--bind", str(kept), str(run / "checkpoints/step-4"))


def flipped(node: Node, run: Path, kept: Path) -> None:
    """The node sees another bit at the end of each file of tensors."""
    shutil.copytree(run / "checkpoints/step-4", kept)
    for file in kept.rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    node.run("mount", "--bind", str(kept), str(run / "checkpoints/step-4"))


def unseen(node: Node, run: Path, kept: Path) -> None:
    """The node sees an empty folder."""
    kept.mkdir()
    node.run("mount", "--bind", str(kept), str(run / "checkpoints/step-4"))


@pytest.mark.slow
@pytest.mark.parametrize("view", [flipped, older, unseen])
def test_nodes_with_different_views_of_a_checkpoint_load_the_same_one(
    cluster: Cluster,
    start: Start,
    train_on: Callable[..., Finished],
    reference: Any,
    here: Path,
    view: Callable[[Node, Path, Path], None],
) -> None:
    """They fall back together where it is damaged. A stale view is named: later it may be as the others'."""
    schedule = "lr_scheduler.total_steps=6"
    shorter = ("loss=faulty", "training.steps=4", schedule)
    assert train_on(2, "tiny.toml", "--run-dir", "r", *shorter).code == 0
    nodes = {name: cluster.node(name) for name in "ab"}
    view(nodes["b"], here / "r", here / "seen")

    def resumed() -> list[Finished]:
        once = ("training.steps=6", schedule, "launcher.max_restarts=0")
        return [command.wait() for command in [start(node, *once) for node in nodes.values()]]

    if view is not flipped:
        for done in resumed():
            assert done.code == 5, done.err
            assert re.search(r"error: rank [01] of 2 on [ab] failed .*step-4 ", done.err)
            assert re.search(r"rank 1 (of 2 )?on b ", done.err)
        assert len(losses(here / "r")) == 4
        nodes["b"].run("umount", str(here / "r/checkpoints/step-4"))
    for done in resumed():
        assert done.code == 0, done.err
        assert ("checkpoint step-4 is skipped: " in done.err) == (view is flipped)
    expected, whole = reference(2, "loss=faulty", "training.steps=6", schedule)
    assert losses(here / "r") == expected
    assert contents(here / "r/checkpoints/step-6") == contents(whole / "checkpoints/step-6")


@pytest.mark.slow
def test_of_two_jobs_without_a_lock_the_older_one_ends_and_harms_nothing(
    cluster: Cluster, reference: Any, here: Path
) -> None:
    (here / "unlocked.py").write_text(UNLOCKED)
    line = ("tiny.toml", "--run-dir", "r", "--resume", *FAULTY, "-p", "./unlocked.py", *SLOW, "--nproc", "1")
    older = Command(here, *line, on=cluster.node("a"))
    until_step(here / "r", 5, [older])
    newer = Command(here, *line, on=cluster.node("b"))
    done = older.wait()
    assert done.code == 5 and "another attempt has begun" in done.err and "on b at" in done.err
    done = newer.wait()
    assert done.code == 0, done.err
    expected, whole = reference(1, "loss=faulty", *SLOW)
    assert losses(here / "r") == expected
    assert contents(here / "r/checkpoints/step-12") == contents(whole / "checkpoints/step-12")
    assert [a["host"] for a in RunFolder(here / "r").record()["attempts"]] == ["a", "b"]


@pytest.mark.slow
def test_two_runs_on_the_same_nodes_do_not_meet(
    cluster: Cluster, start: Start, reference: Any, here: Path
) -> None:
    nodes = [cluster.node(name) for name in "ab"]
    other = ("--run-dir", "other", "loss.sleep=0.3", "training.steps=6")
    running = [start(node, *more) for node in nodes for more in (SLOW, other)]
    for done in [command.wait() for command in running]:
        assert done.code == 0, done.err
    expected = reference(2, "loss=faulty", *SLOW)[0]
    assert losses(here / "r") == expected and worlds(here / "r") == worlds(here / "other") == [2]
    assert losses(here / "other").keys() == set(range(1, 7))


@pytest.mark.slow
def test_a_node_that_was_started_with_something_else_is_refused_and_the_others_go_on(
    cluster: Cluster, start: Start, reference: Any, here: Path
) -> None:
    rows = ("training.local_batch_size=1", "training.global_batch_size=4")
    batch = (*rows, "lr_scheduler.total_steps=100000")
    endless = ("loss.sleep=0.2", "training.steps=100000")  # it is there still when the last one comes
    elastic = ("--nnodes", "1:2", *batch, *endless)
    running = start(cluster.node("a"), *elastic)
    until_step(here / "r", 2, [running])
    b = cluster.node("b")
    (here / "more.py").write_text("")
    for more, what in (
        (("optimizer.lr=0.5",), "resolved recipes"),
        (("--nproc", "2"), "numbers of machines or processes"),
        (("-p", "./more.py"), "plugin files"),
    ):
        done = start(b, *elastic, *more).wait()
        assert done.code == 5 and f"started with different {what} than the run on the others" in done.err
        assert "\n  on a: " in done.err and "\n  on b: " in done.err
        assert ("\n  on b: [optimizer] lr = 0.5\n" in done.err) == ("optimizer.lr=0.5" in more)
    running.process.terminate()
    done = running.wait()
    assert done.code == 75, done.err
    assert worlds(here / "r") == [1]
    expected = reference(1, "loss=faulty", *batch, "training.steps=2")[0]
    assert {step: losses(here / "r")[step] for step in expected} == expected


@pytest.mark.slow
@pytest.mark.cold
def test_a_full_disk_of_one_node_is_said_before_it_meets_the_others(
    cluster: Cluster, start: Start, here: Path
) -> None:
    node = cluster.node("a", disk="16k")
    node.run("dd", "if=/dev/zero", f"of={cluster.local}/full", "bs=4k", "count=3", "status=none")
    small = {**os.environ, "TMPDIR": str(cluster.local)}
    done = start(node, "launcher.join_timeout_seconds=5", env=small).wait()
    assert done.code == 5 and f"cannot write {cluster.local}/titan-" in done.err, done.err
    assert "No space left on device" in done.err and "TMPDIR" in done.err
    assert not (here / "r").exists()

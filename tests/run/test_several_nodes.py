"""Runs on several nodes that are lost, replaced, cut off or frozen; each ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.nodes import Cluster
from tests.rows import rows
from tests.run.conftest import Command, losses, train_here
from tests.run.on_nodes import SLOW, Start, until, until_step, worlds
from tests.run.test_restarts import pid_of_rank
from tests.run.test_skipped_steps import contents
from titancli.launch import LaunchRequest
from titancli.launchers import Local, local, torchrun
from titancli.observe import failures
from titancli.observe.events import read_events
from titancli.runs import RunFolder

pytestmark = pytest.mark.e2e


def ends_as_if_nothing_had_happened(
    run: Path, commands: list[Command], reference: Any, *arguments: str
) -> list[str]:
    """All commands end well, and the run is bitwise the one on two ranks where no node was lost."""
    told = []
    for command in commands:
        done = command.wait()
        assert done.code == 0, done.err
        told.append(done.err)
    expected, whole = reference(2, "loss=faulty", *(arguments or SLOW))
    assert losses(run) == expected
    assert contents(run / "checkpoints/step-12") == contents(whole / "checkpoints/step-12")
    return told


@pytest.mark.parametrize(
    "lost",
    rows(
        ["the node of rank 0, which serves the rendezvous", "another node", "the node of rank 0"],
        slow=["another node", "the node of rank 0"],
    ),
)
def test_a_node_that_is_lost_is_replaced(
    cluster: Cluster, start: Start, reference: Any, here: Path, lost: str
) -> None:
    """Ranks go by the names of nodes; the one that is started first serves the rendezvous."""
    nodes = [cluster.node(name) for name in ("b", "c")]
    order = nodes if "serves" in lost else nodes[::-1] if lost == "the node of rank 0" else nodes
    running = {order[0].name: start(order[0], *SLOW)}
    until(lambda: (here / "r/rendezvous/1").exists())
    running[order[1].name] = start(order[1], *SLOW)
    until_step(here / "r", 5, list(running.values()))
    victim = nodes[1] if lost == "another node" else nodes[0]
    victim.kill()
    del running[victim.name]
    replaced = cluster.node("a" if victim is nodes[1] else "d")
    told = ends_as_if_nothing_had_happened(here / "r", [*running.values(), start(replaced, *SLOW)], reference)
    assert all("a node or a rank was lost; all ranks were restarted (restart 1)" in err for err in told)
    assert len(RunFolder(here / "r").record()["attempts"]) == 1
    moved = "the nodes have lost each other: meeting again"
    assert (moved in told[0]) == ("serves" in lost)


@pytest.mark.slow
def test_a_hot_spare_takes_the_place_of_a_node_and_one_that_is_not_needed_ends_well(
    cluster: Cluster, start: Start, reference: Any, here: Path
) -> None:
    nodes = [cluster.node(name) for name in "abcd"]
    running = [start(node, *SLOW) for node in nodes[:2]]
    until_step(here / "r", 1, running)
    running += [start(node, *SLOW) for node in nodes[2:]]
    until_step(here / "r", 5, running)
    nodes[0].kill()
    ends_as_if_nothing_had_happened(here / "r", running[1:], reference)


@pytest.mark.slow
def test_nodes_whose_own_names_mean_a_loopback_address_find_each_other(
    cluster: Cluster, start: Start, reference: Any, here: Path
) -> None:
    """As in `/etc/hosts` of many machines; nor do they know the names of each other."""
    nodes = [cluster.node(name) for name in "ab"]
    for node in nodes:
        hosts = here / f"hosts-{node.name}"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {node.name}\n")
        node.run("mount", "--bind", str(hosts), "/etc/hosts")
    running = [start(node, *SLOW, "launcher.join_timeout_seconds=40") for node in nodes]
    ends_as_if_nothing_had_happened(here / "r", running, reference)
    assert len(RunFolder(here / "r").record()["attempts"]) == 1


@pytest.mark.slow
def test_a_rank_that_is_killed_restarts_those_of_the_other_node(
    cluster: Cluster, start: Start, reference: Any, here: Path
) -> None:
    running = [start(cluster.node(name), *SLOW) for name in "ab"]
    until_step(here / "r", 5, running)
    os.kill(pid_of_rank(here / "r", 1), signal.SIGKILL)
    ends_as_if_nothing_had_happened(here / "r", running, reference)


def test_a_batch_that_some_numbers_of_nodes_cannot_share_is_refused(train: Any) -> None:
    line = ("tiny.toml", "--run-dir", "r", "--nproc", "1", "--nnodes", "1:4")
    done = train(*line, "training.local_batch_size=1", "training.global_batch_size=8")
    assert done.code == 3 and "with 3 of 1:4 nodes: " in done.err
    assert "numbers of nodes that fit: 1, 2, 4; every number in 1:4 must fit" in done.err
    done = train(*line, "training.local_batch_size=1", "training.global_batch_size=4", "mesh.tp=2")
    assert done.code == 3 and "numbers of nodes that fit: 2, 4; every" in done.err
    done = train(*line)
    assert done.code == 3 and "set training.global_batch_size" in done.err
    assert train(*line[:-1], "4:2").code == 2


def test_nodes_that_come_and_go_need_checkpoints(train: Any) -> None:
    """Each that joins would begin the run anew."""
    line = ("tiny.toml", "--run-dir", "r", "--nproc", "1", "--nnodes", "1:2", "training.global_batch_size=8")
    done = train(*line, "checkpoint.enable=false")
    assert done.code == 3 and "start again when a node joins or is lost: at step 0" in done.err
    assert "remove it, or give --nnodes one number" in done.err


def test_a_node_without_a_disk_of_its_own_says_so(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as own:
        own.setattr(tempfile, "tempdir", "/nowhere/at/all")
        code = train_here("tiny.toml", "--run-dir", "r", "--nproc", "1", "--nnodes", "2")
    said = capsys.readouterr().err
    assert code == 5 and "cannot write /nowhere/at/all: No such file" in said and "TMPDIR" in said


def test_a_node_that_waits_for_others_says_so_and_can_be_stopped(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where its ranks have failed, with those of a node that was lost."""

    def say(line: str) -> None:
        print(line)
        if "waiting" in line:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(torchrun, "say", say)
    monkeypatch.setattr(torchrun, "LOOK_SECONDS", 0.2)
    lost = failures.killed(0, 2, signal.SIGKILL, 4)
    monkeypatch.setattr(local, "_killed_ranks", lambda request, step: ([lost], []))
    code = train_here("tiny.toml", "--run-dir", "r", "--nproc", "1", "--nnodes", "2")
    said = capsys.readouterr().out
    assert code == 75 and "SIGTERM: stopping\n" in said
    assert said.count("waiting for other machines (--nnodes 2), at most 600 seconds") == 1
    assert not (here / "r/run.json").exists() and not list((here / "r/rendezvous").iterdir())


def test_after_a_signal_no_replacement_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The signal came while ranks were there; they failed, since a node was lost."""
    monkeypatch.setattr(torchrun, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(torchrun, "torchrun_command", lambda *given: ["sleep", "60"])
    (tmp_path / "logs").mkdir()
    request = LaunchRequest(tmp_path, tmp_path / "lock", None, [], 1, 2, "a:1", False, False)
    signals, drawing = torchrun.Signals(), Mock(step=3, ended=False)
    signals.received.append(signal.SIGUSR1)
    with open(tmp_path / "log", "w") as log:
        assert torchrun.take_part(Local(), request, log, drawing, signals) == 75


def test_an_end_on_another_node_that_nobody_recorded_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "PATIENCE", 0.0)
    monkeypatch.setattr(local, "take_part", lambda *given: 0)
    request = LaunchRequest(tmp_path, tmp_path / "lock", None, [], 1, 2, "a:1", False, False)
    assert local.launch(Local(), request=request) == 1
    assert "ended on another machine" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_a_signal_while_a_replacement_is_waited_for_stops_the_run(
    cluster: Cluster, start: Start, reference: Any, here: Path, late: bool
) -> None:
    """Or while the ranks have not noticed yet that a node is lost. Slurm requeues a job that ends with 75."""
    a, b = cluster.node("a"), cluster.node("b")
    running = [start(node, *SLOW) for node in (a, b)]
    until_step(here / "r", 3, running)
    b.kill()
    if late:
        until(lambda: bool(list((here / "r/logs").glob("rank-0.error.json"))))
        until(lambda: len(a.processes()) <= 3)  # the holder, titan and torchrun
    running[0].process.send_signal(signal.SIGUSR1)
    done = running[0].wait(60)
    assert done.code == 75 and "Traceback" not in done.err, done.err
    outcome = RunFolder(here / "r").outcome()
    assert outcome is not None and (outcome["why"], outcome["signal"]) == ("stopped", "SIGUSR1")
    ends_as_if_nothing_had_happened(
        here / "r", [start(node, *SLOW) for node in (a, cluster.node("c"))], reference
    )


@pytest.mark.slow
def test_nodes_that_come_and_go_share_the_same_batches(
    cluster: Cluster, start: Start, reference: Any, here: Path
) -> None:
    elastic = ("--nnodes", "1:2", "training.global_batch_size=4", "loss.sleep=0.3", "training.steps=40")
    a, b = cluster.node("a"), cluster.node("b")
    first = start(a, *elastic)
    until_step(here / "r", 2, [first])
    second = start(b, *elastic)

    until(lambda: worlds(here / "r") == [1, 2], 90)
    begun = read_events(here / "r/events.jsonl")[-1].get("step") or 0
    until_step(here / "r", begun + 4, [first, second])
    b.kill()
    done = first.wait(120)
    assert done.code == 0, done.err
    assert "more nodes join: all ranks are started anew" in done.err
    assert worlds(here / "r") == [1, 2, 1]
    expected = reference(1, "loss=faulty", *elastic[2:])[0]
    assert losses(here / "r") == pytest.approx(expected, rel=1e-5)
    assert len(RunFolder(here / "r").record()["attempts"]) == 1


@pytest.mark.slow
def test_a_network_that_is_cut_during_a_save_leaves_no_half_of_one(
    cluster: Cluster, start: Start, reference: Any, here: Path
) -> None:
    """Both halves lose each other, and wait; once the network is back they continue together."""
    a, b = cluster.node("a"), cluster.node("b")
    running = [start(node, *SLOW) for node in (a, b)]
    until_step(here / "r", 3, running)
    until(lambda: bool(list((here / "r/checkpoints").glob(".step-4.tmp-*"))))
    b.unplug()
    time.sleep(15)
    assert {path.name for path in (here / "r/checkpoints").glob("step-*")} <= {"step-2", "step-4"}
    assert not any(e.get("step") == 6 for e in read_events(here / "r/events.jsonl"))
    b.plug()
    ends_as_if_nothing_had_happened(here / "r", running, reference)


@pytest.mark.slow
def test_a_node_that_serves_and_is_cut_off_leaves_it_to_the_others(
    cluster: Cluster, start: Start, reference: Any, here: Path
) -> None:
    """Its disk works, so that it looks alive; the others are enough, and cannot connect to it."""
    a, b, c = (cluster.node(name) for name in "abc")
    patient = (*SLOW, "launcher.join_timeout_seconds=40")
    running = [start(a, *patient)]
    until(lambda: (here / "r/rendezvous/1").exists())
    running += [start(node, *patient) for node in (b, c)]
    until_step(here / "r", 3, running)
    a.unplug()
    until_step(here / "r", 8, running)
    a.plug()
    told = ends_as_if_nothing_had_happened(here / "r", running, reference)
    assert "one of them serves instead" in told[0]
    assert any("cannot connect to a:" in err for err in told[1:])


@pytest.mark.slow
def test_a_node_that_freezes_is_replaced_and_comes_back_as_a_spare(
    cluster: Cluster, start: Start, reference: Any, here: Path
) -> None:
    a, b, c = (cluster.node(name) for name in "abc")
    running = [start(a, *SLOW)]
    until(lambda: (here / "r/rendezvous/1").exists())
    running.append(start(b, *SLOW))
    until_step(here / "r", 5, running)
    a.freeze()
    running.append(start(c, *SLOW))
    until_step(here / "r", 7, running[1:])
    a.thaw()
    ends_as_if_nothing_had_happened(here / "r", running, reference)

"""Runs that continue from the copy of their state in the memory of the nodes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.nodes import Cluster
from tests.run.conftest import Finished, here, losses, reference, start, train
from tests.run.on_nodes import Start, until, until_step, worlds
from tests.run.test_several_nodes import ends_as_if_nothing_had_happened
from tests.run.test_skipped_steps import contents
from titancli.checkpoint import save
from titancli.observe.events import read_events

__all__ = ["here", "reference", "start", "train"]

pytestmark = pytest.mark.e2e

Train = Callable[..., Finished]


def peers_in(folder: object, *options: str) -> tuple[str, ...]:
    values = {"type": "peers", "interval": 1, "folder": f'"{folder}"'}
    return (*options, *(f"checkpoint.copies.{key}={value}" for key, value in values.items()))


PEERS = peers_in("memory")
FAULTY = ("-p", "./faulty.py", "loss=faulty")
SLOW = ("loss.sleep=0.3", "training.steps=12", "checkpoint.interval=4")
FLIP = "for f in {}; do printf X | dd of=$f conv=notrunc bs=1 seek=$(($(stat -c %s $f) - 1)); done"


def resumed_at(run: Path) -> list[int]:
    """Return the steps at which attempts and restarts began."""
    return [e["step"] for e in read_events(run / "events.jsonl") if e["event"] == "run_start"]


@pytest.fixture
def broken(train: Train, here: Path) -> Path:
    """Return a run that failed in step 6: the disk has step 4, and memory step 5."""
    (here / "memory").mkdir()
    done = train("tiny.toml", "--run-dir", "r", *PEERS, *FAULTY, "loss.fault=error", "loss.call=6")
    assert done.code != 0 and "a row of 13 tokens" in done.err
    [copy] = (here / "memory").glob("titan-*/step-*")
    assert copy.name == "step-5" and (copy.parent / "run").resolve() == here / "r"
    return copy


@pytest.mark.parametrize(
    "harm",
    [
        "nothing",
        "a flipped byte",
        pytest.param("no memory", marks=pytest.mark.slow),
        "another run's",
        pytest.param("no checkpoint", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_failed_continues_from_memory_or_else_from_the_disk(
    train: Train, reference: Any, here: Path, broken: Path, harm: str
) -> None:
    if harm == "a flipped byte":
        data = (broken / "rank-00000.safetensors").read_bytes()
        (broken / "rank-00000.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    if harm == "no memory":
        shutil.rmtree(broken.parent)
    if harm == "another run's":
        for name in ("manifest.json", "metadata.json"):
            shutil.copy(here / "r/checkpoints/step-4" / name, broken)
    if harm == "no checkpoint":
        for step in (2, 4):
            shutil.rmtree(here / f"r/checkpoints/step-{step}")
        record = here / "r/checkpoints/peers.json"
        record.write_text(record.read_text().replace('"serial": 2', '"serial": 0'))
    done = train("r", "--resume", "-p", "./faulty.py", "loss.fault=none")
    assert done.code == 0, done.err
    whole = harm in ("nothing", "no checkpoint")
    assert resumed_at(here / "r") == [0, 5 if whole else 4]
    said = {
        "a flipped byte": "the copy in memory cannot be used: rank-00000.safetensors is damaged",
        "no memory": "the copy in memory cannot be used: no node has a part of it",
        "another run's": "the copy in memory cannot be used: ",
    }
    assert said.get(harm, "step 5 was loaded from the memory of the nodes") in done.err
    expected, folder = reference(1, "loss=faulty")
    assert losses(here / "r") == expected
    assert contents(here / "r/checkpoints/step-6") == contents(folder / "checkpoints/step-6")
    assert list((here / "memory").iterdir()) == [] and not (here / "r/checkpoints/peers.json").exists()


def test_a_step_that_was_asked_for_is_not_replaced_by_a_newer_copy(
    train: Train, here: Path, broken: Path
) -> None:
    line = ("--resume", "-p", "./faulty.py")
    assert train("r", *line, "--step", "2", "loss.fault=none", "training.steps=3").code == 0
    assert resumed_at(here / "r") == [0, 2]
    assert not broken.exists()


def test_the_last_step_is_saved_where_only_memory_has_it(
    train: Train, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "memory").mkdir()

    def need(folder: Path, needed: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(save, "need", need)
        assert train("tiny.toml", "--run-dir", "r", *PEERS).code == 5
    assert train("r", "--resume").code == 0
    assert resumed_at(here / "r") == [0, 6] and (here / "r/checkpoints/step-6").is_dir()


def test_a_run_that_is_stopped_leaves_nothing_in_memory(train: Train, here: Path) -> None:
    (here / "memory").mkdir()
    line = ("tiny.toml", "--run-dir", "r", *PEERS, "checkpoint.async_mode=async", *FAULTY)
    assert train(*line, "loss.fault=signal", "loss.call=3").code == 75
    assert list((here / "memory").iterdir()) == [] and not (here / "r/checkpoints/peers.json").exists()
    assert (here / "r/checkpoints/step-3").is_dir()


def test_a_memory_that_cannot_be_used_is_refused_before_the_first_step(train: Train, here: Path) -> None:
    done = train("tiny.toml", "--run-dir", "r", *PEERS)
    assert done.code == 5 and "checkpoint.copies.folder" in done.err and resumed_at(here / "r") == []


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["nothing", "a flipped byte"])
def test_a_node_that_is_lost_costs_no_step_where_another_has_its_copy(
    cluster: Cluster, start: Start, reference: Any, here: Path, harm: str
) -> None:
    """The newest checkpoint on the disk is of step 4, and the run is at step 6 or 7."""
    peers = peers_in(cluster.local)
    a, b = (cluster.node(name) for name in "ab")
    running = [start(node, *SLOW, *peers) for node in (a, b)]
    until_step(here / "r", 6, running)
    b.kill()
    if harm != "nothing":
        a.run("sh", "-c", FLIP.format(f"{cluster.local}/titan-*/step-*/rank-00001.safetensors"))
    commands = [running[0], start(cluster.node("c"), *SLOW, *peers)]
    [told, _] = ends_as_if_nothing_had_happened(here / "r", commands, reference, *SLOW)
    [_, step] = resumed_at(here / "r")
    if harm == "nothing":
        assert step in (5, 6, 7) and f"step {step} was loaded from the memory of the nodes" in told
        assert "they sent each other" in told
    else:
        assert step == 4
        assert "the copy in memory cannot be used: rank-00001.safetensors is damaged" in told
    assert a.run("ls", str(cluster.local)) == ""


@pytest.mark.slow
def test_fewer_nodes_continue_from_the_copies_of_more(
    cluster: Cluster, start: Start, reference: Any, here: Path
) -> None:
    """The disk has the step at which the second node joined."""
    batch = ("training.global_batch_size=4", "loss.sleep=0.3", "training.steps=40", "checkpoint.interval=100")
    peers = peers_in(cluster.local, "--nnodes", "1:2")
    a, b = (cluster.node(name) for name in "ab")
    running = [start(a, *batch, *peers)]
    until_step(here / "r", 2, running)
    running.append(start(b, *batch, *peers))
    until(lambda: worlds(here / "r") == [1, 2], 90)
    joined = resumed_at(here / "r")[-1]
    until_step(here / "r", joined + 4, running)
    b.kill()
    done = running[0].wait()
    assert done.code == 0, done.err
    assert worlds(here / "r") == [1, 2, 1]
    step = resumed_at(here / "r")[-1]
    assert step >= joined + 3 and f"step {step} was loaded from the memory of the nodes" in done.err
    assert losses(here / "r") == pytest.approx(reference(1, "loss=faulty", *batch)[0], rel=1e-5)

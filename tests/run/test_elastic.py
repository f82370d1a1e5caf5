"""`--nnodes MIN:MAX`: nodes come and go, and the batches and their losses stay those of the plain run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.nodes import Cluster
from tests.run.conftest import Finished, losses
from tests.run.on_nodes import Start, until, until_step, worlds
from tests.run.test_experts import RECIPE as EXPERTS
from titancli.observe.events import read_events
from titancli.runs import RunFolder

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def last_step(run: Path) -> int:
    return max((e["step"] for e in read_events(run / "events.jsonl") if e["event"] == "step"), default=0)


def test_two_of_four_nodes_are_lost_and_two_others_are_taken_in(
    cluster: Cluster, start: Start, reference: Any, here: Path
) -> None:
    """Among those lost are the node that serves the rendezvous and that of rank 0."""
    batch = ("training.local_batch_size=1", "training.global_batch_size=12", "training.steps=60")
    elastic = ("--nnodes", "2:4", *batch, "loss.sleep=0.1")
    running = {"c": start(cluster.node("c"), *elastic)}
    until(lambda: (here / "r/rendezvous/1").exists())
    running |= {name: start(cluster.node(name), *elastic) for name in "abd"}
    until(lambda: worlds(here / "r")[-1:] == [4], 120)
    until_step(here / "r", last_step(here / "r") + 3, list(running.values()))
    for name in "ca":
        cluster.nodes[name].kill()
        running.pop(name)
    until(lambda: worlds(here / "r")[-1] == 2, 120)
    until_step(here / "r", last_step(here / "r") + 3, list(running.values()))
    running |= {name: start(cluster.node(name), *elastic) for name in "ef"}
    until(lambda: worlds(here / "r")[-1] == 4, 120)
    for done in [command.wait() for command in running.values()]:
        assert done.code == 0, done.err
    assert losses(here / "r") == pytest.approx(reference(1, "loss=faulty", *batch)[0], rel=1e-5)
    assert len(RunFolder(here / "r").record()["attempts"]) == 1


@pytest.mark.parametrize("degree", ["tp", "pp", "ep"])
def test_other_degrees_stay_as_they_are(
    cluster: Cluster, start: Start, train: Callable[..., Finished], here: Path, degree: str
) -> None:
    if degree == "ep":
        (here / "tiny.toml").rename(here / "base.toml")
        recipe = EXPERTS.replace("tiny.toml", "base.toml").replace("= 6", "= 16")
        (here / "tiny.toml").write_text(recipe)
    batch = ("training.global_batch_size=8", "training.steps=16", "loss.sleep=0.2")
    elastic = ("--nnodes", "1:2", "--nproc", "2", f"mesh.{degree}=2", *batch)
    a, b = cluster.node("a"), cluster.node("b")
    running = [start(node, *elastic) for node in (a, b)]
    until(lambda: worlds(here / "r")[-1:] == [4], 120)
    until_step(here / "r", 5, running)
    b.kill()
    done = running[0].wait()
    assert done.code == 0, done.err
    assert worlds(here / "r")[-2:] == [4, 2]
    mesh = [e["mesh"] for e in read_events(here / "r/events.jsonl") if e["event"] == "run_start"][-1]
    assert (mesh[degree], mesh["dp_shard"]) == (2, 2 if degree == "ep" else 1)
    done = train("tiny.toml", "--run-dir", "plain", "-p", "./faulty.py", "loss=faulty", *batch[:2])
    assert done.code == 0, done.err
    assert losses(here / "r") == pytest.approx(losses(here / "plain"), rel=1e-4 if degree == "ep" else 1e-5)


def test_an_old_side_that_is_cut_off_in_a_save_and_comes_back_writes_no_checkpoint(
    cluster: Cluster, start: Start, reference: Any, here: Path
) -> None:
    """It has rank 0, which gives checkpoints their names, and its disk works all the time."""
    batch = ("training.global_batch_size=4", "loss.sleep=0.3", "training.steps=30")
    elastic = ("--nnodes", "1:2", *batch, "checkpoint.keep_latest_k=0")
    a, b = cluster.node("a"), cluster.node("b")
    running = [start(b, *elastic)]
    until(lambda: (here / "r/rendezvous/1").exists())
    running.append(start(a, *elastic))
    until(lambda: worlds(here / "r")[-1:] == [2], 120)
    begun = last_step(here / "r")
    until_step(here / "r", begun + 3, running)
    until(lambda: bool(list((here / "r/checkpoints").glob(".step-*.tmp-*"))))
    a.unplug()
    until(lambda: worlds(here / "r")[-1] == 1, 90)
    until_step(here / "r", last_step(here / "r") + 4, running)
    a.plug()
    for done in [command.wait() for command in running]:
        assert done.code == 0, done.err
    expected = reference(1, "loss=faulty", *batch)[0]
    assert losses(here / "r") == pytest.approx(expected, rel=1e-5)
    saved = {path.name for path in (here / "r/checkpoints").glob("step-*")}
    assert saved >= {f"step-{step}" for step in range(2, 31, 2)}
    assert not list((here / "r/checkpoints").glob(".step-*"))

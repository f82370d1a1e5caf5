"""What a loop is told of its run: when to go on, when to save, and what a disk that fails means."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.engine.test_library import TINY, batch
from tests.ranks import Ranks
from titancli.engine import Engine as Library
from titancli.errors import EnvironmentProblem, TitanError
from titancli.loops.run import Run
from titancli.models import Llama3
from titancli.recipe.schema import Mesh


@dataclass
class Stop:
    requested: str | None = None


@dataclass
class Engine:
    step: int = 0

    def save_state(self):
        return {}, {"step": self.step}


@dataclass
class Data:
    batches: list[Any] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)

    def __iter__(self):
        return self

    def __next__(self):
        if not self.batches:
            raise StopIteration
        return self.batches.pop(0)


class Disk:
    """A checkpointer whose saves fail while `full`; asynchronous ones are told of at the next call."""

    def __init__(self, run: Run, *, asynchronous: bool) -> None:
        self.run, self.asynchronous = run, asynchronous
        self.full = False
        self.pending: tuple[int, bool] | None = None
        self.failed = False
        run.checkpoints = self  # type: ignore[assignment]

    def save(self, step, tensors, state):
        self.wait()
        self.pending, self.failed = (step, self.full), self.full and self.asynchronous
        if not self.asynchronous:
            self.wait()

    def wait(self):
        pending, self.pending, self.failed = self.pending, None, False
        if pending is not None:
            step, failed = pending
            if failed:
                raise EnvironmentProblem(f"no room for step-{step}")
            self.run.saved(step, Path())


@pytest.fixture(autouse=True)
def alone(ranks_of_one):
    """Decisions are agreed on among ranks; here there is one."""


@pytest.fixture
def ranks_of_one(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)


def test_it_goes_on_until_the_last_step():
    run = Run(steps=3, stop=Stop())
    assert [run.should_continue(step) for step in (0, 2, 3)] == [True, True, False]
    assert run.why == "finished"


@pytest.mark.parametrize(
    ("signal", "why"), [("SIGTERM", "stopped"), ("SIGUSR1", "stopped"), ("SIGINT", "interrupted")]
)
def test_a_signal_ends_it(signal, why):
    run = Run(steps=3, stop=Stop(signal))
    assert not run.should_continue(0)
    assert (run.why, run.signal) == (why, signal)


def test_the_end_of_the_data_gives_what_is_left_and_then_ends_it():
    run, data = Run(steps=9, stop=Stop()), Data([1, 2, 3])
    assert run.next_microbatches(data, 2) == [1, 2]
    assert run.next_microbatches(data, 2) == [3]
    assert run.why == "finished"
    assert run.next_microbatches(data, 2) == []
    assert run.why == "data_ended"


def test_garbage_is_collected_after_the_first_step_and_every_so_many():
    collected = []
    gc.callbacks.append(lambda phase, info: collected.append(info) if phase == "start" else None)
    try:
        gc.disable()
        run = Run(steps=9, stop=Stop(), gc_freq=3)
        counts = []
        for step in range(1, 7):
            run.step_done(step)
            counts.append(len(collected))
    finally:
        gc.enable()
        gc.callbacks.pop()
    assert counts == [1, 1, 2, 2, 2, 3]


def test_the_first_step_is_told_once():
    told = []
    run = Run(steps=9, stop=Stop(), on_first_step=lambda: told.append(True))
    for step in (5, 6, 7):
        run.step_done(step)
    assert told == [True]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_does_not_end_the_training(asynchronous, caplog):
    run, engine = Run(steps=9, stop=Stop()), Engine()
    disk = Disk(run, asynchronous=asynchronous)
    with caplog.at_level(logging.WARNING):
        for engine.step, disk.full in ((2, False), (4, True), (6, False)):
            run.save(engine, Data())
        run.finish(engine, Data())
    assert run.saved_step == 6
    assert "no room for step-4" in caplog.text


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_last_step_is_tried_once_more_and_then_is_an_error(asynchronous, caplog):
    run, engine = Run(steps=4, stop=Stop()), Engine(step=4)
    disk = Disk(run, asynchronous=asynchronous)
    disk.full = True
    run.save(engine, Data())
    with pytest.raises(EnvironmentProblem, match="no room for step-4"):
        run.finish(engine, Data())
    assert caplog.text.count("no room for step-4") == 1 and "training continues" not in caplog.text
    disk.full = False
    run.finish(engine, Data())
    assert run.saved_step == 4


def test_a_save_that_fails_meanwhile_is_told_before_the_next_step_and_once(caplog):
    run, engine = Run(steps=9, stop=Stop()), Engine(step=4)
    disk = Disk(run, asynchronous=True)
    disk.full = True
    run.save(engine, Data())
    assert "no room" not in caplog.text
    assert run.should_continue(4) and run.should_continue(5)
    assert caplog.text.count("no room for step-4") == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_ends_the_training_where_that_is_wanted(asynchronous):
    run, engine = Run(steps=9, stop=Stop(), save_or_stop=True), Engine(step=4)
    disk = Disk(run, asynchronous=asynchronous)
    disk.full = True
    with pytest.raises(EnvironmentProblem, match="no room for step-4"):
        run.save(engine, Data())
        run.should_continue(4)


def test_what_is_saved_is_not_saved_again():
    run, engine = Run(steps=4, stop=Stop(), saved_step=4), Engine(step=4)
    disk = Disk(run, asynchronous=False)
    disk.full = True
    run.finish(engine, Data())


def of_unequal_length() -> str:
    """A loop like pretrain's, on a rank that has more data than the one before it."""
    length = 1 + dist.get_rank()
    data = Data([batch()] * length)
    with Library.of(Llama3(**TINY), mesh=Mesh(dp_shard=2)) as engine:
        run = Run(steps=9, stop=Stop())
        try:
            while run.should_continue(engine.step) and (batches := run.next_microbatches(data, 1)):
                engine.forward_backward(batches)
                engine.optim_step()
            run.finish(engine, data)
        except TitanError as error:
            return str(error)
    return "finished"


def test_data_that_end_on_one_rank_only_are_told_on_every_rank(ranks: Ranks) -> None:
    """It was waited for until the time limit, and ended in an error of the network."""
    for said in ranks(2, of_unequal_length):
        assert "rank 0 finish (its data have ended), rank 1 forward_backward" in said

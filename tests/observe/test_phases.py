"""Phases: where the time of a step went."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.observe.test_observers import Recorder
from titancli.observe import phases as module
from titancli.observe.observers import Observers
from titancli.observe.phases import Phases, phase, phases

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The present, to be moved by hand."""
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def watching(*loggers: Any, **more: Any) -> Observers:
    made = Observers(loggers, device=CPU, **{"log_freq": 2, "total_steps": 4, **more})
    made.run_start({})
    return made


def times(metrics: dict[str, float]) -> dict[str, float]:
    return {name: seconds for name, seconds in metrics.items() if name.startswith("time/")}


def test_phases_are_averaged_over_the_steps_and_add_up_to_their_time(clock: list[float]) -> None:
    recorder = Recorder()
    observers = watching(recorder)
    for step in range(1, 5):
        for name, seconds in {"data": 1.0, "forward": 2.0, "backward": 0.5 * step}.items():
            with phase(name):
                clock[0] += seconds
        clock[0] += 0.25
        observers.step_end(step, {})
        if step == 2:  # after the step's reading, so it is in the next one's
            with phase("save"):
                clock[0] += 6.0
    found = times(recorder.steps[4])
    assert found == pytest.approx(
        {
            "time/data": 1.0,
            "time/forward": 2.0,
            "time/backward": 1.75,
            "time/save": 3.0,
            "time/clip": 0.0,
            "time/optimizer": 0.0,
            "time/evaluation": 0.0,
            "time/other": 0.25,
        }
    )
    assert sum(found.values()) == pytest.approx(recorder.steps[4]["step_seconds"])


def test_an_evaluation_has_its_own_time_beside_that_of_the_step(clock: list[float]) -> None:
    recorder = Recorder()
    observers = watching(recorder)
    with phase("forward"):
        clock[0] += 2.0
    with phase("evaluation"):
        with phase("wait"):  # a phase inside another is that one's
            clock[0] += 1.0
        clock[0] += 4.0
    observers.evaluated({"val_loss": 1.0}, 5.0)
    observers.step_end(1, {})
    metrics = recorder.steps[1]
    assert (metrics["time/evaluation"], metrics["time/forward"], metrics["step_seconds"]) == (5.0, 2.0, 2.0)
    assert "time/wait" not in metrics


def test_a_phase_that_raises_ends_there(clock: list[float]) -> None:
    recorder = Recorder()
    observers = watching(recorder)
    with pytest.raises(ValueError), phase("forward"), phase("inner"):
        clock[0] += 1.0
        raise ValueError
    clock[0] += 2.0
    observers.step_end(1, {})
    assert recorder.steps[1]["time/forward"] == 1.0
    assert recorder.steps[1]["time/other"] == 2.0


def test_a_clock_that_fails_after_an_error_hides_it_not(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As each call does on a device that is lost."""
    phases.start(torch.device("cpu"))

    def lost() -> None:
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(phases, "leave", lost)
    with pytest.raises(ValueError, match="first"), phase("forward"):
        raise ValueError("first")


def test_only_the_thread_of_the_run_is_counted(clock: list[float]) -> None:
    def elsewhere() -> None:
        with phase("upload"):
            clock[0] += 1.0

    recorder = Recorder()
    observers = watching(recorder)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    observers.step_end(1, {})
    assert times(recorder.steps[1])["time/other"] == 1.0
    assert "time/upload" not in recorder.steps[1]


def test_after_a_run_nothing_is_counted_and_the_next_one_begins_anew(clock: list[float]) -> None:
    first = watching()
    with phase("forward"):
        clock[0] += 1.0
        first.run_end({"why": "stopped"})  # in the middle of a phase, as after an error
    with phase("forward"):
        clock[0] += 1.0
    assert phases.drain() == {}
    recorder = Recorder()
    second = watching(recorder)
    second.step_end(1, {})
    assert not any(times(recorder.steps[1]).values())


class Event:
    """A GPU's: passed when the device comes to it."""

    passed = 0.0

    def __init__(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return self.at <= Event.passed

    def elapsed_time(self, later: Event) -> float:
        assert later.query(), "waited for the device"
        return 1000 * (later.at - self.at)


def test_on_a_gpu_only_what_it_has_passed_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module, "stamp", lambda device: Event(now[0]))
    monkeypatch.setattr(Event, "passed", 0.0)
    ours = Phases()
    ours.start(torch.device("cuda"))
    for seconds in (1.0, 2.0):
        ours.enter("forward")
        now[0] += seconds
        ours.leave()
    assert "forward" not in ours.drain()
    Event.passed = 1.5
    assert ours.drain()["forward"] == pytest.approx(1.0)
    Event.passed = 3.0
    assert ours.drain()["forward"] == pytest.approx(2.0)
    for _ in range(1000):  # more than are kept, between two readings
        ours.enter("forward")
        Event.passed = now[0] = now[0] + 0.5
        ours.leave()
    assert len(ours._open) < module.FOLD_AT
    assert ours.drain()["forward"] == pytest.approx(500.0)

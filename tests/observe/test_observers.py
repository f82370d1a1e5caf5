"""Observers: when metrics are read, and what loggers get."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from titancli.observe.metrics import report
from titancli.observe.observers import Observers
from titancli.observe.peaks import peak_flops

CPU = torch.device("cpu")


class Recorder:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments: self.calls.append((name, arguments))

    @property
    def steps(self) -> dict[int, dict[str, float]]:
        return {args[0]: args[1] for name, args in self.calls if name == "step_end"}


def observers(*loggers: Any, log_freq: int = 5, total_steps: int = 12, **more: Any) -> Observers:
    made = Observers(loggers, device=CPU, log_freq=log_freq, total_steps=total_steps, **more)
    made.run_start({})
    return made


def test_metrics_are_read_after_the_first_the_last_and_every_nth_step() -> None:
    recorder = Recorder()
    watching = observers(recorder)
    for step in range(1, 13):
        watching.step_end(step, {"loss": torch.tensor(float(step))})
    assert {step: metrics["loss"] for step, metrics in recorder.steps.items()} == {
        1: 1.0,
        5: 5.0,
        10: 10.0,
        12: 12.0,
    }


def test_nothing_is_read_from_the_device_between_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    watching = observers(recorder, log_freq=10)
    watching.step_end(1, {"loss": torch.tensor(1.0)})

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("waited for the device")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__float__"):
            patch.setattr(torch.Tensor, name, refuse)
        for step in range(2, 10):
            watching.step_end(step, {"loss": torch.tensor(1.0), "tokens": torch.tensor(8)})
            report("custom", torch.tensor(2.0))
    watching.step_end(10, {"loss": torch.tensor(1.0), "tokens": torch.tensor(8)})
    assert recorder.steps[10]["custom"] == 2.0


def test_padding_is_no_throughput() -> None:
    recorder = Recorder()
    watching = observers(recorder, log_freq=1)
    watching.step_end(1, {"tokens": 30, "targets": 20, "padding": 10})
    found = recorder.steps[1]
    assert found["tokens_per_second"] * found["step_seconds"] == pytest.approx(30)
    assert found["targets_per_second"] * found["step_seconds"] == pytest.approx(20)
    assert found["padding_share"] == 0.25
    assert not {"tokens", "targets", "padding"} & found.keys()


def test_one_transfer_reads_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: transfers.append(1) or tolist(tensor))
    report("custom", torch.tensor(2.0))
    watching = Observers([], device=CPU, log_freq=1, total_steps=1)
    report("custom", torch.tensor(2.0))
    watching.step_end(1, {"loss": torch.tensor(1.0), "grad_norm": torch.tensor(2.0), "lr": 0.1, "tokens": 4})
    assert len(transfers) == 1
    assert watching.latest["custom"] == 2.0


def test_a_run_that_is_stopped_still_tells_its_last_step() -> None:
    recorder = Recorder()
    watching = observers(recorder, total_steps=100)
    for step in (1, 2, 3):
        watching.step_end(step, {"loss": torch.tensor(float(step))})
    watching.run_end({"why": "stopped", "step": 3})
    assert recorder.steps[3]["loss"] == 3.0
    assert recorder.calls[-1][1][0]["metrics"]["loss"] == 3.0
    watching.run_end({"why": "stopped", "step": 3})
    assert [name for name, _ in recorder.calls].count("run_end") == 1


def test_throughput_counts_the_tokens_of_all_steps_since_the_last_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder()
    watching = observers(recorder, total_steps=20)
    clock = [watching._read_at]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    for step in range(1, 6):
        clock[0] += 2.0
        watching.step_end(step, {"tokens": torch.tensor(100), "data_wait": 0.5})
    metrics = recorder.steps[5]
    assert metrics["tokens_per_second"] == pytest.approx(50.0)
    assert metrics["step_seconds"] == pytest.approx(2.0)
    assert metrics["data_wait_share"] == pytest.approx(0.25)
    assert metrics["eta_seconds"] == pytest.approx(30.0)
    assert "eta_seconds" not in recorder.steps[1]


def test_one_slow_step_does_not_change_what_is_left_much(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    watching = observers(recorder, log_freq=1, total_steps=100)
    clock = [watching._read_at]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    for step in range(1, 51):
        clock[0] += 31.0 if step in (1, 30) else 1.0  # the first compiles; another one saves
        watching.step_end(step, {"loss": 1.0})
    left = {step: metrics.get("eta_seconds") for step, metrics in recorder.steps.items()}
    assert left[1] is None and left[2] == pytest.approx(98)
    assert left[30] == pytest.approx(70 * (19 + 31) / 20)
    assert left[50] == pytest.approx(50)  # forgotten by then


def test_the_memory_of_a_cpu_is_the_peak_since_the_last_reading() -> None:
    # in a process of its own: this one may give pages of earlier tests back between two readings
    readings = """
import torch
from titancli.observe.memory import memory_gib

cpu = torch.device("cpu")
memory_gib(cpu)
print(memory_gib(cpu))
block = bytearray(b"x") * (200 << 20)
del block
print(memory_gib(cpu))
print(memory_gib(cpu))
"""
    done = subprocess.run([sys.executable, "-c", readings], capture_output=True, text=True, check=True)
    before, peak, after = map(float, done.stdout.split())
    assert peak > before + 0.15
    assert after < before + 0.1  # the peak began anew


def test_utilisation_needs_a_device_whose_peak_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    known, unknown = Recorder(), Recorder()
    for recorder, peak in ((known, 1e3), (unknown, None)):
        watching = observers(recorder, world=2, flops_per_token=10.0, peak_flops=peak)
        start = watching._read_at
        monkeypatch.setattr("time.perf_counter", lambda start=start: start + 1.0)
        watching.step_end(1, {"tokens": 50})
        monkeypatch.undo()
    assert known.steps[1]["mfu"] == pytest.approx(10 * 50 / (1e3 * 2))
    assert "mfu" not in unknown.steps[1]


def test_memory_is_always_there() -> None:
    recorder = Recorder()
    observers(recorder).step_end(1, {})
    assert 0.01 < recorder.steps[1]["memory_gib"] < 1000


def test_a_logger_that_raises_is_said_once_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def step_end(self, step: int, metrics: dict[str, float]) -> None:
            raise ValueError("no such table")

    recorder = Recorder()
    watching = observers(Broken(), recorder, log_freq=1)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            watching.step_end(step, {})
    [record] = caplog.records
    assert "Broken failed in step_end" in record.getMessage()
    assert "no such table" in record.getMessage()
    assert list(recorder.steps) == [1, 2, 3]


def test_a_logger_may_have_any_of_the_methods() -> None:
    watching = observers(object())
    watching.step_end(1, {})
    watching.checkpoint_saved(1, Path("step-1"))
    watching.run_end({"why": "finished"})


def test_what_is_known_of_the_run_reaches_run_start() -> None:
    recorder = Recorder()
    watching = Observers([recorder], device=CPU, log_freq=1, total_steps=1, info={"run_id": "x", "step": 0})
    watching.run_start({"step": 7})
    assert recorder.calls == [("run_start", ({"run_id": "x", "step": 7},))]
    assert watching.step == 7


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", None),
        ("NVIDIA A1000", None),
        ("Some Accelerator 9", None),
    ],
)
def test_peaks_are_those_of_the_very_device_or_none(name: str, tflops: float | None) -> None:
    assert peak_flops(name) == (tflops * 1e12 if tflops is not None else None)


def test_a_rank_that_stays_slow_is_named_once_in_words(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Twice in a row, by a quarter of a step: once may be anything, and less costs little."""
    late = iter([0.0, 0.0, 0.9, 0.1, 0.9, 0.9, 0.9, 0.0, 0.9, 0.9])
    monkeypatch.setattr(Observers, "_speed", lambda self, *given: {"step_seconds": 2.0})
    monkeypatch.setattr(
        "titancli.observe.observers.reduce_over_ranks",
        lambda readings: {"slow_rank": 1.0, "slow_rank_seconds": next(late)},
    )
    watching = observers(log_freq=1)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 6):
            watching.step_end(step, {})
        assert caplog.messages == []
        for step in range(6, 11):
            watching.step_end(step, {})
    assert caplog.messages == ["rank 1 is slower than the others by 900 ms per step"]

"""Signals become a wish; the environment says which rank this is."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from titancli.signals import Stop
from titancli.worker.rank import Place


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
def test_a_signal_is_remembered_by_name_and_handlers_are_put_back(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP would be ignored
    try:
        with Stop().listening() as stop:
            assert stop.requested is None
            os.kill(os.getpid(), number)
            assert stop.requested == number.name
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_under_nohup_a_lost_terminal_stops_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop().listening() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.requested is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_first_signal_counts() -> None:
    with Stop().listening() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.requested == "SIGTERM"


def test_a_second_ctrl_c_leaves_whatever_came_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int | str] = []
    monkeypatch.setattr(os, "_exit", left.append)
    with Stop().listening(leave=lambda: left.append("recorded")) as stop:
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert left == []
        os.kill(os.getpid(), signal.SIGINT)
    assert left == ["recorded", 130]
    assert stop.requested == "SIGTERM"


def test_a_run_whose_words_nobody_reads_stops_all_the_same() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    kept = os.dup(2)
    os.dup2(writer, 2)
    try:
        with Stop().listening(leave=lambda: None) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == "SIGTERM"
    finally:
        os.dup2(kept, 2)
        for handle in (kept, writer):
            os.close(handle)


def test_ranks_that_came_after_a_signal_know_of_it() -> None:
    with Stop("SIGUSR1").listening() as stop:
        assert stop.requested == "SIGUSR1"


def test_a_thread_that_may_not_handle_signals_runs_all_the_same() -> None:
    seen: list[str | None] = []

    def run() -> None:
        with Stop().listening() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [None]


def test_the_place_comes_from_what_torchrun_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert Place.from_environment() == Place(rank=0, world=1, local_rank=0, restart=0)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert Place.from_environment() == Place(rank=5, world=8, local_rank=1, restart=2)

"""A plugin for tests: a cross-entropy that is slow, or goes wrong on one rank at one step; a launcher."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any, Literal

from titancli import component, hookimpl


@component("loss", "faulty", target="faulty:build")
class Faulty:
    """Cross-entropy with a fault."""

    fault: Literal[
        "none",
        "error",
        "advice",
        "kill",
        "kill_in_save",
        "hang",
        "not_finite",
        "spike",
        "slow",
        "signal",
        "full_disk",
        "flip",
    ] = "none"
    rank: int = 0
    call: int = 3
    """The call, from 1, at which it goes wrong."""
    until: int | None = None
    """The last call with wrong numbers, or with a full disk; None: there is only one."""
    after: float = 0.0
    """Seconds after a save's beginning at which "kill_in_save" kills."""
    starts: int = 1000
    """The rank is killed in the first so many starts alone."""
    signal: Literal["SIGTERM", "SIGUSR1", "SIGINT"] = "SIGTERM"
    """What the rank sends itself under the fault "signal"."""
    hang: float = 3600.0
    """Seconds for which it hangs; then it is gone."""
    sleep: float = 0.0
    """Seconds that each call takes longer; under the fault "slow" on that rank alone."""


@component("launcher", "on_pool", target="tests.run.pool:launch")
class OnPool:
    """Runs on ranks that the tests have started."""


WRONG = ("not_finite", "spike", "flip")
"""Faults of the numbers."""


@hookimpl
def titan_components() -> list[type]:
    return [Faulty, OnPool]


def started_before(starts: int) -> bool:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) < starts


def kill_in_save(after: float) -> None:
    """Wait until a checkpoint is written, and die."""
    before = set(Path("r/checkpoints").glob(".step-*.tmp-*"))  # of who died before
    while not set(Path("r/checkpoints").glob(".step-*.tmp-*")) - before:
        time.sleep(0.0005)
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGKILL)


def full_disk(full: bool) -> None:
    """The kernel refuses whatever is longer than the small files of a run."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000 if full else hard, hard))


def build(config: Faulty) -> Any:
    from titancli.errors import TitanError
    from titancli.losses.cross_entropy import CrossEntropy

    class Loss(CrossEntropy):
        calls = 0

        def __call__(self, out: Any, batch: Any) -> Any:
            self.calls += 1
            here = int(os.environ.get("RANK", "0")) == config.rank
            time.sleep(config.sleep if here or config.fault != "slow" else 0.0)
            if config.fault == "full_disk":
                full_disk(config.call <= self.calls <= (config.until or config.call))
            if self.calls == config.call and here:
                if config.fault == "error":
                    raise ValueError("a row of 13 tokens")
                if config.fault == "advice":
                    raise TitanError("the teacher does not answer", hint="start it first")
                if config.fault == "kill" and started_before(config.starts):
                    os.kill(os.getpid(), signal.SIGKILL)
                if config.fault == "kill_in_save" and started_before(config.starts):
                    threading.Thread(target=kill_in_save, args=(config.after,), daemon=True).start()
                if config.fault == "signal":
                    os.kill(os.getpid(), signal.Signals[config.signal])
                if config.fault == "hang":
                    Path("hanging").touch()
                    time.sleep(config.hang)
                    os._exit(1)
            result = super().__call__(out, batch)
            if self.goes_wrong():
                factor = {"spike": 100, "not_finite": float("nan"), "flip": 1 + 2**-20}[config.fault]
                result = result._replace(sum=result.sum * factor)
            return result

        def goes_wrong(self) -> bool:
            here = int(os.environ.get("RANK", "0")) == config.rank
            last = config.until or config.call
            return here and config.fault in WRONG and config.call <= self.calls <= last

    loss = Loss()
    if config.fault in WRONG:
        loss.token_weights = lambda batch: None  # or the head would make the sum by itself
    return loss
